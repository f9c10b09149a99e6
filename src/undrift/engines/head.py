"""What a batch says at the end of a network: loss, metrics and the gradient by the output.

Line by line these are dozens of small operations on [C, B, classes]; recorded once and compiled,
they are a few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from undrift.core.linear import Descent
from undrift.core.ops import Pass
from undrift.core.round import Found
from undrift.core.task import Batch, Buffers, Output, Task
from undrift.core.tree import tree_map
from undrift.engines.fused import Fused

Said = tuple[Tensor, dict[str, Tensor], Buffers]  # losses, scores, and the module's own buffers


class Told(NamedTuple):
    """What everybody's batch says, leading axis C."""

    gradient: Tensor  # of the loss by the network's output, times the task's loss scale
    loss: Tensor
    scores: dict[str, Tensor]


class Tally(NamedTuple):
    """Sums over the steps of a round, which move in place; leading axis C."""

    live: Tensor  # whose step counts
    loss: Tensor
    scores: dict[str, Tensor]

    def add(self, loss: Tensor, scores: dict[str, Tensor]) -> None:
        """Add what the batches of one step said."""
        self.loss.add_(torch.where(self.live, loss, 0.0))
        for name, total in self.scores.items():
            total.add_(torch.where(self.live, scores[name], 0.0))


class Head:
    """The task's loss and metrics of a cohort, where no rule takes part in them."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, compiled = task, device.type == "cuda"
        self._told = vmap(self._one)
        self._fused = Fused(self._told, "the loss", compiled=compiled)
        self._counted = Fused(self._added, "the loss and its sums", compiled=compiled)

    def gradients(
        self,
        parts: dict[str, Tensor],
        buffers: Buffers,
        batch: Batch,
        keys: Tensor,
        descent: Descent | None = None,
        tally: Tally | None = None,
        between: Callable[[Said], None] | None = None,
    ) -> tuple[dict[str, Tensor | None], Said]:
        """Go forward and back: gradients by parameters [C, ...], and what the batches said.

        With a descent some layers move on the way back, and have no gradients.  A tally is added
        to.  What the batches said is told `between` the two passes.
        """

        def outputs(parts: Any, buffers: Buffers, x: Tensor, mask: Tensor, key: Tensor) -> Any:
            run = Pass(mask, key, True, descent=descent)
            out = self.task.forward_named(parts, buffers, x, run)
            return out.value, out.buffers

        leaves = {n: p.detach().requires_grad_() for n, p in parts.items()}
        with torch.enable_grad():
            values, after = vmap(outputs)(leaves, buffers, batch.x, batch.mask, keys)
        seen = (values.detach(), batch.y, batch.mask)
        told: Told = self._fused(*seen) if tally is None else self._counted(*seen, tally)
        said = (told.loss, told.scores, tree_map(lambda v: v.detach(), after))
        if between is not None:
            between(said)
        torch.autograd.backward(values, told.gradient)
        return {n: p.grad for n, p in leaves.items()}, said

    def found(
        self, w: Tensor, buffers: Buffers, batch: Batch, keys: Tensor,
        descent: Descent | None = None, between: Callable[[Said], None] | None = None,
    ) -> Found:  # fmt: skip
        """Take the first half of a step at the models w [C, P]."""
        parts = self.task.named(w)
        grads, said = self.gradients(parts, buffers, batch, keys, descent, between=between)
        scale = self.task.loss_scale
        known = {name: g if scale == 1 else g / scale for name, g in grads.items() if g is not None}
        return Found(w, known, *said)

    def _added(self, values: Tensor, y: Tensor, mask: Tensor, tally: Tally) -> Told:
        told: Told = self._told(values, y, mask)
        tally.add(told.loss, told.scores)
        return told

    def _one(self, value: Tensor, y: Tensor, mask: Tensor) -> Told:
        def scaled(value: Tensor) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
            out, batch = self._shown(value, y, mask)
            loss = self.task.mean_loss(out, batch)
            return loss * self.task.loss_scale, (loss, self.task.scores(out, batch))

        gradient, (_, (loss, scores)) = grad_and_value(scaled, has_aux=True)(value)
        return Told(gradient, loss, scores)

    def _shown(self, value: Tensor, y: Tensor, mask: Tensor) -> tuple[Output, Batch]:
        nothing = value.new_zeros(0)
        return Output(value, None, Buffers(nothing, nothing)), Batch(nothing, y, mask, mask)
