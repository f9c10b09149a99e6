"""Named data sources: embedded, generated, or files in the data directory; see docs/data.md."""

from undrift.sources.augment import augment
from undrift.sources.examples import Examples, Info
from undrift.sources.named import SOURCES, Source, load
from undrift.sources.obtain import Available, available, get
from undrift.sources.place import data_directory
from undrift.sources.ways import Progress

__all__ = [
    "SOURCES",
    "Available",
    "Examples",
    "Info",
    "Progress",
    "Source",
    "augment",
    "available",
    "data_directory",
    "get",
    "load",
]
