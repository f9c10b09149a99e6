"""The driver: an algorithm, a task, a federation and an engine, round after round."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from undrift.core.algorithm import Algorithm, Server, init_client, init_server, resize_server
from undrift.core.ops import Pass
from undrift.core.random import Seeds
from undrift.core.round import server_after, server_round
from undrift.core.rule import ClientInfo, Rule, overrides
from undrift.core.task import Batch, Task
from undrift.core.tree import Tree, leaves, named_leaves, rebuild, size_in_floats, structure
from undrift.data import Everyone, Federation, LocalWork, Population, Sampler, Work
from undrift.describe import describe
from undrift.engines import ENGINES
from undrift.engines.engine import Assignment, Engine, Outcome
from undrift.engines.sums import summing_order
from undrift.errors import ConfigError, DataError, unknown_name
from undrift.state.checkpoint import CheckpointFolder
from undrift.state.store import ClientStateStore, Place

log = logging.getLogger("undrift")


class RoundResult(NamedTuple):
    """What is known after a round."""

    round: int  # 1 after the first
    ids: list[int]  # who was asked
    skipped: list[int]  # who was left out: a non-finite update, or nothing to train on
    loss: float  # mean over participants of their mean local loss
    scores: dict[str, float]
    floats_down: int  # sent to the cohort, in all
    floats_up: int
    seconds: float


class Trainer:
    """Trains one model over a federation.

    >>> clients = [(torch.randn(20, 8), torch.randint(0, 3, (20,))) for _ in range(10)]
    >>> from undrift.rules import fedavg
    >>> trainer = Trainer(Task(nn.Linear(8, 3)), Federation.of(clients), fedavg(lr=0.1))
    >>> trainer.round().round
    1
    """

    def __init__(
        self,
        task: Task,
        federation: Federation,
        algorithm: Algorithm,
        *,
        work: LocalWork | None = None,
        sampler: Sampler | None = None,
        seed: int | Seeds = 0,
        engine: str = "vectorised",
        device: str | torch.device = "cpu",
        state: Place = "device",
        state_path: Path | None = None,
        enrolled: Iterable[int] | None = None,
        **options: Any,
    ) -> None:
        if engine not in ENGINES:
            raise unknown_name("engine", engine, list(ENGINES), "Trainer")
        self.algorithm, self.work = algorithm, Work() if work is None else work
        self.sampler = Everyone() if sampler is None else sampler
        self.seeds = seed if isinstance(seed, Seeds) else Seeds.of(seed)
        self.task = task.to(device)
        self.federation = federation.to(device, task.dtype)
        everyone = range(federation.num_clients)
        self.rounds_done = 0
        self.enrolled = self._valid(everyone if enrolled is None else enrolled)
        examples = self.federation.members[:2]
        self.task.check(self.federation.x[examples], self.federation.y[examples])
        w, buffers = self.task.initial()
        template = init_client(algorithm, w, federation.max_size)
        self.server = init_server(algorithm, w, buffers, federation.num_clients)
        self.store = ClientStateStore(
            template, dtype=task.dtype, device=device, place=state, path=state_path
        )
        self.engine: Engine = ENGINES[engine](self.task, self.federation, self.store, **options)
        self._described = {"engine": engine, "state": state}
        self._folders: dict[Path, CheckpointFolder] = {}
        self._tables: dict[int, dict[str, Tensor]] = {}  # rows that kept checkpoints refer to

    # -- training ----------------------------------------------------------------------------
    def round(self) -> RoundResult:
        """Train one round.  If it fails, the trainer is as it was before."""
        started = time.perf_counter()
        try:
            if self.rounds_done == 0:
                self.server = self._look(self.server, self._everybody())
            cohort = self._assign()
            outcome = self.engine.train(self.algorithm, self.server, cohort)
            ids, enrolled = cohort.info.id, len(self.enrolled)
            server = server_round(
                self.algorithm, self.server, outcome.report, outcome.rows, ids, enrolled
            )
            server = self._look(server, cohort)
            self.store.commit()
        except BaseException:
            self.store.rollback()
            raise
        self.server, self.rounds_done = server, self.rounds_done + 1
        return self._result(cohort, outcome, time.perf_counter() - started)

    def run(self, rounds: int) -> list[RoundResult]:
        """Train several rounds."""
        return [self.round() for _ in range(rounds)]

    def _assign(self) -> Assignment:
        """Choose this round's cohort and its batches."""
        available = self.federation.available(self.rounds_done)
        population = Population.of(available[self.enrolled].numpy(), self.enrolled)
        cohort = self.sampler.sample(self.seeds.run, self.rounds_done, population)
        chance = dict(zip(cohort.ids.tolist(), cohort.probability.tolist(), strict=True))
        ids = summing_order(list(chance))
        return self._assignment(ids, [chance[i] for i in ids], available)

    def _assignment(self, ids: list[int], chances: list[float], available: Tensor) -> Assignment:
        held, sizes = available[self.enrolled].double(), available[ids]
        clients, device = torch.tensor(ids, dtype=torch.int64), self.federation.device

        def numbers(values: Any) -> Tensor:
            made = torch.as_tensor(values, dtype=torch.float64).expand(len(ids))
            return made.to(device, self.task.dtype)

        share, mean = numbers(sizes / held.sum()), numbers(held.mean())
        info = ClientInfo(clients.to(device), numbers(sizes), numbers(chances), share, mean)
        plan = self.work.plan(self.seeds.run, self.rounds_done, clients, sizes, device)
        return Assignment(clients, info, plan.order, plan.steps.cpu(), sizes, self.seeds.run)

    def _everybody(self) -> Assignment:
        available = self.federation.available(self.rounds_done)
        ids = summing_order([i for i in self.enrolled.tolist() if available[i] > 0])
        return self._assignment(ids, [1.0] * len(ids), available)

    def _look(self, server: Server, cohort: Assignment) -> Server:
        """Second exchange: clients look at the new model (only where a rule asks for it)."""
        looking = [r for r in self.algorithm.rules if overrides(r, "after_round")]
        if not looking:
            return server
        if any(r.refresh == "all" for r in looking):
            cohort = self._everybody()
        rows = self.engine.after(self.algorithm, server, cohort)
        accepted = torch.ones(len(cohort.ids), dtype=torch.bool, device=self.engine.device)
        for leaf in leaves(rows):
            accepted &= torch.isfinite(leaf).flatten(1).all(1)
        ids = cohort.info.id
        return server_after(self.algorithm, server, rows, ids, accepted, len(self.enrolled))

    def _result(self, cohort: Assignment, outcome: Outcome, seconds: float) -> RoundResult:
        rows, ids = outcome.rows, cohort.ids
        kept = rows.accepted.cpu()  # sync: once per round
        losses = rows.loss.cpu()[kept]
        scores = {name: float(v.cpu()[kept].mean()) for name, v in rows.scores.items()}
        skipped = sorted(i for i, ok in zip(ids, kept.tolist(), strict=True) if not ok)
        if skipped:
            log.warning(
                "round %d: left out clients %s (not finite, or no batch to train on)",
                self.rounds_done,
                skipped,
            )
        down = outcome.broadcast
        each = size_in_floats((down.w, down.buffers.floats, down.notes, down.cohort))
        up = size_in_floats((outcome.report.total, outcome.report.uploads))
        personal = size_in_floats(outcome.personal)
        return RoundResult(
            self.rounds_done,
            ids,
            skipped,
            float(losses.mean()) if len(losses) else math.nan,
            scores,
            each * len(ids) + personal,
            up * len(ids) + size_in_floats(rows.notes),
            seconds,
        )

    # -- population --------------------------------------------------------------------------
    def enroll(self, ids: Iterable[int]) -> None:
        """Let clients join before the next round."""
        self._change(sorted({*self.enrolled.tolist(), *self._valid(ids).tolist()}))

    def leave(self, ids: Iterable[int]) -> None:
        """Let clients leave before the next round; their state stays with them."""
        self._change(sorted(set(self.enrolled.tolist()) - set(self._valid(ids).tolist())))

    def _change(self, ids: Sequence[int]) -> None:
        before, self.enrolled = len(self.enrolled), self._valid(ids)
        self.server = resize_server(self.algorithm, self.server, before, len(self.enrolled))

    def _valid(self, ids: Iterable[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        made = np.array(sorted(set(ids)), dtype=np.int64)
        if not len(made):
            raise ConfigError("nobody is enrolled: a federation needs at least one client")
        if made[0] < 0 or made[-1] >= self.federation.num_clients:
            bad = made[(made < 0) | (made >= self.federation.num_clients)][0]
            raise DataError(f"no client {bad}: ids run from 0 to {self.federation.num_clients - 1}")
        return made

    # -- reading back ------------------------------------------------------------------------
    def model(self) -> nn.Module:
        """Copy the user's plain module with the trained parameters."""
        return self.task.module_with(self.server.w, self.server.buffers)

    def parameters(self) -> dict[str, Tensor]:
        """Give the server's model by parameter name."""
        return {n: v.clone() for n, v in self.task.named(self.server.w).items()}

    def server_state(self) -> dict[str, Tensor]:
        """Give every tensor of the server's rules, e.g. `{"0.Scaffold": c}`."""
        return _by_rule(self.algorithm.chain, self.server.states)

    def client_state(self, client: int) -> dict[str, Tensor]:
        """Give every tensor of one client's state, e.g. `{"0.Scaffold": c_i}`."""
        state = self.store.gather([client])
        return {n: v[0] for n, v in _by_rule(self.algorithm.rules, state).items()}

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor, *, batch: int = 1024) -> dict[str, float]:
        """Mean loss and metrics of the server's model on held-out examples."""
        if len(x) != len(y) or not len(x):
            raise DataError(f"evaluate needs as many inputs as targets, got {len(x)} and {len(y)}")
        totals: dict[str, float] = {}
        for start in range(0, len(x), batch):
            some = x[start : start + batch].to(self.engine.device)
            target = y[start : start + batch].to(self.engine.device)
            for name, value in self._judge(some, target).items():
                totals[name] = totals.get(name, 0.0) + value * len(some)
        return {name: total / len(x) for name, total in totals.items()}

    def _judge(self, x: Tensor, y: Tensor) -> dict[str, float]:
        x = x.to(self.task.dtype) if x.is_floating_point() else x
        y = y.to(self.task.dtype) if y.is_floating_point() else y
        mask = torch.ones(len(x), dtype=torch.bool, device=x.device)
        out = self.task.forward(self.server.w, self.server.buffers, x, Pass(mask, None, False))
        seen = Batch(x, y, mask, mask.long())
        values = {"loss": self.task.mean_loss(out, seen), **self.task.scores(out, seen)}
        return {name: float(v) for name, v in values.items()}

    # -- checkpoints -------------------------------------------------------------------------
    def describe(self) -> dict[str, Any]:
        """Describe everything that decides the numbers, as plain JSON."""
        return {
            "task": describe(self.task),
            "federation": describe(self.federation),
            "algorithm": describe(self.algorithm),
            "work": describe(self.work),
            "sampler": describe(self.sampler),
            "seeds": self.seeds._asdict(),
            **self._described,
        }

    def save(self, folder: Path | str | CheckpointFolder) -> Path:
        """Write a checkpoint: atomic, checksummed; the previous one is kept too."""
        place = self._folder(folder)
        self.store.seal()  # rows must be durable before a checkpoint refers to them
        rows, rows_meta = self.store.snapshot()
        tensors = {f"server.{n}": v for n, v in named_leaves(self.server).items()}
        tensors |= {f"clients.{n}": v for n, v in rows.items()}
        tensors["enrolled"] = torch.from_numpy(self.enrolled)
        meta = {"clients": rows_meta, "plan": self.engine.plan()}
        path = place.save(self.rounds_done, tensors, meta, self.describe())
        self._keep(place, {self.rounds_done: rows})
        return path

    def load(self, folder: Path | str | CheckpointFolder) -> bool:
        """Go on from the newest checkpoint; False if there is none.

        A checkpoint of another experiment is refused, with the difference.
        """
        place = self._folder(folder)
        found = place.load(self.describe())
        if found is None:
            return False
        server = _part(found.tensors, "server.")
        values = [server[n].to(self.engine.device) for n in named_leaves(self.server)]
        self.store.restore(_part(found.tensors, "clients."), found.meta["clients"])
        self._keep(place, {c.round: _part(c.tensors, "clients.") for c in place.kept()})
        self.server = rebuild(structure(self.server), values)
        self.enrolled = found.tensors["enrolled"].numpy()
        self.rounds_done = found.round
        self.engine.use_plan(found.meta["plan"])
        return True

    def _folder(self, folder: Path | str | CheckpointFolder) -> CheckpointFolder:
        """Find the folder again: it remembers what this run has saved and loaded."""
        if isinstance(folder, CheckpointFolder):
            return folder
        return self._folders.setdefault(Path(folder).resolve(), CheckpointFolder(Path(folder)))

    def _keep(self, place: CheckpointFolder, tables: dict[int, dict[str, Tensor]]) -> None:
        """Protect the rows that kept checkpoints refer to."""
        light = {
            r: {n: t for n, t in rows.items() if n in ("ids", "slots")}
            for r, rows in tables.items()
        }
        self._tables = dict(sorted({**self._tables, **light}.items())[-place.keep :])
        self.store.retain(self._tables.values())


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _by_rule(rules: Sequence[Rule], states: Sequence[Tree]) -> dict[str, Tensor]:
    """Name the tensors of each rule's state by its place and class."""
    found = {}
    for i, (rule, state) in enumerate(zip(rules, states, strict=True)):
        for name, leaf in named_leaves(state).items():
            found[f"{i}.{type(rule).__name__}" + (f".{name}" if name else "")] = leaf
    return found
