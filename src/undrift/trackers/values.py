"""What trackers take from a run: numbers, settings and names."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any

from undrift.errors import MissingExtra
from undrift.experiment.events import Record, RunInfo

Key = tuple[str, str, int, Path | None]
Setting = bool | int | float | str


def key_of(run: RunInfo) -> Key:
    """Tell runs apart; a RunInfo itself holds tables and cannot be a key."""
    return run.name, run.label, run.seed, run.folder


def title(run: RunInfo) -> str:
    """Name a run among those of its experiment."""
    return f"{run.label}/seed-{run.seed}"


def scalars(record: Record) -> dict[str, float]:
    """Take the numbers of a record; its round is the step, lists are left out.

    >>> scalars({"round": 3, "test_loss": 0.5, "clients": [1, 2], "client_steps": 40})
    {'test_loss': 0.5, 'client_steps': 40.0}
    """
    numbers = {n: v for n, v in record.items() if isinstance(v, Real) and not isinstance(v, bool)}
    return {name: float(value) for name, value in numbers.items() if name != "round"}


def settings(tables: Mapping[str, Any]) -> dict[str, Setting]:
    """Flatten nested tables to one level, with dots between the names.

    >>> settings({"algorithm": {"lr": 0.1}, "seeds": [1, 2], "device": None})
    {'algorithm.lr': 0.1, 'seeds': '[1, 2]', 'device': 'null'}
    """
    return dict(_flat("", tables))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Setting]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)
    elif isinstance(value, bool | int | float | str):
        yield prefix, value
    else:
        yield prefix, as_json(value)


def as_json(value: Any, indent: int | None = None) -> str:
    """Write a value as JSON; what JSON does not know is written as Python shows it."""
    return json.dumps(value, indent=indent, default=repr, ensure_ascii=False)


def file_name(label: str) -> str:
    """Turn a label into the name of a folder; different labels stay different.

    >>> file_name("scaffold"), file_name("lr = 0.1/../x")
    ('scaffold', 'lr_=_0.1_.._x-88cfe5')
    """
    safe = re.sub(r"[^\w.+,=-]", "_", label)[:60].lstrip(".")
    if safe == label:
        return safe
    return f"{safe}-{hashlib.sha256(label.encode(errors='replace')).hexdigest()[:6]}"


def need(module: str, extra: str) -> Any:
    """Import an optional module, or say how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingExtra(
            f"{package} is needed for `--track {extra}` and cannot be imported ({error}): "
            f"pip install 'undrift[{extra}]'"
        ) from error
