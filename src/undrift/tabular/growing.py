"""A column of text cells while it is read: as numbers and as texts, until all cells decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrift.tabular.cells import (
    DECIMAL_COMMA,
    DIGITS,
    EXACT,
    FLAGS,
    PADDED,
    WHOLE,
    as_number,
    too_large,
)
from undrift.tabular.frames import Raw
from undrift.tabular.problems import Place, Problems

# "feature" and "target" leave the decision to the cells
Wish = Literal["feature", "target", "texts", "numbers"]
Floats = NDArray[np.float64]

MOST_TEXTS = 50  # values of a feature: each becomes an input of its own
MOST_CLASSES = 1_000  # more are hardly meant as classes, unless somebody says so
FEW = 10_000  # different numbers whose texts are kept beside them
NAN = float("nan")


class RawTable(NamedTuple):
    """The columns that were asked for, as a reader gives them."""

    place: Place
    columns: Mapping[str, Raw]


class Again(Exception):
    """A column has to be read once more, as texts."""


class Growing:
    """Grows one column, as numbers and as texts, until all its cells have decided which."""

    def __init__(self, wish: Wish, missing: Sequence[str]) -> None:
        self.wish = wish
        self.total, self.texts, self.whole, self.padded = 0, 0, True, False
        self.first: list[tuple[int, str]] = []  # rows of cells that are no numbers
        self.huge: list[tuple[int, str]] = []  # whole numbers that float64 rounds
        self.odd: Counter[str] = Counter()  # cells that are no numbers, while they are few
        self.gone = frozenset(missing)
        self.known = dict.fromkeys(missing, -1)  # texts and their codes, by first appearance
        self.dropped = wish == "numbers"  # the texts are not kept
        self._numbers: list[Floats] = []
        self._codes: list[NDArray[np.int32]] = []

    def add(self, cells: Sequence[str]) -> None:
        """Take in some more cells, without blanks around them."""
        if self.wish != "texts":
            self._add_numbers(cells)
        if not self.dropped:
            known, shift = self.known, len(self.gone)
            codes = [known.setdefault(cell, len(known) - shift) for cell in cells]
            self._codes.append(np.array(codes, dtype=np.int32))
            if not self.texts and self.wish == "feature" and len(known) > FEW:
                self.dropped, self._codes = True, []
                self.known = dict.fromkeys(self.gone, -1)
        self.total += len(cells)

    def _add_numbers(self, cells: Sequence[str]) -> None:
        values, texts = self._parsed(cells)
        for k in texts:
            self._note(self.first, k, cells[k])
            if len(self.odd) < FEW:
                self.odd[cells[k]] += 1
        self.texts += len(texts)
        self.whole = self.whole and not texts and self._all_whole(cells, values)
        with np.errstate(invalid="ignore"):
            large: list[int] = np.flatnonzero(np.abs(values) >= EXACT).tolist()
        for k in large:
            if DIGITS.fullmatch(cells[k]):
                self._note(self.huge, k, cells[k])
        drop = self.texts and self.wish != "numbers"
        self._numbers.append(values if not drop else values[:0])

    def _note(self, where: list[tuple[int, str]], row: int, cell: str) -> None:
        if len(where) < FEW:
            where.append((self.total + row, cell))

    def _all_whole(self, cells: Sequence[str], values: Floats) -> bool:
        for cell, value in zip(cells, values.tolist(), strict=True):
            if value == value and not WHOLE.fullmatch(cell):
                return False
            if cell.startswith("0") and PADDED.fullmatch(cell):
                self.padded = True
        return True

    def _parsed(self, cells: Sequence[str]) -> tuple[Floats, list[int]]:
        """Read numbers; the second list says which cells are none."""
        gone = self.gone
        if "_" not in "".join(cells):
            try:
                made = np.array([NAN if c in gone else float(c) for c in cells])
                if not np.isnan(made).any():
                    return made, []
            except ValueError:
                pass  # one of them is a text: look at each
        found = [NAN if cell in gone else as_number(cell) for cell in cells]
        # a cell that says nan in letters that are not of the missing ones is a text
        texts = [
            k
            for k, value in enumerate(found)
            if value is None or (value != value and cells[k] not in gone)
        ]
        return np.array([NAN if value is None else value for value in found]), texts

    # -- the decision ------------------------------------------------------------------------
    @property
    def present(self) -> int:
        """Count the cells that hold something."""
        return self.total - sum(int((c < 0).sum()) for c in self._codes)

    def raw(self, name: str, place: Place, problems: Problems) -> Raw:
        """Decide what the column is; what is wrong with it is noted."""
        if self.wish == "texts":
            return self._as_texts()
        if self.wish == "numbers":
            return self._as_numbers(name, place, problems)
        if not self.texts:
            as_names = self.wish == "target" and self.whole and len(self.known) > len(self.gone)
            return self._as_texts() if as_names else self._as_numbers(name, place, problems)
        if self.dropped:
            if 2 * self.texts > self.total:
                raise Again
            return self._mixed(name, place, problems)
        flags = {text.lower() for text in self.known if text not in self.gone} <= FLAGS.keys()
        commas = all(DECIMAL_COMMA.fullmatch(text) for text in self.odd)
        if not flags and (2 * self.texts <= self.present or commas):
            return self._mixed(name, place, problems)
        return self._as_texts()

    def _as_texts(self) -> Raw:
        names = tuple(text for text in self.known if text not in self.gone)
        codes = np.concatenate(self._codes) if self._codes else np.empty(0, np.int32)
        return Raw("texts", codes, names, whole=self.whole and self.wish != "texts",
                   padded=self.padded)  # fmt: skip

    def _as_numbers(self, name: str, place: Place, problems: Problems) -> Raw:
        for rows, cell in _grouped(self.first):
            problems.cells(place, rows, name, _no_number(cell))
        for rows, cell in _grouped(self.huge):
            problems.cells(place, rows, name, too_large(cell))
        return Raw("numbers", np.concatenate(self._numbers), (), self.whole, self.padded)

    def _mixed(self, name: str, place: Place, problems: Problems) -> Raw:
        """Refuse texts among numbers: a column is what all its cells are."""
        present = self.present if not self.dropped else self.total
        counts = f"{present - self.texts} of {present} cells of the column are"
        move = "leave the column out with exclude=[...] or features=[...]"
        if self.wish == "target":
            move = "say kind='classes'"
        for rows, cell in _grouped(self.first):
            said = "write decimals with a point" if DECIMAL_COMMA.fullmatch(cell) else move
            if cell.lower() in ("nan", "-nan", "+nan"):
                problems.cells(place, rows, name, f"{cell} is no finite number")
            else:
                what = f"{cell!r} is no number, but {counts}: correct it, or {said}"
                problems.cells(place, rows, name, what)
        return Raw("numbers", np.full(self.total, NAN))


def _no_number(cell: str) -> str:
    if cell.lower().lstrip("+-") == "nan":
        return f"{cell} is no finite number"
    more = "; write decimals with a point" if DECIMAL_COMMA.fullmatch(cell) else ""
    shown = cell if len(cell) <= 60 else f"{cell[:60]}..."
    return f"{shown!r} is no number{more}"


def _grouped(found: Sequence[tuple[int, str]]) -> list[tuple[list[int], str]]:
    made: dict[str, list[int]] = {}
    for row, cell in found:
        made.setdefault(cell, []).append(row)
    return [(rows, cell) for cell, rows in made.items()]
