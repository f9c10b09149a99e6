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


def batching() -> AbstractContextManager[Any]:
    """Give the context of a module's call: it exchanges functions under vmap, and only there."""
    levels = _functorch.get_interpreter_stack() or ()
    mapped = any(level.key() == _functorch.TransformType.Vmap for level in levels)
    return Batching() if mapped else nullcontext()


class Batching(TorchFunctionMode):
    """Inside, functions without a batching rule run in operations that have one.

    While a mode is on, torch leaves its fused paths for evaluation (`nn.MultiheadAttention`,
    `nn.TransformerEncoder`) aside, for which vmap has no rule either.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call what stands in for a function, or the function itself."""
        if function is F.multi_head_attention_forward:
            with self:
                return inside_attention(*args, **(kwargs or {}))
        return EXCHANGED.get(function, function)(*args, **(kwargs or {}))


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


EXCHANGED: dict[Any, Callable[..., Any]] = {F.scaled_dot_product_attention: _attention}

# torch's function asks at its beginning whether a mode wants it; this copy goes on to the functions
# inside, which the mode does want
inside_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda given: False},
    "multi_head_attention",
    F.multi_head_attention_forward.__defaults__,
    F.multi_head_attention_forward.__closure__,
)
