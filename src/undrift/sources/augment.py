"""Flips and crops of a batch, on its device, decided by a key.

FedDyn's recipe for CIFAR (its code; AdaBest follows): with probability 1/2 mirror the picture;
independently with probability 1/2 pad it by 4 zeros and cut out a window of the old size.  After
normalisation, so that the border has the mean colour.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.core.random import bits, fold, integers
from undrift.errors import ConfigError, DataError


def augment(
    x: Tensor, key: Tensor, *, flip: float = 0.5, crop: float = 0.5, pad: int = 4
) -> Tensor:
    """Mirror and shift pictures x [B, C, H, W]; row i's part depends on (key, i) alone.

    Decisions are whole-number arithmetic: every device takes the same.  Works under vmap.

    >>> x = torch.arange(4.0).view(1, 1, 2, 2)
    >>> augment(x, fold(0, "augment"), flip=1.0, crop=0.0)
    tensor([[[[1., 0.],
              [3., 2.]]]])
    """
    _check(x, flip, crop, pad)
    batch, _, height, width = x.shape
    row = torch.arange(batch, device=x.device)
    mirrored = _coin(fold(key, "flip"), row, flip)
    moved = _coin(fold(key, "crop"), row, crop)
    down, right = (
        torch.where(moved, integers(fold(key, side), row, -pad, pad + 1), 0)[:, None]
        for side in ("down", "right")
    )
    rows = torch.arange(height, device=x.device) + down  # [B, H] where each pixel comes from
    columns = torch.arange(width, device=x.device) + right  # [B, W]
    inside = _within(rows, height)[:, :, None] & _within(columns, width)[:, None, :]
    columns = torch.where(mirrored[:, None], width - 1 - columns, columns)
    return _take(x, rows.clamp(0, height - 1), columns.clamp(0, width - 1), inside)


def _coin(key: Tensor, row: Tensor, chance: float) -> Tensor:
    # chance = 1 misses one draw in 2**63
    return bits(key, row) < min(int(chance * 2**63), 2**63 - 1)


def _within(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


def _take(x: Tensor, rows: Tensor, columns: Tensor, inside: Tensor) -> Tensor:
    """Gather pixels by row and column; what lies outside is zero."""
    place = rows[:, :, None] * x.shape[3] + columns[:, None, :]  # [B, H, W]
    place = place.flatten(1)[:, None].expand(-1, x.shape[1], -1)
    taken = x.flatten(2).gather(2, place).reshape(x.shape)
    return torch.where(inside[:, None], taken, torch.zeros_like(taken))


def _check(x: Tensor, flip: float, crop: float, pad: int) -> None:
    if x.dim() != 4:
        raise DataError(f"augment takes pictures [B, C, H, W], got {list(x.shape)}")
    if not (0 <= flip <= 1 and 0 <= crop <= 1):
        raise ConfigError(f"augment: flip = {flip} and crop = {crop} must lie in [0, 1]")
    if pad < 0:
        raise ConfigError(f"augment: pad must not be negative, got {pad}")
