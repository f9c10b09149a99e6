"""Statistics of a holder's rows that add: counts and sums, squared deviations, histograms.

Three questions in turn.  Each is answered from one holder's rows by plain numbers; the numbers of
all holders are added, and nothing but the total is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undrift.errors import DataError
from undrift.tabular.frames import Column, Some
from undrift.tabular.schema import Category, Classes, Date, Flag, Number, Numbers, Schema

DAY = 86_400.0
REACH, BINS = 8.0, 1024  # of a histogram over asinh((x - mean) / deviation)
WIDTH = 2 * REACH / BINS  # a quantile is known to WIDTH * (deviation + |quantile - mean|) / 2 * 2
LEAST = 5  # rows that a holder must have of a level before it names the level
ASKED = ("counts", "deviations", "quantiles")

Floats = NDArray[np.float64]
Series = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Question:
    """A question to every holder: which one, the numbers it needs, how many rows name a level."""

    asks: str
    given: Series = field(default_factory=dict)  # (mean,), or (mean, deviation), by series
    least: int = LEAST

    def to_json(self) -> dict[str, Any]:
        """Give plain data."""
        given = {name: list(values) for name, values in self.given.items()}
        return {"asks": self.asks, "given": given, "least": self.least}

    @classmethod
    def from_json(cls, data: Any) -> Question:
        """Read what `to_json` gave; DataError for anything else."""
        return _strictly(lambda: cls._from(data), "question about a table")

    @classmethod
    def _from(cls, data: Any) -> Question:
        _fields(data, "asks", "given", "least")
        if data["asks"] not in ASKED:
            raise ValueError(f"asks {data['asks']!r}")
        width = ASKED.index(data["asks"])
        given = {str(n): _real(v, width) for n, v in data["given"].items()}
        return cls(data["asks"], given, _count(data["least"]))


@dataclass(frozen=True)
class Sums:
    """An answer: sums by series, and counts by level; answers of holders add."""

    asks: str
    rows: int
    series: Series  # counts: (cells, missing, sum); deviations: (squares,); quantiles: the bins
    levels: Mapping[str, Mapping[str, int]]  # by column: rows by level
    unnamed: Mapping[str, tuple[int, int]]  # by column: rows of levels without a name, missing

    def __add__(self, other: Sums) -> Sums:
        if (self.asks, set(self.series), set(self.unnamed)) != (
            *(other.asks, set(other.series), set(other.unnamed)),
        ):
            raise DataError("two holders answered different questions: their schemas differ")
        series = {
            name: tuple(a + b for a, b in zip(values, other.series[name], strict=True))
            for name, values in self.series.items()
        }
        levels = {name: dict(counts) for name, counts in self.levels.items()}
        for name, counts in other.levels.items():
            for level, count in counts.items():
                levels[name][level] = levels[name].get(level, 0) + count
        unnamed = {
            name: (a + other.unnamed[name][0], b + other.unnamed[name][1])
            for name, (a, b) in self.unnamed.items()
        }
        return Sums(self.asks, self.rows + other.rows, series, levels, unnamed)

    def to_json(self) -> dict[str, Any]:
        """Give plain data."""
        return {
            "asks": self.asks,
            "rows": self.rows,
            "series": {name: list(values) for name, values in self.series.items()},
            "levels": {name: dict(counts) for name, counts in self.levels.items()},
            "unnamed": {name: list(counts) for name, counts in self.unnamed.items()},
        }

    @classmethod
    def from_json(cls, data: Any, schema: Schema) -> Sums:
        """Read a holder's answer about the columns of a schema; DataError for anything else."""
        return _strictly(lambda: cls._from(data, schema), "answer about a table")

    @classmethod
    def _from(cls, data: Any, schema: Schema) -> Sums:
        _fields(data, "asks", "rows", "series", "levels", "unnamed")
        asks = data["asks"]
        width = {"counts": 3, "deviations": 1, "quantiles": BINS}[asks]
        series = {n: _real(v, width) for n, v in data["series"].items()}
        levels = {n: {str(k): _count(c) for k, c in v.items()} for n, v in data["levels"].items()}
        unnamed = {n: (_count(v[0]), _count(v[1])) for n, v in data["unnamed"].items()}
        known = set(_named_columns(schema)) if asks == "counts" else set()
        if set(levels) != known or set(unnamed) != known:
            raise ValueError("its columns are not those of the schema")
        if asks != "quantiles" and set(series) != set(series_names(schema)):
            raise ValueError("its series are not those of the schema")
        if not set(series) <= set(series_names(schema)):
            raise ValueError("a series is not in the schema")
        if any(v < 0 for n in series for v in (series[n] if asks != "counts" else series[n][:2])):
            raise ValueError("a count or a square below 0")
        return cls(asks, _count(data["rows"]), series, levels, unnamed)


