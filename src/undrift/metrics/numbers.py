"""Metrics of numbers: functions of predictions [n] and targets [n], in the target's own units."""

from __future__ import annotations

import torch
from torch import Tensor


def rmse(scores: Tensor, targets: Tensor) -> float:
    """Root of the mean squared error."""
    return float((scores - targets).square().mean().sqrt())


def mae(scores: Tensor, targets: Tensor) -> float:
    """Mean of the absolute error."""
    return float((scores - targets).abs().mean())


def r2(scores: Tensor, targets: Tensor) -> float | None:
    """Share of the targets' variance that is explained; None where they do not vary."""
    around = (targets - targets.mean()).square().sum()
    if bool((targets == targets[0]).all()):
        return None
    return float(1 - (scores - targets).square().sum() / around)


def pinball(scores: Tensor, targets: Tensor, quantile: float = 0.5) -> float:
    """Mean of q times what is missing, or of 1 - q times what is too much."""
    gap = targets - scores
    return float(torch.maximum(quantile * gap, (quantile - 1) * gap).mean())


def poisson_deviance(scores: Tensor, targets: Tensor) -> float | None:
    """Twice the log likelihood that is lost to a perfect prediction of counts.

    Predictions must be above 0 and counts not below it.
    """
    if bool((scores <= 0).any()) or bool((targets < 0).any()):
        return None
    return float(2 * (torch.xlogy(targets, targets / scores) - targets + scores).mean())
