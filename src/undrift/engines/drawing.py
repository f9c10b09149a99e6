"""What everybody reads in a round: batches and keys, drawn where they are used.

Letters: S experiments, C clients of a cohort, K local steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from undrift.core.rule import ClientInfo
from undrift.core.task import Task
from undrift.core.views import key_of
from undrift.data.work import Room, Work
from undrift.engines.examples import Examples
from undrift.engines.fused import Fused
from undrift.engines.graphs import Buffers
from undrift.engines.loading import PLANNED, STEPS
from undrift.engines.reading import Reading


class Drawing:
    """Draws batches and keys, and writes them where steps read them."""

    def __init__(
        self, task: Task, plan: Work, room: Room, data: Examples, buffers: Buffers, *, ready: bool
    ) -> None:
        self.task, self.plan, self.room, self.data, self.buffers = task, plan, room, data, buffers
        device = data.x.device
        compiled = device.type == "cuda"
        self._draw = Fused(
            vmap(self._drawn, in_dims=(None, 0, 0, 0, 0)), "batches and keys", compiled=compiled
        )
        # a tensor, not arange: the compiler takes products of an index for 32 bits wide
        most = max(room.steps, room.batch, room.width, room.epochs)
        self._count = torch.arange(most, device=device)
        numbers = self._count[: room.steps].to(task.dtype)
        self.reading = Reading(data, buffers, numbers, ready=ready, compiled=compiled)

    def draw(self, sent: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Draw what everybody reads, given rounds and seeds of all experiments, some at a time."""
        buffers = self.buffers
        rounds, seeds = (v[0] if len(v) == 1 else torch.cat(v) for v in zip(*sent, strict=True))
        found = self._draw(self._count, rounds, seeds, buffers["info"], buffers["numbers"])
        if self.reading.ready:
            keys, order = found
            self.reading.lay_out(keys, order, buffers["info"].id)
            return
        for name, value in zip(("keys", "order"), found, strict=False):
            buffers.put(name, value)
        buffers.put("rows", self.data.rows(buffers["info"].id, buffers["order"]))

    def _drawn(
        self, count: Tensor, round: Tensor, seed: Tensor, info: ClientInfo, numbers: Tensor
    ) -> tuple[Tensor, ...]:
        """Draw a key for every step of every client [C, K] and, where it can, the batches.

        Keys by the server's round, batches by that for which they were planned.
        """
        room, who, planned = self.room, info.id, numbers[PLANNED]
        keys = seed.expand(len(who), room.steps)
        if self.task.draws:
            keys = key_of(seed, round, who[:, None], "step", count[: room.steps])
        if not room.epochs:
            return (keys,)
        sizes, steps = info.size.long(), numbers[STEPS:]
        return keys, self.plan.order(seed, planned, who, sizes, steps, room, count)
