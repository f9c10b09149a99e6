"""Attention of a cohort as an operation of a program.

It has no weights, so clients are no more than further examples: one call for everybody.

Shapes.  q, k, v [N, heads, T, depth], N being clients times examples; log-sums [N, heads, T].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undrift.core.cohort import joined, parted

HALF = (torch.bfloat16, torch.float16)
MOST_DEPTH = 256


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the operation does this: torch's own kernels for half precision, where q is k long.

    On a CPU they stand in for those of a device, so that programs can be tried there.
    """
    alike = q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and q.shape[-1] == v.shape[-1]
    return (
        q.dim() == 4
        and alike
        and q.dtype in HALF
        and q.shape[-2] == k.shape[-2]
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= MOST_DEPTH
    )


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Attend for one client [B, heads, T, depth]; vmap makes it the cohort's."""
    found: Tensor = _Attention.apply(q, k, v, causal, scale)[0]  # type: ignore[no-untyped-call]
    return found


@torch.library.custom_op("undrift::attend", mutates_args=())
def _output(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if q.is_cuda:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        y, sums, *_, seed, offset, _ = flash(q, k, v, 0.0, causal, False, scale=scale)
        return _laid(y), sums.contiguous(), seed.clone(), offset.clone()
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    y, sums = flash(q, k, v, 0.0, causal, scale=scale)
    none = q.new_empty(0, dtype=torch.int64)
    return _laid(y), sums.contiguous(), none, none.clone()


def _laid(t: Tensor) -> Tensor:
    """Lay a result out as torch's kernel writes it, positions before heads."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _room(like: Tensor) -> Tensor:
    return torch.empty_like(like.transpose(1, 2).contiguous()).transpose(1, 2)


@_output.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if q.is_cuda:
        seed, offset = (q.new_empty(n, dtype=torch.uint64) for n in ((2,), ()))
    else:
        seed, offset = (q.new_empty(0, dtype=torch.int64) for _ in range(2))
    return _room(q), sums, seed, offset


@torch.library.custom_op("undrift::attend_back", mutates_args=())
def _gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = q.shape[-2]
    if q.is_cuda:
        back = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lengths = (None, None, rows, rows)
        found = back(
            g, q, k, v, y, sums, *lengths, 0.0, causal, seed, offset, scale=scale
        )  # fmt: skip
    else:
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = back(g, q, k, v, y, sums, 0.0, causal, scale=scale)
    by_q, by_k, by_v = (_laid(t) for t in found[:3])
    return by_q, by_k, by_v


@_gradients.register_fake
def _(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    by_q, by_k, by_v = (_room(t) for t in (q, k, v))
    return by_q, by_k, by_v


class _Attention(torch.autograd.Function):
    """The output, and for the way back the log-sums and what torch's kernel calls its generator."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, ...]:
        return _output(*(_laid(t) for t in (q, k, v)), *settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, *ctx.settings = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if grads[0] is None:
            return (None,) * 5
        found = _AttentionBack.apply(grads[0], *ctx.saved_tensors, *ctx.settings)  # type: ignore[no-untyped-call]
        return *found, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Any, Any]:
        flat = joined(inputs[:3], dims, info.batch_size)
        *whole, seed, offset = _Attention.apply(*flat, *inputs[3:])  # type: ignore[no-untyped-call]
        return (*parted(whole, info.batch_size)[0], seed, offset), (0, 0, None, None)


class _AttentionBack(torch.autograd.Function):
    """Its gradients; they have none of their own."""

    @staticmethod
    def forward(g: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        g, q, k, v, y = (_laid(t) for t in (g, *inputs[:4]))
        return _gradients(g, q, k, v, y, *(t.contiguous() for t in inputs[4:7]), *inputs[7:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep."""

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Any, Any]:
        flat = joined(inputs[:6], dims, info.batch_size)
        found = _AttentionBack.apply(*flat, *inputs[6:])  # type: ignore[no-untyped-call]
        return parted(found, info.batch_size)
