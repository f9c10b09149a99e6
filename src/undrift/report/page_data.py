"""What a report shows, as plain frozen data, and the averages over seeds that its curves need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

from undrift import metrics
from undrift.errors import DataError
from undrift.experiment.events import Record
from undrift.experiment.statistics import mean_of_curves
from undrift.report.judged import Judged

Values = tuple[float | None, ...]
LARGEST = 1e300  # beyond, sums and differences would overflow: as good as infinite


@dataclass(frozen=True)
class RunCurves:
    """One run: for each metric one value per recorded round, None where there is none."""

    seed: int
    rounds: tuple[int, ...]
    values: Mapping[str, Values]

    def __post_init__(self) -> None:
        for metric, values in self.values.items():
            if len(values) != len(self.rounds):
                raise DataError(
                    f"run with seed {self.seed}: {metric!r} has {len(values)} values for "
                    f"{len(self.rounds)} rounds. Give None for rounds without a value"
                )


@dataclass(frozen=True)
class Group:
    """One algorithm or variant with the runs of its seeds."""

    label: str
    runs: tuple[RunCurves, ...]


@dataclass(frozen=True)
class TableRow:
    """What a row says, and by what it is sorted: numbers, texts, or None, which comes last."""

    cells: tuple[str, ...]
    sort: tuple[float | str | None, ...]
    beside: bool = False  # a baseline


@dataclass(frozen=True)
class BaselineLine:
    """A baseline as a line across the curves: its value of each metric."""

    label: str
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class Table:
    """The results, ready to print."""

    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    note: str = ""

    def __post_init__(self) -> None:
        for place, row in enumerate(self.rows):
            if not len(row.cells) == len(row.sort) == len(self.columns):
                raise DataError(
                    f"table row {place}: {len(row.cells)} cells and {len(row.sort)} sort keys "
                    f"for {len(self.columns)} columns. Give one of each per column"
                )


@dataclass(frozen=True)
class Partition:
    """Who holds how many examples of which class."""

    counts: Sequence[Sequence[int]]  # [clients][classes]
    class_names: tuple[str, ...]
    summary: str

    def __post_init__(self) -> None:
        for client, row in enumerate(self.counts):
            if len(row) != len(self.class_names):
                raise DataError(
                    f"partition, client {client}: {len(row)} counts for "
                    f"{len(self.class_names)} classes. Give one count per class"
                )


@dataclass(frozen=True)
class Page:
    """Everything on the report's page; `metrics` are offered in their order."""

    title: str
    command: str
    facts: tuple[tuple[str, str], ...]
    groups: tuple[Group, ...]
    table: Table
    verdict: tuple[str, ...]
    partition: Partition | None
    experiment: str  # TOML
    metrics: tuple[str, ...]
    targets: Mapping[str, float] = field(default_factory=dict)
    baselines: tuple[BaselineLine, ...] = ()
    judged: tuple[Judged, ...] = ()


@dataclass(frozen=True)
class MeanCurve:
    """One metric of a group, averaged over its runs, in the rounds where all have a value."""

    rounds: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]  # with n - 1; 0 where only one run has a value

    @property
    def low(self) -> tuple[float, ...]:
        """The band's lower edge."""
        return tuple(m - s for m, s in zip(self.mean, self.std, strict=True))

    @property
    def high(self) -> tuple[float, ...]:
        """The band's upper edge."""
        return tuple(m + s for m, s in zip(self.mean, self.std, strict=True))


def groups_from(records: Sequence[tuple[str, int, Sequence[Record]]]) -> tuple[Group, ...]:
    """Collect (label, seed, records of the run) into groups, in the order labels first appear.

    >>> groups_from([("fedavg", 0, [{"round": 1, "test_loss": 0.5, "clients": [3, 4]}])])[0].runs
    (RunCurves(seed=0, rounds=(1,), values={'test_loss': (0.5,)}),)
    """
    runs: dict[str, list[RunCurves]] = {}
    for label, seed, history in records:
        runs.setdefault(label, []).append(_curves_of(label, seed, history))
    return tuple(Group(label, tuple(members)) for label, members in runs.items())


def known_metrics(groups: Sequence[Group]) -> tuple[str, ...]:
    """Name the metrics of which some group has a mean curve, in the order they first appear."""
    names = dict.fromkeys(n for group in groups for run in group.runs for n in run.values)
    return tuple(n for n in names if any(map(partial(_has_mean, n), groups)))


def _has_mean(metric: str, group: Group) -> bool:
    rounds = [set(_known(run, metric)) for run in group.runs]
    return bool(rounds) and bool(set.intersection(*rounds))


def mean_curve(group: Group, metric: str) -> MeanCurve:
    """Average a metric in the rounds in which all runs have a value.

    >>> runs = [RunCurves(s, (1, 2), {"loss": (1.0 + s, None)}) for s in (0, 1, 2)]
    >>> mean_curve(Group("fedavg", tuple(runs)), "loss")
    MeanCurve(rounds=(1,), mean=(2.0,), std=(1.0,))
    """
    found = mean_of_curves([_known(run, metric) for run in group.runs])
    mean, std = (tuple(m[k] for m in found.values()) for k in (0, 1))
    return MeanCurve(tuple(found), mean, tuple(0.0 if math.isnan(s) else s for s in std))


def _known(run: RunCurves, metric: str) -> dict[int, float]:
    """Give the values of a run, round by round."""
    pairs = zip(run.rounds, map(finite, run.values.get(metric, ())), strict=False)
    return {number: value for number, value in pairs if value is not None}


def in_percent(groups: Sequence[Group], metric: str) -> bool:
    """Tell whether a metric reads best in percent."""
    values = (finite(v) for g in groups for r in g.runs for v in r.values.get(metric, ()))
    return metrics.in_percent(metric, values)


def finite(value: object) -> float | None:
    """Turn a plain number into a float; everything else, NaN and (nearly) infinity, into None.

    >>> finite(3), finite(float("nan")), finite("3"), finite(True)
    (3.0, None, None, None)
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond any float
        return None
    return number if abs(number) <= LARGEST else None


def _curves_of(label: str, seed: int, history: Sequence[Record]) -> RunCurves:
    # A round that was repeated after a resume counts as it came out last.
    by_round = {_round_of(label, seed, place, r): r for place, r in enumerate(history)}
    rounds = tuple(sorted(by_round))
    lines = [by_round[number] for number in rounds]
    values = {name: tuple(finite(r.get(name)) for r in lines) for name in _scalar_names(lines)}
    return RunCurves(seed, rounds, values)


def _round_of(label: str, seed: int, place: int, record: Record) -> int:
    number = record.get("round")
    if not isinstance(number, int) or isinstance(number, bool):
        raise DataError(
            f"{label}, seed {seed}, record {place}: round is {number!r}. "
            "Every record needs its round as a whole number"
        )
    return number


def _scalar_names(lines: Sequence[Record]) -> list[str]:
    names = dict.fromkeys(name for record in lines for name in record if name != "round")
    return [n for n in names if any(_is_number(record.get(n)) for record in lines)]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
