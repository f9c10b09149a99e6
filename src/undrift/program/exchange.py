"""Functions that are exchanged while a model is traced, so that a cohort's products are one call.

A model is read by the functions that it calls, never by the classes of its layers: any `forward`
is served alike.  Operands are narrowed to the type that a precision asks for; results come back in
the type that they would have had, so a model sees no other types than under torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from undrift.core.batching import inside_attention
from undrift.core.lstm_steps import Start, take_steps
from undrift.core.precision import operand_type
from undrift.layers import lstm
from undrift.layers.attention import attend, takes
from undrift.layers.conv_block import convolve_block, fits
from undrift.layers.convolution import convolve, deconvolve

Pair = int | Iterable[int]
WIDE = (torch.float32, torch.float64)


class Exchange(TorchFunctionMode):
    """Inside, convolutions, products and attention are a cohort's operations."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision = precision
        self._blocks: dict[int, tuple[Tensor, Block]] = {}  # by id of the tensor, which is held

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call what stands in for a function, or the function itself."""
        own = EXCHANGED.get(function)
        found = NotImplemented if own is None else own(self, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {})) if found is NotImplemented else found

    def narrow(self, *values: Tensor) -> list[Tensor] | None:
        """Give operands in the type they are multiplied in; None where they are not of one type."""
        dtype = values[0].dtype
        if dtype not in WIDE or any(v.dtype != dtype for v in values):
            return None
        return [v.to(operand_type(self.precision, dtype)) for v in values]

    def note(self, result: Tensor, block: Block | None) -> Tensor:
        """Remember which block gave a result: what follows may become part of it."""
        if block is not None:
            self._blocks[id(result)] = result, block
        return result

    def block_of(self, value: Any) -> Block | None:
        """Give the block that gave a value."""
        return self._blocks.get(id(value), (None, None))[1]


class Block(NamedTuple):
    """A convolution and what follows it, for one operation (layers/conv_block.py)."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    padding: list[int]
    dilation: list[int]
    relu: bool = False
    pool: bool = False

    def run(self, mode: Exchange) -> Tensor:
        """Compute all of it; the convolution that was computed before has no user any more."""
        return mode.note(convolve_block(*self, mode.precision).to(self.w.dtype), self)


