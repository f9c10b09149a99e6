"""Whose code something is: well known, of an installed package, or the user's own."""

from __future__ import annotations

import hashlib
import sys
from functools import lru_cache
from pathlib import Path
from typing import Literal

from undrift.own import plain_module

Origin = Literal["known", "installed", "own"]
# Their versions are not part of a fingerprint: a run may go on after an update of these.
WELL_KNOWN = frozenset({"undrift", "torch", "torchvision", "torchaudio", "numpy", "scipy"})
INSTALLED = frozenset({"site-packages", "dist-packages"})
_STANDARD = Path(hashlib.__file__).parent
_FOLDERS = f"{plain_module.__module__}."  # modules of the user's that are imported by path


def origin(module: str, file: str | None = None) -> Origin:
    """Tell whose module this is, by its name and where its file lies, or would lie."""
    top = module.partition(".")[0]
    if module.startswith(_FOLDERS):
        return "own"
    if top in WELL_KNOWN or top in sys.builtin_module_names:
        return "known"
    file = file or file_of(module)
    if file is None:
        return "known" if top in sys.stdlib_module_names else "own"
    return _origin_of_file(file)


def file_of(module: str) -> str | None:
    """Tell where a module that is imported lies."""
    found = getattr(sys.modules.get(module), "__file__", None)
    return found if isinstance(found, str) else None


@lru_cache(maxsize=4096)
def _origin_of_file(file: str) -> Origin:
    path = Path(file)
    if INSTALLED.intersection(path.parts):
        return "installed"
    return "known" if path.is_relative_to(_STANDARD) else "own"


def edition(module: str) -> str:
    """Tell the version of an installed package, and digest the file that this module is."""
    top = sys.modules.get(module.partition(".")[0])
    version = getattr(top, "__version__", None)
    file = file_of(module)
    mark = "" if file is None else _digest_of_file(file)
    return " ".join(text for text in (str(version or ""), mark) if text)


@lru_cache(maxsize=4096)
def _digest_of_file(file: str) -> str:
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()
    except OSError:  # in an archive
        return ""


def dotted(module: str | None, name: str = "") -> str:
    """Name something as a user names it, wherever its folder is and however it was started."""
    plain = plain_module(module or "")
    if plain in ("__main__", "__mp_main__"):
        spec, file = getattr(sys.modules["__main__"], "__spec__", None), file_of("__main__")
        stem = "__main__" if file is None else Path(file).stem
        plain = stem if spec is None else spec.name  # python file.py, or python -m package.file
    return ".".join(part for part in (plain, name) if part)
