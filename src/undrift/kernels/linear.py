"""A cohort's linear layer and its gradients, by the kernels.

Shapes.  x [C, R, in], w [C, out, in] (clients may lie far apart), b [C, out], g [C, R, out].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from undrift.kernels import interpreted
from undrift.kernels.interpreter import mend
from undrift.kernels.launches import ROUNDING
from undrift.kernels.problem import TYPES, Lying, Terms, power
from undrift.kernels.programs import linear as programs
from undrift.kernels.settling import ChainStep, Mixed, Rates, Step, sections
from undrift.kernels.trials import largest, relative, some_of
from undrift.kernels.tuner import Configuration, Launch, Trial, as_tuned, configuration, on_device

if interpreted():
    mend()

KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LONG = 4096  # inputs: sums that are best shared out, also where nothing is timed
MOST_ROWS = 128  # more than that, and the layer is bound by arithmetic: torch's products do well


class LinearProblem(NamedTuple):
    """A cohort's linear layer."""

    clients: int
    rows: int
    inputs: int
    outputs: int
    precision: str

    @property
    def operand(self) -> torch.dtype:
        """The type of the operands."""
        return TYPES[self.precision]

    @property
    def operations(self) -> float:
        """Additions and multiplications of one pass."""
        return 2.0 * self.clients * self.rows * self.inputs * self.outputs

    def key(self) -> str:
        """Name the problem; cohorts and batches of similar size share a name."""
        sizes = f"{power(self.clients, 1)}x{power(self.rows)} {self.inputs}->{self.outputs}"
        return f"{sizes} {self.precision}"


def takes(p: LinearProblem, w: Tensor) -> bool:
    """Whether the kernels do this."""
    dense = w.stride(2) == 1 and w.stride(1) == p.inputs
    return dense and _fits(p) and 0 < p.rows <= MOST_ROWS


def rebuilds(p: LinearProblem) -> bool:
    """Whether `rebuild` does this."""
    return p.operand.itemsize == 2 and _fits(p)


def _fits(p: LinearProblem) -> bool:
    small = p.rows * max(p.inputs, p.outputs) < 2**31 and p.inputs * p.outputs < 2**31
    known = not (interpreted() and p.precision == "bf16")  # which the interpreter does not know
    return small and known and p.clients <= 65535


