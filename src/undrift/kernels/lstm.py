"""All steps of a cohort's LSTM layer, a kernel for each.

Shapes.  C clients, T steps, B rows, H hidden units; inner [C, T, B, 4H], h and c [C, B, H],
recurrent [C, 4H, H].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.kernels import interpreted
from undrift.kernels.interpreter import mend
from undrift.kernels.problem import TYPES, power
from undrift.kernels.programs import lstm
from undrift.kernels.tuner import Launch, on_device

ROWS = 16
Form = tuple[int, int, int]  # units of a program, depth of its product, warps
# the first where nothing can be timed
FORWARD = ((32, 64, 4), (16, 128, 4), (16, 256, 8), (32, 128, 8), (64, 64, 8))
BACKWARD = ((16, 256, 4), (16, 128, 4), (32, 128, 4), (32, 256, 8), (16, 512, 8))
INPUT = {"float32": "ieee", "tf32": "tf32", "bf16": "tf32", "fp16": "tf32"}

if interpreted():
    mend()


class Held(NamedTuple):
    """What the steps leave: states of T + 1 moments, the first of which is the start."""

    outputs: Tensor  # [C, T + 1, B, H] in the type of operands
    cells: Tensor  # [C, T + 1, B, H]
    gates: Tensor  # [C, T, B, 4H] in the type of operands


def take_steps(
    inner: Tensor, h: Tensor, c: Tensor, recurrent: Tensor, precision: str,
    form: Form = FORWARD[0],
) -> Held:  # fmt: skip
    """Take all steps."""
    clients, steps, rows, wide = inner.shape
    kind, units = TYPES[precision], wide // 4
    inner, weights = inner.contiguous(), recurrent.to(kind).contiguous()
    moments = (clients, steps + 1, rows, units)
    outputs = torch.empty(moments, dtype=kind, device=h.device)
    cells = torch.empty(moments, dtype=torch.float32, device=h.device)
    outputs[:, 0], cells[:, 0] = h, c
    gates = torch.empty(inner.shape, dtype=kind, device=h.device)
    arguments = (inner, weights, outputs, cells, gates)
    _run(lstm.forward, arguments, range(steps), inner.shape, precision, form)
    return Held(outputs, cells, gates)


def go_back(
    by_output: Tensor, by_cell: Tensor, recurrent: Tensor, held: Held, precision: str,
    form: Form = BACKWARD[0],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Give the gradients of the gates [C, T, B, 4H] and of the first cell state [C, B, H]."""
    steps = held.gates.shape[1]
    weights = recurrent.to(TYPES[precision]).contiguous()
    by_output, by_cell = by_output.contiguous(), by_cell.float().clone()
    by_gates = torch.empty_like(held.gates)
    arguments = (by_output, weights, held.cells, held.gates, by_gates, by_cell)
    _run(lstm.backward, arguments, range(steps)[::-1], held.gates.shape, precision, form)
    return by_gates, by_cell


def _run(
    program: Any,
    arguments: tuple[Tensor, ...],
    order: range,
    shape: Any,
    precision: str,
    form: Form,
) -> None:
    """Launch a kernel for every step."""
    import triton.language as tl

    clients, steps, rows, wide = shape
    units, depth, warps = form
    kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    constants = dict(
        T=steps, B=rows, H=wide // 4, ROWS=ROWS, UNITS=min(units, power(wide // 4)),
        DEPTH=min(depth, power(wide // 4)), KIND=kinds[TYPES[precision]],
        PRECISION=INPUT[precision], num_warps=warps,
    )  # fmt: skip
    grid = (-(-wide // 4 // constants["UNITS"]), clients, -(-rows // ROWS))
    with on_device(arguments[0]):
        for t in order:
            Launch(program, grid, (*arguments, t), constants).run()
