"""One record for each metric: its name, which direction is better, and how it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["classes", "numbers", "counts"]
Function = Callable[[Tensor, Tensor], float | None]  # (scores, targets), both on the host


@dataclass(frozen=True)
class Metric:
    """A metric of targets of one kind; counts are numbers, too.

    Scores of classes are probabilities [n, C], those of numbers predictions [n] in the target's
    own units.  Targets are [n].
    """

    name: str
    better: Literal["more", "less"]
    kind: Kind
    function: Function
    percent: bool = False  # whether it is a share that reads best in percent

    def __call__(self, scores: Tensor, targets: Tensor) -> float | None:
        """Compute it in float64; None where it is not defined.

        >>> from undrift.metrics import METRICS
        >>> METRICS["mae"](torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        1.0
        """
        if not len(scores) or not bool(torch.isfinite(scores).all()):
            return None
        found = self.function(scores.double(), whole_or_double(targets))
        return None if found is None or not math.isfinite(found) else float(found)

    def fits(self, kind: Kind) -> bool:
        """Whether targets of this kind have the metric."""
        return kind == self.kind or (kind == "counts" and self.kind == "numbers")


def whole_or_double(targets: Tensor) -> Tensor:
    """Leave class numbers whole; everything else is float64."""
    return targets.double() if targets.is_floating_point() else targets.long()
