"""The source "table": a user's own table, one row per example, perhaps of several clients."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.data.examples import Examples, Info
from undrift.data.partitions import per_client_test
from undrift.errors import ConfigError, DataError, unknown_name
from undrift.guarded.limits import limit, over
from undrift.models.settings import number, whole
from undrift.tabular.agreeing import agree
from undrift.tabular.cells import MISSING, in_order
from undrift.tabular.frames import Chosen, Frame, Raw, texts_of, typed_columns
from undrift.tabular.growing import RawTable, Wish
from undrift.tabular.infer import infer, settled
from undrift.tabular.preparation import Preparation
from undrift.tabular.problems import SHOWN, Problems
from undrift.tabular.reading import TableFile, header_problems, open_table, read, wish_of
from undrift.tabular.schema import Schema, checked_missing
from undrift.tabular.sums import LEAST

log = logging.getLogger("undrift")

KINDS = ("auto", "classes", "numbers", "count")
TARGETS: Mapping[str, Wish] = {
    "auto": "target",
    "classes": "texts",
    "numbers": "numbers",
    "count": "numbers",
}
Ids = NDArray[np.int64]


class Held(NamedTuple):
    """The rows of one file: typed columns, and the client of each row."""

    frame: Frame
    owners: Ids | None
    clients: tuple[str, ...]
    dropped: int = 0


class Settings(NamedTuple):
    """What is asked of a table, beside its path."""

    target: str
    client: str | None
    features: tuple[str, ...] | None
    exclude: tuple[str, ...]
    kind: str
    columns: Mapping[str, Any] | None
    missing: tuple[str, ...]
    drop: bool


Sides = tuple[tuple[Held, Ids], tuple[Held, Ids]]  # to train on and to test on: indices of rows


def table(
    path: Any,
    target: str,
    client: str | None = None,
    features: Sequence[str] | None = None,
    test_share: float = 0.2,
    test_path: Any = None,
    kind: str = "auto",
    standardise: bool = True,
    split_seed: int = 0,
    columns: Mapping[str, Any] | None = None,
    exclude: Sequence[str] | None = None,
    missing: Sequence[str] | None = None,
    missing_target: str = "refuse",
    least: int | None = None,
) -> Examples:
    """Read a .csv, .tsv or .parquet file, or a DataFrame, of features, a target and a client.

    Without `client` a partition deals the examples.  `columns` says what each column is; without
    it the cells do.  A share of every client's rows is held out for testing, or `test_path` names
    them.  Means, deviations and levels are sums over the clients' training rows.
    """
    number("test_share", test_share, 0, 1)
    whole("split_seed", split_seed, 0)
    least = (1 if columns is None else LEAST) if least is None else whole("least", least)
    asked = settings(target, client, features, exclude, kind, columns, missing, missing_target)
    opened = open_table(path)
    schema, sides = split(opened, asked, test_share, test_path, split_seed)
    return _examples(opened, schema, sides, standardise, least, asked)


def split(
    opened: TableFile, asked: Settings, test_share: float, test_path: Any, split_seed: int
) -> tuple[Schema, Sides]:
    """Read the rows to train on and those to test on."""
    train, schema = _first(opened, asked)
    rows = np.arange(len(train.frame))
    if test_path is None:
        held = _held_out(train, test_share, split_seed)
        return schema, ((train, rows[~held]), (train, rows[held]))
    test = _second(open_table(test_path), schema, asked, train)
    return schema, ((train, rows), (test, np.arange(len(test.frame))))


def settings(
    target: str, client: Any, features: Any, exclude: Any, kind: str, columns: Any, missing: Any,
    missing_target: str,
) -> Settings:  # fmt: skip
    """Check what is asked of a table."""
    if kind not in KINDS:
        raise unknown_name("kind", kind, list(KINDS), "sources.table")
    if missing_target not in ("refuse", "drop"):
        raise unknown_name(
            "choice", missing_target, ["refuse", "drop"], "sources.table: missing_target"
        )
    for name, value in (("features", features), ("exclude", exclude)):
        if isinstance(value, str) or (value is not None and not isinstance(value, Sequence)):
            raise ConfigError(f"sources.table: {name} must be a list of columns, got {value!r}")
    if features is not None and (exclude or columns is not None):
        other = "[columns]" if columns is not None else "exclude"
        raise ConfigError(f"sources.table: features and {other} both choose columns: drop one")
    chosen = None if features is None else tuple(features)
    gone = MISSING if missing is None else checked_missing(missing)
    if columns is not None and hasattr(columns, "table"):
        columns = columns.table()  # as an experiment keeps it
    left = tuple(exclude or ())
    return Settings(target, client, chosen, left, kind, columns, gone, missing_target == "drop")


# ------------------------------------------------------------------------------------- columns
def _first(opened: TableFile, asked: Settings) -> tuple[Held, Schema]:
    """Read the table to train on; without `columns` its cells say what the columns are."""
    problems = Problems(str(opened.path))
    header_problems(opened, problems)
    schema: Schema | None = None
    if asked.columns is not None:
        schema = Schema.of(asked.columns, asked.target, asked.missing)
        names = [name for name, _ in schema.features]
        _check_named(opened, asked, names, problems)
        wishes = {name: wish_of(schema[name]) for name in schema.names}
    else:
        names = _chosen(opened, asked, problems)
        wishes = {**dict.fromkeys(names, "feature"), asked.target: TARGETS[asked.kind]}
    problems.check()
    made = _wished(opened, wishes, asked, problems)
    raw = {name: made.columns[name] for name in (*names, asked.target)}
    if schema is None:
        schema = infer(raw, names, asked.target, asked.kind, asked.missing, problems)
    schema = settled(schema, raw)
    columns = typed_columns(raw, schema, made.place, problems)
    owners: Ids | None = None
    clients: tuple[str, ...] = ()
    if asked.client is not None:
        owners, clients = _owners(made.columns[asked.client], asked.client, made.place, problems)
    return whole_rows(Frame(columns, made.place), owners, clients, asked, problems), schema


def _wished(
    opened: TableFile, wishes: Mapping[str, Wish], asked: Settings, problems: Problems
) -> RawTable:
    owner: dict[str, Wish] = {} if asked.client is None else {asked.client: "texts"}
    return read(opened, {**wishes, **owner}, asked.missing, problems)


def _known(opened: TableFile, name: str, problems: Problems, what: str = "column") -> bool:
    if name not in opened.names:
        problems.add(str(unknown_name(what, name, opened.names)))
        return False
    return True


def _chosen(opened: TableFile, asked: Settings, problems: Problems) -> list[str]:
    """Find the columns to learn from: those that are asked for, or all others."""
    special = [asked.target, *([] if asked.client is None else [asked.client])]
    # pandas keeps an index that counts nothing under such a name
    plain = [n for n in opened.names if not n.startswith("__index_level_")]
    others = [n for n in plain if n not in (*special, *asked.exclude)]
    chosen = others if asked.features is None else list(asked.features)
    named = [*special, *(asked.features or ()), *asked.exclude]
    for name in dict.fromkeys(named):
        _known(opened, name, problems)
    for name, count in Counter(named).items():
        if count > 1:
            problems.add(
                f"column {name!r} is asked for two times; target, client, features and exclude "
                "must differ"
            )
    if not chosen:
        problems.add("no column is left for the features")
    return list(dict.fromkeys(chosen))


def _check_named(
    opened: TableFile, asked: Settings, names: Sequence[str], problems: Problems
) -> None:
    """Compare `[columns]` with the columns that are there: both ways."""
    special = {asked.target, asked.client}
    for name in (*names, asked.target, *([] if asked.client is None else [asked.client])):
        if name not in opened.names:
            near = get_close_matches(name, opened.names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            where = "[columns] names" if name not in special else "[data] names"
            problems.add(f"{where} the column {name!r}, which is not there.{hint}")
    for name in asked.exclude:
        _known(opened, name, problems)
        if name in (*names, *special):
            problems.add(f"column {name!r} is in `exclude` and used all the same: drop one")
    if asked.client in names:
        problems.add(f"[columns] has a line for {asked.client!r}, the client: drop it")
    for name in opened.names:
        index = name.startswith("__index_level_")
        if name and not index and name not in (*names, *special, *asked.exclude):
            problems.add(
                f"the column {name!r} is not in [columns]: add a line for it, or put it into "
                "exclude = [...] of [data]"
            )


def _owners(raw: Raw, name: str, place: Any, problems: Problems) -> tuple[Ids, tuple[str, ...]]:
    texts = texts_of(raw)
    empty = np.flatnonzero(texts.values < 0)
    if len(empty):
        problems.cells(place, empty, name, "the cell is empty, so that nobody holds the row; fill "
                       "it or drop the row")  # fmt: skip
    names = in_order(texts.names)
    order = {text: k for k, text in enumerate(names)}
    codes = np.array([*(order[text] for text in texts.names), -1], dtype=np.int64)
    return codes[texts.values], names


def whole_rows(
    frame: Frame,
    owners: Ids | None,
    clients: tuple[str, ...],
    asked: Settings,
    problems: Problems,
) -> Held:
    """Refuse rows without a target, or leave them out and say so."""
    empty = frame[asked.target].empty
    rows = np.flatnonzero(empty)
    # a cell that could not be read is no missing one
    told = any(f"column {asked.target!r}: " in what for _, what in problems.found)
    if not len(rows) or told:
        problems.check()
    if not len(rows):
        return Held(frame, owners, clients)
    lost = _without(empty, owners, clients)
    sites = f"; {lost} no target at all" if lost else ""
    if not asked.drop:
        problems.cells(
            frame.place, rows, asked.target,
            "the target is missing: the cell is empty; fill it, drop the row, or say "
            f'missing_target = "drop"{sites}',
        )  # fmt: skip
    problems.check()
    if len(rows) == len(frame):
        raise DataError(f"{frame.place.source}: no row has a target in column {asked.target!r}")
    log.warning(
        "%s: %d of %d rows are left out, for their target %r is missing%s",
        *(frame.place.source, len(rows), len(frame), asked.target, sites),
    )
    kept = np.flatnonzero(~empty)
    owners = None if owners is None else owners[kept]
    return Held(frame.take(kept), owners, clients, len(rows))


def _without(empty: NDArray[np.bool_], owners: Ids | None, clients: Sequence[str]) -> str:
    """Name the clients none of whose rows has a target."""
    if owners is None:
        return ""
    there = np.bincount(owners[~empty & (owners >= 0)], minlength=len(clients))
    names = [repr(clients[k]) for k in np.flatnonzero(there == 0).tolist()]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    verb = "has" if len(names) == 1 else "have"
    return f"{', '.join(names[:SHOWN])}{more} {verb}" if names else ""


def _second(opened: TableFile, schema: Schema, asked: Settings, train: Held) -> Held:
    """Read the table to test on, whose columns are those of the first."""
    problems = Problems(str(opened.path))
    header_problems(opened, problems)
    for name in (*schema.names, *([] if asked.client is None else [asked.client])):
        _known(opened, name, problems)
    problems.check()
    made = _wished(opened, {name: wish_of(schema[name]) for name in schema.names}, asked,
                   problems)  # fmt: skip
    raw = {name: made.columns[name] for name in schema.names}
    columns = typed_columns(raw, schema, made.place, problems)
    owners = None
    if asked.client is not None:
        codes, names = _owners(made.columns[asked.client], asked.client, made.place, problems)
        place = {name: k for k, name in enumerate(train.clients)}
        mapped = np.array([*(place.get(name, -1) for name in names), -1])
        for code in np.flatnonzero(mapped[:-1] < 0):
            problems.cells(
                made.place, np.flatnonzero(codes == code), asked.client,
                f"{names[code]!r} does not occur in the table to train on",
            )  # fmt: skip
        owners = mapped[codes]
    return whole_rows(Frame(columns, made.place), owners, train.clients, asked, problems)


# -------------------------------------------------------------------------------------- splits
def _held_out(made: Held, share: float, seed: int) -> NDArray[np.bool_]:
    """Choose rows to test on, a share of every client's."""
    total = len(made.frame)
    held = np.zeros(total, dtype=bool)
    if share == 0:
        return held
    owners = np.zeros(total, dtype=np.int64) if made.owners is None else made.owners
    ends = np.cumsum(np.bincount(owners))[:-1]
    short = owners.astype(np.int16) if len(ends) < 2**15 else owners  # is sorted faster
    parts = np.split(np.argsort(short, kind="stable"), ends)
    held[np.concatenate(per_client_test(parts, share, seed)[1])] = True
    return held


