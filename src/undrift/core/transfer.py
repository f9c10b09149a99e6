"""From the host to a device without waiting for it."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from undrift.core.tree import Tree, leaves, rebuild, structure

APART = 64  # bytes: where a part of a message may begin
PAGES = 8  # for messages that are on their way


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; the host goes on meanwhile.

    A plain `.to` waits until everything before it is done; pinned memory does not.
    """
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=device.type == "cuda")


class Mail:
    """Trees of tensors by name that go to a device again and again, in one transfer each time.

    They stay where they are: `trees`.  Pages of pinned memory are written in turns, each again
    when a device has copied it.
    """

    def __init__(self, like: dict[str, Tree], device: torch.device) -> None:
        held = leaves(like)
        sizes = [-(-v.nbytes // APART) * APART for v in held]
        starts = list(accumulate(sizes, initial=0))
        self._spans = [slice(a, a + v.nbytes) for a, v in zip(starts, held, strict=False)]
        self._like = [(v.dtype, v.shape) for v in held]
        self._structure = structure(like)
        self._there = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        self.trees = self._shown(self._there)
        pages = PAGES if device.type == "cuda" else 1
        room = torch.empty((pages, starts[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._pages = [(page, self._shown(page)) for page in room]
        self._sent: list[torch.cuda.Event | None] = [None] * pages
        self._next = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, values: dict[str, Tree]) -> None:
        """Write trees like the first ones, which the host has; others become what they may."""
        at, self._next = self._next, (self._next + 1) % len(self._pages)
        here, parts = self._pages[at]
        if (before := self._sent[at]) is not None:
            before.synchronize()  # sync: it has been copied long ago, as a rule
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
            self._sent[at] = self._stream.record_event()
        now.wait_stream(self._stream)
        arrived.record_stream(now)
        self._there.copy_(arrived)

    def _shown(self, whole: Tensor) -> dict[str, Tree]:
        """Show a message as the trees that it is."""
        pairs = zip(self._spans, self._like, strict=True)
        parts = [whole[span].view(dtype).view(shape) for span, (dtype, shape) in pairs]
        trees: dict[str, Tree] = rebuild(self._structure, parts)
        return trees


@lru_cache(maxsize=256)
def table(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Put numbers on a device, once: while a round is captured, nothing can be sent there."""
    return torch.tensor(values, dtype=dtype, device=device)
