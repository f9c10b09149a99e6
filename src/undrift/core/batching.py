"""Functions that vmap cannot take, exchanged while a module runs for many clients at once.

torch has kernels without a batching rule: under vmap they run client after client behind a warning
about performance, or fail.  Here they are computed in operations that have one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from undrift.core.recurrent import Cell, gru_move, relu_move, tanh_move


def batching(*given: Tensor) -> AbstractContextManager[Any]:
    """Give the context of a call of a user's code: it exchanges functions under vmap alone.

    Where tensors are given, each client gets its own of whatever the code makes if it has its own
    of one of these: the code may write into it what differs between clients.
    """
    levels = _functorch.get_interpreter_stack() or ()
    mapped = any(level.key() == _functorch.TransformType.Vmap for level in levels)
    return Batching(*given) if mapped else nullcontext()


class Batching(TorchFunctionMode):
    """Inside, functions without a batching rule run in operations that have one.

    While a mode is on, torch leaves its fused paths for evaluation (`nn.MultiheadAttention`,
    `nn.TransformerEncoder`) aside, for which vmap has no rule either.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        none = [t.detach().flatten()[:0].isnan().any() for t in given]  # False, for every client
        self._own = torch.stack(none).any() if given else None

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call what stands in for a function, or the function itself."""
        if function is F.multi_head_attention_forward:
            with self:
                return inside_attention(*args, **(kwargs or {}))
        given = dict(kwargs or {})
        if given.get("memory_format") in CHANNELS_LAST:  # it changes no number, and vmap has no way
            given["memory_format"] = torch.contiguous_format
        found = EXCHANGED.get(function, function)(*args, **given)
        if self._own is None or function not in MAKERS:
            return found
        return torch.where(self._own, found, found)  # the same numbers, for every client


CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Do what F.scaled_dot_product_attention does, in two products and a softmax."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
    found: Tensor = torch._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return found


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Give the directions of v the lengths g, along one axis or (-1) all together."""
    axes = [axis for axis in range(v.dim()) if axis != dim]
    return v * (g / torch.linalg.vector_norm(v, dim=axes, keepdim=True))


def _bilinear(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.einsum("...i,oij,...j->...o", a, weight, b)
    return y if bias is None else y + bias


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    """Weigh negative numbers, one channel like the other or each by its own."""
    if weight.numel() > 1:
        weight = weight.view(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, weight * input)


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean",
    sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Any:  # fmt: skip
    """Reduce bags of one length; others, and what changes weights or gradients, are torch's."""
    if input.dim() != 2 or max_norm is not None or scale_grad_by_freq or sparse:
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse,
            per_sample_weights, include_last_offset, padding_idx,
        )  # fmt: skip
    each = F.embedding(input, weight)
    padding = None if padding_idx is None else padding_idx % len(weight)
    real = (input != padding).unsqueeze(-1) if padding is not None else None
    if mode == "max":
        if real is None:
            return each.max(1).values
        largest = each.masked_fill(~real, -torch.inf).max(1).values
        return torch.where(real.any(1), largest, 0.0)
    if per_sample_weights is not None:
        each = each * per_sample_weights.unsqueeze(-1)
    each = each if real is None else torch.where(real, each, 0.0)
    if mode == "sum":
        return each.sum(1)
    return each.mean(1) if real is None else each.sum(1) / real.sum(1).clamp(min=1)


def _cell(move: Cell) -> Callable[..., Tensor]:
    def cell(
        input: Tensor, h: Tensor, inner: Tensor, outer: Tensor, before: Tensor | None = None,
        beside: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return move(F.linear(input, inner, before), F.linear(h, outer, beside), h)

    return cell


def _lstm_cell(
    input: Tensor, state: Any, inner: Tensor, outer: Tensor, before: Tensor | None = None,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h, c = state
    i, f, g, o = (F.linear(input, inner, before) + F.linear(h, outer, beside)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _solve(a: Tensor, b: Tensor, *, left: bool = True, **more: Any) -> Tensor:
    """Solve a x = b; torch's rule mistakes clients for examples where one side has fewer axes."""
    if b.dim() > 1 and not (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1]):
        axes = max(a.dim(), b.dim())
        a, b = (t[(None,) * (axes - t.dim())] for t in (a, b))
    found: Tensor = torch.linalg.solve(a, b, left=left, **more)
    return found


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Compare with every class; how many there are is not read off the numbers."""
    if num_classes < 0:
        return F.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


# Functions whose results are new memory, which others may be written into.
MAKERS = frozenset(
    (
        *(torch.zeros, torch.ones, torch.empty, torch.full, torch.eye, torch.arange, torch.tensor),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.clone),
        *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.clone),
    )
)
EXCHANGED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    torch._weight_norm: _weight_norm,
    torch.bilinear: _bilinear,
    torch.prelu: _prelu,
    F.embedding_bag: _embedding_bag,
    torch.rnn_tanh_cell: _cell(tanh_move),
    torch.rnn_relu_cell: _cell(relu_move),
    torch.gru_cell: _cell(gru_move),
    torch.lstm_cell: _lstm_cell,
    torch.linalg.solve: _solve,
    F.one_hot: _one_hot,
    # asked before texts become nested tensors, which vmap cannot hold
    torch._nested_tensor_from_mask_left_aligned: lambda x, mask: False,
}

# torch's function asks at its beginning whether a mode wants it; this copy goes on to the functions
# inside, which the mode does want
inside_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda given: False},
    "multi_head_attention",
    F.multi_head_attention_forward.__defaults__,
    F.multi_head_attention_forward.__closure__,
)
