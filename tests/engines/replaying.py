"""CUDA graphs as they would be on a CPU: operations recorded once, then replayed.

A recorded graph keeps the memory it was recorded with.  What it reads must stay where it was, and
its own results are only safe until another graph is replayed that was recorded earlier: that one
may use the same memory for its scratch.  Here such results are destroyed, so that a test fails
where a device would give garbage now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from undrift.core.tree import leaves

DESTROYED = -(2**40)  # as an index it is out of any range


class Recorder(TorchDispatchMode):
    """Notes every operation with the tensors it read and made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


def watch_compiled(monkeypatch: Any) -> list[str]:
    """Collect what is called for the first time, in its shapes, while something is recorded.

    On a device it would be compiled then, which cannot be recorded.
    """
    from undrift.engines.fused import Fused, lies

    known, found, call = set[Any](), list[str](), Fused.__call__

    def watched(self: Fused, *trees: Any) -> Any:
        key = (id(self), lies(leaves(trees)))
        if key not in known and Replayed.recording:
            found.append(self.name)
        known.add(key)
        kept.append(self)
        return call(self, *trees)

    kept = list[Fused]()  # an id is only good as long as what it names
    monkeypatch.setattr(Fused, "__call__", watched)
    return found


class Replayed:
    """Stands in for `Piece`: called as it is, then recorded, then replayed."""

    recorded: list[Replayed]  # in the order of recording
    recording = False

    def __init__(self, function: Callable[[], None], pool: Any) -> None:
        self.function, self.called = function, False
        self.calls: list[tuple[Any, Any, Any, Any]] | None = None

    def __call__(self) -> None:
        if not self.called:
            self.function()
            self.called = True
        elif self.calls is None:
            Replayed.recording = True
            try:
                with Recorder() as recorder:
                    self.function()
            finally:
                Replayed.recording = False
            self.calls = recorder.calls
            self.own = [made for call in self.calls for made in _fresh(call)]
            self.recorded.append(self)
        else:
            self._replay()

    @torch.no_grad()
    def _replay(self) -> None:
        later = self.recorded[self.recorded.index(self) + 1 :]
        for tensor in (t for other in later for t in other.own):
            tensor.detach().fill_(torch.nan if tensor.is_floating_point() else _garbage(tensor))
        for call in self.calls or ():
            func, args, kwargs, made = call
            again = func(*args, **kwargs)
            fresh = {id(t) for t in _fresh(call)}
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if id(old) in fresh:  # torch may have squeezed it since
                    old.detach().view_as(new).copy_(new)


def _fresh(call: tuple[Any, Any, Any, Any]) -> list[Tensor]:
    """Find what an operation made in memory of its own: neither a view nor in place."""
    _, args, kwargs, made = call
    read = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
    return [t for t in tree_leaves(made) if isinstance(t, Tensor) and _memory(t) not in read]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _garbage(tensor: Tensor) -> int:
    return DESTROYED if tensor.dtype == torch.int64 else 1
