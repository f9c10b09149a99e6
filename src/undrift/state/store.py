"""One row of state per client, wherever the bytes fit: on the device, in host memory, in a file.

Letters: C clients of a call, W words of 8 bytes in a row.  A row is the bytes of a client's state
tree, leaf after leaf, so that every dtype comes back bit by bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from undrift.core.tree import Tree, leaves, named_leaves, size_in_floats, structure, tree_map
from undrift.errors import ChangedExperiment, ConfigError, DataError
from undrift.state.rows import Entry, FileTier, MemoryTier, Table, Tier

Place = Literal["device", "host", "file"]


Visible = dict[int, Entry]  # client -> where its row is


class ClientStateStore:
    """The states of all clients; one that was never written reads as `template` and costs nothing.

    New rows are staged and become visible together at `commit`, so a failed round changes nothing.
    `dtype` is what plain Python floats of the template become; tensors keep their own.

    >>> store = ClientStateStore({"c": torch.zeros(2)}, dtype=torch.float32)
    >>> store.stage([7], {"c": torch.ones(1, 2)})
    >>> store.commit()
    >>> store.gather([7, 8])["c"].tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(
        self,
        template: Tree,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        place: Place = "device",
        path: Path | None = None,
        num_slots: int = 16,
    ) -> None:
        self._packing = _Packing(template, dtype)
        self._device = torch.device(device)
        self._visible: dict[int, Entry] = {}
        self._staged: dict[int, Entry] = {}
        self._next: Visible | None = None  # what `merged` gave last
        self._tier = self._make_tier(place, path, num_slots)

    def _make_tier(self, place: Place, path: Path | None, num_slots: int) -> Tier:
        fresh = self._packing.fresh
        if place == "device":
            return MemoryTier(fresh, self._device, pinned=False)
        if place == "host":
            return MemoryTier(fresh, torch.device("cpu"), pinned=torch.cuda.is_available())
        if place != "file":
            raise ConfigError(f"place = {place!r} is not one of 'device', 'host', 'file'")
        if path is None:
            raise ConfigError("place = 'file' needs `path`, the file that holds the rows")
        return FileTier(fresh, Path(path), num_slots)

    def gather(self, ids: Tensor | Sequence[int]) -> Tree:
        """Read states, with a leading axis C, on the store's device."""
        clients = _as_ids(ids)
        rows = self._tier.read(clients, [self._visible.get(i) for i in clients])
        # Safe without waiting: the pinned source is not reused before the copy is done.
        return self._packing.unpack(rows.to(self._device, non_blocking=True))

    def stage(self, ids: Tensor | Sequence[int], states: Tree) -> None:
        """Hold new rows, not yet visible; chunks of one round come one after the other."""
        clients = _as_ids(ids)
        twice = sorted(i for i, n in Counter(clients).items() if n > 1 or i in self._staged)
        if twice:
            raise DataError(f"clients {twice[:8]} are staged twice in one round: commit in between")
        rows = self._packing.pack(states, len(clients))
        entries = self._tier.write(clients, rows, self._visible)
        self._staged.update(zip(clients, entries, strict=True))

    def commit(self) -> None:
        """Make all staged rows visible at once."""
        self.show(self.merged())

    def merged(self) -> Visible:
        """Give the table as it will be when the staged rows are visible."""
        self._next = {**self._visible, **self._staged}
        return self._next

    @property
    def visible(self) -> Visible:
        """Give the table of visible rows; it is never changed, only replaced."""
        return self._visible

    def show(self, table: Visible) -> None:
        """Make exactly these rows visible; what neither they nor checkpoints need is spare."""
        if table is self._visible and not self._staged:
            return
        # what `merged` gave differs by the staged rows alone; all others are not looked at again
        known = self._visible if table is not self._next else self._staged.keys() & self._visible
        held = [(client, self._visible[client]) for client in known] + [*self._staged.items()]
        self._visible, self._staged, self._next = table, {}, None
        self._tier.release([entry for client, entry in held if table.get(client) != entry])

    def rollback(self) -> None:
        """Forget all staged rows."""
        staged, self._staged = self._staged, {}
        self._tier.release(list(staged.values()))

    @property
    def seen(self) -> list[int]:
        """Clients that have a row of their own, sorted."""
        return sorted(self._visible)

    @property
    def row_floats(self) -> int:
        """Count the numbers in one client's state."""
        return self._packing.num_numbers

    @property
    def num_bytes(self) -> int:
        """Count the bytes that the rows take now, spare ones included."""
        return self._tier.num_bytes

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Describe all visible rows for a checkpoint; the file's rows stay in the file."""
        clients = self.seen
        entries = [self._visible[i] for i in clients]
        tensors = {
            "ids": torch.tensor(clients, dtype=torch.int64),
            "template": self._tier.fresh.clone(),
            **self._tier.export(clients, entries),
        }
        return tensors, {**self._tier.meta, "layout": self._packing.layout}

    def restore(self, tensors: Table, meta: Mapping[str, Any]) -> None:
        """Go back to a snapshot; staged rows are forgotten."""
        mine = {**self._tier.meta, "layout": self._packing.layout}
        changed = [k for k in mine if meta.get(k) != mine[k]]
        if changed:
            told = "; ".join(f"{k}: stored {meta.get(k)!r}, now {mine[k]!r}" for k in changed)
            raise ChangedExperiment(
                f"the stored client states do not fit: {told}. "
                "Resume with what the run was started with, or begin in a new folder."
            )
        clients = tensors["ids"].tolist()
        entries = self._tier.restore(clients, tensors)
        self._staged = {}
        self._visible = dict(zip(clients, entries, strict=True))

    def seal(self) -> None:
        """Bring the rows to the disk; call it before the checkpoint that refers to them."""
        self._tier.seal()

    def retain(self, tables: Iterable[Table]) -> None:
        """Protect the rows of exactly these snapshots, one per kept checkpoint, from reuse."""
        self._tier.retain(tables)

    def claim(self, folder: Path) -> None:
        """Bind a row file to the one folder whose checkpoints refer to it."""
        self._tier.claim(folder)

    def close(self) -> None:
        """Close the row file; the store is of no use afterwards."""
        self._tier.close()


