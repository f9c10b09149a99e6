"""From the host to a device without waiting for it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; the host goes on while the device still works.

    A plain `.to` waits until everything before it is done; pinned memory does not.
    """
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=256)
def table(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Put numbers on a device, once: while a round is captured, nothing can be sent there."""
    return torch.tensor(values, dtype=dtype, device=device)
