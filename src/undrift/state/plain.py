"""Plain data as strict JSON, exact in both directions, and the difference of two configurations."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from undrift.errors import CheckpointError
from undrift.guarded.limits import Unreadable
from undrift.guarded.text import check_json, parse_json

_FLOAT = "$float"  # JSON has no NaN and no infinity: {"$float": "nan"} stands for it
ABSENT = "(absent)"
BODY = ".body"  # ends the keys of code
MOST = 12  # differences that are told


class Change(NamedTuple):
    """A dotted key, and what stands there in the two configurations."""

    key: str
    stored: str
    given: str


def to_json(value: Any, place: str) -> str:
    """Write dicts, lists, strings, numbers, booleans, None; `place` names the value in errors."""
    text = json.dumps(_to_plain(value, place), allow_nan=False)
    try:
        check_json(text)  # what could not be read back is not written
    except Unreadable as error:
        raise CheckpointError(f"{place} cannot be kept in a checkpoint ({error})") from error
    return text


def from_json(text: str) -> Any:
    """Undo `to_json`; tuples have become lists."""
    return parse_json(text, _read_float)


def _to_plain(value: Any, place: str) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, (list, tuple)):
        return [_to_plain(v, f"{place}.{k}") for k, v in enumerate(value)]
    if isinstance(value, dict):
        return {_checked_key(k, place): _to_plain(v, f"{place}.{k}") for k, v in value.items()}
    raise CheckpointError(
        f"{place} is {value!r} of type {type(value).__name__}: a checkpoint holds dicts, lists, "
        "strings, numbers, booleans and None. Convert it, or put it into `tensors`."
    )


def _checked_key(key: Any, place: str) -> str:
    # JSON would turn the key 1 into "1" without a word.
    if not isinstance(key, str) or key == _FLOAT:
        raise CheckpointError(
            f"{place} has the key {key!r}: keys must be strings other than {_FLOAT!r}. Rename it."
        )
    return key


def _read_float(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    return float(found[_FLOAT]) if found.keys() == {_FLOAT} else found


def differences(stored: Any, given: Any) -> list[Change]:
    """List where two values read by `from_json` differ, by dotted key, sorted."""
    before, after = _flatten(stored), _flatten(given)
    changes = []
    for path in sorted(before.keys() | after.keys()):
        shown = [repr(side[path]) if path in side else ABSENT for side in (before, after)]
        if ABSENT in shown or not _same(before[path], after[path]):
            changes.append(Change(".".join(path), *shown))
    return changes


def told(changes: Sequence[Change]) -> str:
    """Tell some differences, one in a line."""
    for c in changes:
        if c.key == "fingerprint":
            return (
                f"  fingerprint: stored {c.stored}, given {c.given}. Another version of undrift "
                "described it in another way,\n  so nobody can tell whether this is the same "
                "experiment. That version can finish it."
            )
    lines = [
        f"  {c.key.removesuffix(BODY)}: its code has changed"
        if c.key.endswith(BODY) and ABSENT not in (c.stored, c.given)
        else f"  {c.key}: stored {c.stored}, given {c.given}"
        for c in changes
    ]
    rest = [f"  ... and {len(lines) - MOST} more"] if len(lines) > MOST else []
    return "\n".join([*lines[:MOST], *rest])


def _flatten(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    if not items or not value:
        return {path: value}
    flat: dict[tuple[str, ...], Any] = {}
    for key, inner in items:
        flat |= _flatten(inner, (*path, str(key)))
    return flat


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)  # 1 and 1.0 are the same setting
