"""Dropout whose decisions are a hash of a key: the same on every device, in every precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undrift.core.cohort import joined, parted
from undrift.core.random import bits, fold


def drop(
    x: Tensor, key: Tensor, words: tuple[int, int], p: float, depth: int, use_kernel: bool = False
) -> Tensor:
    """Drop what fold(key, *words) decides, for each index into the first `depth` dimensions.

    Decisions count from row 0 on, so rows of padding at the end change nothing; and they compare
    integers, so every device and every precision takes the same ones.
    """
    # p = 1 lets one draw in 2**63 pass; the factor 0 stops that one too.
    threshold, scale = min(int(p * 2**63), 2**63 - 1), 1 / (1 - p) if p < 1 else 0.0
    if use_kernel and depth == x.dim() and x.dtype != torch.float64 and runs_kernels(x.device):
        dropped: Tensor = _Drop.apply(x[None], key[None], words, threshold, scale)[0]  # type: ignore[no-untyped-call]
        return dropped.squeeze(0)
    sizes = x.shape[:depth]
    draws = _draws(key, *words, sizes.numel()).reshape(*sizes, *[1] * (x.dim() - depth))
    return torch.where(draws >= threshold, x * scale, 0.0)


# Operations of their own: torch's compiler, which bounds every whole number, fails on those that
# wrap, as a hash does.
@torch.library.custom_op("undrift::draws", mutates_args=())
def _draws(key: Tensor, number: int, use: int, count: int) -> Tensor:
    """Draw so many numbers of every key: [*, count]."""
    index = torch.arange(count, device=key.device)
    return bits(fold(key, number, use)[..., None], index)


@_draws.register_fake
def _(key: Tensor, number: int, use: int, count: int) -> Tensor:
    return key.new_empty((*key.shape, count))


@_draws.register_vmap
def _(info: Any, dims: Any, key: Tensor, *numbers: int) -> tuple[Tensor, int | None]:
    if dims[0] is None:
        return _draws(key, *numbers), None
    return _draws(key.movedim(dims[0], 0), *numbers), 0


@torch.library.custom_op("undrift::drop", mutates_args=())
def _dropped(
    x: Tensor, key: Tensor, number: int, use: int, threshold: int, scale: float
) -> Tensor:  # fmt: skip
    from undrift.kernels import dropout

    return dropout.drop(x, key, (number, use), threshold, scale)


@_dropped.register_fake
def _(x: Tensor, key: Tensor, number: int, use: int, threshold: int, scale: float) -> Tensor:
    last = x.dim() == 5 and x.shape[2] > 1 and x.permute(0, 1, 3, 4, 2).is_contiguous()
    return torch.empty_like(x if last else x.contiguous())


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a device."""
    from undrift import kernels

    return kernels.available(device)


class _Drop(torch.autograd.Function):
    """A cohort's dropout by one kernel; the gradient is dropped as x was."""

    @staticmethod
    def forward(
        x: Tensor, key: Tensor, words: tuple[int, int], threshold: int, scale: float
    ) -> tuple[Tensor]:
        return (_dropped(x, key, *words, threshold, scale),)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, key, *ctx.numbers = inputs
        ctx.save_for_backward(key)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (g,) = _Drop.apply(grads[0], *ctx.saved_tensors, *ctx.numbers)  # type: ignore[no-untyped-call]
        return g, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        flat = joined(inputs[:2], dims, info.batch_size)
        return parted(_Drop.apply(*flat, *inputs[2:]), info.batch_size)  # type: ignore[no-untyped-call]
