"""Sources by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from undrift.errors import unknown_name
from undrift.models.settings import check_settings, whole
from undrift.sources import forms
from undrift.sources.catalogue import PICTURES
from undrift.sources.digits import digits
from undrift.sources.examples import Examples, Info
from undrift.sources.forms import PictureSet
from undrift.sources.normalise import check_norm, norm_named, to_floats
from undrift.sources.place import data_directory
from undrift.sources.synthetic import synthetic, synthetic_regression
from undrift.sources.table import table


class Source(NamedTuple):
    """A name, how it loads, and the data set to obtain first, if any."""

    name: str
    load: Callable[..., Examples]
    pictures: PictureSet | None = None


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
    norm = norm_named(data, normalise, raw.train_x)
    info = Info(data.name, found.form.name, found.path, normalise, *norm, data.class_names)
    train_y, test_y = (torch.from_numpy(y.astype("int64")) for y in (raw.train_y, raw.test_y))
    train_x, test_x = (to_floats(x, norm, pixels) for x in (raw.train_x, raw.test_x))
    return Examples(train_x, train_y, test_x, test_y, len(data.class_names), info)


SOURCES: Mapping[str, Source] = {
    "digits": Source("digits", digits),
    "synthetic": Source("synthetic", synthetic),
    "synthetic-regression": Source("synthetic-regression", synthetic_regression),
    "table": Source("table", table),
    **{n: Source(n, partial(load_pictures, data), data) for n, data in PICTURES.items()},
}


def load(name: str, **settings: Any) -> Examples:
    """Load a source by name; nothing is downloaded, see `get`.

    >>> load("synthetic", alpha=0.5, beta=0.5, clients=3, sizes=20)
    Examples(synthetic: 54 to train, 6 to test, x [60], 10 classes)
    """
    source = source_named(name)
    check_settings(source.load, settings, f"sources.{name}")
    return source.load(**settings)


def source_named(name: str) -> Source:
    """Look a source up, with the nearest name if there is none."""
    if name not in SOURCES:
        raise unknown_name("source", name, list(SOURCES), "sources")
    return SOURCES[name]
