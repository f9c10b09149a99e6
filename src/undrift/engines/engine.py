"""What every engine is: train a cohort, report the sum.

An engine holds the task, the data and the clients' states, and knows no algorithm.  Subclasses say
how the core functions are mapped over clients; the order of phases is written here, once.

Shapes.  C clients of a cohort (in summing order), K local steps, B batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.algorithm import (
    Algorithm,
    Broadcast,
    Client,
    Report,
    Row,
    Server,
    write_broadcast,
    write_personal,
)
from undrift.core.noise import Known, hidden
from undrift.core.round import check_path, finite_rows
from undrift.core.rule import ClientInfo, Lineup, overrides
from undrift.core.server import is_finite, not_finite, server_after, server_round
from undrift.core.task import Batch, Buffers, Task
from undrift.core.transfer import send
from undrift.core.tree import EMPTY, Tree, leaves, tree_map, where
from undrift.data.federation import Federation
from undrift.data.spool import Rows
from undrift.data.work import LocalWork, Work
from undrift.engines.guilty import to_leave_out
from undrift.engines.sums import OrderedSum
from undrift.errors import ServerError
from undrift.state.store import ClientStateStore, Place

log = logging.getLogger("undrift")
PIECE = 256  # examples of a client that one pass over its own data takes at a time


class Assignment(NamedTuple):
    """Who trains in a round, and on which batches; clients stand in summing order."""

    clients: Tensor  # [C] ids, on the CPU
    info: ClientInfo  # leading axis C, on the device; on the CPU where the order is left out
    order: Tensor  # [C, K, B] positions among a client's own examples, -1 pads
    steps: Tensor  # [C] on the CPU: the host decides how many steps to run
    sizes: Tensor  # [C] on the CPU: examples that may be used in this round
    seed: int
    round: int = 0
    plan: LocalWork | None = None  # made the order, or will: chunk by chunk, or on the device

    @property
    def ids(self) -> list[int]:
        """Client ids, in summing order."""
        return self.clients.tolist()

    def part(self, index: slice | Tensor) -> Assignment:
        """Take some of the clients; an index tensor lives on the CPU."""

        def of(values: Tensor) -> Tensor:  # what is known of clients may still lie on the CPU
            return values[index if isinstance(index, slice) else send(index, values.device)]

        clients, steps, sizes = of(self.clients), of(self.steps), of(self.sizes)
        info, order = ClientInfo(*map(of, self.info)), of(self.order)
        return self._replace(clients=clients, info=info, order=order, steps=steps, sizes=sizes)

    def ordered(self) -> Assignment:
        """Make the order now, if it was left out."""
        if self.order.shape[1] or self.plan is None or not len(self.clients):
            return self.told()
        device = self.order.device
        made = self.plan.plan(self.seed, self.round, self.clients, self.sizes, device)
        return self._replace(order=made.order).told()

    def slots(self) -> Tensor:
        """Count the positions that the order has yet to hold for each client: [C] on the CPU."""
        if self.order.shape[1] or not isinstance(self.plan, Work):
            return torch.zeros_like(self.steps)
        return self.plan.slots_each(self.sizes, self.steps)

    def without(self, ids: frozenset[int]) -> Assignment:
        """Let some of the clients take no step: they are asked, and nothing of them counts."""
        return self._replace(steps=self.steps.masked_fill(self.listed(ids), 0))

    def listed(self, ids: frozenset[int]) -> Tensor:
        """Tell which clients are among these: [C] on the CPU."""
        return torch.tensor([client in ids for client in self.ids], dtype=torch.bool)

    def told(self) -> Assignment:
        """Bring what is known of clients to the device, if it is not there."""
        device = self.order.device
        if self.info.id.device == device:
            return self
        return self._replace(info=ClientInfo(*(send(v, device) for v in self.info)))


class Trained(NamedTuple):
    """The models that clients ended with; they may be written again in the next round."""

    ids: list[int]
    models: Callable[[], Tensor]  # gives [C, P]
    buffers: Buffers  # leading axis C


class Outcome(NamedTuple):
    """What a cohort sends up."""

    report: Report  # the sum, float64
    rows: Row  # leading axis C, in summing order
    broadcast: Broadcast  # what was sent down
    clients: Client  # what each client had and got, leading axis C
    trained: Trained | None = None  # where they are still there


class Engine:
    """Trains cohorts on one machine; subclasses map the core functions over clients."""

    one_by_one = False  # whether clients train, and are judged, one after the other

    def __init__(self, task: Task, federation: Federation, store: ClientStateStore) -> None:
        self.task, self.federation, self.store = task, federation, store
        self.device = federation.device

    @classmethod
    def make_store(
        cls,
        template: Tree,
        *,
        dtype: torch.dtype,
        device: torch.device,
        place: Place,
        path: Path | None,
    ) -> ClientStateStore:
        """Make the store of client states that this engine works with."""
        return ClientStateStore(template, dtype=dtype, device=device, place=place, path=path)

    def plan(self) -> dict[str, Any]:
        """Give the choices that decide rounding, to be recorded with the run."""
        return {}

    def use_plan(self, plan: dict[str, Any]) -> None:
        """Repeat the choices of a recorded run."""

    def check(
        self, algo: Algorithm, server: Server, work: Assignment, first: Assignment | None = None
    ) -> None:
        """Refuse what cannot work, before any training; `first` is the first cohort, if known."""
        if first is not None:
            self.admit(algo, server, first)
        if not algo.needs_path or not work.ids:
            return
        one = work.part(slice(0, 1))
        broadcast, clients = self._probed(algo, server, one)
        clients = clients._replace(steps=torch.ones_like(clients.steps))  # a rule may divide by it
        batch = self.batch(one.info.id, one.order.new_zeros(1, 1))
        check_path(algo, self.task, broadcast, *tree_map(lambda v: v[0], (clients, batch)))

    def admit(self, algo: Algorithm, server: Server, work: Assignment | None) -> None:
        """Let the parts that are particular about their cohort refuse it; None is nobody."""
        if work is None or not work.ids:
            return
        particular = [part for part in algo.everything if overrides(part, "check")]
        if not particular:
            return  # a device need not compute the rate
        lineup = self._lineup(algo, server, work)
        for part in particular:
            part.check(lineup)

    def caution(self, algo: Algorithm, server: Server, work: Assignment | None) -> None:
        """Tell what parts expect to go wrong with those who may take part."""
        if work is not None and work.ids:
            lineup = self._lineup(algo, server, work)
            for told in filter(None, (rule.caution(lineup) for rule in algo.chain)):
                log.warning("%s", told)

    def _lineup(self, algo: Algorithm, server: Server, work: Assignment) -> Lineup:
        lr = algo.local.lr_at(server.round, torch.zeros_like(server.round))
        info, clients = work.told().info, self.federation.num_clients
        return Lineup(info, work.steps.to(info.size), lr, work.round, clients, algo)

    # -- what a subclass defines -------------------------------------------------------------
    def run_clients(
        self, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> Iterator[tuple[list[int], tuple[Tree, ...], Report, Row]]:
        """Train clients; yield (ids, states, reports, rows) of some of them, in summing order."""
        raise TypeError(f"{type(self).__name__} must define run_clients")

    def measure_clients(
        self, hook: str, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> tuple[Tree, ...]:
        """Evaluate a hook over each client's own data: means with a leading axis C."""
        raise TypeError(f"{type(self).__name__} must define measure_clients")

    # -- the phases of a round -----------------------------------------------------------------
    def round(
        self, algo: Algorithm, server: Server, work: Assignment, population: int, known: Known
    ) -> tuple[Server, Outcome]:
        """Run both halves of a round; new client states are staged, not yet visible.

        A round whose next server is not finite is done again, without the clients that caused it.
        """
        work = work.told()
        self.admit(algo, server, work)

        def finished(outcome: Outcome) -> tuple[Server, list[str]]:
            report, rows, ids = outcome.report, outcome.rows, work.info.id
            after = server_round(algo, server, report, rows, ids, population, known)
            if not bool(report.count > 0):
                return after, []  # the server stays as it was
            return after, not_finite(algo, after)

        outcome = self.train(algo, server, work)
        after, wrong = finished(outcome)
        if not wrong:
            return after, outcome

        def again(out: frozenset[int]) -> tuple[Server, Outcome, bool]:
            self.store.rollback()
            outcome = self.train_again(algo, server, work.without(out))
            after, wrong = finished(outcome)
            return after, outcome, not wrong

        suspects = _by_length(work.ids, outcome.rows)
        out = to_leave_out(suspects, lambda some: again(some)[2])
        after, outcome, sound = again(out)
        if sound and bool(outcome.report.count > 0):
            self.tell_left_out(work.round, sorted(out), "train", wrong)
            return after, outcome
        self.spoiled(work.round, sorted(suspects), "train", wrong)
        return again(frozenset(work.ids))[:2]

    def train(self, algo: Algorithm, server: Server, work: Assignment) -> Outcome:
        """Run one round's client half; new client states are staged, not yet visible."""
        broadcast, clients = self._probed(algo, server, work)
        total = OrderedSum()
        rows = self.add_clients(total, algo, broadcast, clients, work)
        return Outcome(total.result(), rows, broadcast, clients)

    def train_again(self, algo: Algorithm, server: Server, work: Assignment) -> Outcome:
        """Run the client half once more; only clients that have steps count."""
        return self.train(algo, server, work)

    def tell_left_out(self, round: int, ids: list[int], phase: str, parts: list[str]) -> None:
        """Say whose reports would have made the next server infinite."""
        log.warning(
            "round %d: what clients %s sent would make the next server infinite (%s); the round "
            "goes on without them", round + 1, ids, ", ".join(parts[:4]),
        )  # fmt: skip

    def add_clients(
        self,
        total: OrderedSum,
        algo: Algorithm,
        broadcast: Broadcast,
        clients: Client,
        work: Assignment,
    ) -> Row:
        """Train clients, add up their reports and stage their states; gives their rows."""
        rows = []
        for ids, states, reports, some in self.run_clients(algo, broadcast, clients, work):
            accepted = some.accepted.tolist()  # sync: what a refused client sent is not touched
            self._stage(ids, states, accepted)
            total.add(ids, reports, accepted)
            rows.append(some)
        joined: Row = tree_map(lambda *v: torch.cat(v), *rows)
        return joined

    def _probed(
        self, algo: Algorithm, server: Server, work: Assignment
    ) -> tuple[Broadcast, Client]:
        """Write the broadcast; where a rule probes, let clients look at it first."""
        broadcast = write_broadcast(algo, server, len(work.ids), work.seed)
        clients = self.clients(algo, server, work)
        if not algo.uses("probe"):
            return broadcast, clients
        probes = self.measure_clients("probe", algo, broadcast, clients, work)
        shared = cohort_mean(algo, probes, work)
        return broadcast._replace(cohort=shared), clients._replace(probe=probes)

    def after(self, algo: Algorithm, server: Server, work: Assignment) -> tuple[Tree, ...]:
        """Let clients look at the new model: one row per client and rule."""
        broadcast = write_broadcast(algo, server, len(work.ids), work.seed)
        clients = self.clients(algo, server, work)
        return self.measure_clients("after_round", algo, broadcast, clients, work)

    def look(
        self, algo: Algorithm, server: Server, work: Assignment, population: int,
        only: frozenset[int], noise: tuple[Tree, ...] | None = (),
    ) -> tuple[Server, tuple[Tree, ...]]:  # fmt: skip
        """Let clients look at the new model, and the rules at places `only` take it in.

        Their rows get `noise` first, unless they added it themselves (None).  What clients sent
        that makes the server infinite is left out, as in a round.
        """
        rows = hidden(algo, self.after(algo, server, work), noise)
        accepted = finite_rows(rows)

        def taken(out: frozenset[int]) -> Server:
            kept = accepted & ~work.listed(out).to(accepted.device)
            return server_after(algo, server, rows, work.info.id, kept, population, only)

        after = taken(frozenset())
        if self.device.type != "cpu":  # nothing waits for a device: all of it counts, or nothing
            return where(is_finite(algo, after), after, server), rows
        if wrong := not_finite(algo, after):
            suspects = [i for i, ok in zip(work.ids, accepted.tolist(), strict=True) if ok]
            largest = _largest(work.ids, rows)
            out = to_leave_out(largest, lambda some: not not_finite(algo, taken(some)))
            after = taken(out)
            if not_finite(algo, after):
                self.spoiled(work.round, suspects, "look", wrong)
                return server, rows
            self.tell_left_out(work.round, sorted(out), "look", wrong)
        return after, rows

    def spoiled(self, round: int, ids: list[int], phase: str, parts: list[str]) -> None:
        """Stop where the next server is infinite whoever is left out."""
        raise ServerError(
            f"round {round + 1}: the next server would not be finite ({', '.join(parts[:4])}), "
            "whoever's report is left out: the server's own state is at fault. Lower its learning "
            "rate, or go on from an earlier checkpoint; nothing of this round is kept"
        )

    def _stage(self, ids: list[int], states: tuple[Tree, ...], accepted: list[bool]) -> None:
        """Keep the new states of accepted clients; the others stay as they were."""
        kept = [c for c, ok in enumerate(accepted) if ok]
        if len(kept) < len(ids):
            ids, states = [ids[c] for c in kept], tree_map(lambda v: v[kept], states)
        self.store.stage(ids, states)

    # -- shared by all engines -----------------------------------------------------------------
    def clients(self, algo: Algorithm, server: Server, work: Assignment) -> Client:
        """Put together what each client of the cohort has and gets."""
        notes = torch.func.vmap(lambda info: write_personal(algo, server, info))(work.info)
        state = self.store.gather(work.ids)
        nothing = tuple(EMPTY for _ in algo.parts)
        steps = work.steps.to(self.device, self.task.dtype)
        return Client(work.info, notes, state, nothing, nothing[:-1], steps)

    def batch(self, ids: Tensor, positions: Tensor) -> Batch:
        """Fetch examples by position: [C, B] in, a batch with a leading client axis out."""
        return self.batch_of(self.federation.rows(ids, positions), positions)

    def batch_of(self, rows: Tensor, positions: Tensor, over: Tensor | None = None) -> Batch:
        """Fetch examples whose rows are known; their x goes into `over`, where it is given."""
        x, y = _fetch(self.federation.x, rows, over), _fetch(self.federation.y, rows)
        return Batch(x, y, positions >= 0, positions)

    @cached_property
    def piece(self) -> int:
        """Examples that one pass over a client's own data takes at a time.

        A loss that weighs its examples sees all at once: means over pieces have other weights.
        """
        one, data = self.federation.members[:1], self.federation
        return data.max_size if self.task.weighs(data.x[one], data.y[one]) else PIECE

    def pieces(self, sizes: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Walk through everybody's own data: (number, positions [C, piece])."""
        longest = int(sizes.max())
        width = min(self.piece, longest)
        for number, start in enumerate(range(0, longest, width)):
            at = torch.arange(start, start + width, device=self.device)
            inside = at < sizes.to(self.device)[:, None]
            yield number, torch.where(inside, at, -1)

    def left(self, sizes: Tensor, number: int) -> int:
        """Count the clients that have examples in a piece."""
        return int((sizes > number * min(self.piece, int(sizes.max()))).sum())

    def step_number(self, k: int) -> Tensor:
        """Give a step number as a tensor in the model's type."""
        return torch.tensor(float(k), dtype=self.task.dtype, device=self.device)


def _fetch(values: Rows, rows: Tensor, over: Tensor | None = None) -> Tensor:
    # index_select, not values[rows]: the same rows in half the time on a CPU
    flat = rows.reshape(-1)
    if over is None or not isinstance(values, Tensor):
        return values.index_select(0, flat).unflatten(0, rows.shape)
    torch.index_select(values, 0, flat, out=over.flatten(0, 1))
    return over


def _by_length(ids: list[int], rows: Row) -> list[int]:
    """List the clients whose reports count, the longest change first."""
    found = zip(rows.length.tolist(), ids, rows.accepted.tolist(), strict=True)
    return [client for _, client, ok in sorted(found, key=lambda one: -one[0]) if ok]


def _largest(ids: list[int], rows: Tree) -> list[int]:
    """List clients by the largest number that each has sent, the largest first."""
    most = torch.cat([v.reshape(len(v), -1) for v in leaves(rows)], 1).abs().amax(1)
    return [ids[c] for c in most.argsort(descending=True, stable=True).tolist()]


def cohort_mean(algo: Algorithm, probes: tuple[Tree, ...], work: Assignment) -> tuple[Tree, ...]:
    """Average the probes that are shared, by size; what is not finite is left out."""

    def mean(probe: Tree) -> Tree:
        size = work.info.size
        weighted = tree_map(lambda v: by_client(size, v) * v, probe)
        sound = finite_rows(weighted)
        total = OrderedSum()
        total.add(work.ids, weighted, sound.tolist())
        weight = size.double()[sound].sum()
        return tree_map(lambda v, like: (v / weight).to(like.dtype), total.result(), probe)

    pairs = zip(algo.parts, probes, strict=True)
    return tuple(mean(probe) if p.shares_probe and leaves(probe) else EMPTY for p, probe in pairs)


def by_client(values: Tensor, like: Tensor) -> Tensor:
    """Shape values [C], or of several experiments, so that they multiply `like` [C, ...]."""
    return values.reshape(*values.shape, *[1] * (like.dim() - values.dim()))


def mean_rows(summed: Tree, sizes: Tensor) -> Tree:
    """Divide sums over own data by n_i, client by client."""
    return tree_map(lambda v: v / by_client(sizes, v), summed)
