"""Tables in .parquet files; needs pyarrow."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undrift.errors import DataError, MissingExtra
from undrift.guarded.binary import BROKEN
from undrift.guarded.limits import check
from undrift.sources.columns import (
    EMPTY_CELL,
    EXACT,
    LIMITS,
    Column,
    Kind,
    Place,
    Table,
    Wish,
    coded,
    too_large,
    too_many,
)

TEXTS = ("string", "large_string", "string_view")


class Parquet:
    """A file that knows the types of its columns."""

    def __init__(self, path: Path) -> None:
        self.path, self._arrow = path, _arrow()
        try:
            self._file = self._arrow.parquet.ParquetFile(path)
            check("table_columns", "columns", self._file.metadata.num_columns)
        except (self._arrow.ArrowException, OSError, *BROKEN) as error:
            raise DataError(f"{path} cannot be read as parquet ({error})") from error
        self.names = list(self._file.schema_arrow.names)

    def read(self, wishes: Mapping[str, Wish]) -> Table:
        """Read some of the columns."""
        try:
            about = self._file.metadata
            check("table_values", "cells of the columns", about.num_rows * len(wishes))
            held = self._file.read(columns=list(wishes))
        except (self._arrow.ArrowException, OSError, *BROKEN) as error:
            raise DataError(f"{self.path} cannot be read as parquet ({error})") from error
        if not len(held):
            raise DataError(f"{self.path} has columns but no rows")
        place = Place(self.path, "row", np.arange(1, len(held) + 1))
        columns = {n: self._column(n, wish, held[n], place) for n, wish in wishes.items()}
        return Table(place, columns)

    def _column(self, name: str, wish: Wish, cells: Any, place: Place) -> Column:
        given = cells.type
        if self._arrow.types.is_dictionary(given):  # decoded, for it may list unused values too
            cells = cells.cast(given.value_type)
        if cells.null_count:
            row = np.flatnonzero(cells.is_null().to_numpy())[0]
            raise place.error(int(row), name, EMPTY_CELL)
        kind = self._kind(name, wish, given, cells.type)
        if kind == "names":
            return self._names(name, wish, cells, place)
        values = cells.to_numpy()
        if self._arrow.types.is_integer(cells.type):
            _check_exact(name, values, place)
        return Column(kind, values.astype(np.float64))

    def _kind(self, name: str, wish: Wish, given: Any, inner: Any) -> Kind:
        """Decide by the type that the file gives, and by what is wished."""
        types = self._arrow.types
        number = types.is_integer(inner) or types.is_floating(inner) or types.is_decimal(inner)
        flag, text = types.is_boolean(inner), str(inner) in TEXTS
        if not (text or number or flag):
            raise DataError(
                f"{self.path}, column {name!r} is of the type {inner}: leave it out with "
                "features=[...], or turn it into numbers or texts"
            )
        named = text or types.is_dictionary(given)
        whole = flag or types.is_integer(inner)
        if wish == "names" or (named and wish in LIMITS) or (whole and wish == "target"):
            return "names"
        if (wish == "numbers" and not number) or (wish == "flags" and not flag):
            raise DataError(f"{self.path}, column {name!r} holds {inner}, not {wish}")
        return "flags" if flag else "numbers"

    def _names(self, name: str, wish: Wish, cells: Any, place: Place) -> Column:
        """Turn values into codes of their names, in order."""
        found = cells.combine_chunks().dictionary_encode()
        known = [_named(value) for value in found.dictionary.to_pylist()]
        codes = found.indices.to_numpy()
        missing = [code for code, text in enumerate(known) if text in ("", "nan")]
        if missing:
            raise place.error(int(np.argmax(codes == missing[0])), name, EMPTY_CELL)
        if len(known) > LIMITS.get(wish, np.inf):
            raise too_many(name, wish, self.path)
        return coded(known, codes)


def _named(value: Any) -> str:
    text = str(value).strip()
    return text.lower() if isinstance(value, bool) else text


def _check_exact(name: str, values: NDArray[Any], place: Place) -> None:
    bad = np.flatnonzero((values >= EXACT) | (values <= -EXACT))
    if len(bad):
        raise place.error(int(bad[0]), name, too_large(values[bad[0]]))


def _arrow() -> Any:
    try:
        import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtra(
            "pyarrow is needed to read .parquet: pip install 'undrift[parquet]'"
        ) from error
    return import_module("pyarrow")
