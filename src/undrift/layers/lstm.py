"""All steps of a cohort's LSTM layer as an operation of a program.

Shapes.  One client: inner [T, B, 4H], h and c [B, H], recurrent [4H, H]; a cohort has C in front.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from undrift import kernels
from undrift.core.choosing import choose
from undrift.core.cohort import joined, parted
from undrift.core.lstm_steps import Start
from undrift.core.precision import multiplying, operand_type
from undrift.kernels import lstm

FEW = 4  # steps by which forms are measured


def fits(start: Start) -> bool:
    """Whether the kernels do this."""
    alike = {v.dtype for v in start} == {torch.float32}
    return alike and kernels.available(start.inner.device)


def take_steps(start: Start, precision: str) -> tuple[Tensor, Tensor]:
    """Take one client's steps: outputs [T, B, H] and the last cell state [B, H]."""
    outputs, cells, _ = _Steps.apply(*(v[None] for v in start), precision)  # type: ignore[no-untyped-call]
    return outputs[0, 1:].to(torch.float32), cells[0, -1]


@torch.library.custom_op("undrift::lstm", mutates_args=())
def _forward(
    inner: Tensor, h: Tensor, c: Tensor, recurrent: Tensor, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    start = (h, c, recurrent, precision)

    def few(name: str) -> None:
        lstm.take_steps(inner[:, :FEW], *start, forms[name])

    forms = {str(form): form for form in lstm.FORWARD}
    outputs, cells, gates = lstm.take_steps(inner, *start, _chosen("forward", inner, forms, few))
    return outputs, cells, gates


@_forward.register_fake
def _(
    inner: Tensor, h: Tensor, c: Tensor, recurrent: Tensor, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    clients, steps, rows, wide = inner.shape
    kind, moments = operand_type(precision, inner.dtype), (clients, steps + 1, rows, wide // 4)
    outputs, cells = inner.new_empty(moments, dtype=kind), inner.new_empty(moments)
    return outputs, cells, inner.new_empty(inner.shape, dtype=kind)


@torch.library.custom_op("undrift::lstm_back", mutates_args=())
def _backward(
    by_outputs: Tensor, by_cells: Tensor, recurrent: Tensor, outputs: Tensor, cells: Tensor,
    gates: Tensor, precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    held = lstm.Held(outputs, cells, gates)
    # of all cell states only the last is handed out
    given = (by_outputs[:, 1:], by_cells[:, -1], recurrent)

    def few(name: str) -> None:
        some = lstm.Held(outputs[:, : FEW + 1], cells[:, : FEW + 1].contiguous(), gates[:, :FEW])
        some = some._replace(gates=some.gates.contiguous())
        lstm.go_back(given[0][:, :FEW], *given[1:], some, precision, forms[name])

    forms = {str(form): form for form in lstm.BACKWARD}
    chosen = _chosen("backward", gates, forms, few)
    by_gates, by_c = lstm.go_back(*given, held, precision, chosen)
    with multiplying(precision):
        narrow = recurrent.to(by_gates.dtype)
        by_h = torch.bmm(by_gates[:, 0], narrow) + by_outputs[:, 0].to(by_gates.dtype)
        fed = outputs[:, :-1].flatten(1, 2)
        by_recurrent = torch.bmm(by_gates.flatten(1, 2).mT, fed)
    return by_gates.float(), by_h.float(), by_c, by_recurrent.float()


@_backward.register_fake
def _(
    by_outputs: Tensor, by_cells: Tensor, recurrent: Tensor, outputs: Tensor, cells: Tensor,
    gates: Tensor, precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    by_h, by_c = (cells.new_empty(cells[:, 0].shape) for _ in range(2))
    inner, own = (
        gates.new_empty(gates.shape, dtype=cells.dtype),
        recurrent.new_empty(recurrent.shape),
    )
    return inner, by_h, by_c, own


def _chosen(
    direction: str, like: Tensor, forms: dict[str, lstm.Form], few: Callable[[str], None]
) -> lstm.Form:
    """Give the fastest form, measured once by a few steps."""
    if not like.is_cuda:
        return next(iter(forms.values()))
    key = f"lstm {direction} {tuple(like.shape)} {like.dtype}"
    return forms[choose(key, like.device, forms, few)]


class _Steps(torch.autograd.Function):
    """(outputs and cells of all moments, gates): the last are for the way back alone."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.precision = inputs[4]
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(inputs[3], *output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = _Back.apply(*grads[:2], *ctx.saved_tensors, ctx.precision)  # type: ignore[no-untyped-call]
        return *found, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
        flat = joined(inputs[:4], dims, info.batch_size)
        return parted(_Steps.apply(*flat, inputs[4]), info.batch_size)  # type: ignore[no-untyped-call]


class _Back(torch.autograd.Function):
    """Its gradients; they have none of their own."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _backward(*(v.contiguous() for v in inputs[:6]), inputs[6])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep."""

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
        flat = joined(inputs[:6], dims, info.batch_size)
        return parted(_Back.apply(*flat, inputs[6]), info.batch_size)  # type: ignore[no-untyped-call]
