"""Baselines as numbers by name, one set for each seed, and how a comparison reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from undrift.experiment.statistics import Spread, spread

ALWAYS, ALONE, POOLED, BOOSTING = "always", "alone", "pooled", "boosting"
KINDS = (ALWAYS, ALONE, POOLED, BOOSTING)
Values = Mapping[str, float | None]  # by the names of records; None: not defined


class Row(NamedTuple):
    """One baseline with one seed."""

    kind: str
    label: str
    seed: int
    key: str  # a digest of everything that decides it
    values: Values
    note: str = ""


class Baseline(NamedTuple):
    """One baseline over seeds."""

    kind: str
    label: str
    seeds: tuple[int, ...]
    values: tuple[Values, ...]

    @property
    def metrics(self) -> list[str]:
        """Name all that is known of some seed."""
        return list(dict.fromkeys(name for values in self.values for name in values))

    def each(self, metric: str) -> list[float]:
        """Give a metric seed by seed; NaN where it is not known."""
        found = [values.get(_plain(metric)) for values in self.values]
        return [math.nan if value is None else value for value in found]

    def last(self, metric: str) -> Spread:
        """Give mean and deviation over seeds."""
        return spread(self.each(metric))


class Baselines(NamedTuple):
    """All baselines of a comparison, and remarks on them."""

    rows: tuple[Baseline, ...] = ()
    notes: tuple[str, ...] = ()


NONE = Baselines()


def _plain(metric: str) -> str:
    """Other models of a run are judged on the same examples."""
    return metric.removeprefix("avg_").removeprefix("all_")


def over_seeds(rows: Sequence[Row]) -> tuple[Baseline, ...]:
    """Put the rows of one kind together, in the order of kinds."""
    found = []
    for kind in KINDS:
        some = sorted((row for row in rows if row.kind == kind), key=lambda row: row.seed)
        if some:
            labels = {row.label for row in some}
            label = some[0].label if len(labels) == 1 else "always the majority"
            seeds, values = tuple(r.seed for r in some), tuple(r.values for r in some)
            found.append(Baseline(kind, label, seeds, values))
    return tuple(found)
