"""Sources by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from undrift.errors import unknown_name
from undrift.models.settings import check_settings
from undrift.sources.catalogue import PICTURES
from undrift.sources.digits import digits
from undrift.sources.emnist import EMNIST, emnist
from undrift.sources.examples import Examples
from undrift.sources.femnist import FEMNIST, femnist
from undrift.sources.forms import PictureSet
from undrift.sources.kept import KeptSet
from undrift.sources.picture_sets import load_pictures
from undrift.sources.sent140 import SENT140, sent140
from undrift.sources.shakespeare import SHAKESPEARE, shakespeare
from undrift.sources.synthetic import synthetic, synthetic_regression
from undrift.tabular.source import table


class Source(NamedTuple):
    """A name, how it loads, and the files that it needs, if any."""

    name: str
    load: Callable[..., Examples]
    pictures: tuple[PictureSet, ...] = ()  # several: whichever is there
    kept: KeptSet | None = None


SOURCES: Mapping[str, Source] = {
    "digits": Source("digits", digits),
    "synthetic": Source("synthetic", synthetic),
    "synthetic-regression": Source("synthetic-regression", synthetic_regression),
    "table": Source("table", table),
    **{n: Source(n, partial(load_pictures, data), (data,)) for n, data in PICTURES.items()},
    "emnist": Source("emnist", emnist, tuple(EMNIST.values())),
    "femnist": Source("femnist", femnist, kept=FEMNIST),
    "sent140": Source("sent140", sent140, kept=SENT140),
    "shakespeare": Source("shakespeare", shakespeare, kept=SHAKESPEARE),
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
