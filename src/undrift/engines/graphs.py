"""CUDA graphs: a function over buffers that stay where they are, recorded once and replayed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from undrift.core.tree import Tree, leaves, tree_map
from undrift.errors import UndriftError

T = TypeVar("T")

log = logging.getLogger("undrift")

# One launch for a list of tensors has one program for 65,536 numbers: with a few large ones alone
# it leaves most of a device idle (11 us for 1.6 million numbers, 4 by a copy of their own).
LARGE, FEW = 2**17, 4
_HOLDERS: list[torch.cuda.CUDAGraph] = []


class Piece:
    """A part of a round.  Called as it is the first time, recorded the second, then replayed.

    The function reads and writes fixed buffers and takes no decision on the host.  Where it cannot
    be recorded, it is called every time: the same operations, with more launches.
    """

    def __init__(self, function: Callable[[], None], pool: Any) -> None:
        self.function, self.pool = function, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._called = False

    def __call__(self) -> None:
        if self._graph is None and self._called and self.pool is not None:
            self._record()
        if self._graph is None:
            self.function()  # the first time kernels are built and tuned, which cannot be recorded
            self._called = True
        else:
            self._graph.replay()

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": another thread may pin memory meanwhile, as one that reads states does
        mode = "thread_local"
        try:
            with (
                nothing_collected(),
                torch.cuda.graph(graph, pool=self.pool, capture_error_mode=mode),
            ):
                self.function()
        except UndriftError:
            raise
        except Exception as error:
            log.warning("a part of the round cannot be recorded, it runs unrecorded: %s", error)
            self.pool = None
        else:
            self._graph = graph


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Keep Python's collector away: a graph that it destroys spoils one that is being recorded."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


class Buffers:
    """Trees of tensors by name; a name keeps its memory when it is written again."""

    def __init__(self) -> None:
        self._trees: dict[str, Tree] = {}
        self._noted: dict[str, Tree] = {}

    def __getitem__(self, name: str) -> Any:
        return self._trees[name]

    @contextmanager
    def held_by(self, piece: dict[str, Tree]) -> Iterator[None]:
        """Note what a piece of a round holds; where it was noted before, it is held again.

        A piece that is replayed writes where it was recorded, whatever others have held since.
        """
        self._trees.update(piece)
        self._noted = piece
        try:
            yield
        finally:
            self._noted = {}

    def __contains__(self, name: str) -> bool:
        return name in self._trees

    def hold(self, name: str, tree: Tree) -> None:
        """Take a tree as it is, in memory that somebody else keeps."""
        self._trees[name] = self._noted[name] = tree

    def put(self, name: str, tree: Tree) -> Any:
        """Write a tree; of the first one the shapes are taken."""
        if name not in self._trees:
            self._trees[name] = tree_map(own, tree)
        else:
            copy_into(self._trees[name], tree)
        return self._trees[name]


def own(value: Any) -> Tensor:
    """Copy into memory of its own: vmap gives views of what clients share."""
    made: Tensor = torch.as_tensor(value).detach().clone(memory_format=torch.contiguous_format)
    return made


def copy_into(old: Tree, new: Tree) -> None:
    """Copy leaf by leaf, in as few launches as there are types."""
    copy_all(leaves(old), leaves(new))


def write_over(old: Tree, new: Tree) -> None:
    """Write leaf by leaf, one operation each: a compiler puts them where the values are made."""
    for a, b in zip(leaves(old), leaves(new), strict=True):
        a.copy_(b)


def apart(old: Tree, new: T) -> T:
    """Copy those leaves of `new` that show memory of `old`, which is about to be written."""
    places = {v.untyped_storage().data_ptr() for v in leaves(old) if v.numel()}

    def one(value: Tensor) -> Tensor:
        shows = value.numel() and value.untyped_storage().data_ptr() in places
        return value.clone() if shows else value

    found: T = tree_map(one, new)
    return found


def spread_into(old: Tree, new: Tree) -> None:
    """Copy trees with axes [E, C, ...]; what all clients share is copied row by row.

    One launch has many rows, and reads what they share from the cache.
    """
    olds: list[Tensor] = []
    news: list[Tensor] = []
    for a, b in zip(leaves(old), leaves(new), strict=True):
        shared = b.dim() > 2 and b.shape[1] > 1 and b.stride(1) == 0
        olds += [row for part in a.unbind() for row in part.unbind()] if shared else [a]
        news += [row for part in b.unbind() for row in part.unbind()] if shared else [b]
    copy_all(olds, news)


def copy_all(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Copy tensor by tensor, in as few launches as there are types."""
    by_type: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in zip(old, new, strict=True):
        # a launch is for one pair of types, and for tensors that lie in memory alike
        alike = (a.dtype, b.dtype, b.device, a.stride() == b.stride())
        olds, news = by_type.setdefault(alike, ([], []))
        olds.append(a)
        news.append(b)
    for olds, news in by_type.values():
        large = [i for i, v in enumerate(olds) if v.numel() >= LARGE]
        if len(large) <= FEW:
            for i in reversed(large):
                olds.pop(i).copy_(news.pop(i), non_blocking=True)
        if olds:
            torch._foreach_copy_(olds, news, non_blocking=True)


def copied(tree: T) -> T:
    """Copy a tree, in as few launches as there are types."""
    made: T = tree_map(torch.empty_like, tree)
    copy_into(made, tree)
    return made


def graph_pool(device: torch.device) -> Any:
    """Give the memory that the pieces of a round share; None where there are no graphs."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def lasting_pool(device: torch.device) -> Any:
    """Give memory for graphs that come and go; None where there are none.

    A pool is gone with the last of its graphs, and nothing can be recorded into it again: an empty
    one holds it.
    """
    pool = graph_pool(device)
    if pool is not None:
        holder = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(holder, pool=pool, capture_error_mode="thread_local")
        with torch.cuda.device(device), nothing_collected(), recording:
            torch.zeros(1, device=device)
        _HOLDERS.append(holder)
    return pool


def aligned(w: Tensor) -> Tensor:
    """Copy models so that each begins at a multiple of 64 bytes: kernels then load 16 at a time."""
    return room_for(w).copy_(w)


def room_for(w: Tensor) -> Tensor:
    """Make room for as many models, aligned like that."""
    *lead, size = w.shape
    return w.new_empty((*lead, -(-size // 16) * 16))[..., :size]


def shelf_for(values: Tensor) -> Tensor:
    """Make room for values [K, ...] so that each of the K begins at a multiple of 64 bytes."""
    rows = values.flatten(1)
    each = 64 // values.element_size()
    made = rows.new_empty((len(rows), -(-rows.shape[1] // each) * each))
    return made[:, : rows.shape[1]].unflatten(1, values.shape[1:])
