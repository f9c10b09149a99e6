"""One row of state per client, wherever the bytes fit: on the device, in host memory, in a file.

Letters: C clients of a call.  A row is the bytes of a client's state tree, leaf after leaf, so that
every dtype comes back bit by bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from undrift.core.tree import Tree
from undrift.errors import ChangedExperiment, ConfigError, DataError
from undrift.state.ahead import Ahead
from undrift.state.packing import Leaf, Packing
from undrift.state.rows import Entry, FileTier, MemoryTier, Table, Tier

Place = Literal["device", "host", "file"]


Visible = dict[int, Entry]  # client -> where its row is


class Reserved(NamedTuple):
    """Addresses of rows: those that clients have, and spare ones."""

    old: list[int]
    new: list[int]
    entries: list[Entry]  # the spare ones
    table: Tensor  # in which they lie: kept, so that addresses are good as long as this is


class ClientStateStore:
    """The states of all clients; one that was never written reads as `template` and costs nothing.

    New rows are staged and become visible together at `commit`, so a failed round changes nothing.
    `dtype` is what plain Python floats of the template become; tensors keep their own.  `tier`
    makes a keeper of rows that is neither of the three places, from the template as a row.

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
        tier: Callable[[Tensor], Tier] | None = None,
        reads_ahead: bool | None = None,
    ) -> None:
        self._packing = Packing(template, dtype)
        self._device = torch.device(device)
        self._visible: dict[int, Entry] = {}
        self._staged: dict[int, Entry] = {}
        self._next: Visible | None = None  # what `merged` gave last
        own = None if tier is None else tier(self._packing.fresh)
        self._tier = self._make_tier(place, path, num_slots) if own is None else own
        # it pays where a device trains and the host, who has the rows, would wait
        away = own is None and place != "device" and self._device.type == "cuda"
        self.reads_ahead = away if reads_ahead is None else reads_ahead
        self._ahead = Ahead()

    def _make_tier(self, place: Place, path: Path | None, num_slots: int) -> Tier:
        fresh = self._packing.fresh
        if place in ("device", "host") and path is not None:
            raise ConfigError(f"state_path = {str(path)!r}: state = {place!r} keeps no file")
        if place == "device":
            return MemoryTier(fresh, self._device, pinned=False)
        if place == "host":
            return MemoryTier(fresh, torch.device("cpu"), pinned=torch.cuda.is_available())
        if place != "file":
            raise ConfigError(f"state = {place!r} is not one of 'device', 'host', 'file'")
        if path is None:
            raise ConfigError("state = 'file' needs state_path, the file that holds the rows")
        return FileTier(fresh, Path(path), num_slots)

    def gather(self, ids: Tensor | Sequence[int], out: Tree | None = None) -> Tree:
        """Read states, with a leading axis C, on the store's device; into `out`, if it is given."""
        clients = _as_ids(ids)
        states = self._packing.empty(len(clients), self._device) if out is None else out
        if not self._packing.num_words:
            return states
        entries = [self._visible.get(i) for i in clients]
        given = self._packing.checked(states, len(clients))
        table, flat = self._beside(given, len(clients))
        if table is not None:
            table.read_parts(entries, lambda rows: self._packing.pairs(rows, flat))
        else:
            self._packing.unpack_into(self._ahead.read(self._tier, clients, entries), given)
        return states

    def prefetch(self, ids: Tensor | Sequence[int]) -> None:
        """Begin to read the states that will be gathered next, if `reads_ahead`."""
        if self.reads_ahead:
            clients = list(dict.fromkeys(_as_ids(ids)))
            self._ahead.begin(self._tier, clients, [self._visible.get(i) for i in clients])

    def stage(self, ids: Tensor | Sequence[int], states: Tree) -> None:
        """Hold new rows, not yet visible; chunks of one round come one after the other.

        They are copied once, to where they will be read: `states` may change afterwards.
        """
        clients = _as_ids(ids)
        self._refuse_twice(clients)
        given = self._packing.checked(states, len(clients))
        if not self._packing.num_words:
            return  # there is nothing to keep
        table, flat = self._beside(given, len(clients))
        if table is not None:
            entries = table.write_parts(
                len(clients), lambda rows: self._packing.written(rows, flat)
            )
        else:
            rows = self._packing.pack(given, len(clients))
            entries = self._tier.write(clients, rows, self._visible)
        self._staged.update(zip(clients, entries, strict=True))

    def _refuse_twice(self, clients: Sequence[int]) -> None:
        twice = sorted(i for i, n in Counter(clients).items() if n > 1 or i in self._staged)
        if twice:
            raise DataError(f"clients {twice[:8]} are staged twice in one round: commit in between")

    def stage_written(self, ids: Sequence[int], entries: Sequence[Entry]) -> None:
        """Hold new rows that the tier has written already."""
        self._staged.update(zip(ids, entries, strict=True))

    def reserve(self, ids: Sequence[int]) -> Reserved | None:
        """Tell where states lie in memory, and where as many new ones may be written.

        None where rows do not lie in a table on the store's device.  What is written there is
        nothing until `stage_reserved`; it holds until the store is written or restored.
        """
        tier = self._tier
        if not isinstance(tier, MemoryTier) or tier.device.type != self._device.type:
            return None
        entries = tier.spare(len(ids))  # first: the table may move
        old = [tier.address(self._visible.get(i)) for i in ids]
        return Reserved(old, [tier.address(e) for e in entries], entries, tier.table)

    def stage_reserved(self, ids: Sequence[int], reserved: Reserved) -> None:
        """Hold the first of the rows that were reserved, as `stage` does."""
        self._refuse_twice(ids)
        entries = reserved.entries[: len(ids)]
        assert isinstance(self._tier, MemoryTier), "asked for before"
        self._tier.taken(entries)
        self.stage_written(ids, entries)

    def _beside(
        self, given: list[Tensor], count: int
    ) -> tuple[MemoryTier, list[Tensor]] | tuple[None, list[Tensor]]:
        """Give the table that lies where these leaves do, and the leaves as [C, n]; else None."""
        tier = self._tier
        if isinstance(tier, MemoryTier) and all(v.device.type == tier.device.type for v in given):
            flat = self._packing.flat(given, count)
            if flat is not None:
                return tier, flat
        return None, []

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
    def tier(self) -> Tier:
        """The keeper of the rows."""
        return self._tier

    @property
    def places(self) -> list[Leaf]:
        """Tell where each leaf of a state lies in its row."""
        return self._packing.places

    @property
    def template(self) -> Tree:
        """The state of a client that was never seen."""
        return self._packing.template

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
        self._ahead.forget()
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
        self._ahead.close()
        self._tier.close()


def _as_ids(ids: Tensor | Sequence[int]) -> list[int]:
    values = ids.tolist() if isinstance(ids, Tensor) else ids  # sync: for ids on a device
    try:
        clients = [index(i) for i in values]
    except TypeError as error:
        raise DataError(f"client ids must be a list of integers, got {ids!r}") from error
    if clients and (min(clients) < 0 or max(clients) >= 2**63):
        raise DataError(f"client ids must lie in [0, 2^63), got {min(clients)} .. {max(clients)}")
    return clients
