"""Finding and reading a picture data set in whichever form it lies in the data directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from undrift.errors import DataError
from undrift.sources.boxes import in_folder, read_members
from undrift.sources.digests import content_digest, pixel_digest
from undrift.sources.examples import Pixels, Unreadable
from undrift.sources.ways import Way


class Form(NamedTuple):
    """One way in which a data set may lie on the disk."""

    name: str
    boxes: tuple[str, ...]  # folders or archives, relative to the data directory
    members: tuple[str, ...]  # the files inside
    read: Callable[[Mapping[str, bytes]], Pixels]
    pixels: str = ""  # sha256 of the pixels in this form's order, where it is known


class PictureSet(NamedTuple):
    """A data set of small pictures: what it must be, and how it is obtained."""

    name: str
    shape: tuple[int, int, int]  # H, W, channels
    counts: tuple[int, int]  # train, test
    content: tuple[str, str] | None  # order-free sha256 of train and of test, where known
    class_names: tuple[str, ...]
    norms: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]  # mean, std by name
    forms: tuple[Form, ...]
    ways: tuple[Way, ...]


class Found(NamedTuple):
    """A form that is there."""

    form: Form
    path: Path
    files: tuple[Path, ...]

    @property
    def complete(self) -> bool:
        """Whether no file is missing; an archive counts as one file."""
        return self.path.is_file() or len(self.files) == len(self.form.members)


def find(data: PictureSet, directory: Path) -> Found | None:
    """Find the first complete form, else an incomplete one, else None."""
    try:
        seen = [_look(form, directory / box) for form in data.forms for box in form.boxes]
    except OSError as error:
        raise DataError(
            f"{directory} cannot be searched for {data.name} ({error.strerror}): make it readable, "
            "or set UNDRIFT_DATA to another folder"
        ) from error
    there = [found for found in seen if found.files]
    return next((f for f in there if f.complete), there[0] if there else None)


def places(data: PictureSet) -> str:
    """List the files that would do, relative to the data directory."""
    names = [f"{f.boxes[0]}/{f.members[0]} ..." for f in data.forms if "." not in f.boxes[0]]
    return ", ".join(names + [f.boxes[0] for f in data.forms if "." in f.boxes[0]])


def _look(form: Form, box: Path) -> Found:
    if box.is_file():
        return Found(form, box, (box,))
    files = [in_folder(box, name) for name in form.members]
    return Found(form, box, tuple(f for f in files if f is not None))


def read(data: PictureSet, directory: Path, verify: bool = True) -> tuple[Pixels, Found]:
    """Read the pictures, and check that they are the ones meant."""
    found = find(data, directory)
    if found is None:
        raise DataError(
            f"{data.name} is not in {directory}: run `undrift data get {data.name}`, or put one of "
            f"these there yourself: {places(data)}"
        )
    try:
        pixels = found.form.read(read_members(found.path, found.form.members))
        _check_shapes(pixels, data)
        if verify:
            _check_content(pixels, data, found.form)
    except Unreadable as error:
        move = "Delete it, then run" if found.complete else "To complete it, run"
        raise DataError(f"{found.path}: {error}. {move} `undrift data get {data.name}`") from error
    return pixels, found


def _check_shapes(pixels: Pixels, data: PictureSet) -> None:
    parts = {"train": (pixels.train_x, pixels.train_y), "test": (pixels.test_x, pixels.test_y)}
    for part, (x, y) in parts.items():
        if x.shape[1:] != data.shape:
            raise Unreadable(f"its {part} pictures are {x.shape[1:]}, {data.name}'s {data.shape}")
        if y.ndim != 1 or len(x) != len(y) or not len(y):
            raise Unreadable(f"it has {len(x)} {part} pictures but {y.size} labels")
        if y.max() >= len(data.class_names):
            raise Unreadable(f"its {part} label {y.max()} is not among {len(data.class_names)}")


def _check_content(pixels: Pixels, data: PictureSet, form: Form) -> None:
    counts = (len(pixels.train_x), len(pixels.test_x))
    if counts != data.counts:
        raise Unreadable(f"it has {counts} pictures to train and test, {data.name} {data.counts}")
    if data.content is None:
        return
    content = (
        content_digest(pixels.train_x, pixels.train_y),
        content_digest(pixels.test_x, pixels.test_y),
    )
    if content != data.content or (form.pixels and pixel_digest(pixels) != form.pixels):
        raise Unreadable(
            f"its pictures or labels are not those of {data.name} (checksum; verify=False reads "
            "a changed copy all the same)"
        )
