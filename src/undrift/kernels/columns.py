"""The end of a round where no layer remembers: some columns of all vectors, in one launch.

As in ending.py, but weights have moved by themselves: a value is made of the model that a client
ended with, of what clients share and of what each has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undrift.kernels import interpreted
from undrift.kernels.closing import MOST, MOST_SHARED, add_up, filled, packed, sums_from
from undrift.kernels.ending import Ending
from undrift.kernels.interpreter import mend
from undrift.kernels.programs import columns as programs
from undrift.kernels.tuner import Launch, on_device

COLUMNS = 512  # of a program, for one client
ADDED = dict(BC=16, SOME=64)  # clients and columns of a tile, where they are added up
MOST_EACH = 2**28  # bytes of what each client brings to a sum

if interpreted():
    mend()


class Blocks(NamedTuple):
    """The columns of all programs."""

    bounds: Tensor  # [programs, 2]: where they begin and end
    aligned: bool  # whether they all are multiples of 4

    @classmethod
    def of(cls, columns: Sequence[slice], device: torch.device) -> Blocks:
        """Share out columns."""
        bounds = [
            (begin, min(begin + COLUMNS, c.stop))
            for c in columns
            for begin in range(c.start, c.stop, COLUMNS)
        ]
        made = torch.tensor(bounds, dtype=torch.int32, device=device).view(-1, 2)
        return cls(made, all(place % 4 == 0 for block in bounds for place in block))


def takes(model: Tensor, e: Ending, columns: Sequence[slice]) -> bool:
    """Whether the kernels do this: few vectors in float32, clients evenly apart, few columns."""
    few = max(len(e.own), len(e.states)) <= MOST and len(e.shared) <= MOST_SHARED
    each = (model, *e.own, *e.states, *e.before)
    numbers = model[..., 0].numel() * sum(c.stop - c.start for c in columns)
    dense = all(_is_even(v) for v in each) and all(v.stride(-1) == 1 for v in e.shared)
    return few and dense and 4 * min(len(e.sums), MOST) * numbers <= MOST_EACH


def close_columns(model: Tensor, e: Ending, blocks: Blocks) -> Tensor:
    """Write states and sums of some columns: model [E, C, P], and the rest of `e` likewise.

    Of what is placed elsewhere states alone are looked for there.
    Gives what is added up over each client's columns, [summed, E, C, 1].
    """
    size = (len(e.squares), *model.shape[:2], len(blocks.bounds))
    added = torch.empty(size, device=model.device)
    if not len(blocks.bounds):  # layers remember all there is
        return added.new_zeros((*size[:-1], 1))
    with on_device(model):
        _close(model, e, blocks, added, 0)
        for at in range(MOST, len(e.sums), MOST):
            alone = e._replace(squares=(), states=[], before=[])
            _close(model, alone, blocks, added, at)
        return added[..., :1] if e.again is not None else add_up(added)


def _close(model: Tensor, e: Ending, blocks: Blocks, added: Tensor, at: int) -> None:
    experiments, count, _ = model.shape
    wanted, programs_of = sums_from(e, at), len(blocks.bounds)
    each = model.new_empty((len(wanted), experiments * count, programs_of * COLUMNS))
    common = filled(e.shared, model, MOST_SHARED)
    theirs = [v for some in (e.own, e.states, e.before) for v in filled(some, model)]
    if e.placed is not None:
        theirs[2:4] = filled(e.placed.states, model)
    again = model if e.again is None else e.again
    aligned = blocks.aligned and _is_aligned(model, e)
    arguments = (
        model, *common, *theirs[:2], e.table.contiguous(), e.taken.contiguous(), *theirs[2:], each,
        added, again, blocks.bounds, count, model.stride(1), *(v.stride(0) for v in common),
        *(v.stride(-2) if v.dim() > 1 else 0 for v in theirs),
    )  # fmt: skip
    constants = dict(
        packed(e, at), SHARED=len(e.shared), OWN=len(e.own), SUMMED=len(e.squares),
        STATES=len(e.states), SUMS=len(wanted), AGAIN=e.again is not None,
        PLACED=e.placed is not None, ALIGNED=aligned, BN=COLUMNS, num_warps=4,
    )  # fmt: skip
    grid = (programs_of, experiments * count)
    Launch(programs.close_columns, grid, arguments, constants).run()
    if not wanted:
        return
    totals = filled(wanted, model)
    further = (each, *totals, again, blocks.bounds, count, *(v.stride(0) for v in totals))
    known = dict(
        SUMS=len(wanted), AGAIN=e.again is not None, ALIGNED=blocks.aligned, BN=COLUMNS,
        num_warps=4, **ADDED,
    )  # fmt: skip
    shared_out = (programs_of * (COLUMNS // ADDED["SOME"]), experiments)
    Launch(programs.add_clients, shared_out, further, known).run()


def _is_aligned(model: Tensor, e: Ending) -> bool:
    """Whether all vectors begin at multiples of 16 bytes."""
    states = [] if e.placed is not None else e.states
    each = [(v, v.stride(1)) for v in (model, *e.own, *states, *e.before)]
    common = [(v, v.stride(0)) for v in e.shared]
    placed = e.placed is None or e.placed.aligned
    return placed and all(v.data_ptr() % 16 == 0 and far % 4 == 0 for v, far in [*each, *common])


def _is_even(v: Tensor) -> bool:
    """Whether clients [E, C, n] are evenly apart, and columns side by side."""
    even = len(v) == 1 or v.stride(0) == v.shape[1] * v.stride(1)
    return even and v.stride(2) == 1 and v.dtype == torch.float32
