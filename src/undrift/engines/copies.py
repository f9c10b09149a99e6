"""Copies of clients between a cohort and its lanes: whole models in one launch, by their addresses.

torch copies lists of tensors with too few threads for a handful of models; here the host lists a
round's copies in advance, and every launch takes its part of that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from undrift import kernels
from undrift.core.transfer import send

LARGE = 2**16  # bytes; what is smaller is left to torch
WORD = 4  # bytes that are copied as one


class Row(NamedTuple):
    """The tensors of one client."""

    small: dict[torch.dtype, list[Tensor]]
    large: list[tuple[int, int]]  # address, words


Pair = tuple[Row, Row]  # to, from


def row_of(tensors: Sequence[Tensor]) -> Row:
    """Take down where the tensors of a client are; they keep their place."""
    row = Row({}, [])
    for tensor in tensors:
        if _is_large(tensor):
            row.large.append((tensor.data_ptr(), tensor.nbytes // WORD))
        else:
            row.small.setdefault(tensor.dtype, []).append(tensor)
    return row


def _is_large(tensor: Tensor) -> bool:
    whole = tensor.is_contiguous() and tensor.nbytes % WORD == 0
    return whole and tensor.nbytes >= LARGE and kernels.available(tensor.device)


class Copies:
    """The copies of a round, in turns."""

    def __init__(self, turns: Sequence[Sequence[Pair]], device: torch.device) -> None:
        self.turns = turns
        listed = [
            (place, source, words)
            for turn in turns
            for to, frm in turn
            for (place, words), (source, _) in zip(to.large, frm.large, strict=True)
        ]
        counts = [sum(len(to.large) for to, _ in turn) for turn in turns]
        self._ends = np.cumsum([0, *counts]).tolist()
        self._most = max((words for *_, words in listed), default=0)
        self._table = send(torch.tensor(listed, dtype=torch.int64).view(-1, 3), device)

    def make(self, turn: int) -> None:
        """Make the copies of one turn."""
        pairs = self.turns[turn]
        for kind in dict.fromkeys(kind for to, _ in pairs for kind in to.small):
            to = [v for row, _ in pairs for v in row.small.get(kind, ())]
            torch._foreach_copy_(to, [v for _, row in pairs for v in row.small.get(kind, ())])
        mine = self._table[self._ends[turn] : self._ends[turn + 1]]
        if len(mine):
            from undrift.kernels import moving

            moving.move(mine, self._most)
