"""Local steps of plain SGD for stacks of linear layers, cohort tensors all the way through.

What vmap does around each small operation costs more than a small model's whole step; here layers
are called on [C, B, ...] themselves.  Equal to `PlainSteps` within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from undrift.core.algorithm import Client
from undrift.core.linear import Descent, descending_cohort
from undrift.core.losses import LOSSES, METRICS
from undrift.core.task import Batch, Task, per_example
from undrift.core.views import Carry
from undrift.engines.plain import PlainSteps, is_sequence

# Layers that treat every number alike, wherever it stands.
ELEMENTWISE = (
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus),
    nn.Identity,
)


def is_dense(task: Task, dims: int) -> bool:
    """Whether a task is linear layers in a row, and each example of `dims` counts for itself."""
    known = (*LOSSES.values(), *METRICS.values())  # a user's own may look at the whole batch
    return (
        is_sequence(task.module)
        and all(_is_simple(layer) for _, layer in _layers(task.module))
        and all(f in known for f in (task.loss, *task.metrics.values()))
        and dims > 0
        and task.augment is None
        and task.feature is None
        and task.seam is None
    )


def _layers(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """List layers in the order of their calls."""
    if not isinstance(module, nn.Sequential):
        yield name, module
        return
    for key, part in module.named_children():
        yield from _layers(part, f"{name}.{key}" if name else key)


def _is_simple(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Flatten):
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return isinstance(layer, nn.Linear) or type(layer) in ELEMENTWISE


class DenseSteps(PlainSteps):
    """Moves the parameters of a chunk of clients; the task `is_dense`."""

    def step(self, clients: Client, carry: Carry, batch: Batch, k: Tensor) -> Carry:
        """Take one local step; the rows of `carry.w` move."""
        lr = float(self.algo.local.lr_at(self.broadcast.round, k))
        how = Descent(lr, 1 - lr * self.algo.local.weight_decay)
        with torch.enable_grad():
            out = self._forward(carry.w, batch.x, how).flatten(0, 1)
            target = batch.y.flatten(0, 1)
            loss = _means(self.task.losses(out, target), batch.mask)
            loss.sum().backward()
        metrics, value = self.task.metrics.items(), out.detach()
        scores = {n: carry.scores[n] + _means(m(value, target), batch.mask) for n, m in metrics}
        return carry._replace(loss=carry.loss + loss.detach(), scores=scores)

    def _forward(self, w: Tensor, x: Tensor, how: Descent) -> Tensor:
        parts = self._parts(w)
        for name, layer in _layers(self.task.module):
            if isinstance(layer, nn.Linear):
                weight, bias = (
                    parts.get(f"{name}.{key}" if name else key) for key in ("weight", "bias")
                )
                assert weight is not None, "every linear layer has weights"
                x = descending_cohort(x, weight.detach().requires_grad_(), bias, how)
            else:
                x = x.flatten(2) if isinstance(layer, nn.Flatten) else layer(x)
        return x


def _means(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each client's real examples: [C * B, ...] -> [C]."""
    kept = torch.where(mask, per_example(values).view(mask.shape), 0.0)
    return kept.sum(1) / mask.sum(1).clamp(min=1)
