"""How long what a client sends may be, beside what the others of its cohort send."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

FACTOR = 10.0  # times the cohort's median: a silo that sends more is refused, a simulation warns


def middle(values: ArrayLike) -> float:
    """Give the median of the numbers above 0, 0 if there are none.

    It is the lower one of two in the middle: of two reports the longer one is the suspect.

    >>> middle([3.0, 0.0, 1e30]), middle([2.0, 1.0, 4.0]), middle([])
    (3.0, 2.0, 0.0)
    """
    found = np.asarray(values, dtype=np.float64)
    above = found[found > 0]
    half = (len(above) - 1) // 2
    return float(np.partition(above, half)[half]) if len(above) else 0.0


def bounds(typical: float, work: ArrayLike, factor: float = FACTOR) -> NDArray[np.float64]:
    """Tell how long they may be: who does k times the usual work may go k times as far.

    >>> bounds(2.0, work=[5, 10, 30]).tolist()
    [20.0, 20.0, 60.0]
    """
    done = np.asarray(work, dtype=np.float64)
    return factor * typical * np.maximum(1.0, done / (middle(done) or 1.0))
