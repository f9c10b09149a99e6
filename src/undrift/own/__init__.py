"""Own parts: code of the user's that an experiment names as `package.module:attribute`.

An installed package comes first, then the folder of the experiment file, then the current folder.
Neither folder is put on `sys.path`, where a file such as `statistics.py` would stand for the
module that a library wants.  Each folder is a package of its own below this one instead, named
after its path: `undrift.own._2fhome_2fme.my_parts`.  Any process that imports undrift can import
it again, and only modules of the same folder see it when they say `import my_parts`.

Importing runs code, so it needs trust: `scope` says whether there is any.
"""

from __future__ import annotations

import builtins
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, reduce
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from undrift.errors import ConfigError

OURS = frozenset({"undrift.papers.stand_in:few"})  # what `reproduce --tiny` writes; no other's code
_ENCODED = re.compile(r"_([0-9a-f]{2})")


class Scope(NamedTuple):
    """What names of own parts stand for."""

    home: Path | None = None  # the folder of the experiment file
    trusted: bool = True  # False: it is somebody else's, and nothing of it is imported


_CALLERS_OWN = Scope()
_scope: ContextVar[Scope] = ContextVar("own parts", default=_CALLERS_OWN)


@contextmanager
def scope(home: Path | None, trusted: bool = True) -> Iterator[None]:
    """Say where own parts are looked for, and whether they may be imported at all."""
    token = _scope.set(Scope(home, trusted))
    try:
        yield
    finally:
        _scope.reset(token)


def imported(name: str) -> Any:
    """Import `package.module:attribute`, which runs the module's code."""
    home, trusted = _scope.get()
    if not trusted and name not in OURS:
        raise ConfigError(not_trusted([name]))
    module, _, attribute = name.partition(":")
    errors: list[Exception] = []
    for whole in (module, *(f"{package_of(folder)}.{module}" for folder in _folders(home))):
        try:
            return _attribute(importlib.import_module(whole), attribute, module)
        except ModuleNotFoundError as error:
            if not _is_missing(error, whole):
                raise
            errors.append(error)
        except _NoAttribute as error:
            errors.insert(0, error)  # it tells more than that there is no such module elsewhere
    raise errors[0]


def not_trusted(names: Sequence[str]) -> str:
    """Tell that code which a folder names was not run."""
    told = ", ".join(repr(name) for name in dict.fromkeys(names))
    return (
        f"{told}: code that is not part of undrift. Reading never runs it; say --trust "
        "(trust=True in Python) if you trust whoever wrote it"
    )


_BY_NAME = ("data", "model", "algorithm", "partition", "sampler")  # a bare text names something


def foreign_names(table: Mapping[str, Any]) -> list[str]:
    """List what an experiment's table names that would run code which is not of the package."""
    bare = [{"use": table[name]} for name in _BY_NAME if name in table]
    task = table.get("task")
    loss = [{"use": task["loss"]}] if isinstance(task, Mapping) and "loss" in task else []
    engine = table.get("engine")
    address = engine.get("address") if isinstance(engine, Mapping) else None
    cluster = [] if address is None else [f"engine.address = {address}"]  # it would run our words
    return list(dict.fromkeys([*_named([*bare, *loss, *table.values()]), *cluster]))


def _named(value: Any) -> Iterator[str]:
    """Find every text that stands as the `use` of a table; of a sweep, all of them."""
    if isinstance(value, Mapping):
        used = value.get("use")
        for one in used if isinstance(used, list | tuple) else [used]:
            if isinstance(one, str) and ":" in one and one not in OURS:
                yield one
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _named(one)


def plain_module(module: str) -> str:
    """Name a module as an experiment names it, wherever its folder is.

    >>> plain_module("undrift.own._2fhome_2fme.my_parts"), plain_module("torch.nn")
    ('my_parts', 'torch.nn')
    """
    own = module.startswith(f"{__name__}.")
    return module.removeprefix(f"{__name__}.").partition(".")[2] if own else module


def package_of(folder: Path) -> str:
    """Name the package that a folder is: its path, without what a module's name cannot hold."""
    text = os.fsencode(folder.absolute())
    kept = (chr(b) if chr(b).isascii() and chr(b).isalnum() else f"_{b:02x}" for b in text)
    return f"{__name__}.{''.join(kept)}"


def _folder_of(name: str) -> str:
    """Give the folder that a package is named after."""
    return os.fsdecode(_ENCODED.sub(lambda m: chr(int(m[1], 16)), name).encode("latin-1"))


def _folders(home: Path | None) -> list[Path]:
    importlib.invalidate_caches()  # a module may have been written a moment ago
    return list(dict.fromkeys(f.absolute() for f in (home, Path.cwd()) if f is not None))


class _NoAttribute(AttributeError):
    """A module is there, but not what is looked for in it."""


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise _NoAttribute(f"module {name!r} has no attribute {attribute!r}") from error


def _is_missing(error: ModuleNotFoundError, name: str) -> bool:
    """Whether it is this very module that is not there, and not one that it imports."""
    return error.name is not None and f"{name}.".startswith(f"{error.name}.")


# ------------------------------------------------------------------------ how they are imported
class _Finder(MetaPathFinder):
    """Finds folders as packages, and lets their modules see each other."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        folder, _, module = name.removeprefix(f"{__name__}.").partition(".")
        if not module:
            made = ModuleSpec(name, None, is_package=True)
            made.submodule_search_locations = [_folder_of(folder)]
            return made
        found = PathFinder.find_spec(name, path, target)
        if found is not None and isinstance(found.loader, SourceFileLoader):
            found.loader = _Loader(found.loader.name, found.loader.path)
        return found


class _Loader(SourceFileLoader):
    """Loads a module whose `import` statements find its neighbours where nothing is installed."""

    def exec_module(self, module: ModuleType) -> None:
        folder = ".".join(self.name.split(".")[: __name__.count(".") + 2])
        own = {**vars(builtins), "__import__": partial(_import, folder)}
        module.__dict__["__builtins__"] = own
        super().exec_module(module)


def _import(
    folder: str,
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """Do what an `import` statement does; what is missing is looked for in the folder."""
    try:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    except ModuleNotFoundError as missing:
        if level or not _is_missing(missing, name):
            raise
        own = f"{folder}.{name}"
        try:
            importlib.import_module(own)
        except ModuleNotFoundError as error:
            if not _is_missing(error, own):
                raise
            raise missing from None
    if fromlist:
        return builtins.__import__(own, globals, locals, fromlist, 0)
    return sys.modules[f"{folder}.{name.partition('.')[0]}"]


sys.meta_path.insert(0, _Finder())

__all__ = ["foreign_names", "imported", "not_trusted", "package_of", "plain_module", "scope"]
