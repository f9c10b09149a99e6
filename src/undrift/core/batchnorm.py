"""BatchNorm over the real examples of a padded batch, as pure functions.

Shapes.  B rows, F channels; an input is [B, F, ...].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Stats(NamedTuple):
    """What one batch says about its channels."""

    mean: Tensor  # [F]
    var: Tensor  # [F] biased: divided by the size
    size: Tensor  # [] values per channel; 0 if every row is padding


class Running(NamedTuple):
    """What BatchNorm remembers between batches."""

    mean: Tensor  # [F]
    var: Tensor  # [F] unbiased
    batches: Tensor  # [] int64, how many batches went in


def keep(mask: Tensor | None, x: Tensor) -> Tensor:
    """Put zeros into padded rows; their gradient is zero too, even where it came in as NaN."""
    if mask is None:
        return x
    return torch.where(mask.reshape(-1, *[1] * (x.dim() - 1)), x, 0.0)


def normalise(
    x: Tensor,
    mask: Tensor | None,
    fixed: tuple[Tensor, Tensor] | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
) -> tuple[Tensor, Stats]:
    """Normalise per channel by `fixed` (mean, variance), or by the batch's own; padding gives 0."""
    # Sums in half precision would overflow; torch computes them in float32 as well.
    wide = keep(mask, x.to(torch.promote_types(x.dtype, torch.float32)))
    size = _size(wide, mask)
    mean = fixed[0] if fixed else _sum(wide) / size.clamp(min=1)
    centred = wide - _column(mean, wide)
    var = fixed[1] if fixed else _variance(centred, mask, size)
    factor = (var + eps).rsqrt() if scale is None else (var + eps).rsqrt() * scale
    y = centred * _column(factor, wide)
    if shift is not None:
        y = y + _column(shift, wide)
    # The second selection keeps a NaN gradient that arrives at a padded row out of mean and scale.
    return keep(mask, y).to(x.dtype), Stats(mean, var, size)


def remember(old: Running, new: Stats, momentum: float | None) -> Running:
    """Move the running statistics towards a batch; an empty batch leaves them as they are.

    The running variance is unbiased, n/(n-1), as in torch.  A single value per channel has no
    unbiased variance: torch refuses it, which cannot be done under vmap, so the biased one enters.
    """
    real = new.size > 0
    batches = old.batches + real
    step = batches.clamp(min=1).to(old.mean.dtype).reciprocal() if momentum is None else momentum
    unbiased = new.var.detach() * (new.size / (new.size - 1).clamp(min=1))
    return Running(
        torch.where(real, _blend(old.mean, new.mean.detach(), step), old.mean),
        torch.where(real, _blend(old.var, unbiased, step), old.var),
        batches,
    )


def _blend(old: Tensor, new: Tensor, step: Tensor | float) -> Tensor:
    return (1 - step) * old + step * new.to(old.dtype)


def _size(x: Tensor, mask: Tensor | None) -> Tensor:
    positions = x[0, 0].numel()
    if mask is None:
        return x.new_full((), float(x.shape[0] * positions))
    return mask.sum().to(x.dtype) * positions


def _variance(centred: Tensor, mask: Tensor | None, size: Tensor) -> Tensor:
    var = _sum(keep(mask, centred.square())) / size.clamp(min=1)
    # 1 for an empty batch: rsqrt(0) would put an infinity into its zero gradients if eps is 0.
    return torch.where(size > 0, var, 1.0)


def _sum(x: Tensor) -> Tensor:
    return x.sum([0, *range(2, x.dim())])


def _column(v: Tensor, x: Tensor) -> Tensor:
    return v.reshape(-1, *[1] * (x.dim() - 2))
