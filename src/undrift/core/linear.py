"""A linear layer that, on its way back, moves its weights at once.

Under plain SGD a weight gradient has one use: to be scaled and subtracted.  `W.baddbmm_` does both
in the multiplication itself, so that the gradient [C, out, in] never reaches memory.  Only safe
where nothing else reads the weights after their layer's backward pass; the engine decides that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from undrift.core.history import Histories


class Descent(NamedTuple):
    """Plain SGD, to be taken inside the backward pass: w <- keep * w - lr * gradient.

    Or, not `steps`: layers with a history remember the step, those with a combination take theirs,
    and others give their gradients.
    """

    lr: float | Tensor  # of everybody, or one value per client: 0 stands still
    keep: float | Tensor  # 1 - lr * weight_decay
    histories: Histories | None = None  # of layers of a seam whose weights move after all steps
    steps: bool = True
    combinations: Mapping[str, Combination] | None = None  # by layer


class Combination(NamedTuple):
    """How a cohort's layer moves under a linear chain of rules (engines/linear_chain.py).

    Its weights w and their momentum m become combinations of w, m, the gradient, two vectors that
    an experiment shares and one of each client.  Vectors are the layer's columns of those that a
    step reads: its weights, then its bias.
    """

    numbers: Tensor  # [n, 2, 6], n clients
    momentum: Tensor | None  # [n, size]
    shared: tuple[Tensor, ...]  # [S, size] each, n / S clients
    own: Tensor | None  # [n, size]

    def move(self, w: Tensor, b: Tensor | None, by_w: Tensor, by_b: Tensor | None) -> None:
        """Move weights w [n, out, in] and bias b [n, out] in place, given their gradients."""
        size = w[0].numel()
        self._move(w, by_w, slice(0, size))
        if b is not None and by_b is not None:
            self._move(b, by_b, slice(size, size + b[0].numel()))

    def _move(self, w: Tensor, g: Tensor, columns: slice) -> None:
        def of(vectors: Tensor) -> Tensor:
            mine = vectors[:, columns].reshape(len(vectors), *w.shape[1:])
            return mine.repeat_interleave(len(w) // len(vectors), 0)

        places = [(0, w), (2, g), *((3 + j, of(v)) for j, v in enumerate(self.shared))]
        places += [(1, of(self.momentum))] if self.momentum is not None else []
        places += [(5, of(self.own))] if self.own is not None else []
        after = []
        for row in self.numbers.to(w.dtype).unbind(1):
            parts = [(_like(row[:, j], w), v) for j, v in places]
            terms = [torch.where(much == 0, 0.0, much * v) for much, v in parts]
            after.append(torch.stack(terms).sum(0))
        w.copy_(after[0])
        if self.momentum is not None:
            self.momentum[:, columns] = after[1].flatten(1)


def take_step(w: Tensor, g: Tensor | None, how: Descent) -> None:
    """Move w [C, ...] in place; without a gradient it decays all the same."""
    if isinstance(how.keep, Tensor):
        w.mul_(_like(how.keep, w))
    elif how.keep != 1:
        w.mul_(how.keep)
    if g is None:
        return
    if isinstance(how.lr, Tensor):
        rate = _like(how.lr, g)
        w.sub_(torch.where(rate == 0, 0.0, rate * g))  # 0 * NaN would not stand still
    else:
        w.sub_(g, alpha=how.lr)


def _like(values: Tensor, t: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (t.dim() - 1))


class _Cohort(torch.autograd.Function):
    """x [C, B, in], weight [C, out, in], bias [C, out] or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Descent) -> Tensor:
        ctx.save_for_backward(x)
        # .data: the weights change before other layers' backward passes, which do not read them.
        ctx.weight, ctx.bias, ctx.how = weight.data, None if bias is None else bias.data, how
        # W x^T instead of x W^T: a quarter faster here, measured with MKL 2024.2.
        out = torch.bmm(weight, x.transpose(1, 2)).transpose(1, 2)
        return out if bias is None else out.add_(bias[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None]:
        (g,), (x,), how = grads, ctx.saved_tensors, ctx.how
        # in the layout of the forward pass, so that what lies between two layers stays fast
        back = None
        if ctx.needs_input_grad[0]:
            back = torch.bmm(ctx.weight.transpose(1, 2), g.transpose(1, 2)).transpose(1, 2)
        if isinstance(how.lr, Tensor):
            rate = _like(how.lr, g)
            take_step(ctx.weight, None, how)  # decays
            ctx.weight.baddbmm_(torch.where(rate == 0, 0.0, rate * g).transpose(1, 2), x, alpha=-1)
        else:
            ctx.weight.baddbmm_(g.transpose(1, 2), x, beta=how.keep, alpha=-how.lr)
        if ctx.bias is not None:
            take_step(ctx.bias, g.sum(1), how)
        return back, None, None, None


class _Linear(torch.autograd.Function):
    """One client's view of it; vmap hands the whole cohort to `_Cohort`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, how: Descent) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep: this forward only runs under vmap."""

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Descent
    ) -> tuple[Tensor, int]:
        x = x.movedim(dims[0], 0) if dims[0] is not None else x.expand(info.batch_size, *x.shape)
        return descending_cohort(x, weight, bias, how), 0


def descending_linear(x: Tensor, weight: Tensor, bias: Tensor | None, how: Descent) -> Tensor:
    """Apply a linear layer under vmap; its backward pass takes the SGD step."""
    out: Tensor = _Linear.apply(x, weight, bias, how)  # type: ignore[no-untyped-call]
    return out


def descending_cohort(x: Tensor, weight: Tensor, bias: Tensor | None, how: Descent) -> Tensor:
    """Apply a cohort's linear layer to x [C, ..., in]; its backward pass takes the SGD step."""
    rows = x.flatten(1, -2) if x.dim() > 2 else x[:, None]
    out: Tensor = _Cohort.apply(rows, weight, bias, how)  # type: ignore[no-untyped-call]
    return out.reshape(*x.shape[:-1], out.shape[-1])
