"""From the host to a device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; the host goes on while the device still works.

    A plain `.to` waits until everything before it is done; pinned memory does not.
    """
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
