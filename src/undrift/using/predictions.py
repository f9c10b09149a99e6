"""What a model says about rows: probabilities and classes, or values; and which rows it cannot."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undrift.errors import ConfigError, MissingExtra
from undrift.state import disk

DELIMITERS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True, eq=False)
class Predictions:
    """One entry per row that was given, in order; a row with an error has NaN.

    `numbers` are the rows' line numbers in their file, from 0 for what is no file.
    """

    outputs: NDArray[np.float64]  # [n, C] probabilities, or [n, ...] values
    class_names: tuple[str, ...]  # empty where numbers are predicted
    numbers: Sequence[int]  # [n]
    errors: Mapping[int, str]  # by place in the rows, from 0
    target: str = ""  # the column that is predicted

    def __len__(self) -> int:
        return len(self.outputs)

    def __repr__(self) -> str:
        what = f"{len(self.class_names)} classes" if self.class_names else "values"
        wrong = f", {len(self.errors)} with errors" if self.errors else ""
        return f"Predictions({len(self)} rows{wrong}, {what})"

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Give the probability of each class, [n, C]."""
        if not self.class_names:
            raise ConfigError("this model predicts numbers, not classes: read .values")
        return self.outputs

    @property
    def classes(self) -> list[str | None]:
        """Name the most probable class of each row; None where the row has an error."""
        best = np.nan_to_num(self.probabilities, nan=-1.0).argmax(1)
        names = self.class_names
        return [None if i in self.errors else names[k] for i, k in enumerate(best.tolist())]

    @property
    def values(self) -> NDArray[np.float64]:
        """Give the predicted numbers in the target's own units, [n] or [n, outputs]."""
        if self.class_names:
            raise ConfigError("this model predicts classes, not numbers: read .probabilities")
        one = self.outputs.ndim == 2 and self.outputs.shape[1] == 1
        return self.outputs[:, 0] if one else self.outputs

    # -- as a table ----------------------------------------------------------------------------
    @property
    def header(self) -> list[str]:
        """Name the columns of the table that is written."""
        if self.class_names:
            return ["row", *(f"p_{name}" for name in self.class_names), "class", "error"]
        return ["row", *self._value_names(), "error"]

    def _value_names(self) -> list[str]:
        count = math.prod(self.outputs.shape[1:])
        return ["value"] if count == 1 else [f"value_{k}" for k in range(count)]

    @property
    def _flat(self) -> NDArray[np.float64]:
        return self.outputs.reshape(len(self), math.prod(self.outputs.shape[1:]))

    def lines(self) -> Iterator[list[str]]:
        """Give a line for each row, in order."""
        flat = self._flat
        classes = self.classes if self.class_names else None
        for i, number in enumerate(self.numbers):
            error = self.errors.get(i, "")
            # probabilities to float32's digits, values of any size whole
            shown = (lambda v: f"{v:.9g}") if self.class_names else repr
            cells = [""] * flat.shape[1] if error else [shown(v) for v in flat[i].tolist()]
            named = [] if classes is None else [classes[i] or ""]
            yield [str(number), *cells, *named, error]

    def text(self, delimiter: str = ",") -> str:
        """Write the table."""
        made = io.StringIO()
        writer = csv.writer(made, delimiter=delimiter, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows(self.lines())
        return made.getvalue()

    def write(self, path: Path | str, *, force: bool = False) -> None:
        """Write the table to a new .csv or .tsv file; `force` replaces one that is there."""
        check_new(Path(path), tuple(DELIMITERS), force=force)
        disk.write_atomically(
            Path(path), [self.text(DELIMITERS[Path(path).suffix.lower()]).encode()]
        )

    def to_pandas(self) -> Any:
        """Give the table as a DataFrame, whose index are the rows' numbers."""
        try:
            import pandas
        except ImportError as error:
            raise MissingExtra(
                "pandas is needed for a DataFrame: pip install 'undrift[pandas]'"
            ) from error
        flat = self._flat
        columns: dict[str, Any] = dict(zip(self.header[1:], flat.T, strict=False))
        if self.class_names:
            columns["class"] = self.classes
        columns["error"] = [self.errors.get(i, "") for i in range(len(self))]
        return pandas.DataFrame(columns, index=pandas.Index(self.numbers, name="row"))

    def summary(self) -> str:
        """Say in a line how many rows there are, and what is wrong with some."""
        rows = f"{len(self)} row" + ("s" if len(self) != 1 else "")
        if not self.errors:
            return f"{rows}, none with an error"
        common = Counter(self.errors.values()).most_common(3)
        told = "; ".join(f"{text} ({n})" if n > 1 else text for text, n in common)
        rest = len(self.errors) - sum(n for _, n in common)
        more = f"; and {rest} more" if rest else ""
        return f"{rows}, {len(self.errors)} with errors: {told}{more}"


def check_new(path: Path, suffixes: Sequence[str], *, force: bool = False) -> None:
    """Refuse a file that cannot be written, before anything is computed."""
    if path.suffix.lower() not in suffixes:
        known = ", ".join(suffixes)
        raise ConfigError(f"{path}: the name must end in one of {known}: it says what is written")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give the name of a file")
    if path.exists() and not force:
        raise ConfigError(f"{path} is there already: choose another name, or say --force")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}: make it first")
