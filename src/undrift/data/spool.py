"""Where examples lie: in memory while they fit, else in a file from which batches are fetched."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undrift.data.gather import Pair
from undrift.errors import CheckpointError, DataError, unknown_name
from undrift.state import disk

SHARE = 0.25  # of free memory that examples may take: putting them together needs it twice
PIECE = 2**26  # bytes that a walk through a file holds at a time
CONTAINER = Path("/sys/fs/cgroup")
CACHED = ("active_file", "inactive_file")


class Streamed:
    """Rows in a file: indexing fetches some of them, on a device and in a type.

    Moving it moves nothing; it says where the rows that are fetched from now on go.
    """

    def __init__(
        self, rows: Tensor, keeper: Any, device: torch.device, dtype: torch.dtype, path: Path
    ) -> None:
        self._rows, self._keeper, self._path = rows, keeper, path
        self.device, self.dtype, self.shape = device, dtype, rows.shape

    def __len__(self) -> int:
        return len(self._rows)

    def dim(self) -> int:
        """Count the axes."""
        return self._rows.dim()

    def is_floating_point(self) -> bool:
        """Whether the rows hold floating-point numbers."""
        return self._rows.is_floating_point()

    def is_complex(self) -> bool:
        """Whether the rows hold complex numbers."""
        return self._rows.is_complex()

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Streamed:
        """Fetch to this device and in this type from now on."""
        made = torch.device(device)
        return Streamed(self._rows, self._keeper, made, dtype or self.dtype, self._path)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """Fetch rows by number; `dim` is 0, as for a tensor."""
        if self.device.type == "cpu":
            return self._rows.index_select(dim, rows.cpu()).to(self.dtype)
        # through pinned memory: a pageable copy is several times slower
        held = torch.empty(len(rows), *self.shape[1:], dtype=self._rows.dtype, pin_memory=True)
        torch.index_select(self._rows, dim, rows.cpu(), out=held)  # sync: the disk needs the ids
        return held.to(self.device, non_blocking=True).to(self.dtype)

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        if isinstance(rows, slice):
            return self._rows[rows].to(self.device, self.dtype, copy=True)
        return self.index_select(0, rows.reshape(-1)).unflatten(0, rows.shape)

    def pieces(self) -> Iterator[Tensor]:
        """Walk through all rows in order, some at a time, on the CPU."""
        width = max(1, PIECE * len(self) // max(1, self._rows.nbytes))
        for start in range(0, len(self), width):
            yield self._rows[start : start + width].to(self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        # another process maps the same file, which stays its owner's
        stored = (self._path, self.shape, self._rows.dtype)
        return _reopened, (*stored, self.device, self.dtype)


Rows = Tensor | Streamed


def pieces(values: Rows) -> Iterator[Tensor]:
    """Walk through all rows; a tensor is one piece."""
    return values.pieces() if isinstance(values, Streamed) else iter((values,))


class Spool:
    """Takes examples in, and holds them in memory until they are more than `limit` bytes."""

    def __init__(self, limit: float, folder: Path | None) -> None:
        self._limit, self._folder, self._num_bytes = limit, folder, 0
        self._held: list[Pair] = []
        self._files: tuple[RowFile, RowFile] | None = None

    def add(self, pair: Pair) -> None:
        """Take some examples in."""
        self._num_bytes += pair.x.nbytes + pair.y.nbytes
        self._held.append(pair)
        if self._num_bytes > self._limit:
            self._spill()

    def _spill(self) -> None:
        if self._files is None:
            scratch = Scratch(self._folder)
            self._files = RowFile(scratch, "x"), RowFile(scratch, "y")
        waiting, self._held = self._held[::-1], []
        while waiting:  # from the end: what is written is let go at once
            for file, values in zip(self._files, waiting.pop(), strict=True):
                file.append(values)

    def finish(self) -> tuple[Rows, Rows]:
        """Give everything that was taken in: two tensors, or two files' rows."""
        if self._files is not None:
            return self._files[0].mapped(), self._files[1].mapped()
        x, y = (torch.cat(values) for values in zip(*self._held, strict=True))
        return x, y

    def discard(self) -> None:
        """Delete the files at once, without waiting for the last object to go."""
        for file in self._files or ():
            file.discard()


