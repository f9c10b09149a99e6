"""Whether probabilities are what they say, in 15 bins of equal width.

Of two classes the probability of class 1 is asked for, of more that of the most probable class.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BINS = 15


class Calibration(NamedTuple):
    """The bins that have examples: how many, their mean probability, and how often it is true."""

    examples: Tensor  # [k]
    said: Tensor  # [k]
    found: Tensor  # [k]


def calibration(p: Tensor, y: Tensor) -> Calibration:
    """Put examples into bins by their probability; an upper edge belongs to its bin."""
    if p.shape[1] == 2:
        said, true = p[:, 1].contiguous(), y == 1
    else:
        said, best = p.max(1)
        true = best == y
    edges = torch.arange(1, BINS, dtype=torch.float64) * (1.0 / BINS)
    place = torch.bucketize(said, edges)
    count = torch.bincount(place, minlength=BINS)
    sums = (torch.bincount(place, v, minlength=BINS) for v in (said, true.double()))
    some = count > 0
    return Calibration(count[some], *(v[some] / count[some] for v in sums))


def ece(p: Tensor, y: Tensor) -> float:
    """Mean over examples of the distance of a bin's mean probability from how often it is true."""
    bins = calibration(p, y)
    return float((bins.examples * (bins.said - bins.found).abs()).sum() / len(y))
