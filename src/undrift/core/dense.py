"""A linear layer in a chosen precision: a cohort's is one batched matrix product.

Shapes.  C clients, R rows: x [C, R, in], w [C, out, in], b [C, out].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from undrift.core.cohort import joined, parted
from undrift.core.precision import multiplying, operand_type
from undrift.core.seam import Way
from undrift.errors import TaskError

if TYPE_CHECKING:
    from undrift.core.history import History


def dense(x: Tensor, w: Tensor, b: Tensor | None, how: Way) -> Tensor:
    """Apply one client's linear layer to x [..., in]; vmap makes it a cohort's.

    Sums are float32, and so is the output unless it stays narrow: in the operand type.
    """
    if x.shape[-1] != w.shape[1]:
        raise TaskError(f"a linear layer takes {w.shape[1]} inputs, got x of {tuple(x.shape)}")
    rows, bias = x.reshape(1, -1, x.shape[-1]), None if b is None else b[None]
    y: Tensor = _Dense.apply(rows, w[None], bias, how)[0]  # type: ignore[no-untyped-call]
    return y.reshape(*x.shape[:-1], w.shape[0])


def multiply(a: Tensor, b: Tensor, precision: str, result: torch.dtype | None = None) -> Tensor:
    """Multiply [C, m, k] by [C, k, n] with float32 sums (float64: all in float64).

    The output is as wide as the sums, or `result`: float32 or the operands' type.
    """
    with multiplying(precision):
        if a.dtype in (torch.float32, torch.float64):
            return torch.bmm(a, b)
        if a.is_cuda:
            return torch.bmm(a, b, out_dtype=result or torch.float32)
        return torch.bmm(a.float(), b.float()).to(result or torch.float32)


def add_product(y: Tensor, a: Tensor, b: Tensor, scale: float, precision: str) -> Tensor:
    """Add scale * a b to y [C, m, n], where it lies: float32 or of the operands' type."""
    with multiplying(precision):
        if a.dtype in (torch.float32, torch.float64) or (a.is_cuda and a.dtype == y.dtype):
            return y.baddbmm_(a, b, alpha=scale)
        if a.is_cuda and y.is_contiguous():
            return torch.baddbmm(y, a, b, torch.float32, alpha=scale, out=y)
    return y.add_(multiply(a, b, precision), alpha=scale)


class _Dense(torch.autograd.Function):
    """A cohort's linear layer: (y, the weights in the operand type or empty).

    With a history the second is x instead, in the operand type or empty.
    """

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None, how: Way) -> tuple[Tensor, Tensor]:
        kind = operand_type(how.precision, w.dtype)
        result, none = kind if how.narrow else w.dtype, w.new_empty((len(w), 0))
        if _is_remembered(x, how):
            y, operand = _history(how).forward(_rectified(x, how), b, result)
            return y, none if operand is x else operand
        problem = _problem(x, w, how)
        if problem is not None:
            from undrift.kernels import linear

            return linear.forward(problem, x, w, b, result, how.rectify), none
        operand = w.to(kind)
        y = multiply(_rectified(x, how).to(kind), operand.transpose(1, 2), how.precision)
        if b is not None:
            y = y + b[:, None]
        return y.to(result), none if operand is w or how.descent else operand

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, b, ctx.how = inputs
        cast = output[1]
        ctx.mark_non_differentiable(cast)
        ctx.set_materialize_grads(False)  # its own would be zeros, as large as it is
        ctx.dtypes = (x.dtype, w.dtype, w.dtype)
        ctx.remembered = _is_remembered(x, ctx.how)
        if ctx.remembered:
            ctx.save_for_backward(cast if cast.numel() else x, x if ctx.how.rectify else w[:0])
        else:
            ctx.save_for_backward(x, cast if cast.numel() else w)
        ctx.bias = b if ctx.how.descent is not None else None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needs, g = ctx.needs_input_grad[:3], grads[0]
        if g is None or not any(needs):
            return (None,) * 4
        if ctx.remembered:
            by_bias = needs[2] and ctx.how.descent is None
            slope = g.sum(1, dtype=ctx.dtypes[2]) if by_bias else None
            return _remembered(ctx, g, needs[0]), None, slope, None
        x, w = ctx.saved_tensors
        if ctx.how.descent is not None:
            return _descended(g, x, w, ctx.bias, ctx.how, needs[0]), None, None, None
        found = iter(_DenseGradient.apply(g, x, w, ctx.how, ctx.dtypes, needs))  # type: ignore[no-untyped-call]
        return *(next(found) if need else None for need in needs), None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        flat = joined(inputs[:3], dims, info.batch_size)
        return parted(_Dense.apply(*flat, *inputs[3:]), info.batch_size)  # type: ignore[no-untyped-call]


