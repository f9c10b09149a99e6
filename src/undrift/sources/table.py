"""A user's own table: one row per example, perhaps with a column that names its client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.data.partitions import per_client_test
from undrift.errors import ConfigError, DataError, unknown_name
from undrift.guarded.limits import limit, over
from undrift.models.settings import number, whole
from undrift.sources.columns import Codes, Column, Table, Wish, check_numbers
from undrift.sources.delimited import Delimited
from undrift.sources.examples import Examples, Info
from undrift.sources.parquet import Parquet

TARGETS: Mapping[str, Wish] = {"auto": "target", "classes": "names", "numbers": "numbers"}
Mask = NDArray[np.bool_]


class TableFile(Protocol):
    """A file of named columns."""

    path: Path
    names: list[str]

    def read(self, wishes: Mapping[str, Wish]) -> Table:
        """Read some of the columns, as what is wished."""


class Roles(NamedTuple):
    """Which column is what."""

    target: str
    client: str | None
    features: tuple[str, ...]

    def wishes(self, kind: str) -> dict[str, Wish]:
        """Say as what the columns are to be read."""
        made: dict[str, Wish] = dict.fromkeys(self.features, "feature")
        owner: dict[str, Wish] = {} if self.client is None else {self.client: "names"}
        return {**made, self.target: TARGETS[kind], **owner}


def table(
    path: Path | str,
    target: str,
    client: str | None = None,
    features: Sequence[str] | None = None,
    test_share: float = 0.2,
    test_path: Path | str | None = None,
    kind: str = "auto",
    standardise: bool = True,
    split_seed: int = 0,
) -> Examples:
    """Read a .csv, .tsv or .parquet file whose columns are features, a target and a client.

    Without `client` a partition deals the examples; without `features` all other columns are
    taken.  A share of every client's rows is held out for testing, or `test_path` names them.
    """
    number("test_share", test_share, 0, 1)
    whole("split_seed", split_seed, 0)
    if kind not in tuple(TARGETS):
        raise unknown_name("kind", kind, list(TARGETS), "sources.table")
    opened = open_table(path)
    roles = _roles(opened, target, client, features)
    train = _read(opened, roles.wishes(kind))
    if test_path is None:
        held = _held_out(train, roles, test_share, split_seed)
        return _examples(roles, standardise, train, ~held, train, held)
    test = _alike(_read(open_table(test_path), _same_wishes(train)), train)
    return _examples(roles, standardise, train, _all_rows(train), test, _all_rows(test))


def open_table(path: Path | str) -> TableFile:
    """Open a table by the suffix of its name."""
    if not isinstance(path, str | Path):
        raise ConfigError(f"sources.table: path must be a file name, got {path!r}")
    made = Path(path).expanduser()
    kinds: dict[str, type[Delimited] | type[Parquet]] = {
        ".csv": Delimited,
        ".tsv": Delimited,
        ".parquet": Parquet,
    }
    if made.is_dir():
        raise DataError(f"{made} is a folder: name the file in it")
    if made.suffix.lower() not in kinds:
        raise DataError(f"{made}: cannot read {made.suffix!r}; use {', '.join(kinds)}")
    if not made.is_file():
        raise DataError(f"{made} is not there: check the path, which starts from {Path.cwd()}")
    opened = kinds[made.suffix.lower()](made)
    _check_header(opened)
    return opened


def _check_header(opened: TableFile) -> None:
    seen: set[str] = set()
    for k, name in enumerate(opened.names):
        if not name:
            raise DataError(
                f"{opened.path}: column {k + 1} has no name; name it, or write the table without "
                "its index"
            )
        if name in seen:
            raise DataError(f"{opened.path}: two columns are named {name!r}; rename one")
        seen.add(name)


def _roles(
    opened: TableFile, target: str, client: str | None, features: Sequence[str] | None
) -> Roles:
    """Find the columns that are asked for."""
    special = [target] if client is None else [target, client]
    if isinstance(features, str):
        raise ConfigError(f"sources.table: features must be a list of columns, got {features!r}")
    # pandas keeps an index that counts nothing under such a name
    others = [n for n in opened.names if n not in special and not n.startswith("__index_level_")]
    chosen = others if features is None else list(features)
    known = set(opened.names)
    for name in (*special, *chosen):
        if name not in known:
            raise DataError(str(unknown_name("column", name, opened.names, str(opened.path))))
    asked = [*special, *chosen]
    twice = next((name for name, count in Counter(asked).items() if count > 1), None)
    if twice is not None:
        raise DataError(
            f"{opened.path}: column {twice!r} is asked for two times; target, client and "
            "features must differ"
        )
    if not chosen:
        raise DataError(f"{opened.path}: no column is left for the features")
    return Roles(target, client, tuple(chosen))


def _read(opened: TableFile, wishes: Mapping[str, Wish]) -> Table:
    known = set(opened.names)
    missing = [name for name in wishes if name not in known]
    if missing:
        raise DataError(str(unknown_name("column", missing[0], opened.names, str(opened.path))))
    made = opened.read(wishes)
    check_numbers(made)
    return made


def _same_wishes(train: Table) -> dict[str, Wish]:
    return {name: column.kind for name, column in train.columns.items()}


def _alike(test: Table, train: Table) -> Table:
    """Give the names of a second file the codes of the first."""
    columns = dict(test.columns)
    for name, column in columns.items():
        if column.kind != "names":
            continue
        known = {text: code for code, text in enumerate(train.columns[name].names)}
        codes = np.array([known.get(text, -1) for text in column.names])[column.values]
        strange = np.flatnonzero(codes < 0)
        if len(strange):
            text = column.names[column.values[strange[0]]]
            what = f"{text!r} does not occur in {train.place.path}"
            raise test.place.error(int(strange[0]), name, what)
        columns[name] = Column("names", codes, train.columns[name].names)
    return Table(test.place, columns)


def _all_rows(made: Table) -> Mask:
    return np.ones(len(made.place.numbers), dtype=bool)


def _held_out(made: Table, roles: Roles, share: float, seed: int) -> Mask:
    """Choose rows to test on, a share of every client's."""
    total = len(made.place.numbers)
    held = np.zeros(total, dtype=bool)
    if share == 0:
        return held
    owners: Codes = np.zeros(total, dtype=np.int64)
    if roles.client is not None:
        owners = made.columns[roles.client].values
    ends = np.cumsum(np.bincount(owners))[:-1]
    parts = np.split(np.argsort(owners, kind="stable"), ends)
    held[np.concatenate(per_client_test(parts, share, seed)[1])] = True
    return held


