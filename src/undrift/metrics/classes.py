"""Metrics of classes: functions of probabilities [n, C] and class numbers [n].

A mean over classes is one over those that the examples have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST = torch.finfo(torch.float64).eps  # a probability below counts as this one in a logarithm


class Steps(NamedTuple):
    """How many examples of a class, and of the others, score at least each threshold."""

    thresholds: Tensor  # [k] distinct scores, the largest first
    hits: Tensor  # [k] of the class
    false: Tensor  # [k] of the others


def steps(score: Tensor, positive: Tensor) -> Steps:
    """Count down the scores; equal ones are one step."""
    order = score.argsort(descending=True)
    score, hits = score[order], positive[order].double().cumsum(0)
    last = torch.ones(len(score), dtype=torch.bool)
    last[:-1] = score[1:] != score[:-1]
    at = last.nonzero()[:, 0]
    return Steps(score[at], hits[at], (at + 1).double() - hits[at])


def accuracy(p: Tensor, y: Tensor) -> float:
    """Share of examples whose most probable class is theirs."""
    return float((p.argmax(1) == y).double().mean())


def confusion(p: Tensor, y: Tensor) -> Tensor:
    """Count examples of each class (row) that are taken for each class (column): [C, C]."""
    classes = p.shape[1]
    return torch.bincount(y * classes + p.argmax(1), minlength=classes**2).view(classes, classes)


def balanced_accuracy(p: Tensor, y: Tensor) -> float:
    """Mean over classes of the share of their examples that are right."""
    table = confusion(p, y).double()
    there = table.sum(1) > 0
    return float((table.diagonal()[there] / table.sum(1)[there]).mean())


def f1(p: Tensor, y: Tensor) -> float:
    """Mean over classes of the harmonic mean of precision and recall.

    A class counts that has an example, or that an example is taken for.
    """
    table = confusion(p, y).double()
    both = table.sum(0) + table.sum(1)
    return float((2 * table.diagonal()[both > 0] / both[both > 0]).mean())


def auc(p: Tensor, y: Tensor) -> float | None:
    """Area under the ROC curve: how often an example of a class scores above one of another."""
    return _one_against_rest(p, y, _area)


def average_precision(p: Tensor, y: Tensor) -> float | None:
    """Precision, averaged over recall."""
    return _one_against_rest(p, y, _precision)


def log_loss(p: Tensor, y: Tensor) -> float:
    """Mean of -log of the probability of the true class."""
    return float(-p.gather(1, y[:, None]).clamp(SMALLEST, 1.0).log().mean())


def brier(p: Tensor, y: Tensor) -> float:
    """Squared error of the probability of class 1; of more than two classes, the sum over all."""
    wrong = (p - torch.nn.functional.one_hot(y, p.shape[1])).square()
    return float((wrong[:, 1] if p.shape[1] == 2 else wrong.sum(1)).mean())


def _area(found: Steps) -> float:
    hits, false = (torch.cat([v.new_zeros(1), v]) for v in (found.hits, found.false))
    return float(torch.trapezoid(hits, false) / (hits[-1] * false[-1]))


def _precision(found: Steps) -> float:
    gained = found.hits.diff(prepend=found.hits.new_zeros(1)) / found.hits[-1]
    return float((gained * found.hits / (found.hits + found.false)).sum())


def _one_against_rest(p: Tensor, y: Tensor, measure: Callable[[Steps], float]) -> float | None:
    """Measure class 1 of two; of more, average over the classes that the examples have."""
    count = torch.bincount(y, minlength=p.shape[1])
    there = (count > 0).nonzero()[:, 0].tolist()
    if len(there) < 2:
        return None
    chosen = [1] if p.shape[1] == 2 else there
    return sum(measure(steps(p[:, c], y == c)) for c in chosen) / len(chosen)
