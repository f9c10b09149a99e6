"""Passes over everybody's own data: probes before the local steps, reviews after them.

Everybody's data go by in pieces, clients side by side.  Where sizes differ so much that most of
that would be padding, a fixed number of lanes goes through one client's pieces after the other's
instead (lanes.py); the host knows everybody's size, and so who is on which lane when.

Letters: S experiments, C clients of a cohort, X examples of the largest client, M lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from undrift.core.algorithm import Broadcast, Client
from undrift.core.rule import ClientInfo
from undrift.core.task import Batch, Task
from undrift.core.transfer import send
from undrift.core.tree import EMPTY, Tree, leaves, tree_map
from undrift.core.views import Carry, key_of
from undrift.engines.engine import Engine, mean_rows
from undrift.engines.examples import Examples
from undrift.engines.fused import Fused
from undrift.engines.graphs import Buffers, aligned
from undrift.engines.group import Group
from undrift.engines.head import Head
from undrift.engines.lanes import IDLE, NOBODY, cohorts, lanes_for, length, timetable
from undrift.engines.plain import is_sequence

HOOKS = ("probe", "review")


class Looks:
    """Evaluates hooks over everybody's own data."""

    def __init__(self, task: Task, data: Examples, buffers: Buffers, most: int, piece: int) -> None:
        self.task, self.data, self.buffers, self.most = task, data, buffers, most
        self.width = min(piece, most)
        self.lanes: dict[int, OnLanes] = {}  # of the groups that have some

    def spread(self, g: int, group: Group, engines: Sequence[Engine], clients: int) -> None:
        """Give a group lanes where padding its clients would take longer."""
        if not (self.most and any(group.uses(hook) for hook in HOOKS)):
            return
        pieces = [np.asarray(-(-e.federation.sizes // self.width)) for e in engines]
        drawn = [cohorts(own.tolist(), clients) for own in pieces]
        some = [[[k for own in rounds for k in own]] for rounds in zip(*drawn, strict=True)]
        device = engines[0].device
        found = lanes_for(some, IDLE[device.type] / (self.task.size * self.width))
        if found is not None:
            self.lanes[g] = OnLanes(self, g, group, found[0], pieces, device)

    def walk(self, info: ClientInfo, part: slice) -> Iterator[tuple[Tensor, Batch]]:
        """Walk through everybody's own data, piece by piece."""
        for number, start in enumerate(range(0, self.most, self.width)):
            at = torch.arange(start, start + self.width, device=info.id.device)
            positions = torch.where(at < info.size[..., None], at, -1)
            rows = self.data.rows(info.id, positions, part)
            yield self._number(number, info), self.data.batch(rows, positions)

    def _number(self, value: int, info: ClientInfo) -> Tensor:
        shape, kind = (len(info.id),), self.task.dtype
        return torch.full(shape, float(value), dtype=kind, device=info.id.device)

    def side_by_side(
        self, hook: str, group: Group, part: slice, broadcast: Broadcast, clients: Client,
        carry: Carry,
    ) -> tuple[Tree, ...]:  # fmt: skip
        """Evaluate a hook with everybody padded to the largest: means with leading axes S, C."""
        total: Any = None
        for number, batch in self.walk(clients.info, part):
            some = group.look(hook, (), broadcast, clients, carry, batch, number)
            total = some if total is None else tree_map(torch.add, total, some)
        means: tuple[Tree, ...] = mean_rows(total, clients.info.size)
        return means


class Seen(NamedTuple):
    """What all clients of a group look at: numbers, broadcast and carry as in a seat."""

    numbers: tuple[Tensor, ...]
    broadcast: Broadcast
    clients: Client
    carry: Carry | tuple[()]  # empty: they are at the received model


class There(NamedTuple):
    """Who is on the lanes, and what they look at; leading axis M."""

    who: Tensor
    experiment: Tensor
    client: Tensor
    batch: Batch
    piece: Tensor


class OnLanes:
    """The passes of one group on lanes."""

    def __init__(
        self, looks: Looks, g: int, group: Group, lanes: int, pieces: list[np.ndarray],
        device: torch.device,
    ) -> None:  # fmt: skip
        self.looks, self.g, self.pieces = looks, g, pieces
        self.whole, self.group, self.size = group, group.spread(lanes), lanes
        self._sums: dict[str, Tree] = {}
        # One gradient at the received model is all that most rules ask for: it is taken as that of
        # a local step is, and what rules make of it is put into one kernel.
        known = is_sequence(looks.task.module) and not group.uses("loss")
        self.head = Head(looks.task, device) if known else None
        self._add_known = Fused(
            self._known, "a probe", compiled=device.type == "cuda", plain=self._unknown
        )

    def look_up(self, info: ClientInfo, part: slice) -> None:
        """Keep where everybody's examples are."""
        at = torch.arange(self.looks.most, device=info.id.device)
        positions = torch.where(at < info.size[..., None], at, -1)
        rows = self.looks.data.rows(info.id, positions, part)
        self.looks.buffers.put(f"own rows {self.g}", (rows, info.size))

    def run(
        self, hook: str, ids: Sequence[Sequence[int]], clients: int, step: Callable[[], None]
    ) -> None:
        """Go through the data of everybody: `ids` by experiment, of so many with the padding."""
        for total in leaves(self._sums.get(hook, ())):
            total.zero_()
        counts = np.zeros((len(ids), clients), dtype=np.int64)
        for row, own, who in zip(counts, self.pieces, ids, strict=True):
            row[: len(who)] = own[list(who)]
        stays = timetable(counts.reshape(-1).tolist(), self.size)
        table = np.zeros((length(stays), 2, self.size), dtype=np.int64)
        table[:, 1] = NOBODY
        for stay in stays:
            own = table[stay.start : stay.start + stay.steps, :, stay.lane]
            own[:, 0], own[:, 1] = stay.client, np.arange(stay.steps)
        name, device = f"look {self.g}", self._rows[0].device
        for now in send(torch.from_numpy(table), device):
            self.looks.buffers.put(name, now)
            step()

    @property
    def _rows(self) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.looks.buffers[f"own rows {self.g}"]
        return found

    def step(self, hook: str, broadcast: Broadcast, clients: Client, carry: Carry | None) -> None:
        """Let every lane look at the piece that the host says; a probe is at the received model."""
        who, piece = self.looks.buffers[f"look {self.g}"]
        all_rows, sizes = self._rows
        a, c = who // sizes.shape[1], who % sizes.shape[1]
        at = piece[:, None] * self.looks.width + torch.arange(self.looks.width, device=who.device)
        positions = torch.where(at < sizes[a, c][:, None], at, -1)
        rows = all_rows[a, c].gather(1, positions.clamp(min=0))
        batch = self.looks.data.batch(rows[:, None], positions[:, None])
        seen = Seen(tuple(leaves(self.whole.numbers)), broadcast, clients, carry or ())
        there = There(who, a, c, batch, piece.to(self.looks.task.dtype))
        if hook not in self._sums:
            found = self._look(self.group, hook, seen, there)
            room = sizes.numel()
            self._sums[hook] = tree_map(lambda v: v.new_zeros((room, *v.shape[2:])), found)
        if hook == "probe" and self.head is not None and not self._add_known.is_plain:
            gradient = self._gradient(self.head, seen, there)
            self._add_known(self._sums[hook], seen, there, gradient)
        else:
            self._add(self._sums[hook], self._look(self.group, hook, seen, there), who)

    def _look(
        self, group: Group, hook: str, seen: Seen, there: There, *gradient: dict[str, Tensor]
    ) -> tuple[Tree, ...]:
        """Evaluate a hook for the clients that are on lanes."""
        a, c = there.experiment, there.client
        numbers = [v[a] for v in seen.numbers]
        sent = tree_map(lambda v: v[a], seen.broadcast)
        clients = tree_map(lambda v: v[a, c][:, None], seen.clients)
        if not seen.carry:
            held = group.start(sent, clients, numbers)
        else:
            held = tree_map(lambda v: v[a, c][:, None], seen.carry)
        held = held._replace(state=clients.state)
        return group.look(hook, numbers, sent, clients, held, there.batch, there.piece, *gradient)

    def _gradient(self, head: Head, seen: Seen, there: There) -> dict[str, Tensor]:
        """Give the gradients of the loss at the received models: leading axes M, 1."""
        task, a = self.looks.task, there.experiment
        broadcast = seen.broadcast
        w, buffers = aligned(broadcast.w[a]), tree_map(lambda v: v[a], broadcast.buffers)
        ids = seen.clients.info.id[a, there.client]
        keys = broadcast.seed[a]
        if task.draws:
            keys = key_of(keys, broadcast.round[a], ids, "probe", there.piece)
        batch = tree_map(lambda v: v.flatten(0, 1), there.batch)
        gradient = head.found(w, buffers, batch, keys).gradient
        return {name: g[:, None] for name, g in gradient.items()}

    def _known(
        self, sums: Tree, seen: Seen, there: There, gradient: dict[str, Tensor]
    ) -> tuple[()]:
        """Add what rules make of gradients that are known: elementwise algebra."""
        found = self._look(self.group.without_passes(), "probe", seen, there, gradient)
        return self._add(sums, found, there.who)

    def _unknown(
        self, sums: Tree, seen: Seen, there: There, gradient: dict[str, Tensor]
    ) -> tuple[()]:
        """Stand in where a rule wants more than that."""
        return self._add(sums, self._look(self.group, "probe", seen, there), there.who)

    def _add(self, sums: Tree, found: Tree, who: Tensor) -> tuple[()]:
        # lanes without a client add nothing to the first one
        tree_map(lambda total, v: total.index_add_(0, who, v[:, 0]), sums, found)
        return EMPTY

    def means(self, hook: str) -> tuple[Tree, ...]:
        """Give what was found: means with leading axes S, C."""
        _, sizes = self._rows
        total = tree_map(lambda v: v.unflatten(0, sizes.shape), self._sums[hook])
        means: tuple[Tree, ...] = mean_rows(total, sizes)
        return means
