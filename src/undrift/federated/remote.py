"""The engine whose clients are elsewhere: the phases of a round as exchanges of messages.

Where other engines keep a client's state, this one keeps which of its reports was counted last;
the state itself stays with its owner, who stored it under that report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from undrift.core.rule import ClientInfo, Sizes
from undrift.core.task import Task
from undrift.core.tree import EMPTY, Tree, tree_map
from undrift.data import Federation
from undrift.engines.engine import Assignment, Engine, Outcome, cohort_mean
from undrift.engines.sums import OrderedSum
from undrift.errors import FederationError
from undrift.federated.alone import Example, Own, Rehearsal, shares_probe
from undrift.federated.checks import Accepted, Expected
from undrift.federated.exchange import Exchange
from undrift.federated.letters import FRESH, Down, DownOwn, words
from undrift.federated.wire import Form, pack
from undrift.state.store import ClientStateStore


class Counted(NamedTuple):
    """Which report of a client was counted last; round -1 stands for none."""

    round: Tensor  # int64
    mark: Tensor  # [2] int64: the 16 bytes that name the report


NEVER = Counted(torch.tensor(-1), torch.zeros(2, dtype=torch.int64))


class Sheet(NamedTuple):
    """A round that is asked for: what goes down, to whom, and what was counted before."""

    server: Server
    work: Assignment
    broadcast: Broadcast
    notes: tuple[Tree, ...]  # leading axis C


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

    # -- the phases of a round -----------------------------------------------------------------
    def train(self, algo: Algorithm, server: Server, work: Assignment) -> Outcome:
        """Ask the cohort to train; reports are summed in the order of all engines."""
        self.admit(algo, server, work)
        sheet = self._sheet(algo, server, work)
        probes: tuple[Tree, ...] = tuple(EMPTY for _ in algo.parts)
        asked = work
        if shares_probe(algo):
            sheet, probes, asked = self._probed_by(algo, sheet)
        rows: Row = self.forms["train"].zeros(len(work.ids))[1]
        rows = rows._replace(loss=torch.full_like(rows.loss, torch.nan))
        total, taken = OrderedSum(), list[Accepted]()
        for part in self._parts(asked):
            found = self._train_part(sheet, part)
            for client in part.ids:
                if client in found:
                    report, row = found[client].tree
                    total.add([client], tree_map(lambda v: v[None], report))
                    _put(rows, work.ids.index(client), row)
                    taken.append(found[client]._replace(tree=EMPTY))
        clients = Client(work.info, sheet.notes, EMPTY, probes, probes[:-1], rows.steps)
        if len(taken) < self.exchange.patience.minimum:
            rows = rows._replace(accepted=torch.zeros_like(rows.accepted))
            nobody: Report = self.forms["train"].zeros()[0]
            doubled = tree_map(lambda v: v.double(), nobody)
            return Outcome(doubled, rows, sheet.broadcast, clients)
        self.store.stage([one.client for one in taken], _counted(work.round, taken))
        return Outcome(total.result(), rows, sheet.broadcast, clients)

    def after(self, algo: Algorithm, server: Server, work: Assignment) -> tuple[Tree, ...]:
        """Ask clients to look at the new model; who does not answer has a row of NaN."""
        sheet = self._sheet(algo, server, work)
        rows = tree_map(
            lambda v: torch.full_like(v, torch.nan), self.forms["look"].zeros(len(work.ids))
        )
        for part in self._parts(work):
            for client, accepted in self._ask("look", sheet, part).items():
                _put(rows, work.ids.index(client), accepted.tree)
        return rows

    def _probed_by(
        self, algo: Algorithm, sheet: Sheet
    ) -> tuple[Sheet, tuple[Tree, ...], Assignment]:
        """Let the cohort look first; those who do not answer are not asked to train."""
        work, found = sheet.work, dict[int, Accepted]()
        for part in self._parts(work):
            found |= self._ask("probe", sheet, part)
        here = work.part(torch.tensor([c for c, i in enumerate(work.ids) if i in found]).long())
        if not here.ids:
            return sheet, tuple(EMPTY for _ in algo.parts), here
        each = [found[client].tree for client in here.ids]
        probes = tree_map(lambda *v: torch.stack(v), *each)
        shared = cohort_mean(algo, probes, here)
        return sheet._replace(broadcast=sheet.broadcast._replace(cohort=shared)), probes, here

    def _train_part(self, sheet: Sheet, part: Assignment) -> dict[int, Accepted]:
        busy = part.part((part.steps > 0).nonzero().flatten())  # the others have nothing to do
        return self._ask("train", sheet, busy)

    def _parts(self, work: Assignment) -> Iterator[Assignment]:
        width = self.exchange.patience.at_once or max(1, len(work.ids))
        for start in range(0, len(work.ids), width):
            yield work.part(slice(start, start + width))

    # -- messages ------------------------------------------------------------------------------
    def _sheet(self, algo: Algorithm, server: Server, work: Assignment) -> Sheet:
        broadcast = write_broadcast(algo, server, len(work.ids), work.seed)
        notes = torch.func.vmap(lambda info: write_personal(algo, server, info))(work.info)
        return Sheet(server, work, broadcast, notes)

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
        known, change = self.rehearsal.known(*told), None
        if self.exchange.limits.norm is not None:
            change = self.rehearsal.change(*told, self.free)
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


def _counted(round: int, taken: Sequence[Accepted]) -> Counted:
    marks = torch.stack([mark_as(one.mark) for one in taken])
    return Counted(torch.full((len(taken),), round, dtype=torch.int64), marks)


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
