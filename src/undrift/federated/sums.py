"""Every answer about a table is checked before it is added to the others.

A holder's counts must be those of as many rows as it greeted with, its later answers those of its
own first one.  What is left to it are its own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from undrift.errors import DataError
from undrift.federated.wire import Malformed
from undrift.tabular import Category, Classes, Date, Flag, Question, Schema, Sums
from undrift.tabular.cells import LARGEST
from undrift.tabular.schema import Numbers
from undrift.tabular.sums import ASKED, year_of

ROUNDING = 1e-6  # relative: sums of honest holders are rounded


def checked(
    told: Any, question: Question, schema: Schema, size: int, first: Sums | None = None
) -> Sums:
    """Read an answer; `Malformed` says what no honest holder of so many rows can say.

    `first` is the same holder's answer to the first question.
    """
    try:
        made = Sums.from_json(told, schema)
    except (DataError, ArithmeticError) as error:
        raise Malformed(str(error)) from error
    if made.asks != question.asks:
        raise Malformed(f"it answers {made.asks!r}, asked was {question.asks!r}")
    if made.rows != size:
        raise Malformed(f"it adds up {made.rows} rows, and greeted with {size}")
    if question.asks == ASKED[0]:
        _check_series(made, schema)
        _check_levels(made, schema, question.least)
        return made
    assert first is not None, "the first question comes first"
    check = _check_squares if question.asks == ASKED[1] else _check_bins
    check(made, question, first)
    return made


def _check_series(made: Sums, schema: Schema) -> None:
    of_target = {schema.target} if isinstance(schema.goal, Numbers) else set()
    for name, (cells, missing, total) in made.series.items():
        if cells != int(cells) or missing != int(missing) or cells + missing != made.rows:
            raise Malformed(f"{name!r}: {cells:g} cells and {missing:g} missing of {made.rows}")
        if missing and name in of_target:
            raise Malformed(f"{name!r}: {missing:g} rows without a target")
        if abs(total) > cells * LARGEST:
            raise Malformed(f"{name!r}: a sum of {total:.6g} over {cells:g} cells")
    for name, kind in schema.features:
        year = year_of(name)
        dated = isinstance(kind, Date) and year in made.series
        if dated and made.series[year][:2] != made.series[name][:2]:
            raise Malformed(f"{name!r}: its years are not as many as its dates")


def _check_levels(made: Sums, schema: Schema, least: int) -> None:
    for name, levels in made.levels.items():
        other, missing = made.unnamed[name]
        if sum(levels.values()) + other + missing != made.rows:
            raise Malformed(f"{name!r}: its counts do not add up to {made.rows}")
        kind = schema[name]
        declared = ("false", "true") if isinstance(kind, Flag) else _declared(kind)
        if declared is not None and set(levels) != set(declared):
            raise Malformed(f"{name!r}: its levels are not those of [columns]")
        if declared is None and any(count < least for count in levels.values()):
            raise Malformed(f"{name!r}: a level is named that fewer than {least} rows have")
        if any(not level.strip() or level in schema.missing for level in levels):
            raise Malformed(f"{name!r}: a level without a name")
        closed = isinstance(kind, Flag | Classes) and declared is not None
        if closed and other:
            raise Malformed(f"{name!r}: {other} rows of other levels than [columns] names")
        if missing and name == schema.target:
            raise Malformed(f"{name!r}: {missing} rows without a target")


def _declared(kind: Any) -> tuple[str, ...] | None:
    return kind.levels if isinstance(kind, Category | Classes) else None


def _check_squares(made: Sums, question: Question, first: Sums) -> None:
    _same_names(made.series, question.given)
    for name, (squares,) in made.series.items():
        cells, _, total = first.series[name]
        mean = question.given[name][0]
        if squares > 4 * cells * LARGEST**2:
            raise Malformed(f"{name!r}: squares of {squares:.6g} over {cells:g} cells")
        # around any number they are at least those around the own mean, moved
        least = cells * (total / cells - mean) ** 2 if cells else 0.0
        size = max(abs(mean), abs(total / cells) if cells else 0.0)
        if squares < least * (1 - ROUNDING) - cells * (ROUNDING * size) ** 2:
            raise Malformed(f"{name!r}: squares of {squares:.6g}, at least {least:.6g} by its sum")


def _check_bins(made: Sums, question: Question, first: Sums) -> None:
    _same_names(made.series, question.given)
    for name, bins in made.series.items():
        if any(count != int(count) for count in bins):
            raise Malformed(f"{name!r}: a bin of no whole number of rows")
        if math.fsum(bins) != first.series[name][0]:
            raise Malformed(f"{name!r}: its bins do not add up to {first.series[name][0]:g}")


def _same_names(found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    if set(found) != set(asked):
        raise Malformed("it answers about other columns than was asked")
