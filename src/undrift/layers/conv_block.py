"""A convolution with its bias, ReLU and 2x2 max-pooling behind it, as one operation of a program.

Our Triton kernels finish a tile of the output while it is still in registers, so that what lies
between a convolution and its pooling is never written.  They take stride 1 and one group.

Shapes.  x [C, B, ci, H, W] and y [C, B, co, H', W'] in the type of operands, channels last in
memory; w [C, co, ci, kh, kw] and bias [C, co] in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undrift import kernels
from undrift.core.cohort import joined, parted
from undrift.kernels import convolution
from undrift.kernels.problem import Problem, takes, thin
from undrift.layers.convolution import channels_last, room


def fits(x: Tensor, w: Tensor, padding: list[int], dilation: list[int], precision: str) -> bool:
    """Whether the kernels do this for one client's batch [B, ci, H, W]."""
    if w.dtype != torch.float32 or not kernels.available(w.device):
        return False
    return takes(_problem((1, *x.shape), w.shape, padding, dilation, 0, True, True, precision))


def convolve_block(
    x: Tensor, w: Tensor, bias: Tensor | None, padding: list[int], dilation: list[int],
    relu: bool, pool: bool, precision: str,
) -> Tensor:  # fmt: skip
    """Compute one client's block; vmap makes it the cohort's."""
    settings = (padding, dilation, relu, pool, precision)
    own = None if bias is None else bias[None]
    y: Tensor = _Block.apply(x[None], w[None], own, *settings)[0]  # type: ignore[no-untyped-call]
    return y[0]


def _problem(
    size: Any, weights: Any, padding: list[int], dilation: list[int], bias: bool | int, relu: bool,
    pool: bool, precision: str,
) -> Problem:  # fmt: skip
    clients, batch, channels, height, width = size
    outputs, _, *kernel = weights[-4:]
    return Problem(
        clients, batch, height, width, channels, outputs, (kernel[0], kernel[1]),
        (padding[0], padding[1]), (dilation[0], dilation[1]), bool(bias), relu, pool, precision,
        True,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ operations
@torch.library.custom_op("undrift::convolve_block", mutates_args=())
def _forward(
    x: Tensor, w: Tensor, bias: Tensor | None, padding: list[int], dilation: list[int],
    relu: bool, pool: bool, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    p = _problem(x.shape, w.shape, padding, dilation, bias is not None, relu, pool, precision)
    return convolution.convolve(p, x, w, bias)


@_forward.register_fake
def _(
    x: Tensor, w: Tensor, bias: Tensor | None, padding: list[int], dilation: list[int],
    relu: bool, pool: bool, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    p = _problem(x.shape, w.shape, padding, dilation, bias is not None, relu, pool, precision)
    form = thin(p)
    last = (p.clients, p.batch, *p.output, p.outputs)
    place = x.new_empty(last if pool else (p.clients, 0), dtype=torch.int8)
    packed = (p.clients, 0) if form is None else (p.clients, p.batch, form.height, form.width, 4)
    return room((p.clients, p.batch, p.outputs, *p.output), x), place, x.new_empty(packed)


@torch.library.custom_op("undrift::convolve_block_back", mutates_args=())
def _backward(
    g: Tensor, x: Tensor, w: Tensor, y: Tensor, place: Tensor, size: list[int],
    padding: list[int], dilation: list[int], bias: bool, relu: bool, pool: bool, precision: str,
    by_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    p = _problem(size, w.shape, padding, dilation, bias, relu, pool, precision)
    found = iter(convolution.gradients(p, g, x, w, y, place, (by_x, True, bias), False))
    gx = channels_last(next(found)) if by_x else g.new_empty(0)
    return gx, next(found), next(found) if bias else w.new_empty(0)


@_backward.register_fake
def _(
    g: Tensor, x: Tensor, w: Tensor, y: Tensor, place: Tensor, size: list[int],
    padding: list[int], dilation: list[int], bias: bool, relu: bool, pool: bool, precision: str,
    by_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gx = room(tuple(size), g) if by_x else g.new_empty(0)
    return gx, w.new_empty(w.shape), w.new_empty(w.shape[:2] if bias else 0)


# ------------------------------------------------------------------------------ its derivative
class _Block(torch.autograd.Function):
    """(y, places of pooled values, x repacked): the last two are for the way back alone."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, *settings: Any) -> tuple[Tensor, ...]:
        return _forward(channels_last(x), w, bias, *settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, bias, *ctx.settings = inputs
        y, place, packed = output
        ctx.size, ctx.bias = list(x.shape), bias is not None
        ctx.mark_non_differentiable(place, packed)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(packed if packed.numel() else x, w, y, place)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if grads[0] is None:
            return (None,) * 8
        by_x = ctx.needs_input_grad[0]
        more = (ctx.size, *ctx.settings[:2], ctx.bias, *ctx.settings[2:], by_x)
        found = _BlockBack.apply(grads[0], *ctx.saved_tensors, *more)  # type: ignore[no-untyped-call]
        gx, gw, gb = found
        return gx if by_x else None, gw, gb if ctx.bias else None, *[None] * 5

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        flat = joined(inputs[:3], dims, info.batch_size)
        return parted(_Block.apply(*flat, *inputs[3:]), info.batch_size)  # type: ignore[no-untyped-call]


class _BlockBack(torch.autograd.Function):
    """Its gradients; they have none of their own."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        x = channels_last(x) if x.shape[1:] == tuple(rest[3][1:]) else x.contiguous()
        return _backward(channels_last(g), x, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep."""

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        count = info.batch_size
        flat, (size, *rest) = joined(inputs[:5], dims, count), inputs[5:]
        found = _BlockBack.apply(*flat, [size[0] * count, *size[1:]], *rest)  # type: ignore[no-untyped-call]
        bias, by_x = rest[2], rest[-1]
        there = (by_x, True, bias)
        parts = tuple(
            t.unflatten(0, (count, len(t) // count)) if has else t
            for t, has in zip(found, there, strict=True)
        )
        return parts, tuple(0 if has else None for has in there)
