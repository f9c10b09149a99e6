"""What a source gives: examples to train and to test on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from undrift.data.examples import Examples as Examples
from undrift.data.examples import Info as Info
from undrift.guarded.limits import Unreadable as Unreadable  # a loader adds where it lies

Bytes8 = np.ndarray[Any, np.dtype[np.uint8]]


class Pixels(NamedTuple):
    """Pictures as they lie in a file."""

    train_x: Bytes8  # [n, H, W, channels]
    train_y: Bytes8  # [n]
    test_x: Bytes8
    test_y: Bytes8
