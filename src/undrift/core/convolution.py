"""The convolution seam: one op for a client's convolution, and many ways to do the cohort's.

`convolve` means `F.conv2d`, with ReLU and 2x2 max-pooling behind it where its shape says so.  Under
vmap, nested or not, all clients go through one call that sees the whole cohort, and so do their
gradients, be they taken inside the vmap or outside of it.  Which implementation does the work is
the `Seam`'s choice; results differ in rounding alone.

Shapes.  One client: x [B, ci, H, W], w [co, ci / groups, kh, kw], b [co].  A cohort has C in front.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.choosing import choose
from undrift.core.cohort import joined, parted
from undrift.core.conv_ways import TORCH_WAYS, ConvShape, finish, output_size, unfinish
from undrift.core.precision import check_precision, multiplying, operand_type
from undrift.core.seam import WAYS, Seam, Way
from undrift.errors import TaskError, unknown_name

__all__ = ["WAYS", "ConvShape", "Seam", "Way", "convolve"]


def convolve(
    x: Tensor, w: Tensor, b: Tensor | None, shape: ConvShape | None = None, how: Way | None = None
) -> Tensor:
    """Convolve one client's batch, then ReLU and pool as `shape` says; vmap makes it a cohort's."""
    shape, how = shape or ConvShape(), how or Way()
    _check(x, w, how)
    bias = None if b is None else b[None]
    y: Tensor = _Convolution.apply(x[None], w[None], bias, shape, how)[0]  # type: ignore[no-untyped-call]
    return y.squeeze(0)


def _check(x: Tensor, w: Tensor, how: Way) -> None:
    if how.name not in WAYS:
        raise unknown_name("way to convolve", how.name, list(WAYS), "convolve")
    check_precision(how.precision)
    if x.dim() != 4 or w.dim() != 4:
        raise TaskError(
            f"convolve takes a batch of images [B, channels, H, W] and weights of 4 dimensions, "
            f"got {tuple(x.shape)} and {tuple(w.shape)}"
        )


class _Input(NamedTuple):
    """What a gradient must know of an input that was not kept."""

    size: tuple[int, ...]  # ci, H, W
    dtype: torch.dtype


def _input(x: Tensor) -> _Input:
    return _Input(tuple(x.shape[2:]), x.dtype)


class _Convolution(torch.autograd.Function):
    """A cohort's convolution: (y, place of pooled values or empty, x repacked or empty)."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor | None, shape: ConvShape, how: Way
    ) -> tuple[Tensor, Tensor, Tensor]:
        how = _resolved(x, _input(x), w, shape, how)
        problem = _problem(x, _input(x), w, b is not None, shape, how)
        if problem is not None:
            from undrift.kernels import convolution

            return convolution.convolve(problem, x, w, b)
        kind = operand_type(how.precision, w.dtype)
        with multiplying(how.precision):
            bias = None if b is None else b.to(kind)
            z = TORCH_WAYS[_torch_name(how)].forward(x.to(kind), w.to(kind), bias, shape)
        y, place = finish(z, shape)
        return y.to(kind if how.narrow else w.dtype), place, w.new_empty((len(x), 0))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, b, ctx.shape, ctx.how = inputs
        y, place, packed = output
        ctx.input = _input(x)
        ctx.mark_non_differentiable(place, packed)
        ctx.set_materialize_grads(False)  # theirs would be zeros, as large as they are
        keep_y = ctx.shape.relu and not ctx.shape.pool
        ctx.save_for_backward(packed if packed.numel() else x, w, y if keep_y else place, place)
        ctx.bias = b if ctx.how.descent is not None else None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needs, g = ctx.needs_input_grad[:3], grads[0]
        if g is None or not any(needs):
            return (None,) * 5
        x, w, y, place = ctx.saved_tensors
        if ctx.how.descent is not None:
            by_input = _descended(
                g, x, w, y, place, ctx.bias, ctx.shape, ctx.how, ctx.input, needs[0]
            )
            return by_input, None, None, None, None
        rest = (ctx.shape, ctx.how, ctx.input, needs)
        found = iter(_Gradient.apply(g, x, w, y, place, *rest))  # type: ignore[no-untyped-call]
        return *(next(found) if need else None for need in needs), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        flat = joined(inputs[:3], dims, info.batch_size)
        return parted(_Convolution.apply(*flat, *inputs[3:]), info.batch_size)  # type: ignore[no-untyped-call]


