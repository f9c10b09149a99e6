"""Tables wherever they are: files by their endings, DataFrames, columns in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from undrift.errors import ConfigError, DataError
from undrift.tabular.arrow import Parquet, read_csv
from undrift.tabular.cells import EXACT, MISSING, text_of
from undrift.tabular.delimited import Delimited
from undrift.tabular.frames import Column, Frame, Raw, Rows, raw_of, times_of, typed
from undrift.tabular.growing import RawTable, Wish
from undrift.tabular.preparation import Preparation
from undrift.tabular.problems import Place, Problems
from undrift.tabular.schema import Category, Classes, Date, Flag, Kind, Schema

FAST_BYTES = 2**21  # of a .csv that pyarrow is asked to read
KINDS: Mapping[str, type[Delimited] | type[Parquet]] = {
    ".csv": Delimited,
    ".tsv": Delimited,
    ".parquet": Parquet,
}


class TableFile(Protocol):
    """Named columns, wherever they lie."""

    path: Any
    names: list[str]

    def read(self, wishes: Mapping[str, Wish], missing: Sequence[str] = ...) -> RawTable:
        """Read some of the columns, as what is wished."""


def open_table(source: Any) -> TableFile:
    """Open a file by the ending of its name, a DataFrame, or a dict of columns."""
    if isinstance(source, Mapping) or (hasattr(source, "columns") and hasattr(source, "iloc")):
        return Held(source)
    if not isinstance(source, str | Path):
        raise ConfigError(f"sources.table: path must be a file name, got {source!r}")
    path = Path(source).expanduser()
    if path.is_dir():
        raise DataError(f"{path} is a folder: name the file in it")
    if path.suffix.lower() not in KINDS:
        raise DataError(f"{path}: cannot read {path.suffix!r}; use {', '.join(KINDS)}")
    if not path.is_file():
        raise DataError(f"{path} is not there: check the path, which starts from {Path.cwd()}")
    return KINDS[path.suffix.lower()](path)


def read(
    opened: TableFile,
    wishes: Mapping[str, Wish],
    missing: Sequence[str] = MISSING,
    noted: Problems | None = None,
) -> RawTable:
    """Read some columns: fast where that is certain to be right, carefully otherwise.

    Problems with cells are `noted`, so that an error can list others beside them.
    """
    if isinstance(opened, Delimited):
        fast = None
        if opened.path.stat().st_size >= FAST_BYTES:
            fast = read_csv(opened, wishes, missing)
        return fast or opened.read(wishes, missing, noted)
    return opened.read(wishes, missing)


def header_problems(opened: TableFile, problems: Problems) -> None:
    """Note columns without a name, and names that several have."""
    for k, name in enumerate(opened.names):
        if not name:
            problems.add(
                f"column {k + 1} has no name; name it, or write the table without its index"
            )
    for name, count in Counter(opened.names).items():
        if count > 1 and name:
            many = {2: "two", 3: "three"}.get(count, str(count))
            problems.add(f"{many} columns are named {name!r}; rename all but one")


def wish_of(kind: Kind) -> Wish:
    """Say as what a column is to be read."""
    return "texts" if isinstance(kind, Category | Classes | Flag | Date) else "numbers"


# ------------------------------------------------------------------------------------ new rows
class NewRows(NamedTuple):
    """New rows: those in `errors` (by index) could not be read and hold missing cells."""

    frame: Frame
    errors: dict[int, str]
    numbers: Any  # [n] the line or row of each


def read_rows(source: Any, preparation: Preparation) -> NewRows:
    """Read new rows for a model: every row stays, and what is wrong with one is told.

    The target may be absent, and further columns are not looked at.
    """
    opened, schema = open_table(source), preparation.schema
    wanted = _needed(opened, schema)
    raw, errors = _all_rows(opened, schema, wanted)
    made: dict[str, Column] = {}
    for name in wanted:

        def say(rows: Rows, what: str, name: str = name) -> None:
            for row in rows.tolist() if name != schema.target else []:
                before = f"{errors[row]}; " if row in errors else ""
                errors[row] = f"{before}column {name!r}: {what}"

        made[name] = typed(raw.columns[name], schema[name], say)
    return NewRows(Frame(made, raw.place), dict(sorted(errors.items())), raw.place.numbers)


def _needed(opened: TableFile, schema: Schema) -> list[str]:
    """Name the columns to read; all that are not there make one error."""
    problems = Problems(str(opened.path))
    wanted = [name for name, _ in schema.features]
    there = Counter(opened.names)
    for name in wanted:
        if not there[name]:
            problems.add(f"the column {name!r} is not there, and the model needs it")
    for name in (*wanted, schema.target):
        if there[name] > 1:
            problems.add(f"several columns are named {name!r}; rename all but one")
    problems.check()
    return [*wanted, schema.target] if there[schema.target] else wanted


def _all_rows(
    opened: TableFile, schema: Schema, wanted: Sequence[str]
) -> tuple[RawTable, dict[int, str]]:
    if not isinstance(opened, Delimited):
        return opened.read(dict.fromkeys(wanted, "feature"), schema.missing), {}
    if opened.path.stat().st_size >= FAST_BYTES:
        wishes = {name: wish_of(schema[name]) for name in wanted}
        fast = read_csv(opened, wishes, schema.missing)
        if fast is not None:
            return fast, {}
    return opened.rows(schema.missing, wanted)


# ----------------------------------------------------------------------------------- in memory
class Held:
    """A pandas DataFrame, or a dict of columns."""

    def __init__(self, table: Any) -> None:
        self.path, self._table = "the table", table
        self.names = [name if isinstance(name, str) else str(name) for name in table]
        self._keys = dict(zip(self.names, table, strict=True))

    def read(self, wishes: Mapping[str, Wish], missing: Sequence[str] = MISSING) -> RawTable:
        """Read some of the columns."""
        problems = Problems(self.path)
        made: dict[str, Raw] = {}
        for name in wishes:
            values = self._table[self._keys[name]]
            found = _series(values, missing) if hasattr(values, "dtype") else None
            if found is None and hasattr(values, "dtype"):
                problems.add(
                    f"column {name!r} is of the type {values.dtype}: leave it out, or turn it into "
                    "numbers or texts"
                )
            made[name] = raw_of(list(values), missing) if found is None else found
        lengths = {name: len(raw.values) for name, raw in made.items()}
        if len(set(lengths.values())) > 1:
            problems.add(f"columns differ in length: {lengths}")
        problems.check()
        rows = next(iter(lengths.values()), 0)
        if not rows:
            raise DataError(f"{self.path} has columns but no rows")
        return RawTable(Place(self.path, "row", np.arange(1, rows + 1)), made)


def _series(values: Any, missing: Sequence[str]) -> Raw | None:
    """Read a pandas Series or an array by its type; None for a type that is no column."""
    if hasattr(values, "cat"):
        return _categories(values, missing)
    kind = getattr(values.dtype, "kind", "O")
    if kind in "iuf":
        return _numbers(values, kind)
    if kind == "M":
        if getattr(values.dtype, "tz", None) is not None:
            values = values.dt.tz_convert("UTC").dt.tz_localize(None)
        return Raw("times", times_of(np.asarray(values, dtype="datetime64[us]")))
    if kind in "bOUST":
        return raw_of(list(np.asarray(values, dtype=object)), missing)
    return None


def _numbers(values: Any, kind: str) -> Raw:
    if hasattr(values, "to_numpy"):
        made = values.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        made = values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        if kind != "f" and (np.abs(made) >= EXACT).any():
            return raw_of([str(v) for v in values], ("<NA>",))
    return Raw("numbers", made, (), kind != "f")


def _categories(values: Any, missing: Sequence[str]) -> Raw:
    codes = values.cat.codes.to_numpy().astype(np.int32)
    used = np.unique(codes[codes >= 0])
    known: dict[str, int] = {}
    place = np.full(len(values.cat.categories) + 1, -1, dtype=np.int32)
    gone = frozenset(missing)
    for code in used.tolist():
        text = text_of(values.cat.categories[code])
        place[code] = -1 if text in gone else known.setdefault(text, len(known))
    return Raw("texts", place[codes], tuple(known))
