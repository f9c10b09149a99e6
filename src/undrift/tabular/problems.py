"""Everything that is wrong with a table, collected and raised as one error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from undrift.errors import ConfigError, DataError

SHOWN = 10  # problems that are told in full
KEPT = 1000  # problems that are remembered
ROWS = 3  # rows that are named for one of them


class Place(NamedTuple):
    """Where rows stand, for messages."""

    source: str  # the file, or what the rows are of
    unit: str  # "line" or "row"
    numbers: NDArray[Any]  # [n]

    def named(self, rows: Sequence[int] | NDArray[Any]) -> str:
        """Name some rows.

        >>> import numpy as np
        >>> Place("t.csv", "line", np.arange(2, 9)).named([0, 2, 3, 4])
        'lines 2, 4, 5 and 1 more'
        """
        shown = [str(self.numbers[row]) for row in rows[:ROWS]]
        more = len(rows) - len(shown)
        if len(rows) == 1:
            return f"{self.unit} {shown[0]}"
        listed = f"{', '.join(shown)} and {more} more" if more else _listed(shown)
        return f"{self.unit}s {listed}"

    def take(self, rows: NDArray[Any]) -> Place:
        """Keep some rows."""
        return self._replace(numbers=self.numbers[rows])


def _listed(shown: Sequence[str]) -> str:
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


class Problems:
    """Problems of one file; `check` raises them all at once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[tuple[float, str]] = []  # where, for the order, and what
        self.more = 0  # that are counted only
        self.broken = False  # rows could not be read: what the others say is not certain

    def add(self, what: str, order: float = -1.0) -> None:
        """Note a problem of the whole file or of a column."""
        if len(self.found) < KEPT:
            self.found.append((order, what))
        else:
            self.more += 1

    def cells(
        self, place: Place, rows: NDArray[Any] | Sequence[int], column: str, what: str
    ) -> None:
        """Note a problem of some rows of a column."""
        first = float(place.numbers[rows[0]])
        self.add(f"{place.named(rows)}, column {column!r}: {what}", first)

    def take(self, others: Problems) -> None:
        """Note what others found."""
        for order, what in others.found:
            self.add(what, order)
        self.more += others.more

    def text(self) -> str:
        """Tell all problems: one in a line, several in a list."""
        lines = [what for _, what in sorted(self.found, key=lambda pair: pair[0])]
        if len(lines) == 1:
            cell = lines[0].startswith(("line", "row", "column "))
            return f"{self.source}{', ' if cell else ': '}{lines[0]}"
        total = len(lines) + self.more
        more = total - SHOWN
        shown = "".join(f"\n  {line}" for line in lines[:SHOWN])
        return f"{self.source} has {total} problems:{shown}" + (
            f"\n  ... and {more} more" if more > 0 else ""
        )

    def check(self) -> None:
        """Raise what was found, if anything was."""
        if self.found:
            raise DataError(self.text())


def one_error(place: str, found: Sequence[str]) -> ConfigError:
    """Build one error about settings from all that is wrong with them."""
    if len(found) == 1:
        return ConfigError(f"{place}: {found[0]}")
    lines = "".join(f"\n  {line}" for line in found[:SHOWN])
    more = f"\n  ... and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ConfigError(f"{place} has {len(found)} problems:{lines}{more}")
