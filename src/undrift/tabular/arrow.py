"""The fast reader of .csv and .parquet by pyarrow.

It believes nothing that it is not sure of: where a .csv is odd in any way, `read_csv` gives None
and the careful reader says what is wrong, or reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undrift.errors import DataError, MissingExtra
from undrift.guarded.binary import BROKEN
from undrift.guarded.limits import check
from undrift.tabular.cells import (
    DECIMAL_COMMA,
    EXACT,
    MISSING,
    PADDED,
    WHOLE,
    as_number,
    text_of,
    too_large,
)
from undrift.tabular.delimited import Delimited
from undrift.tabular.frames import Raw
from undrift.tabular.growing import RawTable, Wish
from undrift.tabular.problems import Place, Problems

TEXTS = ("string", "large_string", "string_view")
SAMPLE = 1000  # rows that tell how a column is to be read fast
BLOCK_BYTES = 2**22
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


def arrow(needed: str | None = None) -> Any:
    """Import pyarrow; None without it, or an error that says what it is needed for."""
    try:
        for part in ("parquet", "csv", "compute"):
            import_module(f"pyarrow.{part}")
    except ImportError as error:
        if needed is None:
            return None
        raise MissingExtra(
            f"pyarrow is needed to read {needed}: pip install 'undrift[parquet]'"
        ) from error
    return import_module("pyarrow")


# ----------------------------------------------------------------------------------------- csv
def read_csv(
    opened: Delimited, wishes: Mapping[str, Wish], missing: Sequence[str] = MISSING
) -> RawTable | None:
    """Read some columns of a large .csv fast; None where the careful reader has to look."""
    made = arrow()
    if made is None or len(set(opened.names)) < len(opened.names):
        return None
    sample = opened.sample(wishes, missing, SAMPLE)
    numeric = {
        name: not (grown.texts or grown.padded or (wishes[name] == "target" and grown.whole))
        and wishes[name] != "texts"
        for name, grown in sample.items()
    }
    try:
        with opened.path.open("rb") as start:
            breaks = b'"' in start.read(BLOCK_BYTES)
        grown, file = _stream(made, opened, numeric, missing, breaks)
        if (
            file.quotes and not breaks
        ):  # a quoted cell may hold a line break, at which blocks must not be cut
            grown, file = _stream(made, opened, numeric, missing, True)
    except (made.ArrowException, OSError, *BROKEN):
        return None
    columns: dict[str, Raw] = {}
    for name in wishes if grown else ():
        found = grown.pop(name).raw(wishes[name], sample[name].whole)
        if found is None:
            return None
        columns[name] = found
    rows = max((len(raw.values) for raw in columns.values()), default=0)
    exact = file.lines in (rows + 1, rows + 2)
    place = Place(str(opened.path), *(
        ("line", np.arange(2, rows + 2)) if exact else ("row", np.arange(1, rows + 1))
    ))  # fmt: skip
    return RawTable(place, columns) if rows else None


class _Counting:
    """A file for pyarrow that counts its lines while they are read."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self.lines, self.quotes, self.closed = 1, False, False

    def read(self, size: int = -1) -> bytes:
        """Read on."""
        made = self._file.read(size)
        self.lines += made.count(b"\n")
        self.quotes = self.quotes or b'"' in made
        return made

    def __enter__(self) -> _Counting:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def readable(self) -> bool:
        """Say yes."""
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self.closed = True


def _stream(
    made: Any,
    opened: Delimited,
    numeric: Mapping[str, bool],
    missing: Sequence[str],
    breaks: bool,
) -> tuple[dict[str, _Fast], _Counting]:
    """Read batches until the end, or until a quote comes where line breaks are not looked for."""
    words = made.dictionary(made.int32(), made.string())
    csv, written = made.csv, dict(zip(opened.names, opened.header, strict=True))
    types = {written[n]: made.float64() if number else words for n, number in numeric.items()}
    with _Counting(opened.path) as file:
        reader = csv.open_csv(
            made.PythonFile(file, mode="r"),
            read_options=csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
            parse_options=csv.ParseOptions(delimiter=opened.delimiter, newlines_in_values=breaks),
            convert_options=csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=list(missing),
                strings_can_be_null=False,  # texts of missing cells have the code -1
            ),
        )
        grown: dict[str, _Fast] = {}
        for batch in reader:
            if file.quotes and not breaks:
                break
            if not grown:
                size = opened.path.stat().st_size
                rows = 1000 + int(1.05 * batch.num_rows * size / min(size, BLOCK_BYTES))
                grown = {name: _Fast(number, missing, rows) for name, number in numeric.items()}
            for name in numeric:
                grown[name].add(batch.column(written[name]))
        return grown, file


