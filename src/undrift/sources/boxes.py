"""Named files out of a folder, a tar archive or a zip archive; nothing is unpacked to disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from undrift.guarded.binary import BROKEN, open_entry, open_zip, tar_files, whole
from undrift.guarded.limits import Unreadable, check
from undrift.guarded.text import read_bytes


def in_folder(folder: Path, name: str) -> Path | None:
    """Find a file in a folder under its own name or with .gz added."""
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def read_members(box: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read files by their last name, wherever in an archive they lie."""
    try:
        found = _within(_members(box, set(names)))
    except Unreadable:
        raise
    except (OSError, *BROKEN) as error:
        raise Unreadable(f"cannot be read ({type(error).__name__}: {error})") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise Unreadable(f"does not hold {', '.join(missing)}")
    return found


def _within(members: Iterator[tuple[str, bytes]]) -> dict[str, bytes]:
    """Collect files that are not too large together."""
    found: dict[str, bytes] = {}
    for name, data in members:
        found[name] = data
        check("data_bytes", "bytes of all files", sum(map(len, found.values())))
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
            yield name, read_bytes(path, "data_bytes")


def _zip_members(box: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    with box.open("rb") as file, open_zip(file) as archive:
        found = {_wanted(entry.filename, names): entry for entry in archive.infolist()}
        for name, entry in found.items():
            if name:
                with open_entry(archive, entry) as opened:
                    yield name, whole(opened, name)


def _tar_members(box: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    with box.open("rb") as file:
        for path, size, opened in tar_files(file):
            name = _wanted(path, names)
            if name:
                check("data_bytes", f"bytes that {name} claims", size)
                yield name, whole(opened, name)


def _wanted(path: str, names: set[str]) -> str:
    """Tell which name a file answers to, as in a folder: its own, or with .gz added."""
    last = PurePosixPath(path).name
    return next((n for n in (last, last.removesuffix(".gz")) if n in names), "")
