"""Checkpoints: one file per round, whole or not there, every byte checked when it is read.

A file is a header and a payload.  The header, whose shape no later version may change, is magic,
format version, length of the payload, and SHA-256 of all the rest.  The payload is a safetensors
file whose metadata holds the round, `meta` and `config` as JSON.  Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from undrift.errors import ChangedExperiment, CheckpointError, ConfigError, CorruptCheckpoint
from undrift.guarded.limits import check, limit
from undrift.guarded.text import parse_json
from undrift.state import disk
from undrift.state.codes import CODES, DTYPES
from undrift.state.plain import differences, from_json, to_json, told

MAGIC = b"\x89UNDRIFT"
FORMAT = 1
_LEAD = struct.Struct("<8sIQ")  # magic, version, length of the payload
_HEADER_SIZE = _LEAD.size + 32
_FILE_NAME = re.compile(r"round-(\d{8,})\.undrift")


logger = logging.getLogger("undrift")


class Checkpoint(NamedTuple):
    """What was saved after a round."""

    round: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    config: dict[str, Any]


class CheckpointFolder:
    """The newest `keep` checkpoints of one run.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     folder = CheckpointFolder(Path(place))
    ...     name = folder.save(3, {"w": torch.ones(2)}, {"seed": 1}, {"lr": 0.1}).name
    ...     name, CheckpointFolder(Path(place)).load({"lr": 0.1}).round
    ('round-00000003.undrift', 3)
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"keep = {keep!r}: at least 1 checkpoint must be kept")
        self.path, self.keep = Path(path), keep
        self._newest = -1  # the last round that this object loaded or tried to save
        self._corrupt: set[int] = set()

    @property
    def rounds(self) -> list[int]:
        """Rounds that have a file here, sound or not, sorted."""
        names = [_FILE_NAME.fullmatch(p.name) for p in self._entries()]
        return sorted(int(m[1]) for m in names if m)

    def save(
        self,
        round: int,
        tensors: Mapping[str, Tensor],
        meta: dict[str, Any],
        config: dict[str, Any],
    ) -> Path:
        """Write a checkpoint; older ones are deleted only after it is durable.

        Save the rounds in order, and `load` first in a folder that already holds checkpoints.
        """
        self._refuse_to_overwrite(round)
        about = {"round": str(round), "meta": to_json(meta, "meta")}
        about |= {"config": to_json(config, "config"), "undrift": _package_version()}
        chunks = list(_encode(tensors, about))
        disk.make_directory(self.path)
        disk.sweep(self.path)
        self._newest = round
        path = self._file(round)
        disk.write_atomically(path, chunks)
        self._corrupt.discard(round)
        self._prune()
        return path

    def load(self, config: dict[str, Any] | None = None) -> Checkpoint | None:
        """Read the newest sound checkpoint, or None in an empty folder.

        A corrupt one is skipped with a warning.  With `config`, another experiment is refused.
        """
        corrupt: dict[int, CorruptCheckpoint] = {}
        found = next(self._sound(corrupt), None)
        if found is None and corrupt:
            raise self._all_corrupt(corrupt)
        for error in corrupt.values():
            logger.warning("skipping a corrupt checkpoint: %s", error)
        if found is not None:
            if config is not None:
                self._refuse_another_experiment(found, config)
            # Only now: files are deleted later as corrupt if a sound one took their place.
            self._newest, self._corrupt = found.round, set(corrupt)
        return found

    def tidy(self) -> None:
        """After a load, delete what a save that was killed had still to delete."""
        if not self._corrupt:  # else the next save knows what took the place of a corrupt one
            self._prune()

    def kept(self) -> list[Checkpoint]:
        """Read the newest `keep` sound checkpoints: what a later fallback may go back to."""
        # Not all there are: a deletion that a power cut undid must not come back to life.
        return list(islice(self._sound({}), self.keep))

    def _file(self, round: int) -> Path:
        return self.path / f"round-{round:08d}.undrift"

    def _entries(self) -> list[Path]:
        try:
            return list(self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise disk.failure("list", self.path, error, "Nothing was changed") from error

    def _sound(self, corrupt: dict[int, CorruptCheckpoint]) -> Iterator[Checkpoint]:
        for round in self.rounds[::-1]:
            try:
                found = read(self._file(round))
            except CorruptCheckpoint as error:
                corrupt[round] = error
            else:
                yield found

    def _all_corrupt(self, corrupt: dict[int, CorruptCheckpoint]) -> CorruptCheckpoint:
        told = "\n".join(f"  {error}" for error in corrupt.values())
        return CorruptCheckpoint(
            f"no checkpoint in {self.path} is sound:\n{told}\n"
            "If none can be restored, begin again in a new folder."
        )

    def _refuse_to_overwrite(self, round: int) -> None:
        if round < 0 or round < self._newest:
            raise ConfigError(f"round {round} cannot be saved after round {self._newest}")
        foreign = [r for r in self.rounds if r > self._newest and r not in self._corrupt]
        if foreign:
            raise CheckpointError(
                f"{self.path} holds a checkpoint of round {foreign[-1]} that this run did not "
                "load. Resume from it, or choose another folder."
            )

    def _refuse_another_experiment(self, found: Checkpoint, config: dict[str, Any]) -> None:
        given = from_json(to_json(config, "config"))
        changes = differences(found.config, given)
        if changes:
            raise ChangedExperiment(
                f"{self._file(found.round)} belongs to another experiment:\n"
                f"{told(changes)}\nResume with the stored values, or begin in a new folder."
            )

    def _prune(self) -> None:
        """Delete what is too old, and corrupt files that would count as newer or as kept."""
        sound = [r for r in self.rounds if r not in self._corrupt]
        for round in sorted(set(self.rounds) - set(sound[-self.keep :])):
            try:
                disk.remove(self._file(round))
            except OSError as error:
                logger.warning("cannot delete the old %s: %s", self._file(round), error)


def verify(path: Path) -> None:
    """Check every byte of a checkpoint; raises CorruptCheckpoint for a bad one."""
    read(path)


def read(path: Path) -> Checkpoint:
    """Read one checkpoint, checked."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            payload = _checked_payload(path, file)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        if error.errno == errno.EIO:
            raise _corrupt(path, "the disk cannot read it") from error
        raise disk.failure("read", path, error, "Nothing was changed") from error
    try:
        found = _decode(payload)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise _corrupt(path, f"its payload makes no sense ({error})") from error
    named = _FILE_NAME.fullmatch(path.name)
    if named and int(named[1]) != found.round:
        raise _corrupt(path, f"it holds round {found.round}")
    return found


def _checked_payload(path: Path, file: BinaryIO) -> bytes:
    size, header = os.fstat(file.fileno()).st_size, file.read(_HEADER_SIZE)
    if len(header) < _HEADER_SIZE:
        raise _corrupt(path, f"it has only {size} bytes" if size else "it is empty")
    magic, format, length = _LEAD.unpack(header[: _LEAD.size])
    if magic != MAGIC:
        raise _corrupt(path, "it is not a checkpoint of undrift")
    # Before anything is allocated: a forged length must not cost memory.
    if length != size - _HEADER_SIZE:
        raise _corrupt(path, f"it has {size} bytes instead of {length + _HEADER_SIZE}")
    payload = file.read(length)
    if _digest(header[: _LEAD.size], [payload]) != header[_LEAD.size :]:
        raise _corrupt(path, "its SHA-256 does not match")
    if format != FORMAT:
        raise CheckpointError(
            f"{path} has format {format}, this version of undrift reads format {FORMAT}. "
            "Resume with the version that wrote it."
        )
    return payload


def _corrupt(path: Path, reason: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{path} is corrupt: {reason}. Restore it from a copy, or delete it to use an earlier one."
    )


def _digest(lead: bytes, payload: list[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256(lead)
    for chunk in payload:
        digest.update(chunk)
    return digest.digest()


def _encode(tensors: Mapping[str, Tensor], about: dict[str, str]) -> Iterator[bytes | memoryview]:
    # Wide types first: every tensor then starts at a multiple of its own width.
    names = sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n))
    body = [_bytes_of(n, tensors[n]) for n in names]
    table: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, data in zip(names, body, strict=True):
        start, end = end, end + data.nbytes
        tensor = tensors[name]
        table[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > limit("names_bytes"):
        raise CheckpointError(
            f"`meta` and `config` take {len(text)} bytes as JSON, at most {limit('names_bytes')} "
            "are read back. Put large values into `tensors`."
        )
    payload: list[bytes | memoryview] = [struct.pack("<Q", len(text)), text, *body]
    lead = _LEAD.pack(MAGIC, FORMAT, 8 + len(text) + end)
    yield lead + _digest(lead, payload)
    yield from payload


def _bytes_of(name: str, tensor: Tensor) -> memoryview:
    if tensor.dtype not in CODES or tensor.layout != torch.strided:
        raise CheckpointError(
            f"tensor {name!r} is {tensor.dtype}, {tensor.layout}: a checkpoint holds dense tensors "
            f"of {', '.join(str(d) for d in CODES)}. Convert it."
        )
    if name == "__metadata__" or not name.isprintable():
        raise CheckpointError(f"a tensor cannot be named {name!r} in a checkpoint. Rename it.")
    plain = tensor.detach().cpu().resolve_neg().contiguous()  # sync: for tensors on a device
    # One element counts as contiguous with any stride; a change of type wants the stride 1.
    flat = plain.as_strided((plain.numel(),), (1,))
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def _decode(payload: bytes) -> Checkpoint:
    start = 8 + int.from_bytes(payload[:8], "little")
    check("names_bytes", "bytes of names and settings", start - 8)
    table = parse_json(payload[8:start])
    about = table.pop("__metadata__")
    body = memoryview(payload)[start:]
    _check_tiles([entry["data_offsets"] for entry in table.values()], len(body))
    tensors = {name: _tensor_of(entry, body) for name, entry in table.items()}
    meta, config = from_json(about["meta"]), from_json(about["config"])
    return Checkpoint(int(about["round"]), tensors, meta, config)


def _check_tiles(places: list[list[int]], length: int) -> None:
    """Refuse gaps and overlaps: tensors that share bytes take more memory than the file has."""
    end = 0
    for start, stop in sorted(places):
        if start != end or stop < start:
            raise ValueError(f"a tensor starts at byte {start} instead of {end}")
        end = stop
    if end != length:
        raise ValueError(f"{length} bytes of tensors where {end} are described")


def _tensor_of(entry: dict[str, Any], body: memoryview) -> Tensor:
    start, end = entry["data_offsets"]
    dtype = DTYPES[entry["dtype"]]
    # A fresh copy: kernels may round differently on memory that is aligned differently.
    data = bytearray(body[start:end])
    empty = torch.empty(0, dtype=dtype)  # frombuffer refuses an empty buffer
    flat = torch.frombuffer(data, dtype=dtype).clone() if data else empty
    return flat.reshape(entry["shape"])


def _package_version() -> str:
    try:
        return version("undrift")
    except PackageNotFoundError:
        return "unknown"
