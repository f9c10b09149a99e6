"""Names in experiment files and what they stand for; records as tables and back."""

from __future__ import annotations

import inspect
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from undrift import own
from undrift import rules as rule_names
from undrift.core.algorithm import Algorithm
from undrift.core.rule import Rule
from undrift.data import Bernoulli, Everyone, Explicit, Sequential, Uniform, Weighted
from undrift.data.partitions import PARTITIONS
from undrift.errors import ConfigError, DataError, TaskError, UndriftError, unknown_name
from undrift.models import MODELS
from undrift.rules.named import catalogue, comfed
from undrift.rules.server import Adaptive
from undrift.sources import SOURCES

Names = Mapping[str, Any]

SAMPLERS: Names = {
    "uniform": Uniform,
    "bernoulli": Bernoulli,
    "sequential": Sequential,
    "weighted": Weighted,
    "explicit": Explicit,
    "everyone": Everyone,
}


@cache
def records() -> Names:
    """Every record that a sentence may hold: rules, local optimizers, aggregates, schedules."""
    listed = [getattr(rule_names, name) for name in rule_names.__all__]
    return {kind.__name__: kind for kind in [*listed, Rule] if isinstance(kind, type)}


@cache
def sections() -> Mapping[str, Names]:
    """What `use` may name, section by section."""
    return {
        "data": {name: source.load for name, source in SOURCES.items()},
        "partition": PARTITIONS,
        "model": MODELS,
        "algorithm": {"comfed": comfed, **{n: entry.build for n, entry in catalogue().items()}},
        "sampler": SAMPLERS,
    }


def find(names: Names, name: Any, kind: str, place: str) -> Any:
    """Look a name up; `package.module:attribute` imports somebody else's.

    >>> find(SAMPLERS, "Uniform", "sampler", "sampler.use").__name__
    'Uniform'
    """
    if not isinstance(name, str):
        raise ConfigError(f"{place} must be a name ({kind}), got {name!r}")
    plain = {_plain(n): n for n in reversed(list(names))}
    if _plain(name) in plain:
        return names[plain[_plain(name)]]
    if ":" in name:
        found = imported(name, place)
        if not callable(found):
            raise ConfigError(f"{place}: {name!r} is {found!r}, not a function or class")
        return found
    raise unknown_name(kind, name, list(names), place)


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def imported(name: str, place: str) -> Any:
    """Import `package.module:attribute`."""
    try:
        return own.imported(name)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{place}: cannot import {name!r} ({error}); it is looked for in the current folder "
            "and the experiment's, and among the installed packages, as package.module:name"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{place}: importing {name!r} failed: {told(error)}; put what a module does when it is "
            "run behind `if __name__ == '__main__'`"
        ) from error


def told(error: BaseException) -> str:
    """Tell an error of somebody else's code: its kind, its message, its line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


# ----------------------------------------------------------------------------------- settings
def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Name the settings that a function takes; what it hands on to `Adaptive` included."""
    known = dict(inspect.signature(function).parameters)
    open_ended = [n for n, p in known.items() if p.kind is p.VAR_KEYWORD]
    for name in open_ended:
        del known[name]
        further = inspect.signature(Adaptive).parameters
        taken = {"kind", "lr"} | (set() if "server" in known else {"server"})
        known = {**{n: p for n, p in further.items() if n not in taken}, **known}
    return known


def check_names(function: Callable[..., Any], settings: Iterable[str], place: str) -> None:
    """Refuse a setting that a function does not take, and name one that it needs."""
    known = parameters(function)
    given = list(settings)
    for name in given:
        if name not in known:
            raise unknown_name("setting", name, list(known), place)
    missing = [n for n, p in known.items() if p.default is p.empty and n not in given]
    if missing:
        raise ConfigError(f"{place}: needs the setting {missing[0]!r}, which was not given")


def make(function: Callable[..., Any], settings: Mapping[str, Any], place: str) -> Any:
    """Call a function with named settings; what it complains of gets the place in front."""
    check_names(function, settings, place)
    _check_flags(function, settings, place)
    try:
        return function(**settings)
    except (ConfigError, DataError, TaskError) as error:
        raise prefixed(error, place) from error
    except UndriftError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{place}: {told(error)}") from error


def _check_flags(function: Callable[..., Any], settings: Mapping[str, Any], place: str) -> None:
    known = parameters(function)
    for name, value in settings.items():
        if isinstance(known[name].default, bool) and not isinstance(value, bool):
            raise ConfigError(f"{place}: {name} is true or false, got {value!r}")


