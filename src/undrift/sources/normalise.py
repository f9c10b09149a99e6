"""From bytes to the floats that a network takes: scale, shift, and where asked another size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from undrift.errors import unknown_name
from undrift.sources.examples import Bytes8
from undrift.sources.forms import PictureSet

SLICE = 5_000  # pictures at a time: keeps what is needed beside the result small
Norm = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std of each channel, of [0, 1]


def check_norm(data: PictureSet, name: str) -> None:
    """Refuse a normalisation that the data set does not know."""
    known = ["default", *(n for n in data.norms if n != "default"), "train", "unit"]
    if name not in known:
        raise unknown_name("normalisation", name, known, f"sources.{data.name}")


def norm_named(data: PictureSet, name: str, train_x: Bytes8) -> Norm:
    """Look up mean and std: "default", a paper's, "half", "train" (computed) or "unit" (none)."""
    if name == "unit":
        return (0.0,) * data.shape[2], (1.0,) * data.shape[2]
    if name == "train":
        return train_norm(train_x)
    return data.norms[name] if name in data.norms else next(iter(data.norms.values()))


def train_norm(x: Bytes8) -> Norm:
    """Compute mean and std of each channel; exact, for sums of bytes are whole numbers."""
    count, values = x[..., 0].size, np.arange(256) / 255
    shares = [np.bincount(x[..., c].ravel(), minlength=256) / count for c in range(x.shape[-1])]
    means = [float(share @ values) for share in shares]
    spread = [share @ (values - m) ** 2 for share, m in zip(shares, means, strict=True)]
    return tuple(means), tuple(float(np.sqrt(v)) for v in spread)


def to_floats(x: Bytes8, norm: Norm, pixels: int | None = None) -> Tensor:
    """Turn [n, H, W, channels] bytes into [n, channels, H, W] normalised floats."""
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in norm)
    side = x.shape[1] if pixels is None else pixels
    made = torch.empty(len(x), x.shape[3], side, side)
    for start in range(0, len(x), SLICE):
        part = np.ascontiguousarray(x[start : start + SLICE].transpose(0, 3, 1, 2))
        # bytes first become writable, which torch insists on
        floats = _resized(torch.from_numpy(part.copy()).float().div_(255), side)
        made[start : start + SLICE] = floats.sub_(mean).div_(std)
    return made


def _resized(x: Tensor, side: int) -> Tensor:
    if x.shape[-1] == side:
        return x
    return F.interpolate(x, size=(side, side), mode="bilinear", antialias=True)