# ------------------------------------------------------------------------------------ examples
def _examples(
    opened: TableFile,
    schema: Schema,
    sides: Sides,
    standardise: bool,
    least: int,
    asked: Settings,
) -> Examples:
    train, rows = sides[0]
    owners = None if train.owners is None else train.owners[rows]
    try:
        made = agree(schema, Chosen(train.frame, rows), owners, least=least,
                     standardise=standardise)  # fmt: skip
    except DataError as error:
        raise DataError(f"{opened.path}: {error}") from error
    numbers = sum(len(chosen) for _, chosen in sides) * made.inputs
    if numbers > limit("table_values"):
        cause = over("table_values", "numbers of its features", numbers)
        raise DataError(f"{opened.path}: {cause}; or leave columns out with exclude=[...] or "
                        "features=[...]")  # fmt: skip
    (x, y), (test_x, test_y) = (
        (torch.from_numpy(made.encode(held.frame, chosen)), made.encode_target(held.frame, chosen))
        for held, chosen in sides
    )
    clients: list[Tensor | None] = [
        None if held.owners is None else torch.from_numpy(held.owners[chosen])
        for held, chosen in sides
    ]
    info = _info(opened, made, standardise, train.clients)
    dropped = sum(held.dropped for held in {id(held): held for held, _ in sides}.values())
    info = info._replace(dropped=dropped)
    return Examples(x, y, test_x, test_y, made.classes, info, *clients)


def _info(
    opened: TableFile, made: Preparation, standardise: bool, clients: tuple[str, ...]
) -> Info:
    mean, std = zip(*made.scales(), strict=True) if made.inputs else ((), ())
    path = opened.path if isinstance(opened.path, Path) else None
    return Info(
        "table",
        path.suffix.lower().removeprefix(".") if path is not None else "in memory",
        path,
        "train" if standardise else "unit",
        mean,
        std,
        made.target.class_names,
        clients,
        made.feature_names,
        target_scale=(made.target.mean, made.target.std),
        preparation=made,
    )