def constants_of(p: LinearProblem, kind: torch.dtype, config: Configuration) -> dict[str, Any]:
    """Give what a program is compiled for, with operands of some type."""
    return dict(
        IN=p.inputs, OUT=p.outputs, KIND=KINDS[kind], PRECISION=ROUNDING[p.precision],
        BR=power(p.rows), **config,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- forward
def forward(
    p: LinearProblem, x: Tensor, w: Tensor, b: Tensor | None, result: torch.dtype,
    rectify: bool = False, lying: Lying | None = None,
) -> Tensor:  # fmt: skip
    """Give y = x w^T + b in the type `result`; `rectify`: of relu(x).

    `lying`: weights are read there, and written into w on the way, in its type.
    """
    with on_device(x):
        x = x if x.stride(2) == 1 else x.contiguous()
        q, way = as_tuned(p), _forward_way if lying is None else _narrowing_way
        config = way(q, x.device)
        y = torch.empty((p.clients, p.rows, p.outputs), dtype=result, device=x.device)
        for launch in _forward_launches(p, config, x, w, b, y, None, rectify, lying):
            launch.run()
        return y


def _forward_way(p: LinearProblem, device: torch.device) -> Configuration:
    options = _forward_candidates(p)
    return configuration("linear", p, device, options, lambda: _forward_trial(p, device))


def _narrowing_way(p: LinearProblem, device: torch.device) -> Configuration:
    options = _narrowing_candidates(p)
    name = "linear, weights narrowed"
    return configuration(name, p, device, options, lambda: _narrowing_trial(p, device))


def _forward_launches(
    p: LinearProblem, config: Configuration, x: Tensor, w: Tensor, b: Tensor | None, y: Tensor,
    parts: Tensor | None, rectify: bool = False, lying: Lying | None = None,
) -> list[Launch]:  # fmt: skip
    split, bias = config["SPLIT"], y if b is None else b
    if parts is None:
        parts = torch.empty((split, *y.shape), device=x.device) if split > 1 else y
    strides = (x.stride(0), x.stride(1), w.stride(0), bias.stride(0), w.stride(0))
    weights, to = w if lying is None else lying.at, y if split == 1 else parts
    product = Launch(
        programs.linear, (-(-p.outputs // config["BO"]), p.clients, split),
        (x, weights, bias, to, w, p.clients, p.rows, *strides),
        dict(
            constants_of(p, p.operand, config), BIAS=b is not None, RECTIFY=rectify,
            PLACED=lying is not None, ALIGNED=lying is not None and lying.aligned,
            COLUMN=0 if lying is None else lying.column,
        ),
    )  # fmt: skip
    if split == 1:
        return [product]
    block = 512
    total = Launch(
        programs.sum_splits, (-(-p.rows * p.outputs // block), p.clients),
        (parts, bias, y, p.clients, p.rows, bias.stride(0)),
        dict(OUT=p.outputs, BIAS=b is not None, SPLIT=split, BLOCK=block, num_warps=4),
    )  # fmt: skip
    return [product, total]


def _forward_candidates(p: LinearProblem) -> list[Configuration]:
    # (outputs of a tile, inputs of a step, warps, stages)
    tiles = [(64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 4)]
    if p.precision == "float32":
        tiles = [(32, 32, 4, 2), (64, 32, 4, 2)]
    return _split_candidates(p, tiles)


def _narrowing_candidates(p: LinearProblem) -> list[Configuration]:
    tiles = [(64, 64, 4, 2), (64, 64, 8, 3)]
    more = _split_candidates(p, [] if p.precision == "float32" or interpreted() else tiles)
    return [*_forward_candidates(p), *more]


def _split_candidates(
    p: LinearProblem, tiles: Sequence[tuple[int, int, int, int]]
) -> list[Configuration]:
    """Give tiles with sums that are shared out, and not."""
    if interpreted() and tiles:
        tiles = [(32, 32, 4, 2)]
    found = list[Configuration]()
    for bo, bk, warps, stages in tiles:
        alone = p.clients * -(-p.outputs // bo)
        # programs in all; a card runs some hundreds at a time: fewer with long sums take longest
        for wanted in (600, 1) if p.inputs > LONG else (1, 600):
            split = max(1, min(wanted // alone, p.inputs // (2 * bk)))
            tile = dict(SPLIT=split, BO=bo, BK=bk, num_warps=warps, num_stages=stages)
            found += [] if tile in found else [tile]
    return found


def _forward_trial(p: LinearProblem, device: torch.device) -> Trial:
    x, w, b, _ = random_of(p, device)
    y = torch.empty((p.clients, p.rows, p.outputs), device=device)
    options = _forward_candidates(p)
    most = max(config["SPLIT"] for config in options)
    parts = torch.empty((most, *y.shape), device=device)

    def error() -> float:
        kind = p.operand
        wanted = torch.baddbmm(
            b[:, None].double(), x.to(kind).double(), w.to(kind).double().transpose(1, 2)
        )
        return relative(y, wanted) if bool(y.isfinite().all()) else float("inf")

    return Trial(
        options,
        lambda c: _forward_launches(p, c, x, w, b, y, parts),
        [y, parts],
        error,
        p.precision,
    )


def _narrowing_trial(p: LinearProblem, device: torch.device) -> Trial:
    x, w, _, _ = random_of(p, device)
    y = torch.empty((*x.shape[:2], p.outputs), device=device)
    copy = torch.empty_like(w, dtype=p.operand)
    at = [v.data_ptr() for v in w]
    aligned = all(place % 16 == 0 for place in at)
    lying = Lying(torch.tensor(at, device=device), aligned)

    def launches(config: Configuration) -> list[Launch]:
        return _forward_launches(p, config, x, copy, None, y, None, lying=lying)

    def error() -> float:
        narrow = w.to(p.operand)  # not before: w has to stay where it is
        if not torch.equal(copy, narrow):
            return float("inf")
        wanted = x.double() @ narrow.double().transpose(1, 2)
        return relative(y, wanted) if bool(y.isfinite().all()) else float("inf")

    return Trial(_narrowing_candidates(p), launches, [y, copy], error, p.precision)


# -------------------------------------------------------------------------------------- backward
def backward(
    p: LinearProblem, g: Tensor, x: Tensor, w: Tensor, needs: Sequence[bool], result: torch.dtype,
    rectify: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Give the gradients by x (in the type `result`), w and b that are needed.

    `rectify`: what was multiplied is relu(x).
    """
    with on_device(g):
        g, x = g.contiguous(), x if x.stride(2) == 1 else x.contiguous()
        gx, dw, db = _outputs(p, g.device, result)
        config = _backward_config(p, g.device, None)
        _backward_launch(p, config, g, x, w, gx, dw, db, needs, rectify=rectify).run()
        return [t for t, need in zip((gx, dw, db), needs, strict=True) if need]


def descend(
    p: LinearProblem, g: Tensor, x: Tensor, w: Tensor, b: Tensor | None, step: Step,
    by_input: bool, result: torch.dtype, rectify: bool = False,
) -> Tensor | None:  # fmt: skip
    """Move w and b by a step, in place; give the gradient by x if it is needed."""
    with on_device(g):
        g, x = g.contiguous(), x if x.stride(2) == 1 else x.contiguous()
        size = (p.clients, p.rows, p.inputs) if by_input else (1,)
        gx = torch.empty(size, dtype=result, device=g.device)
        bias, needs = w if b is None else b, (by_input, True, b is not None)
        if isinstance(step, ChainStep | Mixed):
            if by_input:  # before the weights move
                config = _backward_config(p, g.device, None)
                alone = (True, False, False)
                _backward_launch(p, config, g, x, w, gx, w, bias, alone, None, rectify).run()
            from undrift.kernels import linear_step

            for own, one in sections(step):
                mine = p._replace(clients=len(w[own]))
                bias_of = None if b is None else b[own]
                linear_step.run(mine, g[own], x[own], w[own], bias_of, one, rectify)
        else:
            config = _backward_config(p, g.device, step)
            _backward_launch(p, config, g, x, w, gx, w, bias, needs, step, rectify).run()
        return gx if by_input else None


def _outputs(
    p: LinearProblem, device: torch.device, result: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty((p.clients, p.rows, p.inputs), dtype=result, device=device),
        torch.empty((p.clients, p.outputs, p.inputs), device=device),
        torch.empty((p.clients, p.outputs), device=device),
    )


def _backward_config(p: LinearProblem, device: torch.device, rates: Rates | None) -> Configuration:
    move = rates is not None
    name, trial = ("linear step", _step_trial) if move else ("linear backward", _backward_trial)
    p = as_tuned(p)
    return configuration(name, p, device, _backward_candidates(p), lambda: trial(p, device))


def half_of(p: LinearProblem) -> torch.dtype:
    """Give the type that operands of the backward pass are rounded to."""
    return torch.float16 if p.precision == "tf32" else p.operand


def _backward_launch(
    p: LinearProblem, config: Configuration, g: Tensor, x: Tensor, w: Tensor, gx: Tensor,
    dw: Tensor, b: Tensor, needs: Sequence[bool], rates: Rates | None = None,
    rectify: bool = False,
) -> Launch:  # fmt: skip
    lr, keep = rates or (0.0, 1.0)
    half = p.precision == "tf32"
    strides = (x.stride(0), x.stride(1), w.stride(0), b.stride(0))
    arguments = (g, x, w, b, gx, dw, lr, keep, largest(g) if half else g, p.rows, *strides)
    constants = dict(
        constants_of(p, half_of(p), config), BY_INPUT=bool(needs[0]), BY_WEIGHT=bool(needs[1]),
        BIAS=bool(needs[2]), MOVE=int(rates is not None), RATES=isinstance(lr, Tensor),
        KEEPS=isinstance(keep, Tensor), HALF=half, RECTIFY=rectify,
    )  # fmt: skip
    grid = (-(-p.inputs // config["BI"]), p.clients)
    return Launch(programs.linear_backward, grid, arguments, constants)


def _backward_candidates(p: LinearProblem) -> list[Configuration]:
    # (inputs and outputs of a tile, warps, stages)
    tiles = [(128, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 1), (128, 32, 4, 3)]
    tiles += [(64, 32, 4, 3), (256, 32, 8, 2), (64, 64, 4, 4), (64, 128, 4, 2)]
    if p.precision == "float32":
        tiles = [(64, 32, 4, 1), (64, 32, 8, 1), (32, 32, 4, 2)]
    if interpreted():
        tiles = [(32, 32, 4, 2)]
    return [dict(BI=bi, BO=bo, num_warps=w, num_stages=s) for bi, bo, w, s in tiles]


# --------------------------------------------------------------------------- what is remembered
def add_rows(p: LinearProblem, g: Tensor, w: Tensor, y: Tensor, scale: float) -> None:
    """Add scale * g w to y [C, R, in], where it lies."""
    with on_device(g):
        q = as_tuned(p)
        config = configuration(
            "added rows", q, g.device, _adding_candidates(q), lambda: _adding_trial(q, g.device)
        )
        _adding_launch(p, config, g.contiguous(), w, y, scale).run()


def _adding_launch(
    p: LinearProblem, config: Configuration, g: Tensor, w: Tensor, y: Tensor, scale: float
) -> Launch:
    grid = (-(-p.inputs // config["BI"]), p.clients)
    arguments = (g, w, y, scale, p.rows, w.stride(0))
    return Launch(programs.add_rows, grid, arguments, constants_of(p, p.operand, config))


def _adding_candidates(p: LinearProblem) -> list[Configuration]:
    # (inputs and outputs of a tile, warps, stages)
    tiles = [(128, 64, 4, 2), (256, 32, 4, 2), (256, 64, 8, 2), (64, 64, 4, 3)]
    if p.precision == "float32":
        tiles = [(64, 32, 4, 2), (128, 32, 8, 1)]
    if interpreted():
        tiles = [(32, 32, 4, 2)]
    return [dict(BI=bi, BO=bo, num_warps=w, num_stages=s) for bi, bo, w, s in tiles]


def _adding_trial(p: LinearProblem, device: torch.device) -> Trial:
    x, w, _, g = random_of(p, device)
    w, g, start, y = w.to(p.operand), g.to(p.operand), x.float(), x.float().clone()

    def error() -> float:
        wanted = start.double() + 0.5 * (g.double() @ w.double())
        return relative(y, wanted) if bool(y.isfinite().all()) else float("inf")

    return Trial(
        _adding_candidates(p), lambda c: [_adding_launch(p, c, g, w, y, 0.5)], [y], error,
        p.precision, lambda: y.copy_(start),
    )  # fmt: skip


def rebuild(p: LinearProblem, g: Tensor, x: Tensor, terms: Terms, w: Tensor, scale: float) -> None:
    """Write the terms + scale * g^T x into w [C, out, in]; at most one term is clients' own.

    g [C, R, out] and x [C, R, in] have two bytes a number.
    """
    with on_device(g):
        q = as_tuned(p)
        config = configuration(
            "rebuilt weights", q, g.device, _rebuilding_candidates(q),
            lambda: _rebuilding_trial(q, g.device),
        )  # fmt: skip
        _rebuilding_launch(p, config, g, x, terms, w, scale).run()


def _rebuilding_launch(
    p: LinearProblem, config: Configuration, g: Tensor, x: Tensor, terms: Terms, w: Tensor,
    scale: float,
) -> Launch:  # fmt: skip
    grid = (-(-p.inputs // config["BI"]), p.clients, -(-p.outputs // config["BO"]))
    shared, weights = terms.shared, w if terms.weights is None else terms.weights
    own, own_weight = (terms.own[0], terms.own_weights[0]) if terms.own else (w, w)
    strides = (
        g.stride(0), x.stride(0), shared.stride(0), shared.stride(1), weights.stride(0),
        own.stride(0), own_weight.stride(0), w.stride(0),
    )  # fmt: skip
    arguments = (
        g, x, shared, weights, own, own_weight, w, scale, p.rows, p.clients // len(shared),
        *strides,
    )  # fmt: skip
    constants = dict(
        IN=p.inputs, OUT=p.outputs, SHARED=shared.shape[1], WEIGHTED=terms.weights is not None,
        OWN=bool(terms.own), BS=min(power(p.rows), 64), **config,
    )  # fmt: skip
    return Launch(programs.rebuild, grid, arguments, constants)


def _rebuilding_candidates(p: LinearProblem) -> list[Configuration]:
    # (inputs and outputs of a tile, warps, stages)
    tiles = [(128, 64, 4, 2), (128, 128, 8, 2), (256, 64, 8, 2), (256, 128, 8, 1), (64, 128, 4, 3)]
    if interpreted():
        tiles = [(32, 32, 4, 2)]
    return [dict(BI=bi, BO=bo, num_warps=w, num_stages=s) for bi, bo, w, s in tiles]


def _rebuilding_trial(p: LinearProblem, device: torch.device) -> Trial:
    x, w, _, g = random_of(p, device)
    start, g, some = w[:1].clone(), g.to(p.operand), some_of(p.clients)
    terms = Terms(start[:, None])

    def error() -> float:
        # Of some clients, and without a mask: a cohort's wide layers would not fit several times.
        if not bool(w.sum().isfinite()):
            return float("inf")
        wanted = start.double() - 0.5 * (g[some].double().transpose(1, 2) @ x[some].double())
        return relative(w[some], wanted)

    return Trial(
        _rebuilding_candidates(p),
        lambda c: [_rebuilding_launch(p, c, g, x, terms, w, -0.5)],
        [w],
        error,
        p.precision,
    )


def wanted_of(p: LinearProblem, g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients by input, weight and bias in float64, of operands as they are rounded."""
    narrow, kind = g.to(p.operand).double(), p.operand
    by_weight = narrow.transpose(1, 2) @ x.to(kind).double()
    return narrow @ w.to(kind).double(), by_weight, g.double().sum(1)


def _backward_trial(p: LinearProblem, device: torch.device) -> Trial:
    x, w, _, g = random_of(p, device)
    outputs = _outputs(p, device, torch.float32)

    def launches(config: Configuration) -> list[Launch]:
        return [_backward_launch(p, config, g, x, w, *outputs, (True, True, True))]

    def error() -> float:
        worst = max(map(relative, outputs, wanted_of(p, g, x, w)))
        return worst if all(bool(t.isfinite().all()) for t in outputs) else float("inf")

    return Trial(_backward_candidates(p), launches, outputs, error, p.precision)


def _step_trial(p: LinearProblem, device: torch.device) -> Trial:
    x, w, b, g = random_of(p, device)
    gx, moved, bias = _outputs(p, device, torch.float32)
    rates = torch.full((p.clients,), 0.5, device=device)

    def launches(config: Configuration) -> list[Launch]:
        every = (True, True, True)
        return [_backward_launch(p, config, g, x, moved, gx, moved, bias, every, (rates, 1.0))]

    def error() -> float:
        by_input, by_weight, by_bias = wanted_of(p, g, x, w)
        wanted = (by_input, w - 0.5 * by_weight, b - 0.5 * by_bias)
        worst = max(map(relative, (gx, moved, bias), wanted))
        return worst if bool(gx.isfinite().all() and moved.isfinite().all()) else float("inf")

    def prepare() -> None:
        moved.copy_(w)
        bias.copy_(b)

    outputs = (gx, moved, bias)
    return Trial(_backward_candidates(p), launches, outputs, error, p.precision, prepare)


def random_of(p: LinearProblem, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make a random input, weight, bias and gradient by the output."""
    source = torch.Generator(device).manual_seed(7)
    sizes = ((p.rows, p.inputs), (p.outputs, p.inputs), (p.outputs,), (p.rows, p.outputs))
    x, w, b, g = (
        torch.randn((p.clients, *size), generator=source, device=device) for size in sizes
    )
    return x.to(p.operand), w, b, g
