"""Memory moved between places that a table names, and cleared where a flag says so."""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.kernels import interpreted
from undrift.kernels.interpreter import mend
from undrift.kernels.problem import Lying
from undrift.kernels.programs import moving
from undrift.kernels.tuner import Launch, on_device

BLOCK = 4096
PROGRAMS = 1056  # of `clear`: eight for each processor of an H200

if interpreted():
    mend()


def move(table: Tensor, most: int) -> None:
    """Copy by a table [N, 3] of addresses to and from and of words, at most `most` of them."""
    with on_device(table):
        grid = (-(-most // BLOCK), len(table))
        Launch(moving.move, grid, (table,), dict(BLOCK=BLOCK, num_warps=8)).run()


def clear(values: Tensor, flag: Tensor) -> None:
    """Write zeros if the flag is set; a few microseconds if not.  Bytes are a multiple of 4."""
    words = values.view(-1).view(torch.int32)
    with on_device(values):
        constants = dict(BLOCK=BLOCK, num_warps=8)
        Launch(moving.clear, (PROGRAMS,), (words, flag, words.numel()), constants).run()


def narrow(lying: Lying, to: Tensor) -> None:
    """Read vectors where they lie, from their column on, into `to` [n, ...] in its type."""
    size = to[0].numel()
    with on_device(to):
        constants = dict(
            COLUMN=lying.column, SIZE=size, ALIGNED=lying.aligned, BLOCK=BLOCK, num_warps=8
        )
        grid = (len(to), -(-size // BLOCK))
        Launch(moving.narrow, grid, (lying.at, to, to.stride(0)), constants).run()


def exchange(at: Tensor, slices: Tensor, most: int, *, out: bool) -> None:
    """Copy slices of rows at addresses [n] from or, `out`, to elsewhere.

    A slice is [bytes from the row's begin, address elsewhere, bytes from one client to the next
    there, words], and has at most so many words.
    """
    with on_device(at):
        grid = (len(at), -(-most // BLOCK), len(slices))
        constants = dict(OUT=out, BLOCK=BLOCK, num_warps=8)
        Launch(moving.exchange, grid, (at, slices), constants).run()
