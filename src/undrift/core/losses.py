"""Losses and metrics by name: functions of (output, target) with one value per example."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional as F

from undrift.errors import TaskError

PerExample = Callable[[Tensor, Tensor], Tensor]  # (output, target) -> one value per example


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy per example; targets are class numbers or probabilities."""
    return F.cross_entropy(output, target, reduction="none")


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Squared error, element by element."""
    if output.shape != target.shape:
        raise TaskError(
            f"mse: outputs {tuple(output.shape)} and targets {tuple(target.shape)} differ in shape "
            "and would be broadcast; give targets the outputs' shape, e.g. y[:, None]"
        )
    return (output - target).square()


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """1 where the largest output is the target's class."""
    # max, not argmax: on a CPU the same place in a sixth of the time
    return (output.max(1).indices == target).to(output.dtype)


LOSSES: Mapping[str, PerExample] = {"cross_entropy": cross_entropy, "mse": mse}
METRICS: Mapping[str, PerExample] = {"accuracy": accuracy}
