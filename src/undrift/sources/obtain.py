"""Obtaining data sets, and telling which are there."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from undrift.errors import CheckpointError, DataError
from undrift.sources import forms
from undrift.sources.digits import FILE
from undrift.sources.forms import PictureSet
from undrift.sources.kept import KeptFiles, look, need
from undrift.sources.named import SOURCES, Source, source_named
from undrift.sources.place import data_directory
from undrift.sources.ways import Progress, WayFailed
from undrift.state.disk import make_directory, sweep


class Available(NamedTuple):
    """What there is of a source: embedded, generated, your own, found, incomplete or missing."""

    name: str
    state: str
    path: Path | None
    bytes: int


def get(
    name: str, progress: Progress | None = None, directory: Path | str | None = None
) -> Path | None:
    """Obtain what is missing of a source, verify it, and tell where it lies.

    Tries the makers' address, then packages; embedded and generated sources need nothing.  Some
    sources are not offered at an address: for these it says who offers them, or verifies them.
    """
    source, place = source_named(name), Path(directory or data_directory())
    if source.kept is not None:
        found = need(source.kept, place)
        (progress or _silent)(f"{name}: verifying", 0, None)
        source.load(directory=place)
        return found.path
    if not source.pictures:
        return None
    there = [data for data in source.pictures if _complete(data, place)]
    return obtain((there or source.pictures)[0], place, progress or _silent)


def obtain(data: PictureSet, directory: Path, progress: Progress) -> Path:
    """Bring a picture data set into the data directory, way after way until one works."""
    found = forms.find(data, directory)
    if found is not None and found.complete:
        return _verified(data, directory, progress)
    folder, failed = directory / data.name, []
    _prepare(folder)
    for way in data.ways:
        try:
            way.bring(folder, progress)
        except WayFailed as error:
            failed.append(f"  {way.title}: {error}")
        else:
            return _verified(data, directory, progress)
    raise DataError(
        f"{data.name} could not be obtained. Tried:\n" + "\n".join(failed) + "\nPut one of "
        f"these into {directory} yourself: {forms.places(data)}"
    )


def available(directory: Path | str | None = None) -> list[Available]:
    """List every source with what there is of it; files are found, not read."""
    place = Path(directory or data_directory())
    return [_available(source, place) for source in SOURCES.values()]


def _available(source: Source, directory: Path) -> Available:
    if source.kept is not None:
        return _available_kept(source.name, look(source.kept, directory))
    if not source.pictures:
        if source.name != "digits":
            state = "your own" if source.name == "table" else "generated"
            return Available(source.name, state, None, 0)
        embedded = Path(__file__).with_name(FILE)
        return Available(source.name, "embedded", embedded, embedded.stat().st_size)
    seen = [found for data in source.pictures if (found := forms.find(data, directory))]
    found = next((f for f in seen if f.complete), seen[0] if seen else None)
    if found is None:
        return Available(source.name, "missing", None, 0)
    size = sum(file.stat().st_size for file in found.files)
    return Available(source.name, "found" if found.complete else "incomplete", found.path, size)


def _available_kept(name: str, found: KeptFiles | None) -> Available:
    if found is None:
        return Available(name, "missing", None, 0)
    size = sum(file.stat().st_size for file in found.train + found.test)
    return Available(name, "found" if found.complete else "incomplete", found.path, size)


def _complete(data: PictureSet, directory: Path) -> bool:
    found = forms.find(data, directory)
    return found is not None and found.complete


def _verified(data: PictureSet, directory: Path, progress: Progress) -> Path:
    progress(f"{data.name}: verifying", 0, None)
    _, found = forms.read(data, directory)
    return found.path


def _prepare(folder: Path) -> None:
    try:
        make_directory(folder)
    except CheckpointError as error:
        raise DataError(str(error).removesuffix(", then resume.")) from error
    sweep(folder)  # what killed downloads left


def _silent(what: str, done: int, total: int | None) -> None:
    """Report nothing."""
