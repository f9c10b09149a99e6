"""Where the rows of client states are kept: a table in memory, or a sparse file.

Letters: C clients of a call, W words of 8 bytes in a row.  A new version of a row never overwrites
the visible one, so taking it back is only forgetting where it is.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.core.transfer import send
from undrift.errors import CheckpointError, ConfigError, CorruptCheckpoint
from undrift.state import disk

Table = Mapping[str, Tensor]  # what `ClientStateStore.snapshot` puts into a checkpoint
Pairs = list[tuple[Tensor, Tensor]]  # columns of a table of rows, and what they are read into


class Entry(NamedTuple):
    """Where one version of a client's row is: a row of the table, or a slot of the file."""

    place: int
    fingerprint: int = 0


NOWHERE = Entry(-1)  # of a client without a row, where one has to be told


class Tier(Protocol):
    """A keeper of rows.  An entry says which version of a row; `None` is the template."""

    fresh: Tensor  # [W] the template, on the CPU

    @property
    def meta(self) -> dict[str, Any]:
        """What must be the same when a snapshot is restored."""

    @property
    def num_bytes(self) -> int:
        """Bytes taken now."""

    def read(self, ids: list[int], entries: list[Entry | None]) -> Tensor:
        """[C, W] rows, a fresh copy."""

    def write(self, ids: list[int], rows: Tensor, visible: Mapping[int, Entry]) -> list[Entry]:
        """Put new versions beside the visible ones."""

    def release(self, entries: list[Entry]) -> None:
        """Take back entries that nobody will read again."""

    def export(self, ids: list[int], entries: list[Entry]) -> dict[str, Tensor]:
        """What a checkpoint must hold to restore these rows."""

    def restore(self, ids: list[int], tensors: Table) -> list[Entry]:
        """Undo `export`."""

    def seal(self) -> None:
        """Make what was written durable."""

    def retain(self, tables: Iterable[Table]) -> None:
        """Keep the rows that these snapshots refer to."""

    def claim(self, folder: Path) -> None:
        """Belong to one checkpoint folder; refuse if the rows belong to another."""

    def close(self) -> None:
        """Give back what the operating system lent."""


LONG = 64  # words of a row
HEADER = 4096  # bytes at the start of a row file: the checkpoint folder that it belongs to


