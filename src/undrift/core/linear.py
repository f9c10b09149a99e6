"""A linear layer that, on its way back, moves its weights at once.

Under plain SGD a weight gradient has one use: to be scaled and subtracted.  `W.baddbmm_` does both
in the multiplication itself, so that the gradient [C, out, in] never reaches memory.  Only safe
where nothing else reads the weights after their layer's backward pass; the engine decides that.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from undrift import kernels
from undrift.core.chain import Chain, Chains, parameter
from undrift.kernels.settling import Step

if TYPE_CHECKING:
    from undrift.core.histories import Histories


class Descent(NamedTuple):
    """Plain SGD, to be taken inside the backward pass: w <- keep * w - lr * gradient.

    Or the step of a chain of rules.  Or, not `steps`: layers with a history remember the step, and
    others give their gradients.
    """

    lr: float | Tensor = 0.0  # of everybody, or one value per client: 0 stands still
    keep: float | Tensor = 1.0  # 1 - lr * weight_decay
    histories: Histories | None = None  # of layers of a seam whose weights move after all steps
    steps: bool = True
    chain: Chain | Chains | None = None
    layer: str = ""  # whose step it is, where a chain has to know

    def step(self, bias: bool) -> Step:
        """Give the step of a layer, with or without a bias, as kernels take it."""
        if self.chain is None:
            return self.lr, self.keep
        return self.chain.step(self._name("weight"), self._name("bias") if bias else None)

    def move(self, name: str, held: Tensor, gradient: Tensor) -> None:
        """Move the layer's weight or bias, which is `held` [C, ...], by its gradient."""
        if self.chain is None:
            take_step(held, gradient, self)
        else:
            self.chain.take(self._name(name), gradient)

    def _name(self, name: str) -> str:
        return parameter(self.layer, name)


def take_step(w: Tensor, g: Tensor | None, how: Descent) -> None:
    """Move w [C, ...] by plain SGD, in place; without a gradient it decays all the same."""
    if g is not None and w.dtype == torch.float32 and w.is_cuda and kernels.available(w.device):
        from undrift.kernels.settling import take

        take((how.lr, how.keep), w.view(len(w), -1), g.flatten(1))
        return
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


@cache
def weights_first() -> bool:
    """Whether W x^T is faster than x W^T on this CPU, as batches of small products go.

    With MKL 2024.2 by a quarter on an Intel Xeon; on an AMD EPYC it is slower by a third.  By the
    maker and not by the clock: a run on one machine keeps its bits.
    """
    try:
        return "AuthenticAMD" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


class _Cohort(torch.autograd.Function):
    """x [C, B, in], weight [C, out, in], bias [C, out] or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Descent) -> Tensor:
        ctx.save_for_backward(x)
        # .data: the weights change before other layers' backward passes, which do not read them.
        ctx.weight, ctx.bias, ctx.how = weight.data, None if bias is None else bias.data, how
        if weights_first():
            out = torch.bmm(weight, x.transpose(1, 2)).transpose(1, 2)
        else:
            out = torch.bmm(x, weight.transpose(1, 2))
        return out if bias is None else out.add_(bias[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None]:
        (g,), (x,), how = grads, ctx.saved_tensors, ctx.how
        # in the layout of the forward pass, so that what lies between two layers stays fast
        back = None
        if ctx.needs_input_grad[0] and weights_first():
            back = torch.bmm(ctx.weight.transpose(1, 2), g.transpose(1, 2)).transpose(1, 2)
        elif ctx.needs_input_grad[0]:
            back = torch.bmm(g, ctx.weight)
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
