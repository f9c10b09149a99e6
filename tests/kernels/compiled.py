"""Compile programs for a card of compute capability 9.0, without one.

Those of a cohort's BatchNorm, in a precision; "steps": those that take the step of a chain where
gradients are made; or "end": those that end a round.  A process of its own: where the interpreter
was asked for, there is no compiler.  Writes one line of JSON per program: its name, and the widths
of its loads and stores as PTX calls them.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from undrift.kernels import batchnorm, closing, columns, launches, linear, settling
from undrift.kernels.ending import Ending, Placed
from undrift.kernels.problem import TYPES, Lying, Norm, Problem, thin
from undrift.kernels.tuner import Launch

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
}
ALIGNED = [["tt.divisibility", 16]]
SHAPES = {  # batch, channels, pixels a side, pooled
    "float32": (100, 64, 8, False),
    "bf16": (100, 512, 2, True),
}


def compile_for_hopper(launch: Launch) -> Any:
    """Compile as a launch with these arguments would: ones and multiples of 16 are known."""
    any_value = {p.name for p in launch.program.params if p.do_not_specialize}
    signature: dict[str, str] = {}
    constants = {n: v for n, v in launch.constants.items() if n in launch.program.arg_names}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, (name, value) in enumerate(
        zip(launch.program.arg_names, launch.arguments, strict=False)
    ):
        if isinstance(value, Tensor):
            signature[name], attributes[(i,)] = POINTERS[value.dtype], ALIGNED
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name not in any_value:
            constants[name] = 1
        else:
            signature[name] = "i32"
            if value % 16 == 0 and name not in any_value:
                attributes[(i,)] = ALIGNED
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(launch.program, signature, constants, attributes)
    known = ("num_warps", "num_stages", "maxnreg")
    options = {name: launch.constants[name] for name in known if name in launch.constants}
    return compiled(source, target=GPUTarget("cuda", 90, 32), options=options)


def report(launch: Launch) -> None:
    made = compile_for_hopper(launch)
    assert made.asm["cubin"]
    widths = sorted(set(re.findall(r"\b(?:ld|st)\.global\.((?:v\d\.)?b\d+)", made.asm["ptx"])))
    print(json.dumps([launch.program.__name__, widths]))


def steps() -> None:
    """Compile what moves weights under SCAFFOLD with momentum."""
    clients, size = 2, 120_000

    def vectors(count: int) -> list[Tensor]:
        return [torch.empty((clients, size)) for _ in range(count)]

    live = torch.ones(clients, dtype=torch.bool)
    needs = ((0, 1, 2, 3, 4), (1, 2, 3, 4))
    step = settling.ChainStep(
        vectors(1), vectors(1), vectors(1), torch.empty(2, clients, 5), live, needs, 1.0, 102_400
    )
    (w,) = vectors(1)
    second = Problem(clients, 50, 14, 14, 64, 64, (5, 5), precision="bf16")
    weights, bias = w[:, :102_400].view(clients, 64, 64, 5, 5), w[:, 102_400:102_464]
    sums = torch.empty((clients, 7, 64))
    launches.sum_parts(second, 4, torch.empty(1), sums, weights, bias, step).run()
    first = second._replace(height=32, width=32, inputs=3)
    form, wide = thin(first), w[:, :4800].view(clients, 64, 3, 5, 5)
    launches.sum_pairs(first, form, dict(BN=64, SPLIT=4), sums, wide, bias, step).run()
    settling.take(step, w, torch.empty((clients, size)))
    p = linear.LinearProblem(clients, 50, 1600, 64, "bf16")
    g, x = (torch.empty((clients, 50, n), dtype=torch.bfloat16) for n in (64, 1600))
    linear.descend(p, g, x, weights.view(clients, 64, 1600), bias, step, True, torch.bfloat16)


def end() -> None:
    """Compile what ends a round of SCAFFOLD with momentum, and what reads c_i in its steps."""
    clients, rows, outputs, inputs = 2, 50, 128, 256

    def vectors(count: int, kind: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.empty((1, outputs, inputs), dtype=kind) for _ in range(count)]

    (own,) = (v.expand(1, clients, -1, -1) for v in vectors(1))
    at = [torch.empty(clients, dtype=torch.int64)]
    ending = Ending(
        torch.empty(5, 1, clients, 4), ((0, 1, 2, 3),) * 5, (True, False), vectors(2),
        torch.ones(2, dtype=torch.bool), [own], torch.ones((1, clients), dtype=torch.bool), [own],
        [own], vectors(2, torch.float64), placed=Placed(at, at, at, True, 64),
    )  # fmt: skip
    p = linear.LinearProblem(clients, rows, inputs, outputs, "bf16")
    g, x = (torch.empty((clients, rows, n), dtype=torch.bfloat16) for n in (outputs, inputs))
    flag = torch.zeros((), dtype=torch.bool)
    for one in (ending, ending._replace(again=flag), ending._replace(placed=None)):
        for config in (closing.PLAIN, closing.DIRECT):
            (launch,), added = closing._launches(p, config, g, x, one, 0.5, 0)
            launch.run()
    closing.add_up(added)
    there, half = Lying(at[0], True, 64), own[0].to(torch.bfloat16)
    config, y = linear._forward_candidates(p)[0], torch.empty((clients, rows, outputs))
    linear._forward_launches(p, config, x, half, None, y, None, False, there)[0].run()
    some, blocks = ending.of(lambda v: v[..., 0, :]), columns.Blocks.of([slice(0, 99)], g.device)
    columns.close_columns(own[:, :, 0], some, blocks)


def main(what: str) -> None:
    Launch.run = report  # type: ignore[method-assign]
    if what == "end":
        end()
        return
    if what == "steps":
        steps()
        return
    precision = what
    images, channels, pixels, pool = SHAPES[precision]
    kind = TYPES[precision]
    x = torch.empty((2, images, pixels, pixels, channels), dtype=kind).movedim(-1, 2)
    mask = torch.ones((2, images), dtype=torch.bool)
    scale, shift = torch.ones((2, 4 * channels)).split(2 * channels, 1)
    mean, var, size = batchnorm.statistics(x, mask)
    known = batchnorm.Known(mask, mean, var, scale[:, :channels], shift[:, :channels])
    how = Norm(1e-5, kind, True, pool)
    y, place = batchnorm.apply(x, known, how)
    batchnorm.gradients(y, x, size, place, known, how)


if __name__ == "__main__":
    main(sys.argv[1])