def prefixed(error: UndriftError, place: str) -> UndriftError:
    """Put the place in front of an error's message."""
    message = str(error)
    if type(error) not in (ConfigError, DataError, TaskError) or message.startswith(place):
        return error
    inner = re.match(r"(models|sources)\.[\w-]+: ", message)  # says the place once more
    return type(error)(f"{place}: {message[inner.end() :] if inner else message}")


def list_depth(function: Callable[..., Any], name: str) -> int:
    """Tell how deep lists may nest in a setting's own value; a list beyond that is a sweep.

    >>> from undrift.models.layers import mlp
    >>> list_depth(mlp, "hidden"), list_depth(mlp, "classes")
    (1, 0)
    """
    try:
        hints = typing.get_type_hints(getattr(function, "func", function))
    except (NameError, TypeError):
        return 0
    return _depth(hints.get(name))


def _depth(hint: Any) -> int:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return max(map(_depth, inner))
    kind = origin or hint
    if not (isinstance(kind, type) and issubclass(kind, Sequence) and kind is not str):
        return 0
    return 1 + max((_depth(i) for i in inner), default=0)


# -------------------------------------------------------------------------- records and tables
def encode(value: Any, place: str) -> Any:
    """Write a record as a table that names its class.

    >>> encode(rule_names.Prox(mu=0.5), "algorithm")
    {'use': 'Prox', 'mu': 0.5}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {"use": class_name(type(value), place), **encode_fields(value, place)}
    if isinstance(value, tuple | list):
        return [encode(v, place) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    raise ConfigError(
        f"{place}: a {type(value).__name__} cannot be written to a file: give a plain value, or "
        "make its class a record (@undrift.record)"
    )


def encode_fields(value: Any, place: str) -> dict[str, Any]:
    """Write a record's settings as a table."""
    return {f.name: encode(getattr(value, f.name), f"{place}.{f.name}") for f in fields(value)}


def class_name(kind: type, place: str) -> str:
    """Name a record's class so that `find` finds it again."""
    for names in (records(), SAMPLERS, PARTITIONS):
        for name, known in names.items():
            if known is kind:
                return name
    name = f"{own.plain_module(kind.__module__)}:{kind.__qualname__}"
    if "<locals>" in name or kind.__module__ == "__main__":
        raise ConfigError(
            f"{place}: {kind.__qualname__} is defined where an experiment cannot import it from; "
            "put it into a module of its own, or train with a Trainer"
        )
    return name


def decode(value: Any, place: str) -> Any:
    """Make the record that a table describes; lists become tuples, other values stay."""
    if isinstance(value, Mapping):
        if "use" not in value:
            raise ConfigError(f"{place}: this table needs `use`, the name of what it describes")
        kind = find(records(), value["use"], "part of an algorithm", f"{place}.use")
        settings = {k: decode(v, f"{place}.{k}") for k, v in value.items() if k != "use"}
        return make(kind, settings, place)
    if isinstance(value, list):
        return tuple(decode(v, f"{place}[{i}]") for i, v in enumerate(value))
    return value


SENTENCE = ("rules", "local", "aggregate", "server")


def decode_algorithm(table: Mapping[str, Any]) -> Algorithm:
    """Make an algorithm: by name with its settings, or as a sentence of parts.

    >>> decode_algorithm({"use": "fedprox", "lr": 0.1, "mu": 0.5}).rules
    (Prox(mu=0.5),)
    >>> decode_algorithm({"rules": [{"use": "Prox", "mu": 0.5}]}).rules
    (Prox(mu=0.5),)
    """
    settings = {k: decode(v, f"algorithm.{k}") for k, v in table.items() if k != "use"}
    if "use" not in table:
        for name in settings:
            if name not in SENTENCE:
                known = ["use", *SENTENCE]
                raise unknown_name("setting", name, known, "algorithm (without `use`: a sentence)")
        return make(Algorithm, settings, "algorithm")
    build = find(sections()["algorithm"], table["use"], "algorithm", "algorithm.use")
    made = make(build, settings, f"algorithm {table['use']!r}")
    if not isinstance(made, Algorithm):
        raise ConfigError(f"algorithm.use: {table['use']!r} gives {made!r}, not an Algorithm")
    return made


def encode_algorithm(algorithm: Algorithm) -> dict[str, Any]:
    """Write an algorithm as the sentence that it is."""
    return {n: encode(getattr(algorithm, n), f"algorithm.{n}") for n in SENTENCE}