# ------------------------------------------------------------------------------------ encoding
class Scale(NamedTuple):
    """What is taken from a column of numbers, and by what the rest is divided; 0 makes zeros."""

    mean: float = 0.0
    std: float = 1.0

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """Scale some numbers."""
        return (values - self.mean) / self.std if self.std else np.zeros_like(values)


def _scale(column: Column, rows: Mask, standardise: bool) -> Scale:
    if column.kind != "numbers" or not standardise:
        return Scale()
    values = column.values[rows]
    # not by the deviation: that of a constant 0.1 is not exactly zero
    constant = values.min() == values.max()
    return Scale(float(values.mean()), 0.0 if constant else float(values.std()))


def _encoded(made: Table, roles: Roles, scales: Sequence[Scale], rows: Mask) -> Tensor:
    """Put the features of some rows side by side: numbers, flags, one column per text."""
    columns = [made.columns[name] for name in roles.features]
    width = sum(map(_width, columns))
    if len(rows) * width > limit("table_values"):
        cause = over("table_values", "numbers of its features", len(rows) * width)
        raise DataError(f"{made.place.path}: {cause}; or leave columns out with features=[...]")
    x = np.zeros((int(rows.sum()), width), dtype=np.float32)
    start = 0
    for column, scale in zip(columns, scales, strict=True):
        values = column.values[rows]
        if column.kind == "names":
            x[np.arange(len(x)), start + values] = 1
        else:
            x[:, start] = scale.apply(values)
        start += _width(column)
    return torch.from_numpy(x)


def _width(column: Column) -> int:
    return len(column.names) if column.kind == "names" else 1


def _targets(column: Column, rows: Mask, scale: Scale | None = None) -> Tensor:
    values = column.values[rows]
    if column.kind == "names":
        return torch.from_numpy(values)
    values = values if scale is None else scale.apply(values)
    return torch.from_numpy(values.astype(np.float32))[:, None]


def _examples(
    roles: Roles, standardise: bool, train: Table, train_rows: Mask, test: Table, test_rows: Mask
) -> Examples:
    target = train.columns[roles.target]
    if target.kind == "names" and len(target.names) < 2:
        raise DataError(
            f"{train.place.path}, column {roles.target!r} holds one class only "
            f"({target.names[0]!r}): there is nothing to tell apart"
        )
    columns = [train.columns[name] for name in roles.features]
    scales = [_scale(column, train_rows, standardise) for column in columns]
    # numbers of any size are learned alike: a loss is in units of their variance
    goal = _scale(target, train_rows, standardise)
    sides = ((train, train_rows), (test, test_rows))
    (x, y), (test_x, test_y) = (
        (_encoded(made, roles, scales, rows), _targets(made.columns[roles.target], rows, goal))
        for made, rows in sides
    )
    owners = [
        None if roles.client is None else _targets(t.columns[roles.client], r) for t, r in sides
    ]
    info = _info(train, roles, scales, standardise)._replace(target_scale=(goal.mean, goal.std))
    return Examples(x, y, test_x, test_y, len(target.names), info, *owners)


def _info(train: Table, roles: Roles, scales: Sequence[Scale], standardise: bool) -> Info:
    columns = [train.columns[name] for name in roles.features]
    widths = [_width(column) for column in columns]
    mean, std = (np.repeat(np.array(v), widths).tolist() for v in zip(*scales, strict=True))
    path = train.place.path
    return Info(
        "table",
        path.suffix.lower().removeprefix("."),
        path,
        "train" if standardise else "unit",
        tuple(mean),
        tuple(std),
        train.columns[roles.target].names,
        () if roles.client is None else train.columns[roles.client].names,
        tuple(
            f"{name}={text}" if column.names else name
            for name, column in zip(roles.features, columns, strict=True)
            for text in column.names or ("",)
        ),
    )
