"""Calls of the programs: grids, and arguments from tensors and a problem."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from undrift.kernels import interpreted
from undrift.kernels.interpreter import mend
from undrift.kernels.problem import Problem, Thin, power
from undrift.kernels.programs import convolution, layout, thin
from undrift.kernels.settling import One
from undrift.kernels.settling import arguments as of_step
from undrift.kernels.tuner import Configuration, Launch

if interpreted():
    mend()

ROUNDING = {"float32": "ieee", "tf32": "tf32", "bf16": "tf32", "fp16": "tf32"}


def _tiles(n: int, size: int) -> int:
    return -(-n // size)


def _geometry(p: Problem) -> dict[str, int]:
    return dict(
        HI=p.height, WI=p.width, CI=p.inputs, HO=p.between[0], WO=p.between[1],
        CO=p.outputs, KH=p.kernel[0], KW=p.kernel[1], PH=p.padding[0], PW=p.padding[1],
        DH=p.dilation[0], DW=p.dilation[1],
    )  # fmt: skip


def convolve(
    p: Problem, config: Configuration, x: Tensor, weights: Tensor, bias: Tensor | None, y: Tensor,
    place: Tensor,
) -> Launch:  # fmt: skip
    """Convolve x [C, B, H, W, ci] with packed weights into y, and into `place` where pooled.

    y is [C, B, h, w, co], or with planes [C, B, co, h, w].
    """
    rows, columns = p.between
    if p.pool:
        tiles = _tiles(p.batch * p.output[0] * p.output[1] * 4, config["BM"])
    elif config["BY_ROW"]:
        tiles = rows * _tiles(p.batch * columns, config["BM"])
    else:
        tiles = _tiles(p.batch * rows * columns, config["BM"])
    grid = (tiles * _tiles(p.outputs, config["BN"]), p.clients)
    constants = dict(
        _geometry(p), ROWS=p.rows, DEPTH=p.depth, BIAS=bias is not None, RELU=p.relu, POOL=p.pool,
        PLANES=p.planes, PRECISION=ROUNDING[p.precision], **config,
    )  # fmt: skip
    shift, far = (y, 0) if bias is None else (bias, bias.stride(0))
    arguments = (x, weights, shift, y, place, p.batch, far)
    return Launch(convolution.convolve, grid, arguments, constants)


def unfinish(
    p: Problem, g: Tensor, seen: Tensor, whole: Tensor, bias_parts: Tensor | None,
    peak_parts: Tensor | None = None,
) -> Launch:  # fmt: skip
    """Bring g [C, B, co, h, w], in any order of memory, back to the convolution's own output.

    `bias_parts` and `peak_parts` have the sizes that `unfinish_parts` tells.
    """
    cells, channels = unfinish_parts(p)
    constants = dict(
        HO=p.between[0], WO=p.between[1], CO=p.outputs, POOL=p.pool, BIAS=bias_parts is not None,
        PEAK=peak_parts is not None, BP=UNFINISH_CELLS, BC=min(power(p.outputs), 128), num_warps=4,
    )  # fmt: skip
    parts = [whole if part is None else part for part in (bias_parts, peak_parts)]
    arguments = (g, seen, whole, *parts, *g.stride(), p.batch)
    return Launch(convolution.unfinish, (cells, p.clients, channels), arguments, constants)


def unfinish_parts(p: Problem) -> tuple[int, int]:
    """Tell how many partial sums each client's bias has, and how many blocks of channels."""
    cells = p.batch * p.output[0] * p.output[1]
    return _tiles(cells, UNFINISH_CELLS), _tiles(p.outputs, min(power(p.outputs), 128))


UNFINISH_CELLS = 64


def rounds_to_half(p: Problem) -> bool:
    """Whether weight gradients round their operands to fp16."""
    return p.precision == "tf32"


def weight_gradient(
    p: Problem, config: Configuration, x: Tensor, g: Tensor, peaks: Tensor, parts: Tensor
) -> Launch:
    """Sum g [C, B, H', W', co] times x into parts [split, C, co, taps, ci]; peaks [C, 2]."""
    depth = p.taps * p.inputs
    grid = (
        _tiles(depth, config["BN"]) * config["SPLIT"],
        p.clients,
        _tiles(p.outputs, config["BC"]),
    )
    constants = dict(
        _geometry(p), PRECISION=ROUNDING[p.precision], HALF=rounds_to_half(p), **config
    )
    arguments = (x, g, peaks, parts, p.clients, p.batch)
    return Launch(convolution.weight_gradient, grid, arguments, constants)


def pack_weights(p: Problem, w: Tensor, packed: Tensor, mirror: bool) -> Launch:
    """Lay weights out for `convolve`; `mirror`: p is the mirrored problem, w the layer's own."""
    channel, row = (w.stride(1), w.stride(2)) if mirror else (w.stride(2), w.stride(1))
    block = min(power(p.inputs), 64)
    constants = dict(
        N=p.outputs, K=p.inputs, TAPS=p.taps, ROWS=p.rows, DEPTH=p.depth, MIRROR=mirror, BK=block,
        BT=power(p.taps, 1), num_warps=4,
    )  # fmt: skip
    grid = (p.rows, p.clients, _tiles(p.inputs, block))
    return Launch(layout.pack_weights, grid, (w, packed, w.stride(0), row, channel), constants)