class _DenseGradient(torch.autograd.Function):
    """The gradients of a cohort's linear layer that are needed, of (x, w, b) in this order."""

    @staticmethod
    def forward(
        g: Tensor, x: Tensor, w: Tensor, how: Way, dtypes: Any, needs: Any
    ) -> tuple[Tensor, ...]:
        problem = _problem(x, w, how)
        if problem is not None and needs[1]:
            from undrift.kernels import linear

            return tuple(linear.backward(problem, g, x, w, needs, dtypes[0], how.rectify))
        return _gradients(g, x, w, how, dtypes, needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.rest = inputs[3:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Differentiate once more, by torch's own rules."""
        pull: Any = torch.func.vjp(lambda *t: _gradients(*t, *ctx.rest), *ctx.saved_tensors)[1]
        return *pull(grads), None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        flat = joined(inputs[:3], dims, info.batch_size)
        return parted(_DenseGradient.apply(*flat, *inputs[3:]), info.batch_size)  # type: ignore[no-untyped-call]


def _gradients(
    g: Tensor, x: Tensor, w: Tensor, how: Way, dtypes: Any, needs: Any
) -> tuple[Tensor, ...]:
    kind = operand_type(how.precision, dtypes[1])
    narrow, found = g.to(kind), []
    if needs[0]:
        found.append(_unrectified(multiply(narrow, w.to(kind), how.precision), x, how))
    if needs[1]:
        inputs = _rectified(x, how).to(kind)
        found.append(multiply(narrow.transpose(1, 2), inputs, how.precision))
    if needs[2]:
        found.append(g.sum(1, dtype=dtypes[2]))
    kinds = [d for d, need in zip(dtypes, needs, strict=True) if need]
    return tuple(t.to(d) for t, d in zip(found, kinds, strict=True))


def _descended(
    g: Tensor, x: Tensor, w: Tensor, b: Tensor | None, how: Way, by_input: bool
) -> Tensor | None:
    """Move a cohort's weights and biases by their step; give the gradient by x if it is needed."""
    # .data: the weights change before other layers' backward passes, which do not read them
    w, bias, descent = w.data, None if b is None else b.data, how.descent
    assert descent is not None, "asked for before"
    problem = _problem(x, w, how)
    if problem is not None:
        from undrift.kernels import linear

        step = descent.step(bias is not None)
        return linear.descend(problem, g, x, w, bias, step, by_input, x.dtype, how.rectify)
    needs = (by_input, True, b is not None)
    found = list(_gradients(g, x, w, how, (x.dtype, w.dtype, w.dtype), needs))
    back = found.pop(0) if by_input else None
    for name, held, gradient in zip(("weight", "bias"), (w, bias), found, strict=False):
        if held is not None:
            descent.move(name, held, gradient)
    return back


def _rectified(x: Tensor, how: Way) -> Tensor:
    return x.relu() if how.rectify else x


def _unrectified(g: Tensor, x: Tensor, how: Way) -> Tensor:
    """Bring a gradient back through ReLU; x from before it."""
    return torch.where(x <= 0, 0.0, g).to(g.dtype) if how.rectify else g


def _is_remembered(x: Tensor, how: Way) -> bool:
    return how.history is not None and how.history.takes(x)


def _history(how: Way) -> History:
    assert how.history is not None, "asked for before"
    return how.history


def _remembered(ctx: Any, g: Tensor, by_input: bool) -> Tensor | None:
    """Hand a step to the layer's history and move the biases; give the gradient by x."""
    (x, before), how, (kind, wide, _) = ctx.saved_tensors, ctx.how, ctx.dtypes
    if ctx.bias is not None:
        how.descent.move("bias", ctx.bias.data, g.sum(1, dtype=wide))
    back = _history(how).backward(g, x, kind if by_input else None)
    return None if back is None else _unrectified(back, before, how)


def _problem(x: Tensor, w: Tensor, how: Way) -> Any:
    """Describe the layer to the Triton kernels, or give None where they do not do it."""
    if how.name not in ("triton", "auto") or w.dtype != torch.float32:
        return None
    from undrift import kernels

    if x.device.type != "cuda" and not kernels.interpreted():
        return None
    kernels.need(x.device)
    from undrift.kernels import linear

    problem = linear.LinearProblem(len(w), x.shape[1], w.shape[2], w.shape[1], how.precision)
    return problem if linear.takes(problem, w) else None
