"""What each column of a table is: records, and the section `[columns]` of an experiment file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

from undrift.errors import ConfigError, DataError, unknown_name
from undrift.tabular.cells import FORMATS, MISSING
from undrift.tabular.problems import one_error

PARTS = ("time", "year", "month", "day", "weekday", "hour")


# --------------------------------------------------------------------------- kinds of features
@dataclass(frozen=True)
class Number:
    """A number; `fill` stands where it is missing, `indicator` adds an input that says so."""

    kind: ClassVar[str] = "number"
    fill: str | float = "mean"  # "median", "zero" or a number
    indicator: bool = False

    def __post_init__(self) -> None:
        if not _is_number(self.fill):
            _one_of("fill", self.fill, ("mean", "median", "zero"), "or a number")
        _flag("indicator", self.indicator)


@dataclass(frozen=True)
class Category:
    """One of some levels; without `levels`, the `most` frequent ones that the holders name."""

    kind: ClassVar[str] = "category"
    levels: tuple[str, ...] | None = None
    most: int = 50
    fill: str = "missing"  # a level of its own, or "mode": the most frequent level

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", _levels(self.levels, 1))
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise ConfigError(f"most must be a whole number above 0, got {self.most!r}")
        _one_of("fill", self.fill, ("missing", "mode"))


@dataclass(frozen=True)
class Flag:
    """True or false."""

    kind: ClassVar[str] = "flag"
    fill: str | bool = "mode"  # "mean" (the share of true), true or false
    indicator: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.fill, bool):
            _one_of("fill", self.fill, ("mode", "mean"), "or true or false")
        _flag("indicator", self.indicator)


@dataclass(frozen=True)
class Date:
    """A day or a time, as a number and as parts of the calendar."""

    kind: ClassVar[str] = "date"
    parts: tuple[str, ...] = ("time", "year", "month", "weekday")
    format: str | None = None  # decided by all cells of the column
    fill: str = "mean"
    indicator: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _texts("parts", self.parts))
        if not self.parts:
            raise ConfigError("parts = [] leaves nothing of the date: name one part at least")
        for part in self.parts:
            _one_of("parts", part, PARTS)
        if self.format is not None:
            _one_of("format", self.format, tuple(FORMATS))
        _one_of("fill", self.fill, ("mean", "median"))
        _flag("indicator", self.indicator)


# ---------------------------------------------------------------------------- kinds of targets
@dataclass(frozen=True)
class Classes:
    """A target of classes; without `levels`, those that the holders name."""

    kind: ClassVar[str] = "classes"
    levels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", _levels(self.levels, 2))


@dataclass(frozen=True)
class Numbers:
    """A target of numbers."""

    kind: ClassVar[str] = "number"


@dataclass(frozen=True)
class Counts:
    """A target that counts: whole numbers from 0."""

    kind: ClassVar[str] = "count"


Feature = Number | Category | Flag | Date
Target = Classes | Numbers | Counts
Kind = Feature | Target
FEATURES: Mapping[str, Callable[..., Feature]] = {c.kind: c for c in (Number, Category, Flag, Date)}
TARGETS: Mapping[str, Callable[..., Target]] = {c.kind: c for c in (Classes, Numbers, Counts)}


# -------------------------------------------------------------------------------------- schema
@dataclass(frozen=True)
class Schema:
    """The columns that are learned from, in order, and the target.

    >>> made = Schema.of({"age": {"kind": "number"}, "y": {"kind": "classes"}}, target="y")
    >>> made.features
    (('age', Number(fill='mean', indicator=False)),)
    """

    features: tuple[tuple[str, Feature], ...]
    target: str
    goal: Target
    missing: tuple[str, ...] = MISSING  # texts of a cell that holds nothing

    @classmethod
    def of(
        cls,
        columns: Mapping[str, Any],
        target: str,
        missing: Sequence[str] = MISSING,
        place: str = "[columns]",
    ) -> Schema:
        """Make a schema of records or of plain tables, all problems in one ConfigError."""
        wrong: list[str] = []
        made: dict[str, Any] = {}
        for name, given in columns.items():
            try:
                made[name] = record_of(given, TARGETS if name == target else FEATURES)
            except ConfigError as error:
                wrong.append(f"{name}: {error}")
        if target not in columns:
            wrong.append(
                f'no line for the target {target!r}: add {target} = {{ kind = "classes" }}, '
                '"number" or "count"'
            )
        if not set(columns) - {target}:
            wrong.append("no column is left for the features")
        gone = checked_missing(missing)
        wrong += _clashes(made, gone)
        if wrong:
            raise one_error(place, wrong)
        goal = made.pop(target)
        return cls(tuple(made.items()), target, goal, gone)

    @cached_property
    def _by_name(self) -> dict[str, Kind]:
        return {**dict(self.features), self.target: self.goal}

    def __getitem__(self, name: str) -> Kind:
        return self._by_name[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Name all columns, the target last."""
        return (*(name for name, _ in self.features), self.target)

    def table(self) -> dict[str, dict[str, Any]]:
        """Write the section `[columns]`."""
        return {name: table_of(self[name]) for name in self.names}

    def to_json(self) -> dict[str, Any]:
        """Give plain data."""
        lines = [[name, table_of(self[name])] for name in self.names]
        return {"columns": lines, "target": self.target, "missing": list(self.missing)}

    @classmethod
    def from_json(cls, data: Any) -> Schema:
        """Read what `to_json` gave; DataError for anything else."""
        try:
            columns = dict(data["columns"])
            if len(columns) < len(data["columns"]) or set(data) != {"columns", "target", "missing"}:
                raise ValueError("columns twice, or unknown fields")
            return cls.of(columns, data["target"], data["missing"], "the schema")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is no schema of a table ({error})") from error


