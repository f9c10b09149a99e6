"""The engine whose clients are elsewhere: the phases of a round as exchanges of messages.

Where other engines keep a client's state, this one keeps which of its reports was counted last;
the state itself stays with its owner, who stored it under that report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
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
from undrift.core.rule import ClientInfo, Sizes
from undrift.core.server import server_round
from undrift.core.task import Task
from undrift.core.tree import EMPTY, Tree, tree_map
from undrift.data import Federation
from undrift.engines.engine import Assignment, Engine, Outcome, cohort_mean
from undrift.engines.sums import OrderedSum
from undrift.errors import FederationError, ReportRefused
from undrift.federated.alone import Example, Own, Rehearsal, shares_probe
from undrift.federated.checks import CHANGE, Accepted, Expected
from undrift.federated.exchange import Exchange
from undrift.federated.held import Held, too_long
from undrift.federated.letters import FRESH, Down, DownOwn, words
from undrift.federated.wire import Form, pack
from undrift.norms import middle
from undrift.state.store import ClientStateStore


class Counted(NamedTuple):
    """Which report of a client was counted last; round -1 stands for none."""

    round: Tensor  # int64
    mark: Tensor  # [2] int64: the 16 bytes that name the report
    length: Tensor  # float64: the norm of its change
    beside: Tensor  # float64: the largest norm of all else that its counted reports have held


NOTHING = torch.zeros((), dtype=torch.float64)
NEVER = Counted(torch.tensor(-1), torch.zeros(2, dtype=torch.int64), NOTHING, NOTHING)


class Sheet(NamedTuple):
    """A round that is asked for: what goes down, to whom, and what the cohort has seen."""

    server: Server
    work: Assignment
    broadcast: Broadcast
    notes: tuple[Tree, ...]  # leading axis C
    probes: tuple[Tree, ...]  # leading axis C


class Remote(Engine):
    """Trains cohorts over a grid; knows no algorithm, and no example."""

    def __init__(
        self,
        task: Task,
        federation: Federation,
        store: ClientStateStore,
        exchange: Exchange,
        rehearsal: Rehearsal,
        sizes: Sizes,
        plan: str,
    ) -> None:
        super().__init__(task, federation, store)
        self.exchange, self.rehearsal, self.sizes, self.plan_name = exchange, rehearsal, sizes, plan
        algo = rehearsal.algo
        phases = ["train", *(["probe"] if shares_probe(algo) else [])]
        phases += ["look"] if algo.uses("after_round") else []
        self.forms: dict[str, Form] = {phase: rehearsal.up(phase) for phase in phases}
        self.free = rehearsal.free()

        self._round: tuple[Sheet, Held] | None = None  # under way, and the reports that passed

    # -- the phases of a round -----------------------------------------------------------------
    def round(
        self, algo: Algorithm, server: Server, work: Assignment, population: int, everyone: Tree
    ) -> tuple[Server, Outcome]:
        """Run both halves of a round; with fewer reports than `minimum` it does not count."""
        try:
            after, outcome = super().round(algo, server, work, population, everyone)
            if 0 < int(outcome.report.count) < self.exchange.patience.minimum:
                self.store.rollback()
                outcome = self.train_again(algo, server, work.without(frozenset(work.ids)))
                told = (outcome.report, outcome.rows, work.info.id, population, everyone)
                after = server_round(algo, server, *told)
            return after, outcome
        finally:
            if self._round is not None:
                self._round[1].close()
            self._round = None

    def train(self, algo: Algorithm, server: Server, work: Assignment) -> Outcome:
        """Ask the cohort to train; reports are summed in the order of all engines."""
        sheet, asked = self._sheet(algo, server, work), work
        if shares_probe(algo):
            sheet, asked = self._probed_by(algo, sheet)
        held = Held(self.forms["train"], in_file=self.exchange.patience.at_once is not None)
        self._round = sheet, held
        busy = asked.part((asked.steps > 0).nonzero().flatten())  # the others have nothing to do
        for part in self._parts(busy):
            held.add(self._ask("train", sheet, part))
        self._keep_to_the_norm("train", busy, held)
        return self.train_again(algo, server, work)

    def train_again(self, algo: Algorithm, server: Server, work: Assignment) -> Outcome:
        """Sum the reports that are here; only clients that have steps count."""
        assert self._round is not None, "asked for before"
        sheet, held = self._round
        rows: Row = self.forms["train"].zeros(len(work.ids))[1]
        rows = rows._replace(loss=torch.full_like(rows.loss, torch.nan))
        total, taken = OrderedSum(), list[Accepted]()
        for c, client in enumerate(work.ids):
            if client in held.accepted and int(work.steps[c]):
                report, row = held.tree(client)
                total.add([client], tree_map(lambda v: v[None], report))
                _put(rows, c, row)
                taken.append(held.accepted[client])
        clients = Client(work.info, sheet.notes, EMPTY, sheet.probes, sheet.probes[:-1], rows.steps)
        if not taken:
            nobody: Report = self.forms["train"].zeros()[0]
            doubled = tree_map(lambda v: v.double(), nobody)
            return Outcome(doubled, rows, sheet.broadcast, clients)
        past: Counted = self.store.gather([one.client for one in taken])
        self.store.stage([one.client for one in taken], _counted(work.round, taken, past))
        return Outcome(total.result(), rows, sheet.broadcast, clients)

    def after(self, algo: Algorithm, server: Server, work: Assignment) -> tuple[Tree, ...]:
        """Ask clients to look at the new model; who does not answer has a row of NaN."""
        sheet = self._sheet(algo, server, work)
        rows = tree_map(
            lambda v: torch.full_like(v, torch.nan), self.forms["look"].zeros(len(work.ids))
        )
        held = self._seen("look", sheet)
        for client in held.accepted:
            _put(rows, work.ids.index(client), held.tree(client))
        return rows

    def tell_left_out(self, round: int, ids: list[int], phase: str, parts: list[str]) -> None:
        """Write down whose reports would have made the next server infinite."""
        told = f"it would make the next server infinite ({', '.join(parts[:4])})"
        for client in ids:
            self._refuse(client, round, phase, told)

    def spoiled(self, round: int, ids: list[int], phase: str, parts: list[str]) -> None:
        """Refuse all reports of a round: one of them may be to blame, which must not end a run."""
        self.tell_left_out(round, ids, phase, parts)

    def _refuse(self, client: int, round: int, phase: str, cause: str) -> None:
        error = ReportRefused(client, round, phase, cause)
        self.exchange.refusals(error, self.exchange.nodes.get(client))

    def _keep_to_the_norm(self, phase: str, work: Assignment, held: Held) -> None:
        """Refuse what is far longer than the cohort's median."""
        here = [c for c, client in enumerate(work.ids) if client in held.accepted]
        if not here:
            return
        steps, sizes = (v[here].double().numpy() for v in (work.steps, work.sizes))
        size = sizes / (middle(sizes) or 1.0)  # a report may be weighted by it
        norms = {work.ids[c]: held.accepted[work.ids[c]].norms for c in here}
        counted: Counted = self.store.gather(self.store.seen)
        factor, before = self.exchange.limits.relative, middle(counted.length)
        beside = middle(counted.beside) if phase == "train" else 0.0
        longer = np.maximum(steps / (middle(steps) or 1.0), size)
        for client, cause in too_long(norms, longer, factor, before, beside).items():
            held.drop(client)
            self._refuse(client, work.round, phase, cause)

    def _seen(self, phase: str, sheet: Sheet) -> Held:
        """Let clients look at a model."""
        held = Held(self.forms[phase], in_file=False)
        for part in self._parts(sheet.work):
            held.add(self._ask(phase, sheet, part))
        self._keep_to_the_norm(phase, sheet.work, held)
        return held

    def _probed_by(self, algo: Algorithm, sheet: Sheet) -> tuple[Sheet, Assignment]:
        """Let the cohort look first; those who do not answer are not asked to train."""
        work, held = sheet.work, self._seen("probe", sheet)
        here = [c for c, client in enumerate(work.ids) if client in held.accepted]
        asked = work.part(torch.tensor(here).long())
        if not here:
            return sheet, asked
        probes = tree_map(lambda *v: torch.stack(v), *(held.tree(i) for i in asked.ids))
        shared = cohort_mean(algo, probes, asked)
        broadcast = sheet.broadcast._replace(cohort=shared)
        return sheet._replace(broadcast=broadcast, probes=probes), asked

    def _parts(self, work: Assignment) -> Iterator[Assignment]:
        width = self.exchange.patience.at_once or max(1, len(work.ids))
        for start in range(0, len(work.ids), width):
            yield work.part(slice(start, start + width))

    # -- messages ------------------------------------------------------------------------------
    def _sheet(self, algo: Algorithm, server: Server, work: Assignment) -> Sheet:
        broadcast = write_broadcast(algo, server, len(work.ids), work.seed)
        notes = torch.func.vmap(lambda info: write_personal(algo, server, info))(work.info)
        return Sheet(server, work, broadcast, notes, tuple(EMPTY for _ in algo.parts))

    def _ask(self, phase: str, sheet: Sheet, part: Assignment) -> dict[int, Accepted]:
        if not part.ids:
            return {}
        run, round = self.exchange.run, part.round
        down = Down(phase, run, round, self.plan_name, self.sizes.clients, self.sizes.features)
        common = pack(sheet.broadcast, words(down))
        bases, own, expected = self._bases(part.ids), dict[int, bytes](), list[Expected]()
        for c, client in enumerate(part.ids):
            info, steps = ClientInfo(*(v[c] for v in part.info)), part.steps[c]
            place = sheet.work.ids.index(client)
            notes = tree_map(lambda v, place=place: v[place], sheet.notes)
            mine = words(DownOwn(phase, run, round, client, bases[client]))
            own[client] = pack(Own(notes, info, steps), mine)
            expected.append(self._expected(client, info, steps, sheet.broadcast))
        return self.exchange.ask(phase, round, common, own, self.forms[phase], expected, self.free)

    def _expected(
        self, client: int, info: ClientInfo, steps: Tensor, broadcast: Broadcast
    ) -> Expected:
        told = info, steps, broadcast.round
        known, change = self.rehearsal.known(*told), self.rehearsal.change(*told, self.free)
        return Expected(client, int(steps), known, broadcast.buffers.counters, change)

    def _bases(self, ids: Sequence[int]) -> dict[int, str]:
        """Tell which report of each client was counted last."""
        counted: Counted = self.store.gather(ids)
        found = {}
        for c, client in enumerate(ids):
            found[client] = FRESH if int(counted.round[c]) < 0 else mark_from(counted.mark[c])
        return found

    # -- what only works where the examples are ----------------------------------------------
    def run_clients(self, *arguments: Any) -> Any:
        """Refuse: clients are elsewhere."""
        raise FederationError("clients train on their own nodes: use Remote.train")

    def measure_clients(self, *arguments: Any) -> Any:
        """Refuse: clients are elsewhere."""
        raise FederationError("clients are judged on their own nodes, where their examples are")