# --------------------------------------------------------------------------------- the columns
def series_names(schema: Schema) -> tuple[str, ...]:
    """Name the series of numbers that a schema has; a date's year is one of its own."""
    return tuple(name for name, _ in _series(schema))


def year_of(name: str) -> str:
    """Name the series of a date's years."""
    return f"{name} year"


def _named_columns(schema: Schema) -> tuple[str, ...]:
    kinds = (Category, Flag, Classes)
    return tuple(name for name in schema.names if isinstance(schema[name], kinds))


def _series(schema: Schema) -> Iterator[tuple[str, str]]:
    """Give each series and the column that it is of."""
    for name, kind in schema.features:
        if isinstance(kind, Number | Date):
            yield name, name
        if isinstance(kind, Date) and "year" in kind.parts:
            yield year_of(name), name
    if isinstance(schema.goal, Numbers):
        yield schema.target, schema.target


def _values(name: str, column: str, schema: Schema, frame: Some) -> Floats:
    """Give the numbers of a series: a date in days since 1970."""
    values: Floats = frame[column].values
    if not isinstance(schema[column], Date):
        return values
    return years(values) if name != column else values / DAY


def years(seconds: Floats) -> Floats:
    """Give the year of each time."""
    made = np.full(len(seconds), np.nan)
    there = ~np.isnan(seconds)
    days = np.floor(seconds[there] / DAY).astype(np.int64).astype("datetime64[D]")
    made[there] = days.astype("datetime64[Y]").astype(np.int64) + 1970
    return made


# -------------------------------------------------------------------------------------- answer
def answer(
    question: Question, schema: Schema, frame: Some, owners: NDArray[Any] | None = None
) -> Sums:
    """Answer a question from some rows: of one holder, or of several whose answers are added.

    `owners` numbers the holder of each row.  The minimum of rows that names a level holds for each
    of them; all other sums are the same however rows are dealt.
    """
    if question.asks == "counts":
        named = {n: _by_level(n, schema, frame, owners, question.least)
                 for n in _named_columns(schema)}  # fmt: skip
        return Sums(
            "counts",
            len(frame),
            {name: _counted(_values(name, of, schema, frame)) for name, of in _series(schema)},
            {name: levels for name, (levels, _) in named.items()},
            {name: unnamed for name, (_, unnamed) in named.items()},
        )
    reply: Callable[..., tuple[float, ...]] = (
        _squares if question.asks == "deviations" else _histogram
    )
    made = {
        name: reply(_values(name, of, schema, frame), *question.given[name])
        for name, of in _series(schema)
        if name in question.given
    }
    return Sums(question.asks, len(frame), made, {}, {})


def _counted(values: Floats) -> tuple[float, float, float]:
    there = values[~np.isnan(values)]
    return len(there), len(values) - len(there), float(there.sum())


def _squares(values: Floats, mean: float) -> tuple[float]:
    there = values[~np.isnan(values)] - mean
    return (float(np.square(there, out=there).sum()),)


def _histogram(values: Floats, mean: float, std: float) -> tuple[float, ...]:
    there = values[~np.isnan(values)] - mean
    scaled = np.arcsinh(there / std) if std else there * 0
    bins = np.floor((scaled + REACH) / WIDTH).clip(0, BINS - 1).astype(np.int64)
    return tuple(map(float, np.bincount(bins, minlength=BINS)))


