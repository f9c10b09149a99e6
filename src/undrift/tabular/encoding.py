"""How the cells of one column become inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrift.tabular.frames import Column
from undrift.tabular.schema import Category, Date, Feature
from undrift.tabular.sums import DAY, years

CYCLES = {"month": 12.0, "day": 31.0, "weekday": 7.0, "hour": 24.0}

Floats = NDArray[np.float64]
Inputs = NDArray[np.float32]


class Goal(NamedTuple):
    """The target: classes, or numbers that are `encoded * std + mean` in their own units."""

    name: str
    kind: str  # "classes", "number" or "count"
    class_names: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0
    counts: tuple[int, ...] = ()  # of classes: the training rows of each


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


def names_of(kind: Feature, part: Part) -> tuple[str, ...]:
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


def scaled_names(kind: Feature, part: Part) -> list[tuple[str, tuple[float, float]]]:
    """Give mean and deviation of the inputs that are scaled, by their names."""
    if isinstance(kind, Date):
        names = [f"{part.name} {p}" for p in ("time", "year") if p in kind.parts]
        return list(zip(names, _kept_scales(kind, part), strict=True))
    return [(part.name, part.scales[0])] if part.scales else []


def _kept_scales(kind: Date, part: Part) -> list[tuple[float, float]]:
    return [s for p, s in zip(("time", "year"), part.scales, strict=True) if p in kind.parts]


class Encoder:
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


def coded(column: Column, names: Sequence[str]) -> NDArray[np.int64]:
    """Give the place of each cell among some names; -1 for others, and where it is missing."""
    assert column.names is not None
    place = {name: k for k, name in enumerate(names)}
    codes = np.array([*(place.get(name, -1) for name in column.names), -1], dtype=np.int64)
    made: NDArray[np.int64] = codes[column.values]
    return made
