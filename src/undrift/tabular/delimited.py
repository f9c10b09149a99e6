"""The careful reader of .csv and .tsv: a stream in plain Python that finds every problem."""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from undrift.errors import DataError
from undrift.guarded.limits import Unreadable, check
from undrift.guarded.text import lines_of
from undrift.tabular.cells import MISSING
from undrift.tabular.growing import Again, Growing, RawTable, Wish
from undrift.tabular.problems import Place, Problems

DELIMITERS = ",;\t"
QUOTED = re.compile(r'"[^"]*+"?')
BLOCK, CELLS = 4096, 2**21  # rows, and cells of all columns, at a time
MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
Rows = Iterator[tuple[int, list[str]]]


class Delimited:
    """A file whose first line names the columns."""

    unit = "line"

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
        self.header = header
        self.names = [name.strip() for name in header]

    def read(
        self,
        wishes: Mapping[str, Wish],
        missing: Sequence[str] = MISSING,
        noted: Problems | None = None,
    ) -> RawTable:
        """Read some of the columns; all problems of the file make one error, or are `noted`."""
        wishes = dict(wishes)
        while True:
            problems = Problems(str(self.path))
            grown, lines = self._grown(wishes, missing, problems)
            place = Place(str(self.path), "line", np.array(lines, dtype=np.int64))
            if not lines:
                problems.check()
                raise DataError(f"{self.path} has a header but no rows")
            again = False
            made = {}
            for name, column in grown.items():
                try:
                    made[name] = column.raw(name, place, problems)
                except Again:
                    wishes[name], again = "texts", True
            if not again:
                if noted is None or problems.broken:
                    problems.check()
                else:
                    noted.take(problems)
                return RawTable(place, made)

    def sample(
        self, wishes: Mapping[str, Wish], missing: Sequence[str], rows: int
    ) -> dict[str, Growing]:
        """Read the first rows only, whatever is wrong in them."""
        return self._grown(wishes, missing, Problems(str(self.path)), rows)[0]

    def rows(
        self, missing: Sequence[str], wanted: Sequence[str]
    ) -> tuple[RawTable, dict[int, str]]:
        """Read all rows as texts; what is wrong with the width of a row is told by its index."""
        problems = Problems(str(self.path))
        odd: dict[int, str] = {}
        grown = {name: Growing("texts", missing) for name in wanted}
        lines = array("q")
        for numbers, rows in self._blocks(problems, odd):
            lines.extend(numbers)
            for name, cells in self.cells(rows, grown).items():
                grown[name].add(cells)
        problems.check()
        place = Place(str(self.path), "line", np.array(lines, dtype=np.int64))
        return RawTable(place, {n: g.raw(n, place, problems) for n, g in grown.items()}), odd

    def _grown(
        self,
        wishes: Mapping[str, Wish],
        missing: Sequence[str],
        problems: Problems,
        most: int | None = None,
    ) -> tuple[dict[str, Growing], Sequence[int]]:
        grown = {name: Growing(wish, missing) for name, wish in wishes.items()}
        lines = array("q")
        for numbers, rows in self._blocks(problems, size=most or BLOCK):
            lines.extend(numbers)
            for name, cells in self.cells(rows, grown).items():
                grown[name].add(cells)
            if most is not None and len(lines) >= most:
                break
        return grown, lines

    def cells(
        self, rows: Sequence[list[str]], wanted: Mapping[str, Any]
    ) -> Mapping[str, list[str]]:
        """Cut some columns out of rows."""
        at_first = {name: k for k, name in reversed(list(enumerate(self.names)))}
        return {name: [row[at_first[name]].strip() for row in rows] for name in wanted}

    def _blocks(
        self, problems: Problems, odd: dict[int, str] | None = None, size: int | None = None
    ) -> Iterator[tuple[list[int], list[list[str]]]]:
        """Give rows block by block; those of another width are problems, or kept and `odd`."""
        count = 0
        with _readable(self.path), self.path.open(encoding="utf-8-sig", newline="") as file:
            rows = _rows(file, self.delimiter, self.path, problems)
            next(rows)
            lines: list[int] = []
            held: list[list[str]] = []
            block = max(1, min(size or BLOCK, CELLS // len(self.names)))
            for line, row in rows:
                if len(row) != len(self.names):
                    if odd is None:
                        problems.add(self._ragged(line, row), line)
                        problems.broken = True
                        continue
                    odd[count] = self._ragged(line, row)
                    row = [""] * len(self.names)
                count += 1
                lines.append(line)
                held.append(row)
                if len(held) == block:
                    yield lines, held
                    lines, held = [], []
            if held:
                yield lines, held

    def _ragged(self, line: int, row: list[str]) -> str:
        cells = "1 cell" if len(row) == 1 else f"{len(row)} cells"
        more = f"; a cell with {self.delimiter!r} in it needs quotes"
        return (
            f"line {line} has {cells} where the header names {len(self.names)} columns"
            f"{more if len(row) > len(self.names) else ''}"
        )


def _delimiter(header: str, path: Path) -> str:
    """Take the delimiter that cuts the header into most cells; a tab wins in a .tsv."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    bare = QUOTED.sub("", header)
    return max(DELIMITERS, key=bare.count)


def _rows(file: IO[str], delimiter: str, path: Path, problems: Problems | None = None) -> Rows:
    """Give rows with the line where each begins; blank lines are left out."""
    reader = csv.reader(lines_of(file), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            what = (
                f"line {line} cannot be read ({error}): a cell may have "
                f"{csv.field_size_limit()} characters, and a quote that opens must close"
            )
            if problems is None:
                raise DataError(f"{path}, {what}") from error
            problems.add(what, line)
            problems.broken = True
            return
        if any(map(str.strip, row)) or len(row) > 1:
            yield line, row


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, {_not_utf8(path, error)}: save the table as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    except Unreadable as error:
        raise DataError(f"{path} cannot be read ({error})") from error


def _not_utf8(path: Path, error: UnicodeDecodeError) -> str:
    """Name all lines that are of another encoding, for a decoder reads ahead."""
    with path.open("rb") as file:
        mark = MARKS.get(file.read(2))
        if mark is not None:
            return f"line 1 is not UTF-8 (the file is {mark})"
        file.seek(0)
        bad = []
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                bad.append(number)
    where = Place(str(path), "line", np.array(bad)).named(range(len(bad)))
    verb = "is" if len(bad) == 1 else "are"
    return f"{where} {verb} not UTF-8 ({error.reason}; perhaps the file is latin-1)"
