"""What is noticeable about a column: identifiers, and columns that tell the target."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undrift.tabular.frames import Raw

FEW_ROWS = 20  # below, chance makes a column look like anything
ID_NAME = re.compile(r"(^|[_\W])(id|ids|nr|no|key|index|uuid|number)$|^(id|key)[_\W]", re.I)
SAME = 0.99999  # a correlation that is no chance

Codes = NDArray[np.int64]


def codes_of(raw: Raw) -> tuple[Codes, int]:
    """Number the values of a column, -1 where it is missing; and count them."""
    if raw.form == "texts":
        used = np.unique(raw.values[raw.values >= 0])
        return raw.values.astype(np.int64), len(used)
    there = ~np.isnan(raw.values)
    known, inner = np.unique(raw.values[there], return_inverse=True)
    made = np.full(len(raw.values), -1, dtype=np.int64)
    made[there] = inner
    return made, len(known)


def is_identifier(name: str, raw: Raw, distinct: int, present: int) -> bool:
    """Tell whether a column names its rows: texts that hardly repeat, or numbers that count."""
    if present < FEW_ROWS:
        return False
    if raw.form == "texts":
        return distinct > 50 and 2 * distinct > present
    if raw.form != "numbers" or distinct < present or not _all_whole(raw.values):
        return False
    counting = np.nanmax(raw.values) - np.nanmin(raw.values) == present - 1
    return bool(counting) or ID_NAME.search(name) is not None


def _all_whole(values: NDArray[Any]) -> bool:
    there = values[~np.isnan(values)]
    return bool((there == np.floor(there)).all())


def tells_target(raw: Raw, target: Raw) -> str | None:
    """Say how a column gives the target away, if it does."""
    if target.form == "texts":
        return _tells_class(raw, target)
    if raw.form != "numbers":
        return None
    both = ~np.isnan(raw.values) & ~np.isnan(target.values)
    x, y = raw.values[both], target.values[both]
    if len(x) < FEW_ROWS or x.min() == x.max() or y.min() == y.max():
        return None
    if np.array_equal(x, y):
        return "equals the target"
    close = abs(float(np.corrcoef(x, y)[0, 1])) > SAME
    return "is the target on another scale" if close else None


def _tells_class(raw: Raw, target: Raw) -> str | None:
    y, _ = codes_of(target)
    x, distinct = codes_of(raw)
    known = y >= 0
    gone = (x < 0)[known]
    if gone.any() and _determines(gone.astype(np.int64), y[known]):
        return "is missing exactly where the target says so"
    both = known & (x >= 0)
    x, y = x[both], y[both]
    classes = len(np.unique(y))
    if len(x) < FEW_ROWS or classes < 2:
        return None
    if distinct == classes and _determines(x, y):
        return "equals the target: each of its values stands for one class"
    if len(x) >= 5 * distinct and _determines(x, y):
        return "determines the target: each of its values occurs with one class only"
    if raw.form == "numbers" and _separates(raw.values[both], y, classes):
        return "separates the classes without an error"
    return None


def _determines(x: Codes, y: Codes) -> bool:
    pairs = np.unique(x * (y.max() + 1) + y)
    return len(pairs) == len(np.unique(x)) and len(np.unique(y)) > 1


def _separates(values: NDArray[Any], y: Codes, classes: int) -> bool:
    order = np.argsort(values, kind="stable")
    known, places = np.unique(values[order], return_inverse=True)
    y = y[order]
    if len(np.unique(places * classes + np.unique(y, return_inverse=True)[1])) > len(known):
        return False  # a value occurs with two classes
    return int((y[1:] != y[:-1]).sum()) == classes - 1