# -------------------------------------------------------------------------------------- products
def _linear(mode: Exchange, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if (operands := mode.narrow(input, weight)) is None:
        return NotImplemented
    y = F.linear(*operands).to(input.dtype)
    return y if bias is None else y + bias


def _matmul(mode: Exchange, input: Tensor, other: Tensor, **more: Any) -> Any:
    if more or not isinstance(other, Tensor):
        return NotImplemented
    if (operands := mode.narrow(input, other)) is None:
        return NotImplemented
    return torch.matmul(*operands).to(input.dtype)


def _einsum(mode: Exchange, equation: str, *operands: Any) -> Any:
    given = operands[0] if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
    if (narrowed := mode.narrow(*given)) is None:
        return NotImplemented
    return torch.einsum(equation, *narrowed).to(given[0].dtype)


# ---------------------------------------------------------------------------------- convolutions
def _conv(dimensions: int) -> Callable[..., Any]:
    def conv(
        mode: Exchange, input: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Pair = 1, padding: Pair | str = 0, dilation: Pair = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        operands = mode.narrow(input)
        sizes = [_each(v, dimensions) for v in (stride, dilation)]
        around = _around(padding, weight.shape[2:], sizes[1])
        if operands is None or weight.dtype != input.dtype or around is None:
            return NotImplemented
        x, single = _batched(operands[0], dimensions)
        down, apart, around = _in_two(sizes[0], 1), _in_two(sizes[1], 1), _in_two(around, 0)
        x, w = _as_images(x, dimensions), _as_images(weight, dimensions)
        y = convolve(x, w, down, around, apart, groups, mode.precision)
        plain = dimensions == 2 and not single and groups == 1 and down == [1, 1]
        block = None
        if plain and fits(x, w, around, apart, mode.precision):
            block = Block(x, w, bias, around, apart)
        return mode.note(_finished(y, bias, dimensions, single, input.dtype), block)

    return conv


def _conv_transpose(dimensions: int) -> Callable[..., Any]:
    def conv_transpose(
        mode: Exchange, input: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Pair = 1, padding: Pair = 0, output_padding: Pair = 0, groups: int = 1,
        dilation: Pair = 1,
    ) -> Any:  # fmt: skip
        operands = mode.narrow(input)
        if operands is None or weight.dtype != input.dtype:
            return NotImplemented
        x, single = _batched(operands[0], dimensions)
        given = ((stride, 1), (padding, 0), (dilation, 1), (output_padding, 0))
        down, around, apart, beyond = (_in_two(_each(v, dimensions), n) for v, n in given)
        x, w = _as_images(x, dimensions), _as_images(weight, dimensions)
        y = deconvolve(x, w, down, around, apart, beyond, groups, mode.precision)
        return _finished(y, bias, dimensions, single, input.dtype)

    return conv_transpose


def _relu(mode: Exchange, input: Tensor, inplace: bool = False) -> Any:
    block = mode.block_of(input)
    if block is None or block.relu:
        return NotImplemented
    if inplace:  # others may read what it writes
        return mode.note(F.relu(input, True), block._replace(relu=True))
    return block._replace(relu=True).run(mode)


def _max_pool(
    mode: Exchange, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
    dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    block = mode.block_of(input)
    sizes = (
        kernel_size,
        kernel_size if stride is None or stride == [] else stride,
        padding,
        dilation,
    )
    small = [_each(v, 2) for v in sizes] == [[2, 2], [2, 2], [0, 0], [1, 1]]
    if block is None or block.pool or not small or ceil_mode or return_indices:
        return NotImplemented
    return block._replace(pool=True).run(mode)


def _batched(x: Tensor, dimensions: int) -> tuple[Tensor, bool]:
    single = x.dim() == dimensions + 1
    return (x[None] if single else x), single


def _finished(y: Tensor, bias: Tensor | None, dimensions: int, single: bool, dtype: Any) -> Tensor:
    """Bring a result into the type and the axes that were asked for, and add the bias."""
    y = (y.squeeze(-2) if dimensions == 1 else y).to(dtype)
    y = y.squeeze(0) if single else y
    return y if bias is None else y + bias.view(-1, *[1] * dimensions)


def _each(value: Pair, dimensions: int) -> list[int]:
    given = [value] if isinstance(value, int) else list(value)
    return given * dimensions if len(given) == 1 else given


def _in_two(sizes: list[int], missing: int) -> list[int]:
    """A line is an image of one row."""
    return sizes if len(sizes) == 2 else [missing, *sizes]


def _as_images(t: Tensor, dimensions: int) -> Tensor:
    return t.unsqueeze(-2) if dimensions == 1 else t


def _around(padding: Pair | str, kernel: torch.Size, dilation: list[int]) -> list[int] | None:
    """Give the padding on both sides, or None where the sides differ."""
    if not isinstance(padding, str):
        return _each(padding, len(kernel))
    if padding == "valid":
        return [0] * len(kernel)
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return None if any(n % 2 for n in total) else [n // 2 for n in total]


# ------------------------------------------------------------------------------------- attention
def _attention(
    mode: Exchange, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:  # fmt: skip
    operands = mode.narrow(query, key, value)
    if operands is None:
        return NotImplemented
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    q, k, v = operands
    plain = attn_mask is None and dropout_p == 0 and not enable_gqa
    if plain and takes(q, k, v):
        return attend(q, k, v, is_causal, scale).to(query.dtype)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(q.dtype)
    found = F.scaled_dot_product_attention(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return found.to(query.dtype)


def _multi_head(mode: Exchange, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return inside_attention(*args, **kwargs)


# ------------------------------------------------------------------------------------- recurrence
def _lstm_steps(mode: Exchange, start: Start) -> Any:
    return lstm.take_steps(start, mode.precision) if lstm.fits(start) else NotImplemented


EXCHANGED: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.bmm: _matmul,
    Tensor.bmm: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.einsum: _einsum,
    F.relu: _relu,
    torch.relu: _relu,
    Tensor.relu: _relu,
    F.max_pool2d: _max_pool,
    torch.max_pool2d: _max_pool,
    F.conv1d: _conv(1),
    F.conv2d: _conv(2),
    F.conv_transpose1d: _conv_transpose(1),
    F.conv_transpose2d: _conv_transpose(2),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    take_steps: _lstm_steps,
}