def _by_level(
    name: str, schema: Schema, frame: Some, owners: NDArray[Any] | None, least: int
) -> tuple[dict[str, int], tuple[int, int]]:
    """Count rows by level; a holder with few rows of a level does not name it."""
    column, kind = frame[name], schema[name]
    codes, names = _as_codes(column)
    missing = int((codes < 0).sum())
    total = np.bincount(codes[codes >= 0], minlength=len(names))
    declared = ("false", "true") if isinstance(kind, Flag) else getattr(kind, "levels", None)
    if declared is not None:
        found = dict(zip(names, total.tolist(), strict=True))
        levels = {level: found.get(level, 0) for level in declared}
    else:
        shown = total * (total >= least) if owners is None else _shown(codes, owners, total, least)
        levels = {n: c for n, c in zip(names, shown.tolist(), strict=True) if c}
    return levels, (int(total.sum()) - sum(levels.values()), missing)


def _as_codes(column: Column) -> tuple[NDArray[Any], Sequence[str]]:
    if column.names is not None:
        return column.values, column.names
    return np.where(column.empty, -1, column.values > 0).astype(np.int32), ("false", "true")


def _shown(
    codes: NDArray[Any], owners: NDArray[Any], total: NDArray[Any], least: int
) -> NDArray[Any]:
    if least <= 1:
        return total
    there = codes >= 0
    pairs = owners[there].astype(np.int64) * len(total) + codes[there]
    held, counts = np.unique(pairs, return_counts=True)
    enough = counts >= least
    weights = counts[enough]
    return np.bincount(held[enough] % len(total), weights, len(total)).astype(np.int64)


# ----------------------------------------------------------------------------------- questions
def first_question(least: int = LEAST) -> Question:
    """Ask for counts and sums."""
    return Question("counts", {}, least)


def means(counts: Sums) -> dict[str, float]:
    """Give the mean of every series; 0 where all cells are missing."""
    return {n: s / c if c else 0.0 for n, (c, _, s) in counts.series.items()}


def second_question(counts: Sums) -> Question:
    """Ask for squared deviations from the means."""
    return Question("deviations", {n: (mean,) for n, mean in means(counts).items()})


def deviations(counts: Sums, squares: Sums) -> dict[str, float]:
    """Give the deviation of every series; 0 where it is constant but for rounding."""
    made = {}
    for name, mean in means(counts).items():
        cells, total = counts.series[name][0], squares.series[name][0]
        std = math.sqrt(total / cells) if cells else 0.0
        # a mean is rounded: the deviation of a constant 0.1 is not exactly zero
        made[name] = 0.0 if std <= 1e-12 * abs(mean) else std
    return made


def third_question(schema: Schema, counts: Sums, squares: Sums) -> Question | None:
    """Ask for histograms of the columns that are filled by their median; None if there is none."""
    names = [n for n, k in schema.features if isinstance(k, Number | Date) and k.fill == "median"]
    if not names:
        return None
    found, spread = means(counts), deviations(counts, squares)
    return Question("quantiles", {n: (found[n], spread[n]) for n in names})


def quantile(bins: Sequence[float], share: float, mean: float, std: float) -> float:
    """Read a quantile off a histogram, by interpolation inside its bin.

    It is wrong by at most the bin: WIDTH times the deviation where it is near the mean, and
    WIDTH * |quantile - mean| far from it.
    """
    counts = np.array(bins)
    if not std or not counts.sum():
        return mean
    below = np.cumsum(counts)
    wanted = share * below[-1]
    k = int(np.argmax((below >= wanted) & (counts > 0)))
    inside = (wanted - (below[k] - counts[k])) / counts[k]
    return mean + std * math.sinh((k + min(max(inside, 0.0), 1.0)) * WIDTH - REACH)


# -------------------------------------------------------------------------------------- checks
def _strictly(make: Callable[[], Any], what: str) -> Any:
    try:
        return make()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"this is no {what} ({type(error).__name__}: {error})") from error


def _fields(data: Any, *names: str) -> None:
    if not isinstance(data, Mapping) or set(data) != set(names):
        raise ValueError(f"it should hold {', '.join(names)}")


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"{value!r} is no count")
    return value


def _real(values: Any, width: int) -> tuple[float, ...]:
    made = tuple(values)
    if len(made) != width:
        raise ValueError(f"{len(made)} numbers where {width} belong")
    for value in made:
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not math.isfinite(value):
            raise ValueError(f"{value!r} is no finite number")
    return tuple(map(float, made))