class _Gradient(torch.autograd.Function):
    """The gradients of a cohort's convolution that are needed, of (x, w, b) in this order."""

    @staticmethod
    def forward(
        g: Tensor, x: Tensor, w: Tensor, y: Tensor, place: Tensor, shape: ConvShape, how: Way,
        source: _Input, needs: tuple[bool, ...],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        how = _resolved(x, source, w, shape, how)
        problem = _problem(x, source, w, needs[2], shape, how)
        if problem is not None:
            from undrift.kernels import convolution

            wide = source.dtype == torch.float32
            return tuple(convolution.gradients(problem, g, x, w, y, place, needs, wide))
        return _torch_gradients(g, x, w, y, place, shape, how, source, needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.shape, ctx.how, ctx.source, ctx.needs = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Differentiate once more, by torch's own rules."""
        g, x, w, y, place = ctx.saved_tensors
        how = ctx.how._replace(name="triton") if ctx.how.name == "auto" else ctx.how
        if _problem(x, ctx.source, w, False, ctx.shape, how) is not None:
            raise TaskError(
                "the Triton kernels have no second derivatives: choose another way for this "
                "layer, e.g. Trainer(..., ways='grouped')"
            )

        def first(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            return _torch_gradients(g, x, w, y, place, ctx.shape, ctx.how, ctx.source, ctx.needs)

        pull: Any = torch.func.vjp(first, g, x, w)[1]
        return *pull(grads), *[None] * 6

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        flat = joined(inputs[:5], dims, info.batch_size)
        return parted(_Gradient.apply(*flat, *inputs[5:]), info.batch_size)  # type: ignore[no-untyped-call]


def _torch_gradients(
    g: Tensor, x: Tensor, w: Tensor, y: Tensor, place: Tensor, shape: ConvShape, how: Way,
    source: _Input, needs: tuple[bool, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    kind = operand_type(how.precision, w.dtype)
    g = unfinish(g.to(kind), y, place, shape, output_size(x.shape, w.shape, shape))
    found: list[Tensor] = []
    if needs[0] or needs[1]:
        with multiplying(how.precision):
            way = TORCH_WAYS[_torch_name(how)]
            gx, gw = way.backward(g, x.to(kind), w.to(kind), shape, (needs[0], needs[1]))
        found += [t.to(d) for t, d in ((gx, source.dtype), (gw, w.dtype)) if t is not None]
    if needs[2]:
        found.append(g.sum((1, 3, 4), dtype=w.dtype))
    return tuple(found)


def _descended(
    g: Tensor, x: Tensor, w: Tensor, y: Tensor, place: Tensor, b: Tensor | None, shape: ConvShape,
    how: Way, source: _Input, by_input: bool,
) -> Tensor | None:  # fmt: skip
    """Move a cohort's weights and biases by their step; give the gradient by x if it is needed."""
    # .data: the weights change before other layers' backward passes, which do not read them
    w, bias, descent = w.data, None if b is None else b.data, how.descent
    assert descent is not None, "asked for before"
    how = _resolved(x, source, w, shape, how)
    problem = _problem(x, source, w, b is not None, shape, how)
    if problem is not None and w[0].is_contiguous():
        from undrift.kernels import convolution

        step, wide = descent.step(bias is not None), source.dtype == torch.float32
        return convolution.descend(problem, g, x, w, bias, y, place, step, by_input, wide)
    needs = (by_input, True, b is not None)
    found = list(_Gradient.forward(g, x, w, y, place, shape, how, source, needs))
    back = found.pop(0) if by_input else None
    for name, held, gradient in zip(("weight", "bias"), (w, bias), found, strict=False):
        if held is not None:
            descent.move(name, held, gradient)
    return back


def _resolved(x: Tensor, source: _Input, w: Tensor, shape: ConvShape, how: Way) -> Way:
    """Give the way that "auto" stands for: a step's forward and gradients, measured."""
    if how.name != "auto":
        return how
    size, device = (len(w), x.shape[1], *source.size), w.device
    key = f"convolution {size} by {tuple(w.shape[1:])}, {shape}, {how.precision}, {w.dtype}"
    names = [name for name in TORCH_WAYS if name != "streams" or device.type == "cuda"]
    if _problem(x, source, w, True, shape, how._replace(name="triton")) is not None:
        names = ["triton", *names]

    def work(name: str) -> None:
        way = Way(name, how.precision, how.narrow)
        like = torch.ones(size, dtype=source.dtype, device=device)
        weights = torch.ones(w.shape, dtype=w.dtype, device=device)
        y, place, packed = _Convolution.forward(like, weights, None, shape, way)
        kept = (packed if packed.numel() else like, weights, y, place)
        _Gradient.forward(torch.ones_like(y), *kept, shape, way, source, (True, True, False))

    return how._replace(name=choose(key, device, names, work))


def _torch_name(how: Way) -> str:
    return how.name if how.name in TORCH_WAYS else "grouped"


def _problem(x: Tensor, source: _Input, w: Tensor, bias: bool, shape: ConvShape, how: Way) -> Any:
    """Describe the layer to the Triton kernels, or give None where they do not do it."""
    apart = shape.groups != 1 or shape.stride != (1, 1) or w.dtype != torch.float32
    if how.name != "triton" or apart:
        return None
    from undrift import kernels

    if x.device.type != "cuda" and not kernels.interpreted():
        return None
    kernels.need(x.device)
    from undrift.kernels.problem import Problem, takes

    channels, height, width = source.size
    problem = Problem(
        len(w), x.shape[1], height, width, channels, w.shape[1], (w.shape[3], w.shape[4]),
        shape.padding, shape.dilation, bias, shape.relu, shape.pool, how.precision, how.narrow,
        how.planes,
    )  # fmt: skip
    return problem if takes(problem) else None
