"""Configurations that were found earlier: on this machine, or on one like it and shipped.

The first are in the user's cache folder; `UNDRIFT_CACHE` names another one.  A file that is lost,
damaged or cannot be written costs time and nothing else.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from undrift.guarded.text import parse_json
from undrift.kernels.own_files import make_own_folder, open_ours

log = logging.getLogger("undrift")

LARGEST = 50_000_000  # bytes that are read of a file
SHIPPED = Path(__file__).parent / "shipped"
_known: dict[Path, dict[str, Any]] = {}  # what was read, by file


def recall(key: str) -> dict[str, Any] | None:
    """Give what was found for a kernel, a problem and a device, if it was."""
    own = _file()
    found = _read(own).get(key) or _read(SHIPPED / own.name, shipped=True).get(key)
    return dict(found) if isinstance(found, dict) else None


def everything() -> dict[str, Any]:
    """Give all that is known, by kernel, problem and device."""
    own = _file()
    return {**_read(SHIPPED / own.name, shipped=True), **_read(own)}


def remember(key: str, configuration: dict[str, Any]) -> None:
    """Write one more; what another process wrote meanwhile is kept."""
    path = _file()
    _known.pop(path, None)
    made = {**_read(path), key: configuration}
    _known[path] = made
    try:
        with tempfile.TemporaryDirectory(dir=make_own_folder(path.parent)) as scratch:
            beside = Path(scratch, path.name)
            beside.touch(0o600)  # before its first byte: nobody else may write it
            beside.write_text(json.dumps(made, indent=1, sort_keys=True))
            beside.replace(path)
    except OSError as error:
        log.debug("%s is not written: %s", path, error)


def folder() -> Path:
    """Name the folder for what was found or made on this machine."""
    if own := os.environ.get("UNDRIFT_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "undrift"
    try:
        return Path.home() / ".cache" / "undrift"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"undrift-{os.getuid()}"


def own_compiler_cache() -> None:
    """Let torch keep compiled code where ours is: its own place in /tmp may be somebody else's."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    try:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(make_own_folder(folder() / "inductor"))
    except OSError:  # built anew by every process, which alone may enter
        made = tempfile.mkdtemp(prefix="undrift-inductor-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = made
        atexit.register(shutil.rmtree, made, ignore_errors=True)


def _file() -> Path:
    import triton

    return folder() / f"kernels-triton-{triton.__version__}.json"


def _read(path: Path, shipped: bool = False) -> dict[str, Any]:
    if path not in _known:
        try:
            with open(path if shipped else open_ours(path), "rb") as file:
                found = parse_json(file.read(LARGEST))
        except (OSError, ValueError, RecursionError):
            found = {}
        _known[path] = found if isinstance(found, dict) else {}
    return _known[path]
