"""Work side by side on a device: what waits for memory in one branch, computes in another.

Every branch is a stream.  While a graph is captured they become its branches; on a CPU they are
called one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from undrift.kernels.tuner import in_a_crowd

_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def side_by_side(calls: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Make calls that need nothing of each other; what comes next waits for all of them."""
    if device.type != "cuda" or len(calls) < 2:
        for call in calls:
            call()
        return
    here = torch.cuda.current_stream(device)
    others = _streams.setdefault(device, [])
    while len(others) < len(calls):
        others.append(torch.cuda.Stream(device))
    for stream, call in zip(others, calls, strict=False):
        stream.wait_stream(here)
        with torch.cuda.stream(stream), in_a_crowd(len(calls)):
            call()
    for stream, _ in zip(others, calls, strict=False):
        here.wait_stream(stream)


class Aside:
    """Work beside what comes next, on one stream of its own: in the order in which it is given."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # most of it is small

    def run(self, call: Callable[[], None]) -> Callable[[], None]:
        """Make a call; what it gives has to be called before anything reads what the call writes.

        Nothing that it reads may be freed or written meanwhile.
        """
        if self._stream is None:
            call()
            return nothing
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                call()
                done = self._stream.record_event()
        except BaseException:
            here.wait_stream(self._stream)  # nobody else will
            raise
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


def nothing() -> None:
    """Leave it at that."""
