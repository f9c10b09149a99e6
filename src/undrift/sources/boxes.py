"""Named files out of a folder, a tar archive or a zip archive; nothing is unpacked to disk."""

from __future__ import annotations

import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from undrift.sources.examples import Unreadable

LARGEST = 768 * 2**20  # no file of these data sets is larger; stops a zip bomb
BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error),
    *(EOFError, OSError, RuntimeError, ValueError, LookupError),
)


def in_folder(folder: Path, name: str) -> Path | None:
    """Find a file in a folder under its own name or with .gz added."""
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def read_members(box: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read files by their last name, wherever in an archive they lie."""
    try:
        found = dict(_members(box, set(names)))
    except Unreadable:
        raise
    except BROKEN as error:
        raise Unreadable(f"cannot be read ({type(error).__name__}: {error})") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise Unreadable(f"does not hold {', '.join(missing)}")
    return found


def _members(box: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    if box.is_dir():
        return _folder_members(box, names)
    with box.open("rb") as opened:
        zipped = opened.read(2) == b"PK"
    return _zip_members(box, names) if zipped else _tar_members(box, names)


def _folder_members(folder: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        path = in_folder(folder, name)
        if path is not None:
            _check_size(name, path.stat().st_size)
            yield name, path.read_bytes()


def _zip_members(box: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(box) as archive:
        for entry in archive.infolist():
            name = _wanted(entry.filename, names)
            if name:
                _check_size(name, entry.file_size)
                yield name, archive.read(entry)


def _tar_members(box: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(box, "r|*") as archive:
        for entry in archive:
            name = _wanted(entry.name, names)
            if name and entry.isfile():
                _check_size(name, entry.size)
                opened = archive.extractfile(entry)
                assert opened is not None, "a plain file can be opened"
                yield name, opened.read()


def _wanted(path: str, names: set[str]) -> str:
    """Tell which name a file answers to, as in a folder: its own, or with .gz added."""
    last = PurePosixPath(path).name
    return next((n for n in (last, last.removesuffix(".gz")) if n in names), "")


def _check_size(name: str, size: int) -> None:
    if size > LARGEST:
        raise Unreadable(f"{name} claims {size} bytes, more than any file of this data set")
