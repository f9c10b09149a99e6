"""A cohort's convolution as an operation of a program, in whichever form is fastest.

Our Triton kernels take stride 1; `conv_forms.py` has grouped convolutions, products of patches, and
clients side by side on streams.  The fastest form differs by layer and by direction, so the output,
the gradient by x and the gradient by w are measured and chosen apart, once.

Shapes.  x [C, B, ci, H, W] in the type of operands, w [C, co, ci / groups, kh, kw] as it is held,
y [C, B, co, H', W'].  Memory of x, y and their gradients is [C, B, H, W, c], so that layers in a
row agree about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from undrift import kernels
from undrift.core.choosing import choose
from undrift.core.cohort import joined, parted
from undrift.core.conv_ways import ConvShape, output_size
from undrift.core.precision import multiplying
from undrift.kernels import convolution
from undrift.kernels.problem import Problem, takes
from undrift.layers.conv_forms import FORMS, GROUPED, PATCHES

KERNELS = "triton"


def convolve(
    x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    precision: str,
) -> Tensor:  # fmt: skip
    """Convolve one client's batch [B, ci, H, W]; vmap makes it the cohort's."""
    settings = (stride, padding, dilation, groups, precision)
    (y,) = _Convolution.apply(x[None], w[None], *settings)  # type: ignore[no-untyped-call]
    found: Tensor = y[0]
    return found


def deconvolve(
    x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int],
    beyond: list[int], groups: int, precision: str,
) -> Tensor:  # fmt: skip
    """Convolve one client's batch transposed, w [ci, co / groups, kh, kw].

    It is the gradient by the input of a convolution; `beyond` is torch's output_padding.
    """
    rules = zip(x.shape[2:], w.shape[2:], stride, padding, dilation, beyond, strict=True)
    space = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in rules]
    size = [x.shape[0], w.shape[1] * groups, *space]
    settings = (stride, padding, dilation, groups, precision)
    (y,) = _InputGradient.apply(x[None], w[None], size, *settings)  # type: ignore[no-untyped-call]
    found: Tensor = y[0]
    return found


def channels_last(t: Tensor) -> Tensor:
    """Lay [C, B, c, H, W] out in memory as [C, B, H, W, c]; no copy if it is so."""
    return t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def room(size: tuple[int, ...], like: Tensor) -> Tensor:
    """Make room for [C, B, c, H, W] that lies so."""
    clients, batch, channels, height, width = size
    return like.new_empty((clients, batch, height, width, channels)).permute(0, 1, 4, 2, 3)


# ------------------------------------------------------------------------------------ operations
@torch.library.custom_op("undrift::convolve", mutates_args=())
def _output(
    x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    precision: str,
) -> Tensor:  # fmt: skip
    shape = ConvShape(_pair(stride), _pair(padding), _pair(dilation), groups)
    problem = _problem(tuple(x.shape), w, shape, precision)

    def form(name: str) -> Tensor:
        if name == KERNELS and problem is not None:
            return convolution.convolve(problem, x, w, None)[0]
        with multiplying(precision):
            return FORMS[name].output(x, w.to(x.dtype), shape)

    return channels_last(form(_chosen("output", x, w, shape, precision, problem, form)))


@_output.register_fake
def _(
    x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    precision: str,
) -> Tensor:  # fmt: skip
    shape = ConvShape(_pair(stride), _pair(padding), _pair(dilation), groups)
    return room((*x.shape[:2], w.shape[1], *output_size(x.shape, w.shape, shape)), x)


@torch.library.custom_op("undrift::convolve_back_x", mutates_args=())
def _by_input(
    g: Tensor, w: Tensor, size: list[int], stride: list[int], padding: list[int],
    dilation: list[int], groups: int, precision: str,
) -> Tensor:  # fmt: skip
    shape = ConvShape(_pair(stride), _pair(padding), _pair(dilation), groups)
    problem = _problem((len(w), *size), w, shape, precision)

    def form(name: str) -> Tensor:
        if name == KERNELS and problem is not None:
            return convolution.input_gradient(problem, g, w)
        with multiplying(precision):
            return FORMS[name].by_x(g, w.to(g.dtype), shape, size)

    return channels_last(form(_chosen("by x", g, w, shape, precision, problem, form, size)))


@_by_input.register_fake
def _(
    g: Tensor, w: Tensor, size: list[int], stride: list[int], padding: list[int],
    dilation: list[int], groups: int, precision: str,
) -> Tensor:  # fmt: skip
    return room((len(w), *size), g)


@torch.library.custom_op("undrift::convolve_back_w", mutates_args=())
def _by_weight(
    g: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, precision: str,
) -> Tensor:  # fmt: skip
    shape = ConvShape(_pair(stride), _pair(padding), _pair(dilation), groups)
    problem = _problem(tuple(x.shape), w, shape, precision)

    def form(name: str) -> Tensor:
        if name == KERNELS and problem is not None:
            return convolution.weight_gradient(problem, g, x)
        with multiplying(precision):
            like = x.new_empty(w.shape)  # only its size is read
            return FORMS[name].by_w(g, x, like, shape)

    found = form(_chosen("by w", x, w, shape, precision, problem, form))
    return found.to(w.dtype).contiguous()


@_by_weight.register_fake
def _(
    g: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, precision: str,
) -> Tensor:  # fmt: skip
    return w.new_empty(w.shape)


def _pair(values: list[int]) -> tuple[int, int]:
    return values[0], values[1]


def _problem(size: tuple[int, ...], w: Tensor, shape: ConvShape, precision: str) -> Problem | None:
    """Describe the layer to the Triton kernels, or give None where they do not do it."""
    plain = shape.groups == 1 and shape.stride == (1, 1) and w.dtype == torch.float32
    if not plain or not kernels.available(w.device):
        return None
    clients, batch, channels, height, width = size
    problem = Problem(
        clients, batch, height, width, channels, w.shape[1], (w.shape[3], w.shape[4]),
        shape.padding, shape.dilation, False, False, False, precision, True,
    )  # fmt: skip
    return problem if takes(problem) else None


def _chosen(
    direction: str, x: Tensor, w: Tensor, shape: ConvShape, precision: str,
    problem: Problem | None, form: Callable[[str], Tensor], *more: Any,
) -> str:  # fmt: skip
    """Give the fastest form of one direction, measured once; on a CPU the grouped one."""
    if x.device.type == "cpu":
        return GROUPED if problem is None else KERNELS
    names = [name for name in FORMS if name != PATCHES or shape.groups == 1]
    names = names if problem is None else [KERNELS, *names]
    sizes = (tuple(x.shape), tuple(w.shape[1:]), *map(tuple, more))
    return choose(f"convolution {direction} {sizes}, {shape}, {precision}", x.device, names, form)


# ------------------------------------------------------------------------------ its derivatives
class _Convolution(torch.autograd.Function):
    """A cohort's convolution, differentiable twice."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, *settings: Any) -> tuple[Tensor]:
        return (_output(channels_last(x), w, *settings),)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, *ctx.settings = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (g,), (x, w), needs = grads, ctx.saved_tensors, ctx.needs_input_grad
        by_x = by_w = None
        if needs[0]:
            size = list(x.shape[1:])
            (by_x,) = _InputGradient.apply(g, w, size, *ctx.settings)  # type: ignore[no-untyped-call]
        if needs[1]:
            (by_w,) = _WeightGradient.apply(g, x, w, *ctx.settings)  # type: ignore[no-untyped-call]
        return by_x, by_w, *[None] * 5

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        flat = joined(inputs[:2], dims, info.batch_size)
        return parted(_Convolution.apply(*flat, *inputs[2:]), info.batch_size)  # type: ignore[no-untyped-call]


