"""Frames: typed columns with missing cells marked, and how raw columns become them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrift.errors import DataError
from undrift.tabular.cells import (
    DECIMAL_COMMA,
    DIGITS,
    EXACT,
    FLAG_TEXTS,
    FORMATS,
    LARGEST,
    as_number,
    date_formats,
    has_zone,
    plain_number,
    too_large,
    written_time,
)
from undrift.tabular.problems import Place, Problems
from undrift.tabular.schema import Category, Classes, Counts, Date, Flag, Kind, Schema

Floats = NDArray[np.float64]
Codes = NDArray[np.int32]
Rows = NDArray[Any]
Say = Callable[[Rows, str], None]  # which rows, and what is wrong with them


class Raw(NamedTuple):
    """A column as a reader gives it: numbers, codes of texts, or times."""

    form: str  # "numbers", "texts" or "times" (seconds since 1970, UTC)
    values: NDArray[Any]  # float64 with NaN, or int32 codes with -1, for what is missing
    names: tuple[str, ...] = ()  # of texts
    whole: bool = False  # numbers that were written as whole ones
    padded: bool = False  # some begin with zeros, as codes do


@dataclass(frozen=True, eq=False)
class Column:
    """A column: numbers (flags are 0 and 1, dates seconds since 1970), or codes of names."""

    values: NDArray[Any]  # float64 with NaN, or int32 codes with -1, for what is missing
    names: tuple[str, ...] | None = None

    @property
    def empty(self) -> NDArray[np.bool_]:
        """Mark the cells that are missing."""
        made: NDArray[np.bool_] = np.isnan(self.values) if self.names is None else self.values < 0
        return made

    def take(self, rows: Rows) -> Column:
        """Keep some rows."""
        return Column(self.values[rows], self.names)


@dataclass(frozen=True, eq=False)
class Frame:
    """Typed columns of some rows."""

    columns: Mapping[str, Column]
    place: Place

    def __len__(self) -> int:
        return len(self.place.numbers)

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def take(self, rows: Rows) -> Frame:
        """Keep some rows: a mask, or their indices."""
        made = {name: column.take(rows) for name, column in self.columns.items()}
        return Frame(made, self.place.take(rows))

    @classmethod
    def of(
        cls, schema: Schema, columns: Mapping[str, Sequence[Any]], source: str = "the rows"
    ) -> Frame:
        """Make a frame of columns in memory: lists or arrays, None and NaN are missing.

        >>> made = Schema.of({"a": "number", "y": "classes"}, target="y")
        >>> Frame.of(made, {"a": [1, None], "y": ["no", "yes"]})["a"].values
        array([ 1., nan])
        """
        raw = {n: raw_of(columns[n], schema.missing) for n in schema.names if n in columns}
        lengths = {len(one.values) for one in raw.values()}
        if len(lengths) > 1:
            raise DataError(f"{source}: columns differ in length ({sorted(lengths)})")
        place = Place(source, "row", np.arange(1, 1 + next(iter(lengths), 0)))
        return frame_of(raw, schema, place)


@dataclass(frozen=True, eq=False)
class Chosen:
    """Some rows of a frame, of which one column at a time is copied."""

    frame: Frame
    rows: Rows  # their indices

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Column:
        return self.frame[name].take(self.rows)


Some = Frame | Chosen


def frame_of(raw: Mapping[str, Raw], schema: Schema, place: Place) -> Frame:
    """Type raw columns as a schema says; all problems in one error."""
    problems = Problems(place.source)
    made = typed_columns(raw, schema, place, problems)
    problems.check()
    return Frame(made, place)


def typed_columns(
    raw: Mapping[str, Raw], schema: Schema, place: Place, problems: Problems
) -> dict[str, Column]:
    """Type raw columns; problems are noted."""
    made: dict[str, Column] = {}
    for name, one in raw.items():

        def say(rows: Rows, what: str, name: str = name) -> None:
            problems.cells(place, rows, name, what)

        made[name] = typed(one, schema[name], say)
    return made


# ---------------------------------------------------------------------------- values in memory
def raw_of(values: Sequence[Any], missing: Sequence[str]) -> Raw:
    """Read values in memory: an array of numbers, or any mixture."""
    array = values if isinstance(values, np.ndarray) else None
    if array is not None and array.dtype.kind in "iuf":
        whole = array.dtype.kind != "f"
        big = whole and len(array) and bool((np.abs(array.astype(np.float64)) >= EXACT).any())
        if not big:
            return Raw("numbers", array.astype(np.float64), whole=whole)
    if array is not None and array.dtype.kind == "M":
        return Raw("times", times_of(array))
    return _mixed([v.item() if isinstance(v, np.generic) else v for v in values], missing)


def times_of(values: NDArray[Any]) -> Floats:
    """Turn datetime64 into seconds since 1970."""
    made = values.astype("datetime64[us]").astype(np.int64).astype(np.float64) / 1e6
    made[np.isnat(values)] = np.nan
    return made


def _mixed(values: list[Any], missing: Sequence[str]) -> Raw:
    gone = set(missing)
    held = [
        None if _nothing(v) or (isinstance(v, str) and v.strip() in gone) else v for v in values
    ]
    kinds = {type(v) for v in held if v is not None}
    if kinds and kinds <= {int, float} and all(abs(v) < EXACT for v in held if v is not None):
        numbers = np.array([np.nan if v is None else float(v) for v in held])
        return Raw("numbers", numbers, whole=kinds == {int})
    stamps = [_time(v) for v in held]
    if kinds and all((s is None) == (v is None) for s, v in zip(stamps, held, strict=True)):
        return Raw("times", np.array([np.nan if s is None else s for s in stamps]))
    known: dict[str, int] = {}
    codes = [-1 if v is None else known.setdefault(_cell(v), len(known)) for v in held]
    return Raw("texts", np.array(codes, dtype=np.int32), tuple(known))


def _nothing(value: Any) -> bool:
    # pandas.NA and NaT say so by their names: pandas need not be there
    named = type(value).__name__ in ("NAType", "NaTType")
    return value is None or named or (isinstance(value, float) and value != value)


def _time(value: Any) -> float | None:
    from datetime import UTC, date, datetime

    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
    return None


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value.strip() if isinstance(value, str) else str(value)


# -------------------------------------------------------------------------------------- typing
def typed(raw: Raw, kind: Kind, say: Say) -> Column:
    """Make of a raw column what the schema says; `say` hears of cells that cannot be that."""
    if isinstance(kind, Category | Classes):
        return _named(texts_of(raw), kind)
    if isinstance(kind, Flag):
        return Column(_parsed(texts_of(raw), _flag, "is no flag: write true or false", say))
    if isinstance(kind, Date):
        return Column(_times(raw, kind, say))
    values = _numbers(raw, say)
    if isinstance(kind, Counts):
        with np.errstate(invalid="ignore"):
            odd = np.flatnonzero((values < 0) | (values != np.floor(values)))
        _each(odd, values, say, "is no count: a count is a whole number from 0")
        values[odd] = np.nan
    return Column(values)


def texts_of(raw: Raw) -> Raw:
    """Give a column as texts, whatever it was."""
    if raw.form == "texts":
        return raw
    present = ~np.isnan(raw.values)
    known, codes = np.unique(raw.values[present], return_inverse=True)
    if raw.form == "times":
        names = [written_time(value) for value in known]
    else:
        # pandas makes floats of whole numbers where one is missing
        whole = raw.whole or (not present.all() and bool((known == np.floor(known)).all()))
        names = [str(int(v)) if whole and np.isfinite(v) else repr(float(v)) for v in known]
    made = np.full(len(raw.values), -1, dtype=np.int32)
    made[present] = codes
    return Raw("texts", made, tuple(names))


def _named(raw: Raw, kind: Category | Classes) -> Column:
    """Find declared levels again that are numbers written in another way."""
    if kind.levels is None or set(raw.names) <= set(kind.levels):
        return Column(raw.values, raw.names)
    alike: dict[str, list[str]] = {}
    for level in kind.levels:
        alike.setdefault(plain_number(level), []).append(level)
    renamed = []
    for name in raw.names:
        near = [name] if name in kind.levels else alike.get(plain_number(name), [])
        renamed.append(near[0] if len(near) == 1 else name)
    known = {name: code for code, name in enumerate(dict.fromkeys(renamed))}
    codes = np.array([*(known[name] for name in renamed), -1], dtype=np.int32)
    return Column(codes[raw.values], tuple(known))


def _numbers(raw: Raw, say: Say) -> Floats:
    if raw.form == "texts":
        values = _parsed(raw, as_number, "is no number", say)
    elif raw.form == "times":
        say(np.flatnonzero(~np.isnan(raw.values)), 'it holds times: its kind is "date"')
        return np.full(len(raw.values), np.nan)
    else:
        values = raw.values.copy() if not raw.values.flags.writeable else raw.values
    with np.errstate(invalid="ignore"):
        far = np.flatnonzero(np.abs(values) > LARGEST)
    infinite = np.isinf(values[far])
    _each(far[infinite], values, say, "is no finite number")
    for row in far[~infinite]:
        say(np.array([row]), too_large(values[row]))
    values[far] = np.nan
    return values


def _each(rows: Rows, values: Floats, say: Say, what: str) -> None:
    for value in dict.fromkeys(values[rows].tolist()):
        say(rows[values[rows] == value], f"{value:g} {what}")


def _flag(text: str) -> float | None:
    found = FLAG_TEXTS.get(text.lower())
    return None if found is None else float(found)


def _parsed(raw: Raw, read: Callable[[str], float | None], what: str, say: Say) -> Floats:
    """Read each text once."""
    found = [read(name) for name in raw.names]
    for code, value in enumerate(found):
        name = raw.names[code]
        large = value is not None and abs(value) >= EXACT and DIGITS.fullmatch(name)
        not_a_number = value is not None and value != value
        if value is None or large or not_a_number:
            rows = np.flatnonzero(raw.values == code)
            if len(rows):
                say(rows, too_large(name) if large else _no(name, what, value))
            found[code] = None
    values = np.array([*(np.nan if v is None else v for v in found), np.nan])
    return values[raw.values]


def _no(name: str, what: str, value: float | None) -> str:
    if value is not None:
        return f"{name} is no finite number"
    comma = what == "is no number" and DECIMAL_COMMA.fullmatch(name)
    shown = name if len(name) <= 60 else f"{name[:60]}..."
    return f"{shown!r} {what}" + ("; write decimals with a point" if comma else "")


def _times(raw: Raw, kind: Date, say: Say) -> Floats:
    if raw.form == "times":
        return raw.values
    if raw.form == "numbers":
        rows = np.flatnonzero(~np.isnan(raw.values))
        if len(rows):
            say(rows, 'it holds numbers, no dates: its kind is "number"')
        return np.full(len(raw.values), np.nan)
    name = kind.format or _format(raw, say)
    if name is None:
        return np.full(len(raw.values), np.nan)
    zones = np.array([*(has_zone(text) for text in raw.names), False])[raw.values]
    there = raw.values >= 0
    zoned, plain = zones & there, ~zones & there
    if zoned.any() and plain.any():  # the fewer are to blame
        if zoned.sum() > plain.sum():
            say(np.flatnonzero(plain), "has no zone, where most times of the column have one")
        else:
            say(np.flatnonzero(zoned), "has a zone, where other times of the column have none")
    return _parsed(raw, FORMATS[name], f"is no date of the format {name!r}", say)


def _format(raw: Raw, say: Say) -> str | None:
    """Decide the format of a column by all its cells; what most cells fit is meant."""
    found = date_formats(raw.names)
    if len(found) == 1 or not raw.names:
        return found[0] if found else "iso"
    rows = np.flatnonzero(raw.values >= 0)
    if len(found) > 1:
        named = " or ".join(f'format = "{name}"' for name in found)
        say(rows[:1], f"{raw.names[raw.values[rows[0]]]!r} may be of two formats: say {named}")
        return None
    fits = {n: sum(read(text) is not None for text in raw.names) for n, read in FORMATS.items()}
    return max(fits, key=lambda name: fits[name])