def sum_parts(
    p: Problem, split: int, parts: Tensor, bias_parts: Tensor | None, w: Tensor, b: Tensor | None,
    step: One = None,
) -> Launch:  # fmt: skip
    """Add partial sums up into w and b, in torch's layout; or these take a step instead.

    bias_parts [C, n, co].  All may be those of some clients that stand side by side.
    """
    block = min(power(p.inputs), 64)
    memory, numbers, flags = of_step(step, w)
    bias = w if b is None else b
    some = parts if bias_parts is None else bias_parts
    arguments = (
        parts, some, w, bias, *memory, p.clients, some.shape[1], w.stride(0), bias.stride(0),
        *numbers,
    )  # fmt: skip
    constants = dict(
        CO=p.outputs, CI=p.inputs, TAPS=p.taps, SPLIT=split, BIAS=bias_parts is not None, BK=block,
        BT=power(p.taps, 1), num_warps=4, **flags,
    )  # fmt: skip
    grid = (p.outputs, len(w), _tiles(p.inputs, block))
    return Launch(layout.sum_parts, grid, arguments, constants)


# --------------------------------------------------------------------------------- a first layer
def pack_images(p: Problem, form: Thin, x: Tensor, packed: Tensor) -> Launch:
    """Bring x [C, B, ci, H, W], in any order of memory, to [C, B, rows, columns, 4]."""
    block = min(power(form.height * form.width), 1024)
    constants = dict(
        CI=p.inputs, HI=p.height, WI=p.width, PH=p.padding[0], PW=p.padding[1], BP=block,
        num_warps=4,
    )  # fmt: skip
    grid = (p.batch, p.clients, _tiles(form.height * form.width, block))
    return Launch(layout.pack_images, grid, (x, packed, *x.stride()), constants)


def pack_pairs(p: Problem, form: Thin, w: Tensor, b: Tensor | None, packed: Tensor) -> Launch:
    """Lay weights and bias out for pairs of outputs."""
    bias = w if b is None else b
    constants = dict(
        CI=p.inputs, CO=p.outputs, KH=p.kernel[0], KW=p.kernel[1], BIAS=b is not None,
        BN=form.block, DEPTH=form.depth, num_warps=4,
    )  # fmt: skip
    arguments = (w, bias, packed, w.stride(0), bias.stride(0))
    return Launch(thin.pack_pairs, (form.blocks, p.clients), arguments, constants)


def _thin_constants(p: Problem, form: Thin, config: Configuration) -> dict[str, Any]:
    return dict(
        EVEN=p.batch * form.lines % config["R"] == 0,
        HI=form.height, WI=form.width, CO=p.outputs, KH=p.kernel[0], KW=p.kernel[1],
        DEPTH=form.depth, RELU=p.relu, POOL=p.pool, PRECISION=ROUNDING[p.precision],
    )  # fmt: skip


def thin_convolve(
    p: Problem, form: Thin, config: Configuration, x: Tensor, weights: Tensor, y: Tensor,
    place: Tensor,
) -> Launch:  # fmt: skip
    """Convolve packed images with packed pairs of weights."""
    own = {name: value for name, value in config.items() if name != "TILES_EACH"}
    tiles = _tiles(p.batch * form.lines, config["R"])
    grid = (_tiles(tiles, config["TILES_EACH"]), p.clients, form.blocks)
    constants = dict(_thin_constants(p, form, config), BN=form.block, **own)
    return Launch(thin.thin_convolve, grid, (x, weights, y, place, p.batch), constants)


def thin_weight_gradient(
    p: Problem, form: Thin, config: Configuration, x: Tensor, g: Tensor, seen: Tensor,
    peaks: Tensor, parts: Tensor,
) -> Launch:  # fmt: skip
    """Sum g, behind ReLU and pooling, times packed images; peaks [C, 2] of both."""
    grid = (config["SPLIT"], p.clients, _tiles(p.outputs, config["BN"]))
    constants = dict(_thin_constants(p, form, config), HALF=rounds_to_half(p), **config)
    arguments = (x, g, seen, peaks, parts, p.clients, p.batch)
    return Launch(thin.thin_weight_gradient, grid, arguments, constants)


def thin_parts(p: Problem, form: Thin, config: Configuration) -> tuple[int, ...]:
    """Give the size of the partial sums of a first layer."""
    blocks = _tiles(p.outputs, config["BN"])
    return config["SPLIT"], p.clients, blocks, 2 * config["BN"], form.depth


def sum_pairs(
    p: Problem, form: Thin, config: Configuration, parts: Tensor, w: Tensor, b: Tensor | None,
    step: One = None,
) -> Launch:  # fmt: skip
    """Add partial sums of pairs up into w and b; or these take a step instead.

    All may be those of some clients that stand side by side.
    """
    rows = max(1, 512 // form.depth)
    memory, numbers, flags = of_step(step, w)
    bias = w if b is None else b
    constants = dict(
        CI=p.inputs, CO=p.outputs, KH=p.kernel[0], KW=p.kernel[1], DEPTH=form.depth,
        BIAS=b is not None, BN=config["BN"], SPLIT=config["SPLIT"], ROWS=rows, num_warps=4,
        **flags,
    )  # fmt: skip
    arguments = (parts, w, bias, *memory, p.clients, w.stride(0), bias.stride(0), *numbers)
    return Launch(thin.sum_pairs, (_tiles(p.outputs, rows), len(w)), arguments, constants)