class _InputGradient(torch.autograd.Function):
    """The gradient by the input: linear in g and in w."""

    @staticmethod
    def forward(g: Tensor, w: Tensor, size: list[int], *settings: Any) -> tuple[Tensor]:
        return (_by_input(channels_last(g), w, size, *settings),)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        g, w, _, *ctx.settings = inputs
        ctx.save_for_backward(g, w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (u,), (g, w) = grads, ctx.saved_tensors
        (by_g,) = _Convolution.apply(u, w, *ctx.settings)  # type: ignore[no-untyped-call]
        (by_w,) = _WeightGradient.apply(g, u, w, *ctx.settings)  # type: ignore[no-untyped-call]
        return by_g, by_w, *[None] * 6

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        flat = joined(inputs[:2], dims, info.batch_size)
        return parted(_InputGradient.apply(*flat, *inputs[2:]), info.batch_size)  # type: ignore[no-untyped-call]


class _WeightGradient(torch.autograd.Function):
    """The gradient by the weights: linear in g and in x."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, w: Tensor, *settings: Any) -> tuple[Tensor]:
        return (_by_weight(channels_last(g), channels_last(x), w, *settings),)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        g, x, _, *ctx.settings = inputs
        ctx.save_for_backward(g, x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (u,), (g, x) = grads, ctx.saved_tensors
        size = list(x.shape[1:])
        (by_g,) = _Convolution.apply(x, u, *ctx.settings)  # type: ignore[no-untyped-call]
        (by_x,) = _InputGradient.apply(g, u, size, *ctx.settings)  # type: ignore[no-untyped-call]
        return by_g, by_x, *[None] * 6

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        flat = joined(inputs[:3], dims, info.batch_size)
        return parted(_WeightGradient.apply(*flat, *inputs[3:]), info.batch_size)  # type: ignore[no-untyped-call]
