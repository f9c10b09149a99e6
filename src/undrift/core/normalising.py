"""A cohort's BatchNorm as one op, with ReLU and 2x2 max-pooling behind it.

`normalised` means `batchnorm.normalise` and what follows.  Where kernels are asked for and can do
it, all clients go through one call, under vmap, nested or not, and so do their gradients; sums are
float32 and taken in a fixed order.  Else, and for second derivatives, torch does it.

Shapes.  One client: x [B, F, ...], mask [B], scale and shift [F].  A cohort has C in front.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn import functional as F

from undrift import kernels
from undrift.core.batchnorm import Stats, normalise
from undrift.core.cohort import joined, parted
from undrift.kernels.problem import Norm

Fixed = tuple[Tensor, Tensor]  # mean, variance


def normalised(
    x: Tensor, mask: Tensor | None, fixed: Fixed | None, scale: Tensor | None,
    shift: Tensor | None, how: Norm, use_kernels: bool = False,
) -> tuple[Tensor, Stats]:  # fmt: skip
    """Normalise one client's batch, then ReLU and pool as `how` says; vmap makes it a cohort's.

    Fixed statistics count as constants: they get no gradient from the kernels.
    """
    if use_kernels and _kernels_take(x, [scale, shift, *(fixed or ())]):
        return _by_kernels(x, mask, fixed, scale, shift, how)
    wide = x.to(torch.promote_types(x.dtype, how.result))
    y, stats = normalise(wide, mask, fixed, scale, shift, how.eps)
    return _finished(y, how), stats


def _kernels_take(x: Tensor, numbers: list[Tensor | None]) -> bool:
    if not kernels.available(x.device) or any(
        t is not None and t.dtype != torch.float32 for t in numbers
    ):
        return False
    from undrift.kernels import batchnorm

    return batchnorm.takes(x) and not batchnorm.is_wrong(x.device)


def _finished(y: Tensor, how: Norm) -> Tensor:
    y = y.relu() if how.relu else y
    y = F.max_pool2d(y, 2) if how.pool else y
    return y.to(how.result).contiguous() if how.planes else y.to(how.result)


def _by_kernels(
    x: Tensor, mask: Tensor | None, fixed: Fixed | None, scale: Tensor | None,
    shift: Tensor | None, how: Norm,
) -> tuple[Tensor, Stats]:  # fmt: skip
    # The kernels pool whole squares; a pixel left over at an edge has a gradient, but no square.
    apart = how.pool and (x.shape[-1] % 2 or x.shape[-2] % 2)
    own = how._replace(pool=False, planes=False) if apart else how
    tensors = (x, mask, *(fixed or (None, None)), scale, shift)
    inputs = (t if t is None else t[None] for t in tensors)
    outputs = _Norm.apply(*inputs, own)  # type: ignore[no-untyped-call]
    y, mean, var, size = (t.squeeze(0) for t in outputs[:4])
    y = _finished(y, how._replace(relu=False)) if apart else y
    return y, Stats(mean, var, size)


class _Norm(torch.autograd.Function):
    """A cohort's BatchNorm: (y, mean, variance, size, place of pooled values or empty)."""

    @staticmethod
    def forward(
        x: Tensor, mask: Tensor | None, mean: Tensor | None, var: Tensor | None,
        scale: Tensor | None, shift: Tensor | None, how: Norm,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        from undrift.kernels import batchnorm

        if mean is None or var is None:
            stats = batchnorm.statistics(x, mask)
        else:  # an op must not return what it was given
            stats = mean.clone(), var.clone(), mean.new_zeros(len(mean))
        known = batchnorm.Known(mask, stats[0], stats[1], scale, shift)
        y, place = batchnorm.apply(x, known, how)
        return y, *stats, place

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, mask, fixed, _, scale, shift, ctx.how = inputs
        _, mean, var, size, place = output
        ctx.fixed = fixed is not None
        ctx.mark_non_differentiable(mean, var, size, place)
        ctx.set_materialize_grads(False)  # theirs would be zeros, as large as they are
        ctx.save_for_backward(x, mask, mean, var, scale, shift, size, place)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if grads[0] is None:
            return (None,) * 7
        found = _NormGradient.apply(grads[0], *ctx.saved_tensors, ctx.fixed, ctx.how)  # type: ignore[no-untyped-call]
        needs = (ctx.needs_input_grad[i] for i in (0, 4, 5))
        by_x, by_scale, by_shift = (t if n else None for t, n in zip(found, needs, strict=True))
        return by_x, None, None, None, by_scale, by_shift, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        flat = joined(inputs[:6], dims, info.batch_size)
        return parted(_Norm.apply(*flat, *inputs[6:]), info.batch_size)  # type: ignore[no-untyped-call]


class _NormGradient(torch.autograd.Function):
    """The gradients of a cohort's BatchNorm by x, scale and shift."""

    @staticmethod
    def forward(
        g: Tensor, x: Tensor, mask: Tensor | None, mean: Tensor, var: Tensor,
        scale: Tensor | None, shift: Tensor | None, size: Tensor, place: Tensor, fixed: bool,
        how: Norm,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        from undrift.kernels import batchnorm

        known = batchnorm.Known(mask, mean, var, scale, shift)
        return batchnorm.gradients(g, x, None if fixed else size, place, known, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, _, _, ctx.fixed, ctx.how = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Differentiate once more, by torch's own rules."""
        g, x, mask, mean, var, scale, shift = ctx.saved_tensors
        fixed = (mean, var) if ctx.fixed else None
        ones, zeros = torch.ones_like(mean), torch.zeros_like(mean)

        def first(g: Tensor, *inputs: Tensor) -> Any:
            pull: Any = vjp(lambda *t: _cohort_by_torch(t[0], mask, fixed, t[1:], ctx.how), *inputs)
            return pull[1](g)

        inputs = (x, ones if scale is None else scale, zeros if shift is None else shift)
        pull: Any = vjp(first, g, *inputs)[1]
        by_g, by_x, by_scale, by_shift = pull(grads)
        by_scale = None if scale is None else by_scale
        by_shift = None if shift is None else by_shift
        return by_g, by_x, None, None, None, by_scale, by_shift, *[None] * 4

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        flat = joined(inputs[:9], dims, info.batch_size)
        return parted(_NormGradient.apply(*flat, *inputs[9:]), info.batch_size)  # type: ignore[no-untyped-call]


def _cohort_by_torch(
    x: Tensor, mask: Tensor | None, fixed: Fixed | None, affine: tuple[Tensor, ...], how: Norm
) -> Tensor:
    def one(x: Tensor, mask: Any, fixed: Any, scale: Tensor, shift: Tensor) -> Tensor:
        return normalised(x, mask, fixed, scale, shift, how)[0]

    dims = (0, None if mask is None else 0, None if fixed is None else 0, 0, 0)
    y: Tensor = vmap(one, dims)(x, mask, fixed, *affine)
    return y
