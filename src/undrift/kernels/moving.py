"""Copies between places that a table names: as many in one launch as there are."""

from __future__ import annotations

from torch import Tensor

from undrift.kernels import interpreted
from undrift.kernels.interpreter import mend
from undrift.kernels.programs import moving
from undrift.kernels.tuner import Launch, on_device

BLOCK = 4096

if interpreted():
    mend()


def move(table: Tensor, most: int) -> None:
    """Copy by a table [N, 3] of addresses to and from and of words, at most `most` of them."""
    with on_device(table):
        grid = (-(-most // BLOCK), len(table))
        Launch(moving.move, grid, (table,), dict(BLOCK=BLOCK, num_warps=8)).run()
