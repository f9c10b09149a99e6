"""ROC and precision-recall curves of one class, thinned for a file."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undrift.metrics.classes import steps

POINTS = 200  # of a curve that is kept


class Curve(NamedTuple):
    """Points of a curve, and the threshold from which on an example is taken for the class."""

    x: Tensor
    y: Tensor
    thresholds: Tensor  # infinite where no example is


def roc(score: Tensor, positive: Tensor, points: int | None = None) -> Curve | None:
    """Give false positives (x) and true positives (y), as shares; None with one class only."""
    found = steps(score, positive)
    hits, false = found.hits[-1], found.false[-1]
    if not hits or not false:
        return None
    nothing = hits.new_zeros(1)
    x, y = torch.cat([nothing, found.false / false]), torch.cat([nothing, found.hits / hits])
    return _thinned(Curve(x, y, _from_nothing(found.thresholds)), points)


def precision_recall(score: Tensor, positive: Tensor, points: int | None = None) -> Curve | None:
    """Give recall (x) and precision (y); None with one class only."""
    found = steps(score, positive)
    if not found.hits[-1] or not found.false[-1]:
        return None
    x, y = found.hits / found.hits[-1], found.hits / (found.hits + found.false)
    x, y = torch.cat([x.new_zeros(1), x]), torch.cat([y.new_ones(1), y])
    return _thinned(Curve(x, y, _from_nothing(found.thresholds)), points)


def _from_nothing(thresholds: Tensor) -> Tensor:
    return torch.cat([thresholds.new_full((1,), torch.inf), thresholds])


def _thinned(curve: Curve, points: int | None) -> Curve:
    """Keep points at equal distances along the curve, both ends among them."""
    if points is None or len(curve.x) <= points:
        return curve
    way = (curve.x.diff().abs() + curve.y.diff().abs()).cumsum(0)
    way = torch.cat([way.new_zeros(1), way])
    wanted = torch.linspace(0, 1, points, dtype=way.dtype) * way[-1]
    at = torch.searchsorted(way, wanted).clamp(max=len(way) - 1)
    at[-1] = len(way) - 1
    at = at.unique()
    return Curve(*(v[at] for v in curve))
