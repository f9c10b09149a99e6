"""The meaning of one cell: missing, a number, a flag, a date; the same for every reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
EXACT = 2**53  # whole numbers below are exact in float64
LARGEST = float(np.finfo(np.float32).max)

WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)
DIGITS = re.compile(r"[+-]?\d+", re.ASCII)
PADDED = re.compile(r"[+-]?0\d+", re.ASCII)  # 007 is rather a code than a number
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
FLAGS = {"true": True, "false": False}
FLAG_TEXTS = {**FLAGS, "yes": True, "no": False, "1": True, "0": False, "1.0": True, "0.0": False}


# ------------------------------------------------------------------------------------- numbers
def as_number(cell: str) -> float | None:
    """Read a number; Python's own float takes 1_000 too, which is more likely a code.

    >>> as_number("1e3"), as_number("1_000"), as_number("12a")
    (1000.0, None, None)
    """
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def too_large(number: object) -> str:
    """Say that a number is too large."""
    text = str(number)
    shown = text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"
    return f"{shown} is too large to be kept exactly: leave the column out, or scale it first"


def plain_number(text: str) -> str:
    """Write a number in one way, so that 1, 1.0 and 01 are the same level.

    >>> plain_number("1.0"), plain_number("1.50"), plain_number("A")
    ('1', '1.5', 'A')
    """
    value = as_number(text)
    if value is None or not np.isfinite(value):
        return text
    return str(int(value)) if value == int(value) else repr(value)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names: whole numbers by value, anything else by letters.

    >>> in_order({"10", "9", "1"}), in_order({"10", "9", "b"})
    (('1', '9', '10'), ('10', '9', 'b'))
    """
    listed = sorted(names)
    if all(WHOLE.fullmatch(name) for name in listed):
        listed.sort(key=int)
    return tuple(listed)


# --------------------------------------------------------------------------------------- dates
_CLOCK = r"(?:[ T](\d{1,2}):(\d{2})(?::(\d{2})(?:\.\d+)?)?)?"
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}(?:[ T]\d{2}:\d{2}.*)?", re.ASCII)
_ZONE = re.compile(r"(?:Z|[+-]\d{2}:?\d{2})$")


def _iso(text: str) -> float | None:
    if not _ISO.fullmatch(text):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _written(pattern: str, order: tuple[int, int, int]) -> Callable[[str], float | None]:
    """Read dates of numbers in another order; `order` says which group is year, month, day."""
    compiled = re.compile(pattern + _CLOCK, re.ASCII)

    def read(text: str) -> float | None:
        found = compiled.fullmatch(text)
        if found is None:
            return None
        parts = [int(part or 0) for part in found.groups()]
        year, month, day = (parts[k] for k in order)
        hour, minute, second = parts[3:6]
        try:
            return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
        except ValueError:
            return None

    return read


# seconds since 1970 in UTC, by the name of a format; a time without a zone is taken as it stands
FORMATS: Mapping[str, Callable[[str], float | None]] = {
    "iso": _iso,
    "d.m.Y": _written(r"(\d{1,2})\.(\d{1,2})\.(\d{4})", (2, 1, 0)),
    "d/m/Y": _written(r"(\d{1,2})/(\d{1,2})/(\d{4})", (2, 1, 0)),
    "m/d/Y": _written(r"(\d{1,2})/(\d{1,2})/(\d{4})", (2, 0, 1)),
    "Y/m/d": _written(r"(\d{4})/(\d{1,2})/(\d{1,2})", (0, 1, 2)),
}


def date_formats(texts: Iterable[str]) -> tuple[str, ...]:
    """Name the formats that every text fits: none, one, or two where days look like months.

    >>> date_formats(["2024-01-31"]), date_formats(["31.1.2024"]), date_formats(["3/4/2024"])
    (('iso',), ('d.m.Y',), ('d/m/Y', 'm/d/Y'))
    """
    left = dict(FORMATS)
    for text in texts:
        left = {name: read for name, read in left.items() if read(text) is not None}
        if not left:
            break
    return tuple(left) if len(left) < len(FORMATS) else ()


def has_zone(text: str) -> bool:
    """Tell whether a time says its zone.

    >>> has_zone("2024-01-31T10:00Z"), has_zone("2024-01-31")
    (True, False)
    """
    return len(text) > 10 and _ZONE.search(text) is not None


def written_time(seconds: float) -> str:
    """Write a time as ISO text, as a level or in a message."""
    found = np.datetime64(int(seconds), "s")
    text = str(found)
    return text.removesuffix("T00:00:00")


def text_of(value: Any) -> str:
    """Write one value of a file with types, or of Python, as a cell."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating):
        return repr(float(value))
    return str(value).strip()
