"""The end of a round where no layer remembers: some columns of all vectors, in one launch.

As in ending.py, but weights have moved by themselves: a value is made of the model that a client
ended with, of what clients share and of what each has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.kernels import interpreted
from undrift.kernels.closing import MOST, MOST_SHARED, filled, packed, sums_from
from undrift.kernels.ending import Ending
from undrift.kernels.interpreter import mend
from undrift.kernels.programs import columns as programs
from undrift.kernels.tuner import Launch, on_device

CLIENTS, COLUMNS = 64, 32  # of a tile: all of it is asked for before any of it is waited for

if interpreted():
    mend()


def parts_of(size: int) -> int:
    """Tell how many numbers each client's sum over so many columns comes in."""
    return -(-size // COLUMNS)


def takes(model: Tensor, e: Ending) -> bool:
    """Whether the kernel does this: few vectors in float32, clients evenly apart."""
    few = max(len(e.own), len(e.states)) <= MOST and len(e.shared) <= MOST_SHARED
    each = (model, *e.own, *e.states, *e.before)
    return few and all(_is_even(v) for v in each) and all(v.stride(-1) == 1 for v in e.shared)


def close_columns(model: Tensor, e: Ending, added: Tensor) -> None:
    """Write states and sums of columns: model [E, C, n]; the rest of `e` likewise.

    Sums over each client's columns come in `added` [summed, E, C, parts].
    """
    with on_device(model):
        _launch(model, e, added, 0)
        for at in range(MOST, len(e.sums), MOST):
            _launch(model, e._replace(squares=(), states=[], before=[]), added, at)


def _launch(model: Tensor, e: Ending, added: Tensor, at: int) -> None:
    experiments, each, size = model.shape
    wanted = sums_from(e, at)
    common, totals = filled(e.shared, model, MOST_SHARED), filled(wanted, model)
    theirs = [v for some in (e.own, e.states, e.before) for v in filled(some, model)]
    again = model if e.again is None else e.again
    arguments = (
        model, *common, *theirs[:2], e.table, e.taken.contiguous(), *theirs[2:], *totals, added,
        again, size, each, model.stride(1), *(v.stride(0) for v in common),
        *(v.stride(1) for v in theirs), *(v.stride(0) for v in totals),
    )  # fmt: skip
    constants = dict(
        packed(e, at), SHARED=len(e.shared), OWN=len(e.own), SUMMED=len(e.squares),
        STATES=len(e.states), SUMS=len(wanted), AGAIN=e.again is not None, BC=CLIENTS, BN=COLUMNS,
        num_warps=8,
    )  # fmt: skip
    grid = (parts_of(size), experiments)
    Launch(programs.close_columns, grid, arguments, constants).run()


def _is_even(v: Tensor) -> bool:
    """Whether clients [E, C, n] are evenly apart, and columns side by side."""
    even = len(v) == 1 or v.stride(0) == v.shape[1] * v.stride(1)
    return even and v.stride(2) == 1 and v.dtype == torch.float32
