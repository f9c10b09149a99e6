"""Tables of text with a delimiter: .csv and .tsv, read as a stream; no cell is kept as text."""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from undrift.errors import DataError
from undrift.guarded.limits import Unreadable, check
from undrift.guarded.text import lines_of
from undrift.sources.columns import EMPTY_CELL, Builder, Place, Table, Wish, at

DELIMITERS = ",;\t"
QUOTED = re.compile(r'"[^"]*+"?')
BLOCK, CELLS = 4096, 2**21  # rows, and cells of all columns, at a time


class Block(NamedTuple):
    """Some rows: where each begins, and the cells of the wanted columns."""

    lines: list[int]
    cells: Mapping[str, list[str]]


class Delimited:
    """A file whose first line names the columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _readable(path), path.open(encoding="utf-8-sig", newline="") as file:
            first = next((line for line in lines_of(file) if line.strip()), "")
            self.delimiter = _delimiter(first, path)
            file.seek(0)
            _, header = next(_rows(file, self.delimiter, path), (0, []))
            check("table_columns", "columns", len(header))
        if any("\0" in name for name in header):
            raise DataError(f"{path} is no text: it holds zero bytes; save the table as UTF-8")
        if not header:
            raise DataError(f"{path} is empty: its first line should name the columns")
        self.names = [name.strip() for name in header]

    def read(self, wishes: Mapping[str, Wish]) -> Table:
        """Read some of the columns."""
        grown = {name: Builder(wish) for name, wish in wishes.items()}
        lines = array("q")
        for block in self._blocks(list(wishes)):
            lines.extend(block.lines)
            for name, cells in block.cells.items():
                grown[name].add(cells, block.lines)
        if not lines:
            raise DataError(f"{self.path} has a header but no rows")
        columns = {name: column.column(name, self.path) for name, column in grown.items()}
        return Table(Place(self.path, "line", np.array(lines)), columns)

    def _blocks(self, wanted: Sequence[str]) -> Iterator[Block]:
        at_first = {name: k for k, name in reversed(list(enumerate(self.names)))}
        places = {name: at_first[name] for name in wanted}
        with _readable(self.path), self.path.open(encoding="utf-8-sig", newline="") as file:
            rows = _rows(file, self.delimiter, self.path)
            next(rows)
            lines: list[int] = []
            held: list[list[str]] = []
            block = max(1, min(BLOCK, CELLS // len(self.names)))
            for line, row in rows:
                self._check_width(line, row)
                lines.append(line)
                held.append(row)
                if len(held) == block:
                    yield self._block(lines, held, places)
                    lines, held = [], []
            if held:
                yield self._block(lines, held, places)

    def _check_width(self, line: int, row: list[str]) -> None:
        if len(row) != len(self.names):
            raise DataError(
                f"{self.path}, line {line} has {len(row)} cells where the header names "
                f"{len(self.names)} columns; a cell with {self.delimiter!r} in it needs quotes"
            )

    def _block(self, lines: list[int], rows: list[list[str]], places: Mapping[str, int]) -> Block:
        cells = {name: [row[k].strip() for row in rows] for name, k in places.items()}
        for name, column in cells.items():
            if "" in column:
                line = lines[column.index("")]
                raise at(self.path, f"line {line}", name, EMPTY_CELL)
        return Block(lines, cells)


def _delimiter(header: str, path: Path) -> str:
    """Take the delimiter that cuts the header into most cells; a tab wins in a .tsv."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    bare = QUOTED.sub("", header)
    return max(DELIMITERS, key=bare.count)


def _rows(file: IO[str], delimiter: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Give rows with the line where each begins; blank lines are left out."""
    reader = csv.reader(lines_of(file), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"{path}, line {line} cannot be read ({error}): a cell may have "
                f"{csv.field_size_limit()} characters, and a quote that opens must close"
            ) from error
        if any(map(str.strip, row)) or len(row) > 1:
            yield line, row


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {_bad_line(path)} is not UTF-8 ({error.reason}): save the table as UTF-8"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    except Unreadable as error:
        raise DataError(f"{path} cannot be read ({error})") from error


def _bad_line(path: Path) -> int:
    """Find the line, for a decoder reads ahead."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return number
