"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-:=+*#"


def sparkline(values: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """Draw values as one line of at most `width` characters, from their least to their greatest.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    >>> sparkline([0.0, 0.2, 0.6, 1.0], 2, ASCII)
    '_#'
    """
    # A diverged loss may be near the largest float: clipped, so that no sum overflows.
    finite = [max(-1e300, min(value, 1e300)) for value in values if isfinite(value)]
    means = _squeeze(finite, width)
    if not means:
        return ""
    low, span = min(means), max(means) - min(means)
    top = len(levels) - 1
    places = [round(top * (mean - low) / span) if span else top // 2 for mean in means]
    return "".join(levels[place] for place in places)


def _squeeze(values: Sequence[float], width: int) -> list[float]:
    """Bring a curve to at most `width` points, each the mean of the values it stands for."""
    points = min(len(values), width)
    edges = [len(values) * i // points for i in range(points + 1)] if points > 0 else [0]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
