"""The data directory: `UNDRIFT_DATA`, or undrift's folder in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

from undrift.errors import ConfigError


def data_directory() -> Path:
    """Tell where data sets lie; the folder need not exist."""
    chosen = os.environ.get("UNDRIFT_DATA", "")
    if chosen:
        return _home(chosen)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG convention: a relative path there is ignored.
    base = Path(cache) if os.path.isabs(cache) else _home("~/.cache")
    return base / "undrift"


def _home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"the data directory {path!r} needs a home folder and there is none: "
            "set UNDRIFT_DATA to a folder"
        ) from error
