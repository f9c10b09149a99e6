"""The engine of one client: the core functions on the examples of one owner."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.algorithm import (
    Algorithm,
    Broadcast,
    Client,
    Report,
    Row,
    init_client,
    init_server,
    write_broadcast,
    write_personal,
)
from undrift.core.round import _impulse_step, check_path, client_start
from undrift.core.rule import ClientInfo, ClientView, Sizes
from undrift.core.task import Batch, Task
from undrift.core.tree import EMPTY, Tree, leaves, tree_map
from undrift.core.views import Carry, no_batch, views_of
from undrift.data import Federation
from undrift.engines.engine import Assignment
from undrift.engines.reference import Reference
from undrift.errors import ConfigError
from undrift.federated.wire import Form
from undrift.state.store import ClientStateStore

STEPS = 2  # of a rehearsal


class Own(NamedTuple):
    """What goes down to one client alone."""

    notes: tuple[Tree, ...]  # one per rule
    info: ClientInfo
    steps: Tensor  # int64


class Alone(Reference):
    """Trains the one client whose examples are here, whatever its number is."""

    def __init__(self, task: Task, federation: Federation) -> None:
        if federation.num_clients != 1:
            count = federation.num_clients
            raise ConfigError(f"a node holds the examples of one client, not of {count}")
        super().__init__(task, federation, ClientStateStore(EMPTY, dtype=task.dtype))

    def batch(self, ids: Tensor, positions: Tensor) -> Batch:
        """Fetch examples: whoever is asked for, they are the only ones here."""
        return super().batch(torch.zeros_like(ids), positions)

    def probed(
        self, algo: Algorithm, broadcast: Broadcast, client: Client, work: Assignment
    ) -> tuple[Tree, ...]:
        """Look at the received model: one tree per part, without a leading axis."""
        return _first(self.measure_clients("probe", algo, broadcast, client, work))

    def looked(
        self, algo: Algorithm, broadcast: Broadcast, client: Client, work: Assignment
    ) -> tuple[Tree, ...]:
        """Look at the new model: one tree per rule, without a leading axis."""
        return _first(self.measure_clients("after_round", algo, broadcast, client, work))

    def trained(
        self, algo: Algorithm, broadcast: Broadcast, client: Client, work: Assignment
    ) -> tuple[tuple[Tree, ...], Report, Row]:
        """Train: next state, what is summed, what is not, all without a leading axis."""
        _, states, report, row = next(iter(self.run_clients(algo, broadcast, client, work)))
        return _first((states, report, row))


def client_of(algo: Algorithm, own: Own, state: Tree, probe: Tree | None = None) -> Client:
    """Put one client together, with a leading axis of 1."""
    nothing = tuple(EMPTY for _ in algo.parts)
    seen = nothing if probe is None else probe
    steps = own.steps.to(own.info.size.dtype)
    made = Client(own.info, own.notes, state, seen, nothing[:-1], steps)
    one: Client = tree_map(lambda v: torch.as_tensor(v)[None], made)
    return one


def _first(value: Any) -> Any:
    return tree_map(lambda v: v[0], value)


def shares_probe(algo: Algorithm) -> bool:
    """Whether probes have to travel: some part reads the cohort's mean."""
    return algo.uses("probe") and any(part.shares_probe for part in algo.parts)


def without_telling(algo: Algorithm, row: Row) -> Row:
    """Leave out what a row tells beside the report, where some rule promises to hide a client."""
    if not any(getattr(rule, "hides", False) for rule in algo.rules):
        return row
    blank = tree_map(torch.zeros_like, (row.loss, row.scores, row.length))
    return row._replace(loss=blank[0], scores=blank[1], length=blank[2])


def shared_only(algo: Algorithm, probes: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """Keep of all probes what somebody else reads; the rest stays where it was made."""
    pairs = zip(algo.parts, probes, strict=True)
    return tuple(probe if part.shares_probe else EMPTY for part, probe in pairs)


class Example(NamedTuple):
    """What one example looks like, without being one."""

    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    y_shape: tuple[int, ...]
    y_dtype: torch.dtype

    @classmethod
    def of(cls, federation: Federation) -> Example:
        """Describe the examples of a federation."""
        x, y = federation.x, federation.y
        return cls(tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), y.dtype)

    def blank(self, count: int = 2) -> Federation:
        """Make a client whose examples are all zero."""
        x = torch.zeros(count, *self.x_shape, dtype=self.x_dtype)
        y = torch.zeros(count, *self.y_shape, dtype=self.y_dtype)
        return Federation.of([(x, y)])

    def words(self) -> list[Any]:
        """Write it down as plain JSON."""
        x, y = str(self.x_dtype), str(self.y_dtype)
        return [list(self.x_shape), x, list(self.y_shape), y]