class MemoryTier:
    """A growing table of rows.  Row 0 is the template; a new version goes to a spare row."""

    meta: dict[str, Any] = {"kind": "memory"}  # noqa: RUF012  (one constant, never changed)

    def __init__(self, fresh: Tensor, device: torch.device, pinned: bool) -> None:
        self.device, self._pinned = device, pinned
        self.fresh = fresh
        self._table = self._rows(8)
        self._table[0].copy_(fresh)
        self._spare = list(range(7, 0, -1))

    @property
    def num_bytes(self) -> int:
        return self._table.untyped_storage().nbytes()

    def _rows(self, count: int) -> Tensor:
        """Make a table of so many rows; on a device long ones begin at a multiple of 64 bytes."""
        size = len(self.fresh)
        each = -(-size // 8) * 8 if size >= LONG and self.device.type == "cuda" else size
        shape = (count, each)
        made = torch.empty(shape, dtype=torch.int64, device=self.device, pin_memory=self._pinned)
        return made[:, :size]

    def _empty(self, num_rows: int) -> Tensor:
        shape = (num_rows, len(self.fresh))
        return torch.empty(shape, dtype=torch.int64, device=self.device, pin_memory=self._pinned)

    def read(self, ids: list[int], entries: list[Entry | None]) -> Tensor:
        rows = self._empty(len(ids))
        self.read_parts(entries, lambda table: [(table, rows)])
        return rows

    def read_parts(self, entries: list[Entry | None], pairs: Callable[[Tensor], Pairs]) -> None:
        """Read columns of the table straight to where they are wanted."""
        if found := pairs(self._table):
            where = self._index([e.place if e else 0 for e in entries])
            for columns, wanted in found:
                torch.index_select(columns, 0, where, out=wanted)

    def write(self, ids: list[int], rows: Tensor, visible: Mapping[int, Entry]) -> list[Entry]:
        if rows.device.type != self.device.type:
            # Through pinned memory where there is some: a pageable copy is several times slower.
            rows = self._empty(len(ids)).copy_(rows)
        return self.write_parts(len(ids), lambda table: [(table, rows)])

    def write_parts(self, count: int, pairs: Callable[[Tensor], Pairs]) -> list[Entry]:
        """Write columns of spare rows straight from where they are."""
        self._grow(count)
        first = len(self._spare) - count
        places = self._spare[first:]
        if found := pairs(self._table):  # a state may be empty
            where = self._index(places)
            for columns, given in found:
                columns.index_copy_(0, where, given)
        del self._spare[first:]  # only now: what fails leaves them spare
        return [Entry(p) for p in places]

    def spare(self, count: int) -> list[Entry]:
        """Tell which rows would be written next; they stay spare until they are `taken`."""
        self._grow(count)
        return [Entry(p) for p in self._spare[len(self._spare) - count :]]

    def taken(self, entries: Sequence[Entry]) -> None:
        """Keep rows that were spare, and that somebody else has written."""
        places = [e.place for e in entries]
        if places:
            first = len(self._spare) - 1 - self._spare[::-1].index(places[0])
            if self._spare[first : first + len(places)] != places:
                raise RuntimeError("rows were reserved, and then written in another way")
            del self._spare[first : first + len(places)]

    @property
    def table(self) -> Tensor:
        """The table as it is now; when it grows, another takes its place."""
        return self._table

    @property
    def aligned(self) -> bool:
        """Whether all rows begin at a multiple of 16 bytes."""
        return self._table.stride(0) % 2 == 0 and self._table.data_ptr() % 16 == 0

    def address(self, entry: Entry | None) -> int:
        """Tell where a row lies in memory, until the table grows."""
        place = entry.place if entry else 0
        return self._table.data_ptr() + place * self._table.stride(0) * 8

    def _grow(self, num_wanted: int) -> None:
        size = len(self._table)
        missing = num_wanted - len(self._spare)
        if missing <= 0:
            return
        grown = max(2 * size, size + missing)
        table = self._rows(grown)
        table[:size].copy_(self._table)
        self._table = table
        self._spare = [*range(grown - 1, size - 1, -1), *self._spare]

    def release(self, entries: list[Entry]) -> None:
        self._spare += [e.place for e in entries]

    def export(self, ids: list[int], entries: list[Entry]) -> dict[str, Tensor]:
        where = self._index([e.place for e in entries])
        return {"rows": self._table.index_select(0, where).cpu()}

    def restore(self, ids: list[int], tensors: Table) -> list[Entry]:
        other = MemoryTier(tensors["template"], self.device, self._pinned)
        entries = other.write(ids, tensors["rows"], {})
        self.fresh, self._table, self._spare = other.fresh, other._table, other._spare
        return entries

    def _index(self, places: list[int]) -> Tensor:
        return send(torch.tensor(places, dtype=torch.int64), self.device)

    def seal(self) -> None:
        return  # a snapshot carries the rows themselves

    def retain(self, tables: Iterable[Table]) -> None:
        return

    def claim(self, folder: Path) -> None:
        return

    def close(self) -> None:
        return


class FileTier:
    """A sparse file with `num_slots` versions of every client's row.

    pread and pwrite, not mmap: a full disk is then an error to report and not a SIGBUS.  A slot is
    written only when neither the visible table nor a kept checkpoint refers to it, so whatever the
    moment of a crash, the rows of every kept checkpoint are still there.
    """

    def __init__(self, fresh: Tensor, path: Path, num_slots: int) -> None:
        if num_slots < 2:
            raise ConfigError(f"num_slots = {num_slots!r}: a row needs at least 2 slots")
        self.fresh, self._path, self._num_slots = fresh, path, num_slots
        self._weights = _weights(len(fresh))
        self._kept: dict[int, int] = {}  # client -> bit mask of slots that checkpoints refer to
        self._torn = False
        self._fd = disk.open_rows(path)
        self._named = False  # whether the file's name is known to be on the disk
        self.close = weakref.finalize(self, os.close, self._fd)
        self._owner = self._read_owner()  # None until the first checkpoint
        self._claimed = False

    @property
    def meta(self) -> dict[str, Any]:
        return {"kind": "file", "num_slots": self._num_slots}

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._fd).st_blocks * 512  # holes are not counted

    def _offset(self, client: int, slot: int) -> int:
        return HEADER + (client * self._num_slots + slot) * 8 * len(self.fresh)

    def _read_owner(self) -> str | None:
        header = os.pread(self._fd, HEADER, 0)
        if not header.rstrip(b"\0"):
            return None
        name, _, mark = header.rstrip(b"\0").rpartition(b"\n")
        if mark != _mark(name):
            raise CorruptCheckpoint(
                f"{self._path}: its header is damaged, or it is no file of client states. "
                "Restore the file from a copy, or choose another one for a new run."
            )
        return name.decode()

    def claim(self, folder: Path) -> None:
        # relative, so that a run that is moved with its rows stays whole
        name = os.path.relpath(folder, self._path.parent)
        if self._owner not in (None, name):
            raise CheckpointError(
                f"{self._path} holds the client states of the checkpoints in {self._owner!r} "
                f"(seen from there), not of {name!r}. Use that folder, or another file."
            )
        self._owner_wanted, self._claimed = name, True

    def _check_claimed(self) -> None:
        if self._owner is not None and not self._claimed:
            raise CheckpointError(
                f"{self._path} holds the client states of the checkpoints in {self._owner!r} "
                "(seen from there). Load that run first, or choose another file for a new one."
            )

    def read(self, ids: list[int], entries: list[Entry | None]) -> Tensor:
        shape = (len(ids), len(self.fresh))
        rows = torch.empty(shape, dtype=torch.int64, pin_memory=torch.cuda.is_available())
        words: NDArray[np.int64] = rows.numpy()
        for row, client, entry in zip(words, ids, entries, strict=True):
            if entry is None:
                row[:] = self.fresh.numpy()
            else:
                self._read_row(row, client, entry)
        return rows

    def _read_row(self, row: NDArray[np.int64], client: int, entry: Entry) -> None:
        whole = self._fill(row, self._offset(client, entry.place))
        # Every read is checked: hashing costs about what reading does (6 GB/s measured).
        if not whole or int(row @ self._weights) != entry.fingerprint:
            raise CorruptCheckpoint(
                f"{self._path}: the state of client {client} (slot {entry.place}) is "
                f"{'not what was written' if whole else 'missing'}. Restore the file from a copy, "
                "or resume from an earlier checkpoint. A trainer beside this one needs a "
                "state_path of its own."
            )

    def _fill(self, row: NDArray[np.int64], offset: int) -> bool:
        rest = row.view(np.uint8).data
        try:
            while len(rest):
                count = os.preadv(self._fd, [rest], offset)
                if count == 0:
                    return False
                rest, offset = rest[count:], offset + count
        except OSError as error:
            raise disk.failure("read", self._path, error, "Nothing was changed") from error
        return True

    def write(self, ids: list[int], rows: Tensor, visible: Mapping[int, Entry]) -> list[Entry]:
        self._check_claimed()
        words: NDArray[np.int64] = rows.cpu().numpy()
        marks = (words @ self._weights).tolist()
        slots = [self._spare_slot(i, visible.get(i)) for i in ids]
        try:
            for client, slot, row in zip(ids, slots, words, strict=True):
                disk.pwrite_all(self._fd, row.data, self._offset(client, slot))
        except OverflowError as error:
            raise CheckpointError(
                f"cannot write {self._path}: client ids up to {max(ids)} need offsets beyond what "
                "a file can have. Number the clients from 0, or keep the rows in memory."
            ) from error
        except OSError as error:
            intact = "Every visible row is untouched"
            raise disk.failure("write", self._path, error, intact) from error
        return [Entry(s, m) for s, m in zip(slots, marks, strict=True)]

    def _spare_slot(self, client: int, visible: Entry | None) -> int:
        busy = self._kept.get(client, 0) | (1 << visible.place if visible else 0)
        for slot in range(self._num_slots):
            if not busy >> slot & 1:
                return slot
        raise CheckpointError(
            f"{self._path}: all {self._num_slots} slots of client {client} are in use. Call "
            "`retain` with the kept checkpoints after each save, or raise `num_slots` "
            "(kept checkpoints + 2)."
        )

    def release(self, entries: list[Entry]) -> None:
        return  # a slot is spare when nothing refers to it

    def export(self, ids: list[int], entries: list[Entry]) -> dict[str, Tensor]:
        slots = torch.tensor([e.place for e in entries], dtype=torch.int64)
        marks = torch.tensor([e.fingerprint for e in entries], dtype=torch.int64)
        return {"slots": slots, "fingerprints": marks}

    def restore(self, ids: list[int], tensors: Table) -> list[Entry]:
        slots, marks = tensors["slots"].tolist(), tensors["fingerprints"].tolist()
        ends = [self._offset(i, s) + 8 * len(self.fresh) for i, s in zip(ids, slots, strict=True)]
        size = os.fstat(self._fd).st_size
        if len(self.fresh) and max(ends, default=0) > size:
            raise CorruptCheckpoint(
                f"{self._path}: the checkpoint refers to {max(ends)} bytes of client states, the "
                f"file has {size}. Put the file of this run back beside its checkpoints."
            )
        entries = [Entry(s, m) for s, m in zip(slots, marks, strict=True)]
        row: NDArray[np.int64] = np.empty(len(self.fresh), dtype=np.int64)
        for client, entry in zip(ids, entries, strict=True):
            self._read_row(row, client, entry)  # damage shows now, not rounds later
        self.fresh = tensors["template"]
        self.retain([tensors])
        return entries

    def seal(self) -> None:
        # After a failed fsync the kernel may drop the pages and let the next fsync succeed.
        if self._torn:
            raise CheckpointError(
                f"{self._path}: an earlier sync failed, so its rows may be lost. "
                "Check the disk, then resume from the last checkpoint in a new process."
            )
        try:
            if self._claimed and self._owner is None:
                name = self._owner_wanted.encode()
                disk.pwrite_all(self._fd, (name + b"\n" + _mark(name)).ljust(HEADER, b"\0"), 0)
                self._owner = self._owner_wanted
            disk.fsync(self._fd)
            if not self._named:
                disk.fsync_directory(self._path.parent)
        except OSError as error:
            self._torn = True  # an interrupt loses nothing: the next sync takes the same pages
            intact = "The checkpoints so far are untouched"
            raise disk.failure("sync", self._path, error, intact) from error
        self._named = True

    def retain(self, tables: Iterable[Table]) -> None:
        kept: dict[int, int] = {}
        for table in tables:
            for client, slot in zip(table["ids"].tolist(), table["slots"].tolist(), strict=True):
                kept[client] = kept.get(client, 0) | 1 << slot
        self._kept = kept


def _mark(name: bytes) -> bytes:
    return b"undrift rows %08x" % zlib.crc32(name)


def _weights(num_words: int) -> NDArray[np.int64]:
    """Odd numbers, one per position, by splitmix64.

    An odd number is invertible modulo 2^64, so any change within one word of a row changes the
    fingerprint `row @ weights`.
    """
    z = np.arange(1, num_words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31)) | np.uint64(1)).view(np.int64)
