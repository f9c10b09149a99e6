"""From the pictures in a file to examples."""

from __future__ import annotations

from pathlib import Path

import torch

from undrift.models.settings import whole
from undrift.sources import forms
from undrift.sources.examples import Examples, Info, Pixels
from undrift.sources.forms import Found, PictureSet
from undrift.sources.normalise import check_norm, norm_named, to_floats
from undrift.sources.place import data_directory


def load_pictures(
    data: PictureSet,
    normalise: str = "default",
    pixels: int | None = None,
    verify: bool = True,
    directory: Path | str | None = None,
) -> Examples:
    """Load a picture data set; `pixels` brings the pictures to another size."""
    if pixels is not None:
        whole("pixels", pixels)
    check_norm(data, normalise)
    raw, found = forms.read(data, Path(directory or data_directory()), verify)
    return as_examples(data, raw, found, normalise, pixels)


def as_examples(
    data: PictureSet, raw: Pixels, found: Found, normalise: str, pixels: int | None
) -> Examples:
    """Normalise pictures that were read."""
    norm = norm_named(data, normalise, raw.train_x)
    info = Info(data.name, found.form.name, found.path, normalise, *norm, data.class_names)
    train_y, test_y = (torch.from_numpy(y.astype("int64")) for y in (raw.train_y, raw.test_y))
    train_x, test_x = (to_floats(x, norm, pixels) for x in (raw.train_x, raw.test_x))
    return Examples(train_x, train_y, test_x, test_y, len(data.class_names), info)