def limit_for(keep: str) -> float:
    """Tell how many bytes of examples memory may hold."""
    limits = {"auto": free_memory() * SHARE, "memory": math.inf, "disk": -1.0}
    if keep not in tuple(limits):
        raise unknown_name("place", keep, list(limits), "Federation.from_datasets(keep=)")
    return limits[keep]


class Scratch:
    """A folder of our own, deleted with the last object that holds it, or when Python ends."""

    def __init__(self, folder: Path | None) -> None:
        place = Path(tempfile.gettempdir()) if folder is None else Path(folder)
        try:
            disk.make_directory(place)
            self.path = Path(tempfile.mkdtemp(prefix="undrift-examples-", dir=place))
        except CheckpointError as error:
            raise _advised(error) from error
        except OSError as error:
            raise _failed(place, error) from error
        self.remove = weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a process that was forked off
        shutil.rmtree(path, ignore_errors=True)


class RowFile:
    """A file that grows by rows of one kind and is mapped when it is complete."""

    def __init__(self, scratch: Scratch, name: str) -> None:
        self._scratch, self._path = scratch, scratch.path / name
        self._kind, self._shape, self._num_bytes = torch.float32, [0], 0
        try:
            self._fd = disk.open_rows(self._path)
        except CheckpointError as error:
            raise _advised(error) from error
        self._close = weakref.finalize(self, os.close, self._fd)

    def append(self, rows: Tensor) -> None:
        """Write rows at the end."""
        flat = rows.contiguous().reshape(-1)
        self._kind, self._shape = rows.dtype, [self._shape[0] + len(rows), *rows.shape[1:]]
        if not flat.numel():
            return
        try:
            disk.pwrite_all(self._fd, flat.view(torch.uint8).numpy().data, self._num_bytes)
        except OSError as error:
            raise _failed(self._path, error) from error
        self._num_bytes += flat.nbytes

    def mapped(self) -> Streamed:
        """Close the file and give its rows."""
        self._close()
        rows = _map(self._path, self._shape, self._kind)
        return Streamed(rows, self._scratch, torch.device("cpu"), self._kind, self._path)

    def discard(self) -> None:
        """Delete the file and its folder."""
        self._close()
        self._scratch.remove()


def _map(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = math.prod(shape)
    if not size:
        return torch.empty(shape, dtype=dtype)
    # shared: a private mapping counts as memory, and a file larger than memory would be refused
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)


def _reopened(
    path: Path,
    shape: Sequence[int],
    stored: torch.dtype,
    device: torch.device,
    dtype: torch.dtype,
) -> Streamed:
    if not path.is_file():
        raise DataError(
            f"the examples in {path} are gone: the process that wrote them must keep its "
            "federation as long as others use it"
        )
    return Streamed(_map(path, shape, stored), None, device, dtype, path)


def _failed(path: Path, error: OSError) -> DataError:
    return _advised(disk.failure("write the examples to", path, error, "They were not kept"))


def _advised(error: CheckpointError) -> DataError:
    # its last words are about resuming a run
    return DataError(f"{str(error).removesuffix(', then resume.')} (folder=...).")


def free_memory() -> int:
    """Tell how much memory is free: what the system could give and a container may take."""
    return min(_available(), _allowed())


def _available() -> int:
    """Memory that the system could give, page cache included where it says so."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _allowed() -> int:
    """Memory that a container may still take; without a limit, more than there is."""
    try:
        limit, used = (int((CONTAINER / f"memory.{n}").read_text()) for n in ("max", "current"))
        parts = (line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        # what was read of files counts as used, but is given back as soon as somebody asks
        cached = sum(int(size) for name, size in parts if name in CACHED)
    except (OSError, ValueError):
        return sys.maxsize
    return max(0, limit - used + cached)
