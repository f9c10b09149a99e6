"""Rows of client states with the owners of shards: one file per shard.

The files outlive the process that writes them: whoever takes over a shard finds its rows.  Which
version of a row counts is not written there; whoever asks says it, so asking twice changes nothing.

Letters: C clients of a call, W words of 8 bytes in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undrift.engines.sums import SHARDS
from undrift.errors import CheckpointError
from undrift.state.rows import Entry, FileTier, Table

SLOTS = 2  # of a client whose rows a checkpoint copies: the one that counts, and the next
KEPT_SLOTS = 16  # of a client whose rows checkpoints refer to


class ShardFile(FileTier):
    """The rows of one shard."""

    def _offset(self, client: int, slot: int) -> int:
        return super()._offset(client // SHARDS, slot)


class ShardFiles:
    """The rows of some shards, on the machine of their owner; a tier.  Files appear when needed."""

    def __init__(self, fresh: Tensor, folder: Path, num_slots: int) -> None:
        self.fresh, self.folder, self._num_slots = fresh, folder, num_slots
        self._files: dict[int, ShardFile] = {}
        self._owner: Path | None = None
        self._kept: list[dict[str, Tensor]] = []

    @property
    def meta(self) -> dict[str, Any]:
        """What must be the same when a snapshot is restored."""
        return {"kind": "shards", "num_slots": self._num_slots}

    @property
    def num_bytes(self) -> int:
        """Bytes taken now."""
        return sum(file.num_bytes for file in self._files.values())

    def _file(self, shard: int) -> ShardFile:
        if shard not in self._files:
            path = self.folder / f"shard-{shard:02d}"
            made = ShardFile(self.fresh, path, self._num_slots)
            if self._owner is not None:
                made.claim(self._owner)
            made.retain([_of_shard(table, shard) for table in self._kept])
            self._files[shard] = made
        return self._files[shard]

    def read(self, ids: list[int], entries: list[Entry | None]) -> Tensor:
        """[C, W] rows, a fresh copy."""
        rows = torch.empty(len(ids), len(self.fresh), dtype=torch.int64)
        known = [entry is not None for entry in entries]
        rows[[not k for k in known]] = self.fresh
        for shard, places in _by_shard(ids, known).items():
            found = self._file(shard).read([ids[c] for c in places], [entries[c] for c in places])
            rows[places] = found
        return rows

    def write(self, ids: list[int], rows: Tensor, visible: Mapping[int, Entry]) -> list[Entry]:
        """Put new versions beside the visible ones."""
        entries = [Entry(0)] * len(ids)
        for shard, places in _by_shard(ids).items():
            mine = [ids[c] for c in places]
            made = self._file(shard).write(mine, rows[places].contiguous(), visible)
            for c, entry in zip(places, made, strict=True):
                entries[c] = entry
        return entries

    def release(self, entries: list[Entry]) -> None:
        """Do nothing: a slot is spare when nobody refers to it."""

    def export(self, ids: list[int], entries: list[Entry]) -> dict[str, Tensor]:
        """Tell in which slots rows are."""
        return written(entries)

    def restore(self, ids: list[int], tensors: Table) -> list[Entry]:
        """Check that rows are what a checkpoint refers to."""
        table = {n: tensors[n] for n in ("ids", "slots", "fingerprints")}
        table["template"] = self.fresh
        for shard in _by_shard(ids):
            self._file(shard).restore(*_with_ids(_of_shard(table, shard)))
        return entries_of(tensors["slots"], tensors["fingerprints"])

    def seal(self) -> None:
        """Bring all rows to the disk."""
        for file in self._files.values():
            file.seal()

    def retain(self, tables: Iterable[Table]) -> None:
        """Keep the rows that these snapshots refer to."""
        self._kept = [{n: table[n] for n in ("ids", "slots")} for table in tables]
        for shard, file in self._files.items():
            file.retain([_of_shard(table, shard) for table in self._kept])

    def claim(self, folder: Path) -> None:
        """Belong to one checkpoint folder."""
        self._owner = folder
        for file in self._files.values():
            file.claim(folder)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files = {}


Ask = Callable[[str, list[int], Mapping[str, Any]], list[tuple[Tensor, Any]]]


class FarRows:
    """The tier of whoever asks the owners: knows which versions count, and holds no row.

    `kept` says that checkpoints refer to the owners' files; else they copy the rows.
    """

    def __init__(self, fresh: Tensor, folder: Path | None) -> None:
        self.fresh, self.folder, self.kept = fresh, folder, folder is not None
        self.ask: Ask = _nobody

    @property
    def num_slots(self) -> int:
        """Versions of a row that there is room for."""
        return KEPT_SLOTS if self.kept else SLOTS

    @property
    def meta(self) -> dict[str, Any]:
        """What must be the same when a snapshot is restored."""
        return {"kind": "shards", "num_slots": KEPT_SLOTS} if self.kept else {"kind": "memory"}

    @property
    def num_bytes(self) -> int:
        """Bytes that the owners hold."""
        return sum(answer for _, answer in self.ask("num_bytes", [], {}))

    def read(self, ids: list[int], entries: list[Entry | None]) -> Tensor:
        """Fetch rows from their owners."""
        rows = self.fresh.repeat(len(ids), 1)
        known = [c for c, entry in enumerate(entries) if entry is not None]
        found = [entry for entry in entries if entry is not None]
        if known and len(self.fresh):
            asked = self.ask("read", [ids[c] for c in known], written(found))
            for places, answer in asked:
                rows[torch.tensor(known)[places]] = answer["rows"]
        return rows

    def write(self, ids: list[int], rows: Tensor, visible: Mapping[int, Entry]) -> list[Entry]:
        """Hand rows to their owners, who have none of these clients yet."""
        entries = [Entry(0)] * len(ids)
        for places, answer in self.ask("write", ids, {"rows": rows}) if ids else []:
            made = entries_of(answer["slots"], answer["fingerprints"])
            for c, entry in zip(places.tolist(), made, strict=True):
                entries[c] = entry
        return entries

    def release(self, entries: list[Entry]) -> None:
        """Do nothing: owners are told which versions count."""

    def export(self, ids: list[int], entries: list[Entry]) -> dict[str, Tensor]:
        """Collect what a checkpoint must hold."""
        return written(entries) if self.kept else {"rows": self.read(ids, [*entries])}

    def restore(self, ids: list[int], tensors: Table) -> list[Entry]:
        """Hand rows back to their owners, or let them check that they have them."""
        self.fresh = tensors["template"]
        self.ask("template", [], {"template": self.fresh})
        if not self.kept:
            return self.write(ids, tensors["rows"], {})
        if ids:
            self.ask("restore", ids, {n: tensors[n] for n in ("slots", "fingerprints")})
        self.retain([tensors])
        return entries_of(tensors["slots"], tensors["fingerprints"])

    def seal(self) -> None:
        """Bring the owners' rows to the disk."""
        if self.kept:
            self.ask("seal", [], {})

    def retain(self, tables: Iterable[Table]) -> None:
        """Keep the rows that these snapshots refer to."""
        if self.kept:
            light = [{n: table[n] for n in ("ids", "slots")} for table in tables]
            self.ask("retain", [], {"tables": light})

    def claim(self, folder: Path) -> None:
        """Bind the owners' files to one checkpoint folder."""
        if self.kept:
            self.ask("claim", [], {"folder": str(folder.resolve())})

    def close(self) -> None:
        """Do nothing: owners close their own files."""


