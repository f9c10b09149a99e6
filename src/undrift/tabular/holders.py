"""One holder's rows of a table: of the experiment's own, or of a table that the holder brings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from undrift.data.partitions import per_client_test
from undrift.tabular.frames import Frame, typed_columns
from undrift.tabular.problems import Problems
from undrift.tabular.reading import header_problems, open_table, read, wish_of
from undrift.tabular.schema import Schema
from undrift.tabular.source import Settings, settings, split, table, whole_rows
from undrift.tabular.sums import LEAST


class Asked(NamedTuple):
    """What an experiment says of its table."""

    schema: Schema
    least: int  # rows of a holder that name a level
    standardise: bool
    test_share: float  # of every holder's rows; 0 where a table to test on is named
    seed: int  # of that split
    path: Any
    test_path: Any
    settings: Settings

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Asked:
        """Read the settings of the source, `columns` among them."""
        bound = inspect.signature(table).bind(**given)
        bound.apply_defaults()
        told = bound.arguments
        names = inspect.signature(settings).parameters
        asked = settings(**{name: told[name] for name in names})
        assert asked.columns is not None, "silos need [columns]"
        schema = Schema.of(asked.columns, asked.target, asked.missing)
        least = LEAST if told["least"] is None else told["least"]
        share = 0.0 if told["test_path"] is not None else told["test_share"]
        seed, paths = told["split_seed"], (told["path"], told["test_path"])
        return cls(schema, least, told["standardise"], share, seed, *paths, asked)


class Rows(NamedTuple):
    """The rows of an experiment's own table."""

    train: Frame
    test: Frame


def experiments_rows(asked: Asked) -> Rows:
    """Read the rows that a simulation trains on and those that it tests on."""
    share = asked.test_share
    _, sides = split(open_table(asked.path), asked.settings, share, asked.test_path, asked.seed)
    train, test = (held.frame.take(chosen) for held, chosen in sides)
    return Rows(train, test)


def own_rows(source: Any, asked: Asked, client: int) -> Frame:
    """Read the rows that a holder trains on from its own table: a path or a DataFrame.

    It needs the columns of the schema; others, a column of clients among them, are not looked at.
    As in a simulation a share is held out, by the holder's number.
    """
    opened = open_table(source)
    problems = Problems(str(opened.path))
    header_problems(opened, problems)
    for name in asked.schema.names:
        if name not in opened.names:
            problems.add(f"[columns] names the column {name!r}, which is not there")
    problems.check()
    wishes = {name: wish_of(asked.schema[name]) for name in asked.schema.names}
    raw = read(opened, wishes, asked.settings.missing, problems)
    columns = typed_columns(
        {name: raw.columns[name] for name in asked.schema.names}, asked.schema, raw.place, problems
    )
    frame = Frame(columns, raw.place)
    _note_classes(frame, asked.schema, problems)
    frame = whole_rows(frame, None, (), asked.settings, problems).frame
    return _trained_on(frame, asked, client)


def _note_classes(frame: Frame, schema: Schema, problems: Problems) -> None:
    """Note classes that [columns] does not name: nobody else could."""
    levels: tuple[str, ...] = getattr(schema.goal, "levels", None) or ()
    column = frame[schema.target]
    for code, name in enumerate((column.names or ()) if levels else ()):
        rows = np.flatnonzero(column.values == code)
        if len(rows) and name not in levels:
            what = f"{name!r} is no class that [columns] names: {', '.join(levels[:8])}"
            problems.cells(frame.place, rows, schema.target, what)


def _trained_on(frame: Frame, asked: Asked, client: int) -> Frame:
    if not asked.test_share:
        return frame
    nobody = [np.arange(0)] * client  # those before, whose rows are elsewhere
    rows = np.arange(len(frame))
    kept = per_client_test([*nobody, rows], asked.test_share, asked.seed)[0][client]
    return frame.take(kept)


def is_a_table(given: Any) -> bool:
    """Whether a loader gives a table: a path, or a DataFrame."""
    if isinstance(given, str | Path):
        return True
    return hasattr(given, "columns") and hasattr(given, "iloc")