class _Fast:
    """Grows one column from batches; `rows` is about how many there will be."""

    def __init__(self, number: bool, missing: Sequence[str], rows: int) -> None:
        self.number, self.odd, self.rows = number, False, 0
        self.shift = len(set(missing))
        self.known = dict.fromkeys(missing, -1)
        # pages that are never written take no memory
        self.values: NDArray[Any] = np.empty(rows, np.float64 if number else np.int32)

    def add(self, cells: Any) -> None:
        """Take in a batch."""
        end = self.rows + len(cells)
        if end > len(self.values):
            more = np.empty(2 * end, self.values.dtype)
            more[: self.rows] = self.values[: self.rows]
            self.values = more
        self.values[self.rows : end] = self._numbers(cells) if self.number else self._codes(cells)
        self.rows = end

    def _numbers(self, cells: Any) -> NDArray[Any]:
        values: NDArray[Any] = cells.to_numpy(zero_copy_only=False)
        gone = np.count_nonzero(np.isnan(values))
        with np.errstate(invalid="ignore"):
            far = gone < len(values) and np.fmax.reduce(np.abs(values)) >= EXACT
        self.odd |= bool(far) or gone != cells.null_count
        return values

    def _codes(self, cells: Any) -> NDArray[Any]:
        names = [text.strip() for text in cells.dictionary.to_pylist()]
        known, shift = self.known, self.shift
        codes = [known.setdefault(name, len(known) - shift) for name in names]
        made: NDArray[Any] = np.array(codes, dtype=np.int32)[cells.indices.to_numpy()]
        return made

    def raw(self, wish: Wish, whole: bool) -> Raw | None:
        """Give the column; None where somebody has to look closer."""
        values = self.values[: self.rows]
        if self.number:
            if self.odd:
                return None
            whole = whole and bool((np.isnan(values) | (values == np.floor(values))).all())
            return Raw("numbers", values, (), whole)
        names = tuple(list(self.known)[self.shift :])
        raw = Raw("texts", values, names)
        return raw if wish == "texts" else _decided(raw, wish)


def _decided(raw: Raw, wish: Wish) -> Raw | None:
    """Take texts for what the cells say, where there is no doubt."""
    numbers = [as_number(name) for name in raw.names]
    words = [name for name, value in zip(raw.names, numbers, strict=True) if value is None]
    if words:
        counts = np.bincount(raw.values[raw.values >= 0], minlength=len(numbers))
        texts = int(counts[[value is None for value in numbers]].sum())
        comma = all(map(DECIMAL_COMMA.fullmatch, words))
        return None if comma or 2 * texts <= counts.sum() else raw
    if wish == "target" and raw.names and all(map(WHOLE.fullmatch, raw.names)):
        return raw._replace(whole=True)
    if not all(value is not None and abs(value) < EXACT for value in numbers):
        return None
    whole = all(map(WHOLE.fullmatch, raw.names))
    values = np.array([*numbers, np.nan], dtype=np.float64)[raw.values]
    return Raw("numbers", values, (), whole, any(map(PADDED.fullmatch, raw.names)))


