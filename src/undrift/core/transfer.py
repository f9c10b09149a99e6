"""From the host to a device without waiting for it."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from undrift.core.tree import Tree, leaves, rebuild, structure

APART = 64  # bytes: where a part of a message may begin


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; the host goes on meanwhile.

    A plain `.to` waits until everything before it is done; pinned memory does not.
    """
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=device.type == "cuda")


class Mail:
    """Trees of tensors by name that go to a device again and again, in one transfer each time.

    They stay where they are: `trees`.
    """

    def __init__(self, like: dict[str, Tree], device: torch.device) -> None:
        held = leaves(like)
        sizes = [-(-v.nbytes // APART) * APART for v in held]
        starts = list(accumulate(sizes, initial=0))
        self._spans = [slice(a, a + v.nbytes) for a, v in zip(starts, held, strict=False)]
        self._there = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        self._like = [(v.dtype, v.shape) for v in held]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._structure = structure(like)
        self.trees: dict[str, Tree] = rebuild(self._structure, self._parts(self._there))

    def send(self, values: dict[str, Tree]) -> None:
        """Write trees like the first ones, which the host has; others become what they may."""
        here = torch.empty(self._there.shape, dtype=torch.uint8, pin_memory=self._there.is_cuda)
        parts: dict[str, Tree] = rebuild(self._structure, self._parts(here))
        for name, tree in values.items():
            for part, value in zip(leaves(parts[name]), leaves(tree), strict=True):
                part.copy_(value)
        if self._stream is None:
            self._there.copy_(here)
            return
        # On a stream of its own: what comes next on this one would wait for the engine that copies.
        now = torch.cuda.current_stream(self._there.device)
        with torch.cuda.stream(self._stream):
            arrived = here.to(self._there.device, non_blocking=True)
        now.wait_stream(self._stream)
        arrived.record_stream(now)
        self._there.copy_(arrived)

    def _parts(self, whole: Tensor) -> list[Tensor]:
        pairs = zip(self._spans, self._like, strict=True)
        return [whole[span].view(dtype).view(shape) for span, (dtype, shape) in pairs]


@lru_cache(maxsize=256)
def table(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Put numbers on a device, once: while a round is captured, nothing can be sent there."""
    return torch.tensor(values, dtype=dtype, device=device)
