"""Data sets of files that one obtains oneself: where they may lie, and what to do if they do not.

The files of LEAF (Caldas et al. 2018) are json, many people in each:
{"users": [name, ...], "num_samples": [n, ...], "user_data": {name: {"x": [...], "y": [...]}}}.
Its scripts leave them in `all_data`, or split into `train` and `test`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from undrift.errors import DataError

SPLIT, WHOLE = "LEAF json, split", "LEAF json"


class Layout(NamedTuple):
    """One way in which files may lie in the data directory."""

    form: str
    train: str  # a pattern relative to the data directory
    test: str = ""  # another, where the files are split already
    first: bool = False  # whether one file is enough


class KeptSet(NamedTuple):
    """A data set that undrift reads but does not fetch."""

    name: str
    layouts: tuple[Layout, ...]
    advice: str  # where it is offered, and how the files are made


class KeptFiles(NamedTuple):
    """Files that are there."""

    layout: Layout
    path: Path  # the folder that holds them, or the file
    train: tuple[Path, ...]
    test: tuple[Path, ...]

    @property
    def complete(self) -> bool:
        """Whether what the layout asks for is there."""
        return bool(self.train) and bool(self.test or not self.layout.test)


def leaf_layouts(name: str) -> tuple[Layout, ...]:
    """List where LEAF's files may lie: in the folder itself, or as its scripts leave them."""
    made: list[Layout] = []
    for base in (name, f"{name}/data"):
        made.append(Layout(SPLIT, f"{base}/train/*.json", f"{base}/test/*.json"))
        made.append(Layout(WHOLE, f"{base}/all_data/*.json"))
    return (*made, Layout(WHOLE, f"{name}/*.json"))


def look(data: KeptSet, directory: Path) -> KeptFiles | None:
    """Find the first complete layout, else an incomplete one, else None."""
    try:
        seen = [_look(layout, directory) for layout in data.layouts]
    except OSError as error:
        raise DataError(
            f"{directory} cannot be searched for {data.name} ({error.strerror}): make it readable, "
            "or set UNDRIFT_DATA to another folder"
        ) from error
    there = [found for found in seen if found.train or found.test]
    return next((f for f in there if f.complete), there[0] if there else None)


def need(data: KeptSet, directory: Path) -> KeptFiles:
    """Find the files, or say which are missing and where they come from."""
    found = look(data, directory)
    if found is None:
        raise DataError(
            f"{data.name} is not in {directory}. {data.advice} Put there one of: {places(data)}"
        )
    if not found.complete:
        missing = found.layout.test if found.train else found.layout.train
        raise DataError(
            f"{data.name} is incomplete: {directory} has files of one half but no {missing}. "
            "Put them there, or move the half away"
        )
    return found


def places(data: KeptSet) -> str:
    """List the files that would do, relative to the data directory."""
    return ", ".join(
        f"{one.train} with {one.test}" if one.test else one.train for one in data.layouts
    )


def _look(layout: Layout, directory: Path) -> KeptFiles:
    train, test = (
        tuple(sorted(p for p in directory.glob(pattern) if p.is_file())) if pattern else ()
        for pattern in (layout.train, layout.test)
    )
    if layout.first:
        train = train[:1]
        return KeptFiles(layout, train[0] if train else directory, train, test)
    folder = directory / Path(layout.train).parent
    return KeptFiles(layout, folder.parent if layout.test else folder, train, test)