def _nobody(what: str, ids: list[int], values: Mapping[str, Any]) -> list[tuple[Tensor, Any]]:
    raise CheckpointError(f"nobody owns the rows yet ({what}): make the engine first")


def written(entries: Sequence[Entry]) -> dict[str, Tensor]:
    """Write entries as tensors."""
    slots = torch.tensor([e.place for e in entries], dtype=torch.int64)
    marks = torch.tensor([e.fingerprint for e in entries], dtype=torch.int64)
    return {"slots": slots, "fingerprints": marks}


def entries_of(slots: Tensor, marks: Tensor) -> list[Entry]:
    """Undo `written`."""
    return [Entry(s, m) for s, m in zip(slots.tolist(), marks.tolist(), strict=True)]


def _by_shard(ids: Sequence[int], wanted: Sequence[bool] | None = None) -> dict[int, list[int]]:
    """Group places in a list of clients by shard."""
    found: dict[int, list[int]] = {}
    for c, client in enumerate(ids):
        if wanted is None or wanted[c]:
            found.setdefault(client % SHARDS, []).append(c)
    return found


def _of_shard(table: Table, shard: int) -> dict[str, Tensor]:
    mine = (table["ids"] % SHARDS == shard).nonzero().flatten()
    return {n: v if n == "template" else v[mine] for n, v in table.items()}


def _with_ids(table: dict[str, Tensor]) -> tuple[list[int], dict[str, Tensor]]:
    return table["ids"].tolist(), table
