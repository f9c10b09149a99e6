"""A preparation of the sums of all holders."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from undrift.errors import DataError
from undrift.tabular.cells import in_order
from undrift.tabular.encoding import Goal, Part
from undrift.tabular.frames import Some
from undrift.tabular.preparation import Preparation
from undrift.tabular.schema import Category, Classes, Counts, Date, Feature, Flag, Schema
from undrift.tabular.sums import (
    LEAST,
    Sums,
    answer,
    deviations,
    first_question,
    means,
    quantile,
    second_question,
    third_question,
    year_of,
)


def agree(
    schema: Schema,
    frame: Some,
    owners: NDArray[Any] | None = None,
    *,
    least: int = LEAST,
    standardise: bool = True,
) -> Preparation:
    """Ask the three questions of the holders of a frame's rows, and prepare."""
    counts = answer(first_question(least), schema, frame, owners)
    squares = answer(second_question(counts), schema, frame, owners)
    third = third_question(schema, counts, squares)
    bins = None if third is None else answer(third, schema, frame, owners)
    return prepare(schema, counts, squares, bins, standardise=standardise)


def prepare(
    schema: Schema,
    counts: Sums,
    squares: Sums,
    bins: Sums | None = None,
    *,
    standardise: bool = True,
) -> Preparation:
    """Make a preparation of the sums of all holders."""
    maker = _Maker(schema, counts, squares, bins, standardise)
    parts = tuple(maker.part(name, kind) for name, kind in schema.features)
    return Preparation(schema, parts, maker.goal(), counts.rows)


class _Maker:
    def __init__(
        self, schema: Schema, counts: Sums, squares: Sums, bins: Sums | None, standardise: bool
    ) -> None:
        self.schema, self.counts, self.bins, self.standardise = schema, counts, bins, standardise
        self.means, self.spread = means(counts), deviations(counts, squares)

    def part(self, name: str, kind: Feature) -> Part:
        """Make the part of a column."""
        if isinstance(kind, Category):
            return self._category(name, kind)
        if isinstance(kind, Flag):
            return self._flag(name, kind)
        missing = kind.indicator and self.counts.series[name][1] > 0
        scales = [self._scale(name)]
        if isinstance(kind, Date):
            scales.append(self._scale(year_of(name)) if "year" in kind.parts else (0.0, 1.0))
        fill = kind.fill
        if not isinstance(fill, str):
            value = float(fill)
        else:
            value = {"mean": self.means[name], "zero": 0.0}.get(fill, 0.0)
        if fill == "median":
            value = self._median(name)
        return Part(name, value, tuple(scales), missing=missing)

    def _median(self, name: str) -> float:
        if self.bins is None:
            raise DataError(f"column {name!r} is filled by its median: ask the third question")
        return quantile(self.bins.series[name], 0.5, self.means[name], self.spread[name])

    def _scale(self, name: str) -> tuple[float, float]:
        return (self.means[name], self.spread[name]) if self.standardise else (0.0, 1.0)

    def _flag(self, name: str, kind: Flag) -> Part:
        yes, no = (self.counts.levels[name].get(text, 0) for text in ("true", "false"))
        fill = {"mean": yes / (yes + no) if yes + no else 0.0, "mode": float(yes > no)}
        value = float(kind.fill) if isinstance(kind.fill, bool) else fill[kind.fill]
        missing = kind.indicator and self.counts.unnamed[name][1] > 0
        return Part(name, value, missing=missing)

    def _category(self, name: str, kind: Category) -> Part:
        found = self.counts.levels[name]
        unnamed, missing = self.counts.unnamed[name]
        if kind.levels is not None:
            levels = kind.levels
        else:
            frequent = sorted(found, key=lambda level: (-found[level], level))
            levels = in_order(frequent[: kind.most])
        other = unnamed > 0 or any(found[level] for level in found if level not in levels)
        mode = None
        if kind.fill == "mode" and levels:
            mode = max(levels, key=lambda level: found.get(level, 0))
        own = kind.fill == "missing" and missing > 0
        return Part(name, levels=tuple(levels), filled=mode, other=other, missing=own)

    def goal(self) -> Goal:
        """Make the target."""
        name, kind = self.schema.target, self.schema.goal
        if isinstance(kind, Classes):
            names, found = self._classes(name, kind), self.counts.levels[name]
            return Goal(name, kind.kind, names, counts=tuple(found.get(n, 0) for n in names))
        if isinstance(kind, Counts) or not self.standardise:
            return Goal(name, kind.kind)
        return Goal(name, kind.kind, (), self.means[name], self.spread[name])

    def _classes(self, name: str, kind: Classes) -> tuple[str, ...]:
        unnamed, _ = self.counts.unnamed[name]
        if kind.levels is not None:
            if unnamed:
                known = ", ".join(kind.levels[:8])
                raise DataError(
                    f"column {name!r}: {unnamed} rows hold a class that [columns] does not name; "
                    f"its levels are {known}"
                )
            return kind.levels
        found = in_order(self.counts.levels[name])
        if unnamed:
            raise DataError(
                f"column {name!r}: {unnamed} rows are of classes that too few rows of a client "
                "have to be named: declare the levels of the target in [columns]"
            )
        if len(found) < 2:
            held = f"one class only ({found[0]!r})" if found else "no class"
            raise DataError(f"column {name!r} holds {held}: there is nothing to tell apart")
        return found