# ------------------------------------------------------------------------------------- parquet
class Parquet:
    """A file that knows the types of its columns."""

    unit = "row"

    def __init__(self, path: Path) -> None:
        self.path, self._arrow = path, arrow(".parquet")
        try:
            self._file = self._arrow.parquet.ParquetFile(path)
            check("table_columns", "columns", self._file.metadata.num_columns)
        except (self._arrow.ArrowException, OSError, *BROKEN) as error:
            raise DataError(f"{path} cannot be read as parquet ({error})") from error
        self.names = list(self._file.schema_arrow.names)

    def read(self, wishes: Mapping[str, Wish], missing: Sequence[str] = MISSING) -> RawTable:
        """Read some of the columns, one after the other; problems make one error."""
        problems = Problems(str(self.path))
        rows = self._file.metadata.num_rows
        check("table_values", "cells of the columns", rows * len(wishes))
        if not rows:
            raise DataError(f"{self.path} has columns but no rows")
        place = Place(str(self.path), "row", np.arange(1, rows + 1))
        made = {}
        for name in wishes:
            try:
                cells = self._file.read(columns=[name], use_threads=False)[name]
            except (self._arrow.ArrowException, OSError, *BROKEN) as error:
                raise DataError(f"{self.path} cannot be read as parquet ({error})") from error
            found = self._column(name, wishes[name], cells, place, problems, missing)
            if found is not None:
                made[name] = found
        problems.check()
        return RawTable(place, made)

    def _column(
        self,
        name: str,
        wish: Wish,
        cells: Any,
        place: Place,
        problems: Problems,
        missing: Sequence[str],
    ) -> Raw | None:
        types, given = self._arrow.types, cells.type
        inner = given.value_type if types.is_dictionary(given) else given
        number = types.is_integer(inner) or types.is_floating(inner) or types.is_decimal(inner)
        if number and not types.is_dictionary(given):
            return self._numbers(name, wish, cells, place, problems)
        if types.is_timestamp(inner) or types.is_date(inner):
            return Raw("times", self._times(cells, inner))
        if str(inner) in TEXTS or types.is_boolean(inner) or number or types.is_null(inner):
            return self._texts(cells, missing)
        problems.add(
            f"column {name!r} is of the type {inner}: leave it out with exclude=[...] or "
            "features=[...], or turn it into numbers or texts"
        )
        return None

    def _numbers(self, name: str, wish: Wish, cells: Any, place: Place, problems: Problems) -> Raw:
        whole = self._arrow.types.is_integer(cells.type)
        if whole and self._far(cells):
            if wish in ("texts", "target"):
                return self._texts(cells, ())
            for row, value in enumerate(cells.to_pylist()):
                if value is not None and abs(value) >= EXACT:
                    problems.cells(place, [row], name, too_large(value))
        values = np.array(cells.cast(self._arrow.float64(), safe=False).to_numpy())
        return Raw("numbers", values, (), whole)

    def _far(self, cells: Any) -> bool:
        """Tell whether a whole number is too large for float64: it stays a text."""
        ends = self._arrow.compute.min_max(cells).as_py()
        return any(v is not None and abs(v) >= EXACT for v in ends.values())

    def _times(self, cells: Any, inner: Any) -> NDArray[np.float64]:
        empty = cells.is_null().to_numpy()
        wide = cells.cast(self._arrow.timestamp("us"), safe=False)
        values = wide.cast(self._arrow.int64()).fill_null(0).to_numpy() / 1e6
        values[empty] = np.nan
        return np.asarray(values, dtype=np.float64)

    def _texts(self, cells: Any, missing: Sequence[str]) -> Raw:
        gone = frozenset(missing)
        types = self._arrow.types
        if types.is_dictionary(cells.type):  # decoded, for it may list unused values too
            cells = cells.cast(cells.type.value_type)
        if types.is_null(cells.type):
            return Raw("texts", np.full(len(cells), -1, dtype=np.int32))
        found = cells.combine_chunks().dictionary_encode()
        known: dict[str, int] = {}
        codes = []
        for value in found.dictionary.to_pylist():
            text = text_of(value)
            here = text in gone or text in ("", "nan")
            codes.append(-1 if here else known.setdefault(text, len(known)))
        place = np.array([*codes, -1], dtype=np.int32)
        return Raw("texts", place[found.indices.fill_null(len(codes)).to_numpy()], tuple(known))
