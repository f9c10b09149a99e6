"""How the columns of a table become inputs and targets, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.errors import DataError
from undrift.tabular.encoding import Encoder, Goal, Inputs, Part, coded, names_of, scaled_names
from undrift.tabular.frames import Frame
from undrift.tabular.problems import Problems
from undrift.tabular.schema import Date, Feature, Number, Schema

BLOCK = 8192  # rows that are encoded at a time: they stay in the processor's cache
VERSION = 1


@dataclass(frozen=True)
class Preparation:
    """How frames become inputs and targets; the same for every holder.

    An input that no training row would set (a level "other", an indicator) is left out: such a
    cell of a new row makes zeros.
    """

    schema: Schema
    parts: tuple[Part, ...]
    target: Goal
    rows: int  # that it was made from

    # -- what comes out ----------------------------------------------------------------------
    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Name every input."""
        return tuple(name for _, kind, part in self._columns() for name in names_of(kind, part))

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Count the inputs of each column, in order."""
        return tuple(len(names_of(kind, part)) for _, kind, part in self._columns())

    @property
    def inputs(self) -> int:
        """Count the inputs."""
        return sum(self.blocks)

    @property
    def classes(self) -> int:
        """Count the classes; 0 for numbers."""
        return len(self.target.class_names)

    def scales(self) -> tuple[tuple[float, float], ...]:
        """Give mean and deviation of each input: (0, 1) where it is not scaled."""
        made: list[tuple[float, float]] = []
        for _, kind, part in self._columns():
            mine = dict(scaled_names(kind, part))
            made += [mine.get(name, (0.0, 1.0)) for name in names_of(kind, part)]
        return tuple(made)

    # -- encoding ----------------------------------------------------------------------------
    def encode(self, frame: Frame, rows: NDArray[Any] | None = None) -> Inputs:
        """Make the inputs of a frame, [n, inputs]; `rows` chooses some by their indices."""
        chosen = np.arange(len(frame)) if rows is None else rows
        # numpy asks for large pages where memory is not zeroed yet
        x = np.empty((len(chosen), self.inputs), dtype=np.float32)
        steps = [Encoder(kind, part, frame[name]) for name, kind, part in self._columns()]
        for start in range(0, len(chosen), BLOCK):
            block = chosen[start : start + BLOCK]
            some = x[start : start + BLOCK]
            some.fill(0)
            at = 0
            for step, width in zip(steps, self.blocks, strict=True):
                step.write(block, some[:, at : at + width])
                at += width
        return x

    def encode_target(self, frame: Frame, rows: NDArray[Any] | None = None) -> Tensor:
        """Make the targets of a frame: int64 [n], or float32 [n, 1]."""
        held = frame if rows is None else Frame(
            {self.target.name: frame[self.target.name].take(rows)}, frame.place.take(rows)
        )  # fmt: skip
        column = held[self.target.name]
        problems = Problems(frame.place.source)
        missing = np.flatnonzero(column.empty)
        if len(missing):
            problems.cells(held.place, missing, self.target.name, "the target is missing")
        if self.target.kind != "classes":
            problems.check()
            values = column.values - self.target.mean
            values = values / self.target.std if self.target.std else np.zeros_like(values)
            return torch.from_numpy(values.astype(np.float32))[:, None]
        codes = coded(column, self.target.class_names)
        strange = np.flatnonzero((codes < 0) & ~column.empty)
        assert column.names is not None
        for code in np.unique(column.values[strange]):
            known = ", ".join(self.target.class_names[:8])
            what = f"{column.names[code]!r} is no class that is known: {known}"
            problems.cells(
                held.place, strange[column.values[strange] == code], self.target.name, what
            )
        problems.check()
        return torch.from_numpy(codes.astype(np.int64))

    def _columns(self) -> Iterator[tuple[str, Feature, Part]]:
        for (name, kind), part in zip(self.schema.features, self.parts, strict=True):
            yield name, kind, part

    # -- plain data --------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """Give plain data."""
        return {
            "undrift_preparation": VERSION,
            "schema": self.schema.to_json(),
            "parts": [_part_json(part) for part in self.parts],
            "target": _goal_json(self.target),
            "rows": self.rows,
        }

    @classmethod
    def from_json(cls, data: Any) -> Preparation:
        """Read what `to_json` gave; DataError for anything else."""
        try:
            return _read(cls, data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"this is no preparation of a table, or it is damaged ({error}): take the "
                "preparation.json of a run's folder"
            ) from error


# ------------------------------------------------------------------------------------- reading
def _part_json(part: Part) -> dict[str, Any]:
    made: dict[str, Any] = {"name": part.name}
    if part.levels or part.filled or part.other:
        made |= {"levels": list(part.levels), "filled": part.filled, "other": part.other}
    else:
        made |= {"fill": part.fill, "scales": [list(pair) for pair in part.scales]}
    return {**made, "missing": part.missing}


def _goal_json(goal: Goal) -> dict[str, Any]:
    lists = {"class_names": list(goal.class_names), "counts": list(goal.counts)}
    return {**goal._asdict(), **lists}


def _read(cls: type[Preparation], data: Any) -> Preparation:
    if set(data) != {"undrift_preparation", "schema", "parts", "target", "rows"}:
        raise ValueError("its fields are not those of a preparation")
    if data["undrift_preparation"] != VERSION:
        raise ValueError(f"version {data['undrift_preparation']!r}")
    schema = Schema.from_json(data["schema"])
    parts = tuple(map(_read_part, data["parts"]))
    if [part.name for part in parts] != [name for name, _ in schema.features]:
        raise ValueError("its parts are not those of its schema")
    for part, (_, kind) in zip(parts, schema.features, strict=True):
        wide = {Number: 1, Date: 2}.get(type(kind), 0)
        if len(part.scales) != wide or (part.filled and part.filled not in part.levels):
            raise ValueError(f"the part of {part.name!r} does not fit its kind")
    if isinstance(data["rows"], str):
        raise ValueError("its rows are no number")
    return cls(schema, parts, _read_goal(data["target"], schema), int(data["rows"]))


def _read_goal(data: Mapping[str, Any], schema: Schema) -> Goal:
    lists = {name: tuple(data.get(name, ())) for name in ("class_names", "counts")}
    target = Goal(**{**data, **lists})
    if (target.name, target.kind) != (schema.target, schema.goal.kind):
        raise ValueError("its target is not that of its schema")
    texts = all(isinstance(name, str) for name in target.class_names)
    if not texts or not _finite(target.mean, target.std):
        raise ValueError("its target holds no numbers")
    whole = all(type(count) is int and count >= 0 for count in target.counts)
    if not whole or len(target.counts) not in (0, len(target.class_names)):
        raise ValueError("its target does not count its classes")
    return target


def _read_part(data: Mapping[str, Any]) -> Part:
    values: dict[str, Any] = dict(data)
    if "scales" in values:
        values["scales"] = tuple((mean, std) for mean, std in values["scales"])
    if "levels" in values:
        values["levels"] = tuple(values["levels"])
    part = Part(**values)
    numbers = [part.fill, *(v for pair in part.scales for v in pair)]
    if not _finite(*numbers) or not all(isinstance(v, str) for v in part.levels):
        raise ValueError(f"the part of {part.name!r} holds no numbers")
    if not isinstance(part.missing, bool) or not isinstance(part.other, bool):
        raise ValueError(f"the part of {part.name!r} holds no flags")
    return part


def _finite(*values: Any) -> bool:
    real = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return real and all(math.isfinite(v) for v in values)
