"""Work side by side on a device: what waits for memory in one branch, computes in another.

Every branch is a stream.  While a graph is captured they become its branches; on a CPU there is
one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from undrift.kernels.tuner import in_a_crowd

_streams: dict[torch.device, list[torch.cuda.Stream]] = {}

On = Callable[[int], AbstractContextManager[None]]


@contextmanager
def forked(count: int, device: torch.device) -> Iterator[On]:
    """Give branches that need nothing of each other, to be entered by number, often.

    What comes next waits for all of them.
    """
    if device.type != "cuda" or count < 2:
        yield lambda _: nullcontext()
        return
    here = torch.cuda.current_stream(device)
    known = _streams.setdefault(device, [])
    while len(known) < count:
        known.append(torch.cuda.Stream(device))
    streams = known[:count]
    for stream in streams:
        stream.wait_stream(here)

    @contextmanager
    def on(branch: int) -> Iterator[None]:
        with torch.cuda.stream(streams[branch]), in_a_crowd(count):
            yield

    try:
        yield on
    finally:
        for stream in streams:
            here.wait_stream(stream)


def side_by_side(calls: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Make calls that need nothing of each other."""
    with forked(len(calls), device) as on:
        for branch, call in enumerate(calls):
            with on(branch):
                call()
