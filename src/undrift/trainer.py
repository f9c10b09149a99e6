"""The driver: an algorithm, a task, a federation and an engine, round after round."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrift.arguments import (
    check_labels,
    check_options,
    check_parts,
    known_device,
    known_seeds,
)
from undrift.core.algorithm import (
    REFRESH,
    Algorithm,
    Server,
    init_client,
    init_server,
    resize_server,
)
from undrift.core.noise import Known, Secret, draws_noise, hides_rows, row_noise, server_noise
from undrift.core.random import Seeds
from undrift.core.rule import Rule, Sizes, overrides
from undrift.core.server import not_finite
from undrift.core.task import Buffers, Task, Vec
from undrift.core.transfer import send
from undrift.core.tree import EMPTY, Tree, leaves, named_leaves, rebuild, structure, tree_map
from undrift.data import Federation, LocalWork, Sampler
from undrift.data.checks import check_whole
from undrift.data.spool import Rows, Streamed
from undrift.describe import FINGERPRINT, Album, describe, describe_task, task_parts
from undrift.engines import ENGINES
from undrift.engines.engine import Assignment, Engine, Outcome, Trained
from undrift.engines.traffic import NOTHING, Traffic, look_traffic, training_traffic
from undrift.errors import ConfigError, DataError, ServerError, UndriftError, unknown_name
from undrift.identity import Portrait
from undrift.identity.content import digest
from undrift.judging import Judge
from undrift.private_key import PrivateKey
from undrift.roster import Roster
from undrift.rounds import Advance, Judged, JudgedClients, Opened, Reading, RoundResult
from undrift.rules.observe import LastModel
from undrift.state.checkpoint import CheckpointFolder
from undrift.state.keeper import Keeper, part_of
from undrift.state.store import Place, Visible
from undrift.version import __version__

log = logging.getLogger("undrift")


class Present(NamedTuple):
    """What changes from round to round, all of it at once."""

    server: Server
    rounds: int
    rows: Visible  # which client states belong to it
    holders: frozenset[int] = frozenset()  # who has looked at this model already
    begun: bool = False  # before the first round: all who may have looked already


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
        private_key: Path | str | Secret | None = None,
        **options: Any,
    ) -> None:
        check_parts(task, federation, algorithm)
        self.private_key = PrivateKey(_noisy(algorithm, private_key))
        if engine not in tuple(ENGINES):
            raise unknown_name("engine", engine, list(ENGINES), "Trainer")
        check_options(ENGINES[engine], options)
        device, self.seeds, self.algorithm = known_device(device), known_seeds(seed), algorithm
        self.task = task.to(device)
        self.federation = federation.to(device, task.dtype)
        self.roster = Roster(self.federation, sampler, work, self.seeds, task.dtype, enrolled)
        examples = self.federation.members[:2]
        check_labels(self.task, self.federation)
        features = self.task.check(self.federation.x[examples], self.federation.y[examples])
        self.sizes = Sizes(federation.num_clients, federation.max_size, features)
        w, buffers = self.task.initial()
        template = init_client(algorithm, w, self.sizes)
        self.store = ENGINES[engine].make_store(
            template, dtype=task.dtype, device=device, place=state, path=state_path
        )
        self.keeper = Keeper(self.store)
        self.engine: Engine = ENGINES[engine](self.task, self.federation, self.store, **options)
        start = init_server(algorithm, w, buffers, self.sizes)
        self._present = Present(start, 0, self.store.visible)
        # what cannot be sampled or planned shows now
        late = self.roster.orders_late
        first = self.roster.cohort(0, ordered=not late) if enrolled is None else None
        self.engine.check(algorithm, start, self.roster.lookers(0), first)
        if enrolled is None:
            admit_anyone(self.engine, algorithm, start, self.roster)
        chosen = {n: options[n] for n in ("precision",) if options.get(n) is not None}
        self._ready({"engine": engine, "state": state, **chosen})

    def _ready(self, described: dict[str, Any]) -> None:
        """Have what every trainer has, wherever its clients are."""
        self._judge = Judge(self.engine)
        self._trained: Trained | None = None  # of the last round, where the engine still has them
        self._traffic: dict[tuple[int, int, int], Traffic] = {}
        self._warned: set[str] = set()  # what is said once in a run
        self._described = described
        self._origin = ""  # names the server that the run began at, once noise is drawn
        self._album = Album()
        self.portraits()  # now: training may change what a loss or a rule remembers

    @property
    def server(self) -> Server:
        """The server as it is after the last completed round."""
        return self._present.server

    @property
    def rounds_done(self) -> int:
        """Rounds completed."""
        return self._present.rounds

    def put(self, server: Server, rounds: int | None = None, *others: Tensor) -> None:
        """Go on with another server of the same structure, between two rounds.

        It may count other `rounds`; `others` are client states that were exchanged with it.
        """
        here = zip(
            leaves(server._replace(round=self.server.round)), leaves(self.server), strict=True
        )
        if draws_noise(self.algorithm) and (others or any(a is not b for a, b in here)):
            # equal noise on models that differ could be subtracted
            self._origin = digest(*leaves(server), *others)
        rounds = self.rounds_done if rounds is None else rounds
        rows = self.store.visible if others else self._present.rows
        self._present = self._present._replace(server=server, rounds=rounds, rows=rows)

    def restart(self, server: Server, seeds: Seeds) -> None:
        """Begin again at this server, with other cohorts and batches; nobody has a state yet."""
        self.seeds = self.roster.seeds = seeds
        self._present, self._trained, self._origin = Present(server, 0, {}), None, ""
        self.settle()

    # -- training ----------------------------------------------------------------------------
    def round(self) -> RoundResult:
        """Train one round.  If it fails, the trainer is as it was before."""
        return self.advance().result()

    def run(self, rounds: int) -> list[RoundResult]:
        """Train several rounds; a device is not waited for in between."""
        check_whole("rounds", rounds, low=0)
        if self.engine.device.type == "cpu":
            return [self.round() for _ in range(rounds)]
        return Reading(self.advance() for _ in range(rounds)).results()

    def advance(self) -> Advance:
        """Train one round without waiting for a device."""
        try:
            opened = self.open_round()
            server, outcome = self.engine.round(
                self.algorithm, opened.server, opened.cohort, self.roster.count, opened.known
            )
            return self.finished(opened, server, outcome)()
        finally:
            self.settle()

    def begin(self) -> None:
        """Let all look at the first model now, not when the first round opens."""
        if self.rounds_done == 0 and not self._present.begun:
            server, _, holders = self._look(self.server, None)
            self._present = self._present._replace(server=server, holders=holders, begun=True)

    def open_round(self, cohort: Assignment | None = None) -> Opened:
        """Choose the next round's cohort, unless it is known; before the first one all may look."""
        started = time.perf_counter()
        self.settle()
        self._trained = None
        server, first, holders = self.server, NOTHING, self._present.holders
        if self.rounds_done == 0 and not self._present.begun:
            server, first, holders = self._look(server, None)
        if cohort is None:
            late = self.roster.orders_late
            cohort = self.roster.cohort(self.rounds_done, ordered=not late)
        if self.store.reads_ahead:
            with suppress(UndriftError):  # there need not be another round
                self.store.prefetch(self.roster.cohort(self.rounds_done + 1, ordered=False).ids)
        return Opened(server, cohort, self.known(cohort), first, holders, started)

    def finished(self, opened: Opened, server: Server, outcome: Outcome) -> Callable[[], Advance]:
        """Do what may still fail; the call that it gives makes the round the present."""
        return partial(self._taken, opened, outcome, *self._look(server, opened.cohort))

    def _taken(
        self, opened: Opened, outcome: Outcome, server: Server, last: Traffic,
        looked: frozenset[int],
    ) -> Advance:  # fmt: skip
        # one assignment: an interrupt leaves the round done or not done, never in between
        self._present = Present(server, self.rounds_done + 1, self.store.merged(), looked)
        self.settle()
        self._trained = outcome.trained
        held = len(opened.holders.intersection(opened.cohort.ids))
        sent = self._sent(outcome, held).plus(opened.sent).plus(last)
        rows = outcome.rows._replace(notes=(), counters=EMPTY)  # nobody asks for these again
        times = (opened.started, time.perf_counter())
        return Advance(self.rounds_done, opened.cohort.ids, rows, sent, *times, self._warned)

    def _sent(self, outcome: Outcome, held: int) -> Traffic:
        """Count the exchange around training; it depends on how many there are, and is kept."""
        key = (len(outcome.rows.steps), held, self.roster.count)
        if key not in self._traffic:
            self._traffic[key] = training_traffic(self.algorithm, outcome, held)
        return self._traffic[key]

    def settle(self) -> None:
        """Show the client states that belong to the present, whatever was interrupted before."""
        self.store.show(self._present.rows)

    def known(self, cohort: Assignment) -> Known:
        """Tell the server's half what it reads beside the reports: the record, and secret noise."""
        algo = self.algorithm
        reads = any(rule.reads_everyone for rule in algo.chain)
        everyone = self.roster.lookers(self.rounds_done).info if reads else EMPTY
        if not draws_noise(algo):
            return Known(everyone)
        size, device = len(self.server.w), self.engine.device
        noise = server_noise(algo, size, self._secret(), self.rounds_done, device)
        return Known(everyone, noise, self._row_noise("row", self.rounds_done, cohort.ids))

    def _row_noise(self, hook: str, round: int, ids: Sequence[int]) -> tuple[Tree, ...] | None:
        """Draw what clients add to the rows that leave them."""
        algo = self.algorithm
        if not hides_rows(algo):
            return ()
        return row_noise(algo, self.sizes, self._secret(), hook, round, ids, self.engine.device)

    def _secret(self) -> Secret:
        def described() -> dict[str, Any]:
            told = self.describe()
            rest = {n: told[n] for n in told if n not in ("undrift", *self._described)}
            return {**rest, "origin": self._began_at()}

        return self.private_key.secret((self.seeds, self._began_at()), described)

    def _began_at(self) -> str:
        """Name the numbers that the run began at: a description of the task leaves them out."""
        self._origin = self._origin or digest(*leaves(self.server))
        return self._origin

    def _look(
        self, server: Server, cohort: Assignment | None
    ) -> tuple[Server, Traffic, frozenset[int]]:
        """Second exchange, only where a rule asks for it: clients look at the new model.

        `cohort` is None before the first round; then everybody looks.
        """
        sent, looked = NOTHING, frozenset[int]()
        for kind in REFRESH:
            only = self._looking(kind)
            if only and not (kind == "once" and cohort is not None):
                who = cohort if cohort is not None and kind == "cohort" else None
                who = self.roster.lookers(self.rounds_done) if who is None else who
                seen = self.rounds_done + (cohort is not None)
                server, more = self._take_in(server, who, only, seen)
                sent, looked = sent.plus(more), looked.union(who.ids)
        return server, sent, looked

    def _looking(self, *kinds: str) -> frozenset[int]:
        """Find the rules that look back and whose `refresh` is one of these."""
        rules = enumerate(self.algorithm.rules)
        return frozenset(i for i, r in rules if overrides(r, "after_round") and r.refresh in kinds)

    def _take_in(
        self, server: Server, who: Assignment, only: frozenset[int], round: int
    ) -> tuple[Server, Traffic]:
        """Let clients look at the model after so many rounds."""
        who, noise = who.told(), self._row_noise("after_round", round, who.ids)
        after, rows = self.engine.look(self.algorithm, server, who, self.roster.count, only, noise)
        model = (server.w, server.buffers.floats)
        return after, look_traffic(model, [rows[i] for i in only], len(who.ids))

    # -- population --------------------------------------------------------------------------
    @property
    def enrolled(self) -> list[int]:
        """Ids of the clients that are enrolled now."""
        return self.roster.enrolled.tolist()

    def enroll(self, ids: Iterable[int]) -> None:
        """Let clients join before the next round."""
        self._change({*self.enrolled, *self.roster.known(ids)})

    def leave(self, ids: Iterable[int]) -> None:
        """Let clients leave before the next round; their states stay with them."""
        self._change(set(self.enrolled) - self.roster.known(ids))

    def _change(self, wanted: set[int]) -> None:
        self.settle()
        old, after, holding = self.roster.enrolled, self.roster.valid(wanted), self.roster.holding
        before = holding(self.enrolled)
        newcomers, leavers = holding(wanted.difference(before)), holding(set(before) - wanted)
        counts, server = (len(before), len(before) + len(newcomers) - len(leavers)), self.server
        if before and not counts[1]:
            raise ConfigError("nobody is enrolled who holds an example: one such client must stay")
        if newcomers or leavers:
            joined, left = self.store.gather(newcomers), self.store.gather(leavers)
            server = resize_server(self.algorithm, server, *counts, joined, left)
        self.roster.enrolled = after
        try:
            server = self._welcome(server, newcomers)
            if wrong := not_finite(self.algorithm, server):
                raise ServerError(
                    f"the server would not be finite ({', '.join(wrong[:4])}) with "
                    f"{counts[1]} clients instead of {counts[0]}: nobody has joined or left"
                )
        except BaseException:
            self.roster.enrolled = old
            raise
        self._present = self._present._replace(server=server)

    def _welcome(self, server: Server, newcomers: list[int]) -> Server:
        """Let newcomers look at the model; before the first round everybody does."""
        only = self._looking(*REFRESH)
        if not (newcomers and only and (self.rounds_done or self._present.begun)):
            return server
        who = self.roster.lookers(self.rounds_done, newcomers)
        return self._take_in(server, who, only, self.rounds_done)[0]

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
        self.settle()
        state = self.store.gather(sorted(self.roster.known([client])))
        return {n: v[0] for n, v in _by_rule(self.algorithm.rules, state).items()}

    def evaluate(self, x: Rows, y: Rows, *, batch: int = 1024) -> dict[str, float]:
        """Mean loss and metrics of the server's model on held-out examples."""
        return self.judge(x, y, batch=batch).result()

    def judge(self, x: Rows, y: Rows, *, batch: int = 1024) -> Judged:
        """Evaluate the server's model as it is now, without waiting for a device."""
        check_whole("batch", batch)
        x, y = (v if isinstance(v, Streamed) else torch.as_tensor(v) for v in (x, y))
        if len(x) != len(y) or not len(x):
            raise DataError(
                f"evaluate needs at least one input and as many targets: {len(x)} and {len(y)}"
            )
        return self._judge.examples(self.server.w, self.server.buffers, x, y, batch)

    def judge_clients(
        self, ids: Iterable[int], *, own: bool = False, batch: int = 4096
    ) -> JudgedClients:
        """Judge the server's model on the examples of some clients, without waiting for a device.

        With `own`, every client is judged by the model that it trained last.  Of the last round's
        clients it is still there if that was trained as one on a device; `LastModel` among the
        rules keeps everybody's (then running statistics are the server's).  `batch` is how many
        examples are taken at a time.
        """
        check_whole("batch", batch)
        who = self.roster.lookers(max(0, self.rounds_done - 1), sorted(self.roster.known(ids)))
        if not who.ids:
            raise DataError("judge_clients needs at least one client that has an example")
        if not own:
            return self._judge.clients(self.server.w, self.server.buffers, who, batch)
        trained = self._trained
        if trained is not None and trained.ids == who.ids:
            return self._judge.clients(trained.models(), trained.buffers, who, batch, stays=True)
        return self._judge.clients(*self._own_models(who.ids), who, batch)

    def _own_models(self, ids: list[int]) -> tuple[Vec, Buffers]:
        """Give the models that clients trained last, in this order."""
        trained = self._trained
        if trained is not None and set(ids) <= set(trained.ids):
            places = torch.tensor([trained.ids.index(i) for i in ids])
            there = send(places, self.engine.device)
            return tree_map(lambda v: v[there], (trained.models(), trained.buffers))
        each = tree_map(lambda v: v.expand(len(ids), *v.shape), self.server.buffers)
        return self._last_models(ids), each

    def _last_models(self, ids: list[int]) -> Vec:
        kept = [isinstance(rule, LastModel) for rule in self.algorithm.rules]
        if True not in kept:
            raise ConfigError("judge_clients(own=True) needs LastModel() among the rules")
        self.settle()
        models: Vec = self.store.gather(ids)[kept.index(True)]
        return models

    # -- checkpoints -------------------------------------------------------------------------
    def describe(self) -> dict[str, Any]:
        """Describe everything that decides the numbers, as plain JSON."""
        seen = self.portraits()
        return {
            "fingerprint": FINGERPRINT,
            "undrift": __version__,
            "task": describe_task(self.task, seen),
            "federation": describe(self.federation),
            **{part: seen[part].told() for part in ("algorithm", "work", "sampler")},
            "seeds": self.seeds._asdict(),
            **self._described,
        }

    def portraits(self) -> dict[str, Portrait]:
        """Tell what each part is, as it was when this trainer first had it."""
        task, roster = self.task, self.roster
        own = {"algorithm": self.algorithm, "work": roster.work, "sampler": roster.sampler}
        parts = {**task_parts(task), **own}
        return {n: self._album.find(n, part, task.original) for n, part in parts.items()}

    def save(self, folder: Path | str | CheckpointFolder) -> Path:
        """Write a checkpoint: atomic, checksummed; the previous one is kept too."""
        self.settle()
        tensors = {f"server.{n}": v for n, v in named_leaves(self.server).items()}
        tensors["enrolled"] = torch.from_numpy(self.roster.enrolled)
        self.keep_key(folder)
        meta = {"plan": self.engine.plan(), "holders": sorted(self._present.holders)}
        if draws_noise(self.algorithm):
            meta["origin"] = self._began_at()
        return self.keeper.save(folder, self.rounds_done, tensors, meta, self.describe())

    def keep_key(self, folder: Path | str | CheckpointFolder) -> None:
        """Keep the private key beside the checkpoints of a run that adds secret noise."""
        if draws_noise(self.algorithm):
            self.private_key.keep(_path(folder))

    def load(self, folder: Path | str | CheckpointFolder) -> bool:
        """Go on from the newest checkpoint whose client states are whole; False if there is none.

        A checkpoint of another experiment is refused, with the difference.
        """
        found = self.keeper.load(folder, self.describe())
        if draws_noise(self.algorithm):
            self.private_key.load(_path(folder))  # it is there before the first checkpoint
        if found is None:
            return False
        self._warn_of_unknown()
        saved = part_of(found.tensors, "server.")
        values = [saved[n].to(self.engine.device) for n in named_leaves(self.server)]
        server = rebuild(structure(self.server), values)
        holders = frozenset(found.meta.get("holders", ()))
        self._present = Present(server, found.round, self.store.visible, holders)
        self._origin = found.meta.get("origin", "")
        self._trained = None  # what clients ended with belongs to another round
        self.roster.enrolled = found.tensors["enrolled"].numpy()
        self.engine.use_plan(found.meta["plan"])
        return True

    def _warn_of_unknown(self) -> None:
        held = {f"{part}.{path}": one for part, seen in self.portraits().items()
                for path, one in seen.unknown.items()}  # fmt: skip
        if held:
            some = [f"{path} ({type(one).__name__})" for path, one in held.items()]
            told = ", ".join([*some[:5], *(["..."] if len(some) > 5 else [])])
            log.warning(
                "nobody can look into %s: whether it is as it was when the run was begun cannot "
                "be told. Make it of attributes and tensors, or be sure of it yourself", told
            )  # fmt: skip


def admit_anyone(engine: Engine, algorithm: Algorithm, start: Server, roster: Roster) -> None:
    """Let parts refuse, or warn of, what the longest work of anyone would make of them."""
    if any(overrides(p, "check") for p in algorithm.everything):
        engine.admit(algorithm, start, roster.longest())
    if any(overrides(rule, "caution") for rule in algorithm.chain):
        engine.caution(algorithm, start, roster.longest())


def _path(folder: Path | str | CheckpointFolder) -> Path:
    return folder.path if isinstance(folder, CheckpointFolder) else Path(folder)


def _noisy(algorithm: Algorithm, path: Path | str | Secret | None) -> Path | str | Secret | None:
    if path is not None and not draws_noise(algorithm):
        raise ConfigError("private_key: no part of this algorithm adds noise, so it has no use")
    return path


def _by_rule(rules: Sequence[Rule], states: Sequence[Tree]) -> dict[str, Tensor]:
    """Name the tensors of each rule's state by its place and class."""
    found = {}
    for i, (rule, state) in enumerate(zip(rules, states, strict=True)):
        for name, leaf in named_leaves(state).items():
            found[f"{i}.{type(rule).__name__}" + (f".{name}" if name else "")] = leaf
    return found
