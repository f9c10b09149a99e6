"""Columns of a table: what the cells of a whole column are, and what is wrong with one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrift.errors import DataError

Wish = Literal["feature", "target", "names", "numbers", "flags"]  # the first two: decide
Kind = Literal["numbers", "flags", "names"]
Floats = NDArray[np.float64]
Codes = NDArray[np.int64]

MOST_TEXTS = 50  # values of a feature: each becomes a column of its own
MOST_CLASSES = 1_000  # more are hardly meant as classes, unless somebody says so
EXACT = 2**53  # whole numbers below are exact in float64
EMPTY_CELL = "the cell is empty; fill it or drop the row"
LARGEST = float(np.finfo(np.float32).max)
LIMITS: Mapping[str, float] = {"feature": MOST_TEXTS, "target": MOST_CLASSES}

WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)
DIGITS = re.compile(r"[+-]?\d+", re.ASCII)
FLAGS = {"true": 1.0, "false": 0.0}


class Column(NamedTuple):
    """One column: numbers, or codes of names."""

    kind: Kind
    values: NDArray[Any]  # [n] float64, or int64 codes
    names: tuple[str, ...] = ()


class Place(NamedTuple):
    """Where rows stand in a file, for messages."""

    path: Path
    unit: str  # "line" or "row"
    numbers: Codes  # [n]

    def error(self, row: int, column: str, what: str) -> DataError:
        """Build the error for one cell."""
        return at(self.path, f"{self.unit} {self.numbers[row]}", column, what)


class Table(NamedTuple):
    """The columns that were asked for."""

    place: Place
    columns: Mapping[str, Column]


def at(path: Path, where: str, column: str, what: str) -> DataError:
    """Build the error for one cell: file, line and column."""
    return DataError(f"{path}, {where}, column {column!r}: {what}")


def as_number(cell: str) -> float | None:
    """Read a number; Python's own float takes 1_000 too, which is more likely a code."""
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names: whole numbers by value, anything else by letters.

    >>> in_order({"10", "9", "1"}), in_order({"10", "9", "b"})
    (('1', '9', '10'), ('10', '9', 'b'))
    """
    listed = sorted(names)
    if all(WHOLE.fullmatch(name) for name in listed):
        listed.sort(key=int)
    return tuple(listed)


class Builder:
    """Grows one column, as numbers and as names, until all its cells have decided which."""

    def __init__(self, wish: Wish) -> None:
        self.wish, self.limit = wish, LIMITS.get(wish, np.inf)
        self.total, self.texts, self.whole = 0, 0, True  # cells; those that are no numbers
        self.first: dict[str, tuple[int, str]] = {}  # first text and first huge cell, with line
        self.known: dict[str, int] = {}  # names and their codes, by first appearance
        self._numbers: list[Floats] = []
        self._codes: list[Codes] = []

    def add(self, cells: Sequence[str], lines: Sequence[int]) -> None:
        """Take in some more cells."""
        self.total += len(cells)
        if self.wish != "names":
            self._add_numbers(cells, lines)
        if self.wish != "numbers" and len(self.known) <= self.limit:
            known = self.known
            codes = [known.setdefault(cell, len(known)) for cell in cells]
            self._codes.append(np.array(codes))

    def _add_numbers(self, cells: Sequence[str], lines: Sequence[int]) -> None:
        values, texts = _parsed(cells)
        self.texts += len(texts)
        self.whole = self.whole and all(map(WHOLE.fullmatch, cells))
        large: list[int] = np.flatnonzero(np.abs(values) >= EXACT).tolist()
        huge = [k for k in large if DIGITS.fullmatch(cells[k])]
        for what, found in (("text", texts), ("huge", huge)):
            if found:
                self.first.setdefault(what, (lines[found[0]], cells[found[0]]))
        self._numbers.append(values if not self.texts else values[:0])

    def column(self, name: str, path: Path) -> Column:
        """Decide what the column is, and make it."""
        kind = decide(name, self, path)
        if kind == "numbers":
            return Column(kind, np.concatenate(self._numbers))
        names, codes = tuple(self.known), np.concatenate(self._codes)
        if kind == "flags":
            return Column(kind, np.array([FLAGS[n.lower()] for n in names])[codes])
        return coded(names, codes)


def _parsed(cells: Sequence[str]) -> tuple[Floats, list[int]]:
    """Read numbers; the second list says which cells are none."""
    if "_" not in "".join(cells):
        try:
            return np.fromiter(map(float, cells), np.float64, len(cells)), []
        except ValueError:
            pass  # one of them is a text: look at each
    found = [as_number(cell) for cell in cells]
    values = np.array([0.0 if value is None else value for value in found])
    return values, [k for k, value in enumerate(found) if value is None]


def coded(names: Sequence[str], codes: NDArray[Any]) -> Column:
    """Make a column of names, whose codes follow their order."""
    ordered = in_order(set(names))
    place = {name: k for k, name in enumerate(ordered)}
    return Column("names", np.array([place[name] for name in names])[codes], ordered)


DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


def decide(name: str, seen: Builder, path: Path) -> Kind:
    """Decide what a column of cells is, by all of them."""
    wish = seen.wish
    if wish == "names":
        return "names"
    if wish in ("numbers", "flags"):
        return _as_wished(name, wish, seen, path)
    if _only_flags(seen):
        return "names" if wish == "target" else "flags"
    if 0 < 2 * seen.texts <= seen.total:
        raise _no_number(name, seen, path)
    if seen.texts and all(DECIMAL_COMMA.fullmatch(text) for text in seen.known):
        raise _no_number(name, seen, path)
    if seen.texts or (wish == "target" and seen.whole):
        if len(seen.known) > seen.limit:
            raise too_many(name, wish, path)
        return "names"
    return _as_wished(name, "numbers", seen, path)


def _only_flags(seen: Builder) -> bool:
    return seen.texts == seen.total and {known.lower() for known in seen.known} <= FLAGS.keys()


def _as_wished(name: str, wish: Wish, seen: Builder, path: Path) -> Kind:
    """Refuse a column that is not what it has to be."""
    if wish == "flags":
        if not _only_flags(seen):
            raise DataError(f"{path}, column {name!r} must hold true and false only")
        return "flags"
    if seen.texts:
        raise _no_number(name, seen, path)
    if "huge" in seen.first:
        line, cell = seen.first["huge"]
        raise at(path, f"line {line}", name, too_large(cell))
    return "numbers"


def too_large(number: object) -> str:
    """Say that a number is too large."""
    return (
        f"{number} is too large to be kept exactly: leave the column out with features=[...], or "
        "scale it first"
    )


def _no_number(name: str, seen: Builder, path: Path) -> DataError:
    line, cell = seen.first["text"]
    moves = {"target": "kind='classes'", "feature": "leave the column out with features=[...]"}
    move = moves.get(seen.wish, "choose another kind")
    if DECIMAL_COMMA.fullmatch(cell):
        move = "write decimals with a point"
    counts = f"{seen.total - seen.texts} of {seen.total} cells of the column are"
    what = f"{cell!r} is no number, but {counts}: correct it, or {move}"
    return at(path, f"line {line}", name, what)


def too_many(name: str, wish: Wish, path: Path) -> DataError:
    """Build the error for a column of too many different values."""
    most, move = MOST_TEXTS, "leave it out with features=[...]"
    if wish == "target":
        most, move = MOST_CLASSES, "say kind='classes' if they are classes, or kind='numbers'"
    return DataError(f"{path}, column {name!r} holds more than {most} different values: {move}")


def check_numbers(table: Table) -> None:
    """Refuse NaN, infinity and what is too large for float32, with line and column."""
    for name, column in table.columns.items():
        if column.kind != "numbers":
            continue
        bad = np.flatnonzero(~(np.abs(column.values) <= LARGEST))  # NaN compares false
        if len(bad):
            value = column.values[bad[0]]
            what = too_large(value) if np.isfinite(value) else f"{value} is no finite number"
            raise table.place.error(int(bad[0]), name, what)
