"""What a partition is: labels and a seed in, one list of example indices per client out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Labels = Tensor | NDArray[Any] | Sequence[Any]  # [n, ...] the first axis counts the examples
Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
Parts = list[Ids]  # one array of example indices per client


class Partition(Protocol):
    """Any object with this method deals examples to clients.

    An example goes to one client at most, no client is empty unless the partition was asked for
    that (`min_size=0`), and the order within a client is the order in which examples arrive.
    """

    def split(self, labels: Labels, seed: int, keys: Labels | None = None) -> Parts:
        """Deal the examples; the same arguments give the same parts.

        `keys` names the natural owner of every example; only partitions by owner look at it.
        """
