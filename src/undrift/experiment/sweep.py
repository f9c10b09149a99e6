"""Lists make a sweep: one table with lists in it becomes many tables without."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from undrift.errors import ConfigError, UndriftError
from undrift.experiment.names import find, list_depth, records, sections
from undrift.experiment.tables import Table, write_value
from undrift.rules.named import comfed_name

MOST = 10_000  # variants of one file
_STRANGE = re.compile(r"[^\w .,=+@()\[\]-]")

Path = tuple[str, ...]
Found = tuple[Path, list[Any]]


class Variant(NamedTuple):
    """One combination of a sweep."""

    table: Table
    label: str  # tells it from the others; seeds do not count


def expand(table: Mapping[str, Any]) -> list[Variant]:
    """Write out every combination of the lists in a table.

    >>> [v.label for v in expand({"algorithm": {"use": ["fedavg", "scaffold"], "lr": 0.1}})]
    ['fedavg', 'scaffold']
    """
    pending: list[tuple[Table, tuple[Path, ...]]] = [(copy.deepcopy(dict(table)), ())]
    done: list[tuple[Table, tuple[Path, ...]]] = []
    while pending:
        one, swept = pending.pop()
        found = next(_sweeps(one), None)
        if found is None:
            done.append((one, swept))
        else:
            path, values = found
            if len(pending) + len(done) + len(values) > MOST:  # before copies are made
                raise ConfigError(
                    f"this sweep has more than {MOST} combinations, with {len(values)} values of "
                    f"{'.'.join(path)}: shorten its lists"
                )
            pending += [(_with(one, path, v), (*swept, path)) for v in reversed(values)]
    return _labelled(done)


def _sweeps(table: Table) -> Iterator[Found]:
    """Find the lists that are sweeps, one after the other; `use` decides what others mean."""
    for key, value in table.items():
        if isinstance(value, list):
            yield (key,), _checked((key,), value)
        elif isinstance(value, dict):
            yield from _inside(value, (key,), _function(key, value))


def _inside(table: Table, path: Path, function: Callable[..., Any] | None) -> Iterator[Found]:
    for key in sorted(table, key=lambda k: k != "use"):
        value, here = table[key], (*path, key)
        if isinstance(value, dict):
            yield from _inside(value, here, _record(value))
        elif isinstance(value, list) and _is_sweep(value, here, function):
            yield here, _checked(here, value)


_LISTS = {
    *(("algorithm", "rules"), ("evaluate", "models"), ("evaluate", "metrics")),
    ("task", "class_weights"),
}


def _is_sweep(value: list[Any], path: Path, function: Callable[..., Any] | None) -> bool:
    own = list_depth(function, path[-1]) if function is not None else 0
    column = path[0] == "columns" and path[-1] in ("levels", "parts")
    return _nesting(value) > max(own, 1 if path in _LISTS or column else 0)


def _nesting(value: Any) -> int:
    return 1 + max(map(_nesting, value), default=0) if isinstance(value, list) else 0


def _checked(path: Path, value: list[Any]) -> list[Any]:
    if not value:
        raise ConfigError(f"{'.'.join(path)} = []: an empty list leaves nothing to run")
    return value


def _function(section: str, table: Table) -> Callable[..., Any] | None:
    names, use = sections().get(section), table.get("use")
    if names is None or not isinstance(use, str):
        return None
    try:
        found: Callable[..., Any] = find(names, use, section, section)
        return found
    except UndriftError:
        return None  # building the experiment says what is wrong


def _record(table: Table) -> Callable[..., Any] | None:
    try:
        found: Callable[..., Any] = find(records(), table.get("use"), "part", "")
        return found
    except UndriftError:
        return None


def _with(table: Table, path: Path, value: Any) -> Table:
    """Exchange one value; tables on its path are copied, everything else is shared."""
    first, *rest = path
    return {**table, first: _with(table[first], tuple(rest), value) if rest else value}


# -------------------------------------------------------------------------------------- labels
POLICY = "policy.safetensors"  # every trained one: its folder has the name


def algorithm_label(table: Mapping[str, Any]) -> str:
    """Give an algorithm's short name.

    >>> algorithm_label({"use": "comfed", "client": "prox", "server": "yogi"})
    'proxyogi'
    """
    if "label" in table:
        return str(table["label"])
    use = str(table.get("use", "sentence"))
    if use == "comfed":
        return comfed_name(str(table.get("client", "sgd")), str(table.get("server", "sgd")))
    return use.rpartition(":")[2]  # of somebody else's module, its own name


_IN_THE_NAME = {("algorithm",), ("algorithm", "use"), ("algorithm", "label"), ("seed",)}
_COMFED = {("algorithm", "client"), ("algorithm", "server")}


def _labelled(found: list[tuple[Table, tuple[Path, ...]]]) -> list[Variant]:
    variants = [Variant(table, _label(table, swept)) for table, swept in found]
    names: dict[str, Table] = {}
    for variant in variants:
        bare = {k: v for k, v in variant.table.items() if k != "seed"}
        if names.setdefault(variant.label, bare) != bare:
            raise ConfigError(
                f"two variants are called {variant.label!r}: give each [[algorithm]] a `label`"
            )
    return variants


def _label(table: Table, swept: tuple[Path, ...]) -> str:
    if "label" in table:
        return str(table["label"])
    algorithm = table.get("algorithm", {})
    algorithm = {"use": algorithm} if isinstance(algorithm, str) else algorithm
    algorithm = algorithm if isinstance(algorithm, dict) else {}
    known = _IN_THE_NAME | (_COMFED if algorithm.get("use") == "comfed" else set())
    settings = [f"{_short(p)}={_value(table, p)}" for p in dict.fromkeys(swept) if p not in known]
    return _STRANGE.sub("_", " ".join([algorithm_label(algorithm), *settings]))[:100]


def _short(path: Path) -> str:
    return path[-1] if path[-1] != "use" else path[0]


def _value(table: Table, path: Path) -> str:
    inner: Any = table
    for key in path:
        inner = inner[key]
    if isinstance(inner, dict):
        return str(inner.get("use", "table"))
    if isinstance(inner, str):  # of a module's function its name, of a file its stem
        file = PurePath(inner)
        own = file.parent.name if file.name == POLICY and file.parent.name else file.stem
        return own if "/" in inner else inner.rpartition(":")[2]
    return write_value(inner).replace('"', "")