def mark_from(numbers: Tensor) -> str:
    """Write the 16 bytes of a mark as text."""
    return numbers.numpy().tobytes().hex()


def mark_as(text: str) -> Tensor:
    """Write a mark as two whole numbers."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.int64).clone()


def _counted(round: int, taken: Sequence[Accepted], past: Counted) -> Counted:
    marks = torch.stack([mark_as(one.mark) for one in taken])
    lengths = torch.tensor([one.norms[CHANGE] for one in taken], dtype=torch.float64)
    sent = [max((v for n, v in one.norms.items() if n != CHANGE), default=0.0) for one in taken]
    beside = torch.maximum(past.beside, torch.tensor(sent, dtype=torch.float64))
    return Counted(torch.full((len(taken),), round, dtype=torch.int64), marks, lengths, beside)


def _put(rows: Tree, place: int, row: Tree) -> None:
    """Write one client's row to its place."""

    def put(into: Tensor, value: Tensor) -> Tensor:
        into[place] = value
        return into

    tree_map(put, rows, row)


def record_of(sizes: Mapping[int, int], clients: int, arrival: Any) -> Federation:
    """Make the server's record of who holds how many examples; it holds none itself."""
    held = torch.zeros(clients, dtype=torch.int64)
    for client, size in sizes.items():
        held[client] = size
    nothing = torch.zeros(0)
    places = torch.zeros(clients + 1, dtype=torch.int64)
    return Federation(nothing, nothing, torch.zeros(0, dtype=torch.int64), places, held, arrival)


def example_sizes(task: Task, example: Example, sizes: Mapping[int, int], clients: int) -> Sizes:
    """Tell how large a federation is, from its record and from what an example looks like."""
    x, y = example.blank().to(dtype=task.dtype).client(0)
    features = task.check(x, y)
    return Sizes(clients, max(sizes.values(), default=1), features)