class Rehearsal:
    """A round on blank examples: it tells what every message must look like."""

    def __init__(self, algo: Algorithm, task: Task, example: Example, sizes: Sizes) -> None:
        self.algo, self.task = algo, task
        self._impulses: dict[tuple[int, float], Tree] = {}
        blank = example.blank().to(dtype=task.dtype)
        self.engine = Alone(task, blank)
        w, buffers = task.initial()
        self.server = init_server(algo, w, buffers, sizes)
        self.broadcast = write_broadcast(algo, self.server, 1, 0)
        info = _blank_info(task.dtype)
        notes = write_personal(algo, self.server, info)
        self.own = Own(notes, info, torch.tensor(STEPS))
        state = init_client(algo, w, sizes._replace(examples=2))
        self.client = client_of(algo, self.own, state)
        at = torch.zeros(1, dtype=torch.int64)
        order = torch.tensor([[[0, 1]] * STEPS])
        infos = ClientInfo(*(v[None] for v in info))
        self.work = Assignment(at, infos, order, at + STEPS, at + 2, 0)
        if algo.uses("probe"):
            self._probe()

    def _probe(self) -> None:
        probes = self.engine.probed(self.algo, self.broadcast, self.client, self.work)
        self.client = self.client._replace(probe=tree_map(lambda v: v[None], probes))
        self.broadcast = self.broadcast._replace(cohort=shared_only(self.algo, probes))

    def check_path(self) -> None:
        """Refuse a chain whose gradients have no single weight ||a||_1."""
        if self.algo.needs_path:
            batch = self.engine.batch(self.work.clients, self.work.order[:, 0])
            one = tree_map(lambda v: v[0], (self.client, batch))
            check_path(self.algo, self.task, self.broadcast, *one)

    # -- forms -------------------------------------------------------------------------------
    def down(self, phase: str) -> Form:
        """Tell what goes down to everybody in a phase."""
        nothing = tuple(EMPTY for _ in self.algo.parts)
        sent = self.broadcast if phase == "train" else self.broadcast._replace(cohort=nothing)
        return Form(sent)

    def down_own(self) -> Form:
        """Tell what goes down to one client alone."""
        return Form(self.own)

    def up(self, phase: str) -> Form:
        """Tell what comes up in a phase."""
        if phase == "hello":
            return Form(EMPTY)
        if phase == "probe":
            return Form(self.broadcast.cohort)
        if phase == "look":
            plain = self.broadcast._replace(cohort=tuple(EMPTY for _ in self.algo.parts))
            return Form(self.engine.looked(self.algo, plain, self.client, self.work))
        _, report, row = self.engine.trained(self.algo, self.broadcast, self.client, self.work)
        return Form((report, row))

    # -- what is known of single numbers --------------------------------------------------------
    def known(self, info: ClientInfo, steps: Tensor, round: Tensor) -> Known:
        """Tell which single numbers an honest report has, whatever the data are."""
        lifted, view = self._lift(info, steps, round, torch.zeros_like(self.broadcast.w))
        weight = float(self.algo.aggregate.weight(view))
        return Known(weight, float(view.path), tuple(singles(lifted)))

    def _lift(
        self, info: ClientInfo, steps: Tensor, round: Tensor, delta: Tensor
    ) -> tuple[Tree, ClientView]:
        """Lift a change as a client would, as far as that can be known without its data."""
        client: Client = tree_map(lambda v: v[0], self.client)
        client = client._replace(info=info, steps=steps.to(info.size.dtype))
        broadcast = self.broadcast._replace(round=round)
        carry = client_start(self.algo, self.task, broadcast, client)
        carry = carry._replace(impulse=self._impulse(int(steps), broadcast, client, carry))
        none = no_batch(carry.w)
        view = views_of(self.algo, self.task, broadcast, client, carry, none, None)[-1]
        return self.algo.aggregate.lift(delta, view), view

    def change(
        self, info: ClientInfo, steps: Tensor, round: Tensor, free: Sequence[bool]
    ) -> Callable[[Tree], float]:
        """Give what tells how long a change of the model a report stands for.

        It is what the report alone would move the model by, over what a change of norm 1 would;
        where the data decide a weight, that is at most 1.
        """
        finish, reach = self.algo.aggregate.finish, 1.0
        if not any(free):
            ones = torch.ones_like(self.broadcast.w)
            alone = finish(self._lift(info, steps, round, ones)[0])
            reach = float(torch.linalg.vector_norm(alone)) / math.sqrt(len(ones))
        return lambda total: float(torch.linalg.vector_norm(finish(total).double())) / reach

    def _impulse(self, steps: int, broadcast: Broadcast, client: Client, carry: Carry) -> Tree:
        """Run the chain on the scalar that measures ||a||_1: it needs no example."""
        if not self.algo.needs_path:
            return EMPTY
        key = (steps, float(broadcast.round))
        if key not in self._impulses:
            batch: Batch = tree_map(
                lambda v: v[0], self.engine.batch(self.work.clients, self.work.order[:, 0])
            )
            for k in range(steps):
                views = views_of(self.algo, self.task, broadcast, client, carry, batch, None)
                lr = self.algo.local.lr_at(broadcast.round, self.engine.step_number(k))
                carry = carry._replace(impulse=_impulse_step(self.algo, views, carry, lr))
            self._impulses[key] = carry.impulse
        return self._impulses[key]

    def free(self) -> tuple[bool, ...]:
        """Tell of each single number that is lifted whether the data decide it."""
        here = self._lifted(self.broadcast)
        moved = self._lifted(self.broadcast._replace(w=self.broadcast.w + 0.125))
        return tuple(one != other for one, other in zip(here, moved, strict=True))

    def _lifted(self, broadcast: Broadcast) -> list[float]:
        """Give the single numbers that a report of the rehearsal lifts."""
        client = self.client
        if self.algo.uses("probe"):
            plain = broadcast._replace(cohort=tuple(EMPTY for _ in self.algo.parts))
            seen = self.engine.probed(self.algo, plain, client, self.work)
            client = client._replace(probe=tree_map(lambda v: v[None], seen))
        _, report, _ = self.engine.trained(self.algo, broadcast, client, self.work)
        return singles(report.total)


class Known(NamedTuple):
    """The single numbers of an honest report."""

    weight: float
    path: float  # ||a||_1
    lifted: tuple[float, ...]  # of those that the data decide, the value means nothing


def singles(lifted: Tree) -> list[float]:
    """List the leaves that are one number each."""
    return [float(v) for v in leaves(lifted) if v.dim() == 0]


def _blank_info(dtype: torch.dtype) -> ClientInfo:
    one = torch.ones((), dtype=dtype)
    return ClientInfo(torch.zeros((), dtype=torch.int64), 2 * one, one, one, 2 * one)
