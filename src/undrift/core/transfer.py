"""From the host to a device without waiting for it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device, into: Tensor | None = None) -> Tensor:
    """Copy a tensor to a device, `into` memory that is there; the host goes on meanwhile.

    A plain `.to` waits until everything before it is done; pinned memory does not.
    """
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    if into is not None:
        return into.copy_(values, non_blocking=True)
    return values.to(device, non_blocking=device.type == "cuda")


@lru_cache(maxsize=256)
def table(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Put numbers on a device, once: while a round is captured, nothing can be sent there."""
    return torch.tensor(values, dtype=dtype, device=device)
