"""Losses and metrics: functions of (output, target) with one value per example, or more."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from undrift.errors import ConfigError, TaskError, unknown_name


class WeightedMean(NamedTuple):
    """Values whose mean over a batch is a weighted one: totals.sum() / weights.sum().

    A loss that is averaged over valid tokens returns, for each example, the sum over its valid
    tokens and their number.

    >>> WeightedMean(torch.tensor([6.0, 0.0]), torch.tensor([3.0, 0.0])).weights.sum()
    tensor(3.)
    """

    totals: Tensor  # [B, ...]
    weights: Tensor  # [B, ...]


Values = Tensor | WeightedMean
PerExample = Callable[[Tensor, Tensor], Values]  # (output, target) -> one value per example


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy per example; targets are class numbers or probabilities."""
    return F.cross_entropy(output, target, reduction="none")


def focal(output: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor:
    """Cross-entropy times (1 - p)^gamma, p the probability of the true class: easy ones count less.

    Targets are class numbers.
    """
    if target.is_floating_point():
        raise TaskError("focal: targets must be class numbers; for probabilities use cross_entropy")
    log_p = output.log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
    # kept above 0: there the power of a gamma below 1 has no slope
    rest = (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny)
    return -log_p * rest**gamma


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Squared error, element by element."""
    return _gap("mse", output, target).square()


def mae(output: Tensor, target: Tensor) -> Tensor:
    """Absolute error, element by element: it learns medians."""
    return _gap("mae", output, target).abs()


def huber(output: Tensor, target: Tensor) -> Tensor:
    """Half the squared error up to 1, beyond it the absolute error less a half."""
    gap = _gap("huber", output, target).abs()
    return torch.where(gap <= 1, 0.5 * gap.square(), gap - 0.5)


def pinball(output: Tensor, target: Tensor, quantile: float = 0.5) -> Tensor:
    """Give q times what is missing, or 1 - q times what is too much: it learns the quantile q."""
    gap = -_gap("pinball", output, target)
    return torch.maximum(quantile * gap, (quantile - 1) * gap)


def poisson(output: Tensor, target: Tensor) -> Tensor:
    """Negative log likelihood of counts, less its constant; outputs are logarithms of means."""
    _gap("poisson", output, target)
    return output.exp() - target * output


def _gap(name: str, output: Tensor, target: Tensor) -> Tensor:
    if output.shape != target.shape:
        raise TaskError(
            f"{name}: outputs {tuple(output.shape)} and targets {tuple(target.shape)} differ in "
            "shape and would be broadcast; give targets the outputs' shape, e.g. y[:, None]"
        )
    return output - target


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """1 where the largest output is the target's class."""
    # max, not argmax: on a CPU the same place in a sixth of the time
    return (output.max(1).indices == target).to(output.dtype)


class Focal(nn.Module):
    """The focal loss with a gamma and class weights of its own.

    >>> Focal(gamma=0.0)(torch.zeros(1, 2), torch.tensor([1]))
    tensor([0.6931])
    """

    weight: Tensor | None

    def __init__(self, gamma: float = 2.0, weight: Tensor | None = None) -> None:
        super().__init__()
        self.gamma = gamma
        self.register_buffer("weight", weight)

    def forward(self, output: Tensor, target: Tensor) -> Values:
        """Give a value for each example; with weights, their weighted mean is the loss."""
        values = focal(output, target, self.gamma)
        if self.weight is None:
            return values
        weights = self.weight[target]
        return WeightedMean(weights * values, weights)


class Pinball(nn.Module):
    """The pinball loss of a quantile."""

    def __init__(self, quantile: float = 0.5) -> None:
        super().__init__()
        self.quantile = quantile

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Give a value for each number."""
        return pinball(output, target, self.quantile)


OF_CLASSES: Mapping[str, PerExample] = {"cross_entropy": cross_entropy, "focal": focal}
OF_NUMBERS: Mapping[str, PerExample] = {
    "mse": mse, "mae": mae, "huber": huber, "pinball": pinball, "poisson": poisson,
}  # fmt: skip
LOSSES: Mapping[str, PerExample] = {**OF_CLASSES, **OF_NUMBERS}
METRICS: Mapping[str, PerExample] = {"accuracy": accuracy}


def counts_alone(function: Any) -> bool:
    """Whether a loss or metric of ours takes each example for itself, with no weight."""
    if isinstance(function, Focal | Pinball):
        return getattr(function, "weight", None) is None
    return function in (*LOSSES.values(), *METRICS.values())


# ------------------------------------------------------------------------ means over examples
def per_example(values: Tensor) -> Tensor:
    """Average over everything but the examples: [B, ...] -> [B]."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def shares(values: Values) -> WeightedMean:
    """Give what each example adds to the two sums of a mean: [B] and [B]."""
    if isinstance(values, WeightedMean):
        return WeightedMean(*(v.flatten(1).sum(1) if v.ndim > 1 else v for v in values))
    each = per_example(values)
    return WeightedMean(each, torch.ones_like(each))


def mean_of(values: Values, mask: Tensor) -> Tensor:
    """Mean over the real examples of a batch; 0 where nothing counts."""
    if not isinstance(values, WeightedMean):
        return masked_mean(per_example(values), mask)
    total, weight = (torch.where(mask, v, torch.zeros_like(v)).sum() for v in shares(values))
    return total / torch.where(weight == 0, torch.ones_like(weight), weight)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the real rows; 0 if there is none.  Selects, so a NaN in padding is harmless."""
    m = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    kept = torch.where(m, values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum(0) / mask.sum().clamp(min=1)


def check_values(what: str, values: Any, examples: int) -> None:
    """Refuse what is not one value per example, or more."""
    parts = values if isinstance(values, WeightedMean) else (values,)
    rows = [isinstance(v, Tensor) and v.ndim > 0 and len(v) == examples for v in parts]
    if not all(rows):
        told = [tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for v in parts]
        raise TaskError(
            f"{what} must return one value per example ([{examples}] or more dimensions), got "
            f"{' and '.join(f'shape {t}' if isinstance(t, tuple) else t for t in told)}: use "
            "reduction='none', or return WeightedMean(totals, weights) for a mean over tokens"
        )
    if any(v.is_complex() for v in parts):
        raise TaskError(
            f"{what} returns complex numbers, whose imaginary part would be lost: return "
            "real ones, e.g. their absolute values"
        )


# --------------------------------------------------------------------------- torch's own losses
# Their mean is the mean of the values that they return under reduction='none'.
PLAIN_MEANS = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(nn.PoissonNLLLoss, nn.SoftMarginLoss, nn.HingeEmbeddingLoss, nn.KLDivLoss),
    *(nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss),
)
# Their mean is divided by the class weights of the targets that are not ignored.
WEIGHTED_MEANS = (nn.CrossEntropyLoss, nn.NLLLoss)
_FORWARDS = {kind.forward: kind for kind in (*PLAIN_MEANS, *WEIGHTED_MEANS)}


class OneByOne(nn.Module):
    """One of torch's losses, whose mean is taken over the examples of a batch that are real."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss, self.reduction = loss, loss.reduction
        loss.reduction = "none"  # type: ignore[assignment]

    def forward(self, output: Tensor, target: Tensor) -> Values:
        """Give the values, and what torch's mean divides by."""
        values: Tensor = self.loss(output, target)
        if self.reduction == "batchmean":
            return values.flatten(1).sum(1) if values.ndim > 1 else values
        if not isinstance(self.loss, WEIGHTED_MEANS) or target.is_floating_point():
            return values
        counts = target != self.loss.ignore_index
        classes: Tensor | None = self.loss.weight
        if classes is None:
            return WeightedMean(values, counts.to(values.dtype))
        weights = classes[torch.where(counts, target, 0)]
        return WeightedMean(values, torch.where(counts, weights, 0.0))


def named_loss(loss: Any, dtype: torch.dtype) -> tuple[str, PerExample]:
    """Find a loss by its name, or take somebody's own; torch's own are taken apart."""
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise unknown_name("loss", loss, list(LOSSES), "Task")
        return loss, LOSSES[loss]
    if not callable(loss) or isinstance(loss, type):
        example = f": write {loss.__name__}()" if isinstance(loss, type) else f": {loss!r}"
        raise ConfigError(f"Task.loss must be a name or a function of (output, target){example}")
    name = f"own {getattr(loss, '__qualname__', type(loss).__qualname__)}"  # none of `LOSSES`
    return name, _own_copy(loss, dtype) if isinstance(loss, nn.Module) else loss


def _own_copy(loss: nn.Module, dtype: torch.dtype) -> PerExample:
    if any(p.requires_grad for p in loss.parameters()):
        raise TaskError(
            f"Task.loss: {type(loss).__name__} has parameters, which nobody would train: make them "
            "part of the module, or freeze them with requires_grad_(False)"
        )
    held = [*loss.named_buffers(), *loss.named_parameters()]
    if strange := [n for n, v in held if v.is_complex()]:
        raise TaskError(
            f"Task.loss: {strange[0]!r} of {type(loss).__name__} is complex, and its imaginary "
            "part would be lost: give real numbers"
        )
    own = copy.deepcopy(loss).to(dtype)
    changed = "forward" in vars(own) or own._forward_hooks or own._forward_pre_hooks
    if type(own).forward not in _FORWARDS or changed or own.reduction == "none":
        return own
    if own.reduction == "sum":
        raise ConfigError(
            f"Task.loss: {own} is a sum, which grows with the batch; a loss is averaged over "
            "examples here: use reduction='mean'"
        )
    return OneByOne(own)
