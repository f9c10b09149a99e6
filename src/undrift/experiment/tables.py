"""Experiment files as plain nested tables: read, write, override one value by its dotted name."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from undrift.errors import ConfigError
from undrift.guarded.limits import Unreadable
from undrift.guarded.text import parse_toml, read_text

Table = dict[str, Any]

LINES = ("columns",)  # a section whose tables are written in one line each
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def read_table(path: Path) -> Table:
    """Read a TOML file."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file: an experiment is a text file of its own")
        text = read_text(path, "toml_bytes")
    except Unreadable as error:
        raise ConfigError(f"{path} is no experiment file: {error}") from error
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot read the experiment file {path}: {cause}") from error
    return parse_table(text, str(path))


def parse_table(text: str, place: str) -> Table:
    """Parse TOML text.

    >>> parse_table("rounds = 3", "here")
    {'rounds': 3}
    """
    try:
        return parse_toml(text)
    except Unreadable as error:
        raise ConfigError(f"{place}: this is not TOML: {error}") from error


# ---------------------------------------------------------------------------------- overrides
def override(table: Mapping[str, Any], changes: Sequence[str]) -> Table:
    """Set values by `dotted.name=value`; a list, or values with commas between, make a sweep.

    >>> override({"algorithm": {"lr": 0.1}}, ["algorithm.lr=0.05,0.1", "data.use=digits"])
    {'algorithm': {'lr': [0.05, 0.1]}, 'data': {'use': 'digits'}}
    """
    made = copy.deepcopy(dict(table))
    for change in changes:
        name, equals, text = change.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"{change!r} is no setting: write section.name=value, e.g. rounds=10")
        _set(made, keys, parse_value(text.strip()), name.strip())
    return made


def parse_value(text: str) -> Any:
    """Read a value as TOML does; a word without quotes is a text.

    >>> parse_value("true"), parse_value("fedavg"), parse_value("1,2"), parse_value("{use='mlp'}")
    (True, 'fedavg', [1, 2], {'use': 'mlp'})
    """
    try:
        found = parse_toml(f"value = {text}")
        if set(found) == {"value"}:
            return found["value"]
    except Unreadable:
        pass
    if "," in text and not text.lstrip().startswith(("[", "{", '"', "'")):
        return [parse_value(part.strip()) for part in text.split(",") if part.strip()]
    if text.startswith(("[", "{", '"', "'")):
        raise ConfigError(
            f"cannot read the value {text[:200]!r}: inside brackets it must be TOML, quotes around "
            "words and every bracket closed"
        )
    return text


def _set(table: Table, keys: Sequence[str], value: Any, name: str) -> None:
    first, *rest = keys
    if not rest:
        table[first] = value
        return
    inner = table.setdefault(first, {})
    # an array of tables is a sweep: the setting holds in each of them
    for one in inner if isinstance(inner, list) else [inner]:
        if not isinstance(one, dict):
            raise ConfigError(f"{name}: {first!r} is the value {one!r} and has no settings inside")
        _set(one, rest, value, name)


# ------------------------------------------------------------------------------------ writing
def write_table(table: Mapping[str, Any]) -> str:
    """Write TOML that reads back to the same table; None is left out.

    >>> print(write_table({"rounds": 3, "model": {"use": "mlp", "hidden": [32]}}), end="")
    rounds = 3
    <BLANKLINE>
    [model]
    use = "mlp"
    hidden = [32]
    """
    return "\n\n".join(_sections(table, ())).strip("\n") + "\n"


def _sections(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    inner = {k: v for k, v in table.items() if isinstance(v, Mapping) and path != LINES}
    plain = {k: v for k, v in table.items() if v is not None and k not in inner}
    head = [f"[{'.'.join(map(write_key, path))}]"] if path and (plain or not inner) else []
    lines = [*head, *(f"{write_key(k)} = {write_value(v)}" for k, v in plain.items())]
    below = [text for k, v in inner.items() for text in _sections(v, (*path, k))]
    return [*(["\n".join(lines)] if lines else []), *below]


def write_key(name: str) -> str:
    """Write the name of a setting as TOML.

    >>> print(write_key("age"), write_key("blood group"))
    age "blood group"
    """
    return name if _BARE.fullmatch(name) else _text(name)


def write_value(value: Any) -> str:
    """Write one value as TOML.

    >>> write_value([0.1, {"use": "Prox", "mu": 1.0}])
    '[0.1, { use = "Prox", mu = 1.0 }]'
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Mapping):
        pairs = (f"{write_key(k)} = {write_value(v)}" for k, v in value.items() if v is not None)
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(write_value(v) for v in value)}]"
    raise ConfigError(f"{value!r} cannot be written to an experiment file: name it instead")


def _float(value: float) -> str:
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    text = repr(value)
    return text if set(text) & set(".en") else text + ".0"


def _text(value: str) -> str:
    named = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return f'"{"".join(named.get(c, c if c.isprintable() else _escaped(c)) for c in value)}"'


def _escaped(c: str) -> str:
    return f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"


# ----------------------------------------------------------------------------------- comparing
def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name every value by its dotted path; lists stay whole.

    >>> flatten({"algorithm": {"local": {"lr": 0.1}}, "rounds": 3})
    {'algorithm.local.lr': 0.1, 'rounds': 3}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flatten(value, name + ".")
        elif value is not None:
            found[name] = value
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Tell where two tables differ, one line each.

    >>> differences({"a": {"lr": 0.1}}, {"a": {"lr": 0.2}, "b": 1})
    ['a.lr: 0.1 there, 0.2 now', 'b: not set there, 1 now']
    >>> differences({"rules": [{"mu": 1.0}]}, {"rules": [{"mu": 2.0}]})
    ['rules[0].mu: 1.0 there, 2.0 now']
    """
    was, now = flatten(old), flatten(new)

    def told(values: dict[str, Any], name: str) -> str:
        return write_value(values[name]) if name in values else "not set"

    found = []
    for name in [*was, *(n for n in now if n not in was)]:
        pair = was.get(name), now.get(name)
        if told(was, name) == told(now, name):
            continue
        if _are_tables(*pair):  # a chain of rules: which of them, and what of it
            for i, (a, b) in enumerate(zip(*pair, strict=True)):  # type: ignore[arg-type]
                found += [f"{name}[{i}].{line}" for line in differences(a, b)]
        else:
            found.append(f"{name}: {told(was, name)} there, {told(now, name)} now")
    return found


def _are_tables(one: Any, other: Any) -> bool:
    both = (one, other)
    lists = all(isinstance(v, list | tuple) for v in both) and len(one) == len(other)
    return lists and all(isinstance(part, Mapping) for v in both for part in v)
