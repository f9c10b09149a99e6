"""How the columns of a table become inputs and targets: made from sums, saved as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.errors import DataError
from undrift.tabular.cells import in_order
from undrift.tabular.frames import Column, Frame, Some
from undrift.tabular.problems import Problems
from undrift.tabular.schema import Category, Classes, Counts, Date, Feature, Flag, Number, Schema
from undrift.tabular.sums import (
    DAY,
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
    years,
)

BLOCK = 8192  # rows that are encoded at a time: they stay in the processor's cache
CYCLES = {"month": 12.0, "day": 31.0, "weekday": 7.0, "hour": 24.0}
VERSION = 1

Floats = NDArray[np.float64]
Inputs = NDArray[np.float32]


class Goal(NamedTuple):
    """The target: classes, or numbers that are `encoded * std + mean` in their own units."""

    name: str
    kind: str  # "classes", "number" or "count"
    class_names: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Part:
    """How one column becomes inputs."""

    name: str
    fill: float = 0.0  # numbers, flags, dates (days): what stands where a cell is missing
    scales: tuple[tuple[float, float], ...] = ()  # mean and deviation: numbers; time and year
    levels: tuple[str, ...] = ()
    filled: str | None = None  # the level that stands where a cell is missing
    other: bool = False  # an input for levels that are not listed
    missing: bool = False  # an input that says that the cell is missing


@dataclass(frozen=True)
class Preparation:
    """How frames become inputs and targets; the same for every holder.

    An input that no training row would set (a level "other", an indicator) is left out: such a
    cell of a new row makes zeros.
    """

    schema: Schema
    parts: tuple[Part, ...]
    target: Goal
    rows: int  # that it was made from

    # -- what comes out ----------------------------------------------------------------------
    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Name every input."""
        return tuple(name for _, kind, part in self._columns() for name in _names(kind, part))

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Count the inputs of each column, in order."""
        return tuple(len(_names(kind, part)) for _, kind, part in self._columns())

    @property
    def inputs(self) -> int:
        """Count the inputs."""
        return sum(self.blocks)

    @property
    def classes(self) -> int:
        """Count the classes; 0 for numbers."""
        return len(self.target.class_names)

    def scales(self) -> tuple[tuple[float, float], ...]:
        """Give mean and deviation of each input: (0, 1) where it is not scaled."""
        made: list[tuple[float, float]] = []
        for _, kind, part in self._columns():
            mine = dict(_scaled_names(kind, part))
            made += [mine.get(name, (0.0, 1.0)) for name in _names(kind, part)]
        return tuple(made)

    # -- encoding ----------------------------------------------------------------------------
    def encode(self, frame: Frame, rows: NDArray[Any] | None = None) -> Inputs:
        """Make the inputs of a frame, [n, inputs]; `rows` chooses some by their indices."""
        chosen = np.arange(len(frame)) if rows is None else rows
        # numpy asks for large pages where memory is not zeroed yet
        x = np.empty((len(chosen), self.inputs), dtype=np.float32)
        steps = [_Encoder(kind, part, frame[name]) for name, kind, part in self._columns()]
        for start in range(0, len(chosen), BLOCK):
            block = chosen[start : start + BLOCK]
            some = x[start : start + BLOCK]
            some.fill(0)
            at = 0
            for step, width in zip(steps, self.blocks, strict=True):
                step.write(block, some[:, at : at + width])
                at += width
        return x

    def encode_target(self, frame: Frame, rows: NDArray[Any] | None = None) -> Tensor:
        """Make the targets of a frame: int64 [n], or float32 [n, 1]."""
        held = frame if rows is None else Frame(
            {self.target.name: frame[self.target.name].take(rows)}, frame.place.take(rows)
        )  # fmt: skip
        column = held[self.target.name]
        problems = Problems(frame.place.source)
        missing = np.flatnonzero(column.empty)
        if len(missing):
            problems.cells(held.place, missing, self.target.name, "the target is missing")
        if self.target.kind != "classes":
            problems.check()
            values = column.values - self.target.mean
            values = values / self.target.std if self.target.std else np.zeros_like(values)
            return torch.from_numpy(values.astype(np.float32))[:, None]
        codes = _coded(column, self.target.class_names)
        strange = np.flatnonzero((codes < 0) & ~column.empty)
        assert column.names is not None
        for code in np.unique(column.values[strange]):
            known = ", ".join(self.target.class_names[:8])
            what = f"{column.names[code]!r} is no class that is known: {known}"
            problems.cells(
                held.place, strange[column.values[strange] == code], self.target.name, what
            )
        problems.check()
        return torch.from_numpy(codes.astype(np.int64))

    def _columns(self) -> Iterator[tuple[str, Feature, Part]]:
        for (name, kind), part in zip(self.schema.features, self.parts, strict=True):
            yield name, kind, part

    # -- plain data --------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """Give plain data."""
        return {
            "undrift_preparation": VERSION,
            "schema": self.schema.to_json(),
            "parts": [_part_json(part) for part in self.parts],
            "target": {**self.target._asdict(), "class_names": list(self.target.class_names)},
            "rows": self.rows,
        }

    @classmethod
    def from_json(cls, data: Any) -> Preparation:
        """Read what `to_json` gave; DataError for anything else."""
        try:
            return _read(cls, data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"this is no preparation of a table, or it is damaged ({error}): take the "
                "preparation.json of a run's folder"
            ) from error


# ------------------------------------------------------------------------------------- writing
def _names(kind: Feature, part: Part) -> tuple[str, ...]:
    """Name the inputs of a column."""
    name, more = part.name, []
    if isinstance(kind, Category):
        made = [f"{name}={level}" for level in part.levels]
        more = [f"{name} is other"] if part.other else []
    elif isinstance(kind, Date):
        made = [n for p in kind.parts for n in _date_names(name, p)]
    else:
        made = [name]
    return (*made, *more, *([f"{name} is missing"] if part.missing else []))


def _date_names(name: str, part: str) -> tuple[str, ...]:
    if part in CYCLES:
        return f"{name} {part} sin", f"{name} {part} cos"
    return (f"{name} {part}",)


def _scaled_names(kind: Feature, part: Part) -> list[tuple[str, tuple[float, float]]]:
    if isinstance(kind, Date):
        names = [f"{part.name} {p}" for p in ("time", "year") if p in kind.parts]
        return list(zip(names, _kept_scales(kind, part), strict=True))
    return [(part.name, part.scales[0])] if part.scales else []


def _kept_scales(kind: Date, part: Part) -> list[tuple[float, float]]:
    return [s for p, s in zip(("time", "year"), part.scales, strict=True) if p in kind.parts]


class _Encoder:
    """Writes the inputs of one column, some rows at a time."""

    def __init__(self, kind: Feature, part: Part, column: Column) -> None:
        self.kind, self.part, self.values = kind, part, column.values
        if isinstance(kind, Category):
            # the input of each code; the last one is that of a missing cell
            assert column.names is not None
            place = {level: k for k, level in enumerate(part.levels)}
            other = len(part.levels) if part.other else -1
            filled = -1 if part.filled is None else place[part.filled]
            gone = len(part.levels) + part.other if part.missing else filled
            self.inputs = np.array([*(place.get(n, other) for n in column.names), gone])

    def write(self, rows: NDArray[Any], out: Inputs) -> None:
        values = self.values[rows]
        if isinstance(self.kind, Category):
            at = self.inputs[values]
            there = np.flatnonzero(at >= 0)
            out[there, at[there]] = 1
            return
        gone = np.isnan(values)
        if self.part.missing:
            out[:, -1] = gone
        if isinstance(self.kind, Date):
            self._date(values, gone, out)
            return
        np.copyto(values, self.part.fill, where=gone)
        if self.part.scales:
            mean, std = self.part.scales[0]
            np.subtract(values, mean, out=values)
            np.divide(values, std, out=values) if std else values.fill(0)
        out[:, 0] = values

    def _date(self, seconds: Floats, gone: NDArray[np.bool_], out: Inputs) -> None:
        seconds[gone] = self.part.fill * DAY
        at = 0
        for part in self.kind.parts:  # type: ignore[union-attr]
            if part in CYCLES:
                angle = 2 * math.pi * _turn(seconds, part) / CYCLES[part]
                out[:, at], out[:, at + 1] = np.sin(angle), np.cos(angle)
                out[gone, at : at + 2] = 0  # no day of the week is the middle one
                at += 2
                continue
            time = part == "time"
            values = seconds / DAY if time else years(seconds)
            out[:, at] = _scaled(values, *self.part.scales[0 if time else 1])
            at += 1


def _scaled(values: Floats, mean: float, std: float) -> Floats:
    return (values - mean) / std if std else np.zeros_like(values)


def _turn(seconds: Floats, part: str) -> Floats:
    """Tell where in its cycle a time is; January, Monday and the first are 0."""
    days = np.floor(seconds / DAY).astype(np.int64)
    if part == "hour":
        return (seconds - days * DAY) / 3600
    if part == "weekday":
        return ((days + 3) % 7).astype(np.float64)  # 1970 began on a Thursday
    dates = days.astype("datetime64[D]")
    months = dates.astype("datetime64[M]")
    if part == "month":
        return (months.astype(np.int64) % 12).astype(np.float64)
    return (dates - months).astype(np.int64).astype(np.float64)


def _coded(column: Column, names: Sequence[str]) -> NDArray[np.int64]:
    assert column.names is not None
    place = {name: k for k, name in enumerate(names)}
    codes = np.array([*(place.get(name, -1) for name in column.names), -1], dtype=np.int64)
    made: NDArray[np.int64] = codes[column.values]
    return made


# -------------------------------------------------------------------------------------- making
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
            return Goal(name, kind.kind, self._classes(name, kind))
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


# ------------------------------------------------------------------------------------- reading
def _part_json(part: Part) -> dict[str, Any]:
    made: dict[str, Any] = {"name": part.name}
    if part.levels or part.filled or part.other:
        made |= {"levels": list(part.levels), "filled": part.filled, "other": part.other}
    else:
        made |= {"fill": part.fill, "scales": [list(pair) for pair in part.scales]}
    return {**made, "missing": part.missing}


def _read(cls: type[Preparation], data: Any) -> Preparation:
    if set(data) != {"undrift_preparation", "schema", "parts", "target", "rows"}:
        raise ValueError("its fields are not those of a preparation")
    if data["undrift_preparation"] != VERSION:
        raise ValueError(f"version {data['undrift_preparation']!r}")
    schema = Schema.from_json(data["schema"])
    parts = tuple(map(_read_part, data["parts"]))
    if [part.name for part in parts] != [name for name, _ in schema.features]:
        raise ValueError("its parts are not those of its schema")
    for part, (_, kind) in zip(parts, schema.features, strict=True):
        wide = {Number: 1, Date: 2}.get(type(kind), 0)
        if len(part.scales) != wide or (part.filled and part.filled not in part.levels):
            raise ValueError(f"the part of {part.name!r} does not fit its kind")
    target = Goal(**{**data["target"], "class_names": tuple(data["target"]["class_names"])})
    if (target.name, target.kind) != (schema.target, schema.goal.kind):
        raise ValueError("its target is not that of its schema")
    texts = all(isinstance(name, str) for name in target.class_names)
    if not texts or not _finite(target.mean, target.std) or isinstance(data["rows"], str):
        raise ValueError("its target holds no numbers")
    return cls(schema, parts, target, int(data["rows"]))


def _read_part(data: Mapping[str, Any]) -> Part:
    values: dict[str, Any] = dict(data)
    if "scales" in values:
        values["scales"] = tuple((mean, std) for mean, std in values["scales"])
    if "levels" in values:
        values["levels"] = tuple(values["levels"])
    part = Part(**values)
    numbers = [part.fill, *(v for pair in part.scales for v in pair)]
    if not _finite(*numbers) or not all(isinstance(v, str) for v in part.levels):
        raise ValueError(f"the part of {part.name!r} holds no numbers")
    if not isinstance(part.missing, bool) or not isinstance(part.other, bool):
        raise ValueError(f"the part of {part.name!r} holds no flags")
    return part


def _finite(*values: Any) -> bool:
    real = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return real and all(math.isfinite(v) for v in values)