class _Leaf(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in words
    num_words: int


class _Packing:
    """How a state tree becomes a row of words: every leaf starts at a multiple of 8 bytes."""

    def __init__(self, template: Tree, dtype: torch.dtype) -> None:
        self._template = tree_map(lambda v: None if v is None else _as_leaf(v, dtype), template)
        self._leaves: list[_Leaf] = []
        self.num_words = 0
        for name, leaf in named_leaves(self._template).items():
            if leaf.dtype.itemsize > 8:
                raise ConfigError(f"client state {name!r} is {leaf.dtype}: too wide for a row")
            size = -(-leaf.numel() * leaf.dtype.itemsize // 8)
            spec = _Leaf(name, leaf.dtype, tuple(leaf.shape), self.num_words, size)
            self._leaves.append(spec)
            self.num_words += size
        self.num_numbers = size_in_floats(self._template)
        self.fresh = self._fill([v[None] for v in leaves(self._template)], 1)[0].cpu()

    @property
    def layout(self) -> list[list[Any]]:
        return [[p.name, str(p.dtype), list(p.shape)] for p in self._leaves]

    def pack(self, states: Tree, count: int) -> Tensor:
        """[C, W] words of a tree with a leading axis C."""
        if structure(states) != structure(self._template):
            raise DataError(
                f"client states {structure(states)} do not have the structure of "
                f"their template {structure(self._template)}"
            )
        given = leaves(states)
        for part, leaf in zip(self._leaves, given, strict=True):
            if tuple(leaf.shape) != (count, *part.shape) or leaf.dtype != part.dtype:
                raise DataError(
                    f"client state {part.name!r} is {leaf.dtype} {tuple(leaf.shape)}, "
                    f"expected {part.dtype} {(count, *part.shape)}"
                )
        return self._fill(given, count)

    def _fill(self, given: list[Tensor], count: int) -> Tensor:
        device = given[0].device if given else torch.device("cpu")
        rows = torch.zeros(count, self.num_words, dtype=torch.int64, device=device)
        for part, leaf in zip(self._leaves, given, strict=True):
            self._part(rows, part).copy_(leaf.detach())
        return rows

    def unpack(self, rows: Tensor) -> Tree:
        # contiguous: the layout of what a rule gets must not depend on the other leaves
        parts = iter([self._part(rows, part).contiguous() for part in self._leaves])
        return tree_map(lambda v: None if v is None else next(parts), self._template)

    def _part(self, rows: Tensor, part: _Leaf) -> Tensor:
        words = rows[:, part.start : part.start + part.num_words]
        numbers = words.view(part.dtype)[:, : math.prod(part.shape)]
        return numbers.view(len(rows), *part.shape)


def _as_ids(ids: Tensor | Sequence[int]) -> list[int]:
    values = ids.tolist() if isinstance(ids, Tensor) else ids  # sync: for ids on a device
    try:
        clients = [index(i) for i in values]
    except TypeError as error:
        raise DataError(f"client ids must be a list of integers, got {ids!r}") from error
    if clients and (min(clients) < 0 or max(clients) >= 2**63):
        raise DataError(f"client ids must lie in [0, 2^63), got {min(clients)} .. {max(clients)}")
    return clients


def _as_leaf(value: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.as_tensor(value, dtype=dtype if isinstance(value, float) else None)
