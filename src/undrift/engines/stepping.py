"""One local step of all clients that are there, of all experiments.

Experiments of one structure share every call; others share forward and backward, where no rule
takes part in it, and differ in their elementwise algebra alone.

Every tree has two leading axes [A, B]: A experiments with their B clients, or A lanes with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from undrift.core.algorithm import Algorithm, Broadcast, Client
from undrift.core.history import Histories
from undrift.core.round import Found, shares_gradient, task_gradient
from undrift.core.task import Batch, Buffers, Task
from undrift.core.tree import tree_map
from undrift.core.views import Carry
from undrift.engines.group import Group, split
from undrift.engines.head import Head
from undrift.engines.plain import PlainSteps, is_sequence


class Seat(NamedTuple):
    """What the steps of one crew read and move."""

    numbers: tuple[Tensor, ...]  # of its algorithms, [A]; none where all have the same
    broadcast: Broadcast  # [A]
    clients: Client
    carry: Carry


class Stepping:
    """Takes local steps, in place."""

    def __init__(
        self,
        task: Task,
        device: torch.device,
        in_place: bool,
        histories: Histories | None = None,
    ) -> None:
        self.task, self.in_place, self.histories = task, in_place, histories
        # other modules may do what torch's own backward pass and vmap do not like together
        self.head = Head(task, device) if is_sequence(task.module) else None

    def take(
        self, groups: Sequence[Group], seats: Sequence[Seat], models: tuple[Tensor, Buffers],
        batch: Batch, keys: Tensor, k: Tensor,
    ) -> None:  # fmt: skip
        """Take one step; k [A] is its number, and nobody moves who takes no such step.

        `models` are those of all seats, side by side.
        """
        if self.in_place:
            self._take_in_place(groups[0].algo, seats[0], batch, keys, k)
            return
        if self.task.augment is not None:
            batch = vmap(vmap(self.task.augmented))(batch, keys)
        sharing = sum(g.size for g in groups if shares_gradient(g.algo))
        together: Any = None
        if sharing:
            inputs = tree_map(lambda v: v[:sharing], (*models, batch, keys))
            together = self._found(*inputs)
        for group, seat, part in zip(groups, seats, split([g.size for g in groups]), strict=True):
            seen, mine, number = tree_map(lambda v, part=part: v[part], (batch, keys, k))
            if shares_gradient(group.algo):
                found = tree_map(lambda v, part=part: v[part], together)
            else:
                found = group.gradient(seat.numbers, *_at(seat), seen, mine)
            group.move(*seat, seen, mine, number, found)

    def _found(self, w: Tensor, buffers: Buffers, batch: Batch, keys: Tensor) -> Found:
        """Go forward and back, everybody at once."""
        if self.head is None:
            each: Found = vmap(vmap(partial(task_gradient, self.task)))(w, buffers, batch, keys)
            return each
        flat = tree_map(lambda v: v.flatten(0, 1), (w, buffers, batch, keys))
        whole: Found = tree_map(lambda v: v.unflatten(0, w.shape[:2]), self.head.found(*flat))
        return whole

    def _take_in_place(
        self, algo: Algorithm, seat: Seat, batch: Batch, keys: Tensor, k: Tensor
    ) -> None:
        """Move the models themselves, everybody in one axis."""
        rates = vmap(lambda round, k: torch.zeros_like(round) + algo.local.lr_at(round, k))
        live = k[:, None] < seat.clients.steps
        own = rates(seat.broadcast.round, k)[:, None]
        lr = torch.where(live, own, torch.zeros_like(seat.carry.loss))
        # one axis for all: a view, for models lie side by side
        carry, batch, keys, lr, live = tree_map(
            lambda v: v.flatten(0, 1), (seat.carry, batch, keys, lr, live)
        )
        if self.histories is not None:
            self.histories.at(k[:, None].expand_as(seat.clients.steps).flatten(), lr)
        steps = PlainSteps(self.task, algo, seat.broadcast, together=True, head=self.head)
        steps.step_in_place(carry, batch, keys, lr, live, self.histories)


def _at(seat: Seat) -> tuple[Broadcast, Client, Carry]:
    return seat.broadcast, seat.clients, seat.carry._replace(state=seat.clients.state)