@dataclass(frozen=True)
class Columns:
    """The section `[columns]` of an experiment, as records."""

    lines: tuple[tuple[str, Kind], ...]

    @classmethod
    def of(cls, table: Any, target: Any = None, missing: Any = None) -> Columns:
        """Check a section, for a target that may not be known yet."""
        if isinstance(table, cls):
            return table
        if not isinstance(table, Mapping) or not table:
            raise ConfigError(f"[columns] needs a line for every column, got {table!r}")
        if isinstance(target, str):
            made = Schema.of(table, target, MISSING if missing is None else list(missing))
            return cls(tuple((str(name), made[name]) for name in table))
        wrong, lines = [], []
        for name, given in table.items():
            try:
                lines.append((str(name), record_of(given, {**TARGETS, **FEATURES})))
            except ConfigError as error:
                wrong.append(f"{name}: {error}")
        if wrong:
            raise one_error("[columns]", wrong)
        return cls(tuple(lines))

    def table(self) -> dict[str, dict[str, Any]]:
        """Write the section."""
        return {name: table_of(kind) for name, kind in self.lines}


def record_of(given: Any, kinds: Mapping[str, Callable[..., Any]]) -> Any:
    """Make the record of one line of `[columns]`."""
    if isinstance(given, str):
        given = {"kind": given}
    if isinstance(given, Kind):
        given = table_of(given)
    if not isinstance(given, Mapping):
        raise ConfigError(f'must be a table such as {{ kind = "number" }}, got {given!r}')
    if "kind" not in given:
        raise ConfigError(f"needs `kind`, one of: {', '.join(kinds)}")
    kind = given["kind"]
    if not isinstance(kind, str) or kind not in kinds:
        raise unknown_name("kind", kind, list(kinds))
    settings = {str(name): value for name, value in given.items() if name != "kind"}
    known = [f.name for f in fields(kinds[kind])]  # type: ignore[arg-type]
    for name in settings:
        if name not in known:
            raise unknown_name(f"setting of {kind!r}", name, known)
    return kinds[kind](**settings)


def table_of(kind: Kind) -> dict[str, Any]:
    """Write one line of `[columns]`; what is as usual stays away."""
    made: dict[str, Any] = {"kind": kind.kind}
    for field in fields(kind):
        value = getattr(kind, field.name)
        if value != field.default or (field.name == "fill" and isinstance(kind, Number)):
            made[field.name] = list(value) if isinstance(value, tuple) else value
    return made


def _clashes(made: Mapping[str, Any], missing: tuple[str, ...]) -> list[str]:
    """Find levels that stand for missing cells, and names that a date's parts would take."""
    wrong = [
        f"{name}: the level {level!r} stands for a missing cell: say otherwise with "
        "missing = [...] in [data]"
        for name, kind in made.items()
        for level in getattr(kind, "levels", None) or ()
        if level in missing
    ]
    taken = [f"{name} year" for name, kind in made.items() if isinstance(kind, Date)]
    return wrong + [f"{name}: the year of a date has this name; rename it" for name in taken
                    if name in made]  # fmt: skip


def checked_missing(texts: Any) -> tuple[str, ...]:
    """Check the texts of cells that hold nothing; an empty cell always does."""
    made = _texts("missing", texts)
    return made if "" in made else ("", *made)


# -------------------------------------------------------------------------------------- checks
def _is_number(value: Any) -> bool:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and math.isfinite(value)


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is true or false, got {value!r}")


def _one_of(name: str, value: Any, known: tuple[str, ...], more: str = "") -> None:
    if not isinstance(value, str) or value not in known:
        error = unknown_name(name, value, list(known))
        raise ConfigError(f"{error} {more}".strip())


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name} must be a list of texts, got {value!r}")
    strange = [v for v in value if not isinstance(v, str)]
    if strange:
        raise ConfigError(f"{name} must be texts: put quotes around {strange[0]!r}")
    twice = sorted({v for v in value if list(value).count(v) > 1}) if len(value) < 1000 else []
    if twice:
        raise ConfigError(f"{name} names {twice[0]!r} twice")
    return tuple(value)


def _levels(value: Any, least: int) -> tuple[str, ...] | None:
    if value is None:
        return None
    made = tuple(text.strip() for text in _texts("levels", value))
    if len(set(made)) < len(made):
        raise ConfigError("levels differ by blanks at their ends only: name each once")
    if len(made) < least:
        raise ConfigError(f"levels = {list(made)} must name {least} or more")
    return made
