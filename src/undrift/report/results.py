"""Leave the results of a comparison in its folder: table, pictures, page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from undrift.data.partitions.labels import find_classes, is_continuous
from undrift.data.summary import count_table, summarise
from undrift.errors import ConfigError, DataError, MissingExtra, UndriftError
from undrift.experiment.baselines import Baseline
from undrift.experiment.comparison import Comparison, Line
from undrift.experiment.folder import open_run
from undrift.experiment.pool import run_folder
from undrift.experiment.spec import Experiment
from undrift.experiment.tables import write_table
from undrift.experiment.world import deal
from undrift.guarded.text import read_json
from undrift.own import foreign_names
from undrift.report.curves import draw_curves, metric_label
from undrift.report.judged_runs import judged_of
from undrift.report.page import write_page
from undrift.report.page_data import (
    BaselineLine,
    Group,
    Page,
    Partition,
    Table,
    TableRow,
    groups_from,
)
from undrift.report.partition_picture import draw_partition
from undrift.state import disk
from undrift.version import __version__


class Reported(NamedTuple):
    """A run as a report tells it."""

    experiment: Experiment  # own parts may be exchanged for plain ones: nothing is trained
    written: str  # as its file says it
    dealt: bool = True  # whether its data can be dealt again, for their picture
    as_run: bool = True  # whether no own part was exchanged
    folder: Path | None = None  # where it lies; None: where a comparison puts it

    @classmethod
    def of(cls, experiment: Experiment) -> Reported:
        """Report an experiment of the caller's own."""
        return cls(experiment, experiment.to_toml())

    @classmethod
    def read(
        cls, table: Mapping[str, Any], home: Path | None = None, *, trust: bool = False
    ) -> Reported:
        """Report what a folder says, without importing any code that it names, unless trusted."""
        if trust or not foreign_names(table):
            return cls.of(Experiment.from_table(table, trust=trust, home=home))
        strange = [name for name in PLAIN if foreign_names({name: table.get(name)})]
        plain = {**table, **{name: PLAIN[name] for name in strange}}
        dealt = not {"data", "partition"} & set(strange)
        return cls(Experiment.from_table(plain), write_table(table), dealt, as_run=False)


# what stands for own parts where they are only told of
PLAIN: Mapping[str, Any] = {
    "data": "digits",
    "partition": {"use": "iid", "clients": 1},
    "model": "mlp",
    "task": {},
    "algorithm": {"use": "fedavg", "lr": 0.1},
    "sampler": "everyone",
    "engine": {},
}


def write_results(
    out: Path, comparison: Comparison, runs: Sequence[Reported], command: str
) -> list[Path]:
    """Write comparison.md, comparison.json, curves, partition picture and report.html."""
    disk.make_directory(out)
    made = [_write(out / "comparison.md", comparison.markdown())]
    made.append(_write(out / "comparison.json", json.dumps(as_json(comparison), indent=1) + "\n"))
    groups = _groups(comparison)
    # without matplotlib the page still draws its own; what diverged at once has no curve
    with suppress(MissingExtra, DataError, ConfigError):
        title = f"{comparison.name}: {metric_label(comparison.metric, percent=False)}"
        picture, target = out / "curves.png", comparison.target
        made += draw_curves(picture, groups, comparison.metric, title=title, target=target)
    partition = _partition(out, runs[0].experiment, made) if runs[0].dealt else None
    page = _page(comparison, groups, partition, runs, command, out)
    return [*made, write_page(out / "report.html", page)]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Give the numbers of a comparison as plain JSON."""
    lines = [_json_line(line) for line in comparison.lines()]
    seeds = {v.label: list(v.seeds) for v in comparison.variants}
    return {
        "name": comparison.name,
        "metric": comparison.metric,
        "target": comparison.target,
        "baseline": comparison.variants[0].label,
        "seeds": seeds,
        "variants": lines,
        "baselines": [_json_baseline(b) for b in comparison.baselines.rows],
        "verdict": comparison.verdict(),
    }


def _json_baseline(baseline: Baseline) -> dict[str, Any]:
    found = {metric: baseline.last(metric) for metric in baseline.metrics}
    return {
        "kind": baseline.kind,
        "label": baseline.label,
        "seeds": list(baseline.seeds),
        "metrics": {n: {"mean": _number(s.mean), "std": _number(s.std)} for n, s in found.items()},
    }


def _json_line(line: Line) -> dict[str, Any]:
    gap, reached = line.difference, line.reached
    return {
        "label": line.label,
        "last": {"mean": _number(line.last.mean), "std": _number(line.last.std)},
        "best": {"mean": _number(line.best.mean), "std": _number(line.best.std)},
        "rounds_to_target": None if reached is None else list(reached.each),
        "rounds_to_target_on_mean": None if reached is None else reached.on_mean,
        "difference": None
        if gap is None
        else {"mean": _number(gap.mean), "low": _number(gap.low), "high": _number(gap.high),
              "clear": gap.clear},
    }  # fmt: skip


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write(path: Path, text: str) -> Path:
    disk.write_atomically(path, [text.encode()])
    return path


def _groups(comparison: Comparison) -> tuple[Group, ...]:
    runs = [
        (v.label, seed, tuple(history))
        for v in comparison.variants
        for seed, history in zip(v.seeds, v.histories, strict=True)
    ]
    return groups_from(runs)


def _partition(out: Path, experiment: Experiment, made: list[Path]) -> Partition | None:
    """Draw how the first seed's data were dealt; data that have gone leave no picture."""
    try:
        dealt = deal(experiment)
        labels = dealt.examples.train_y.numpy()
        summary = str(summarise(labels, dealt.parts))
        with suppress(MissingExtra):
            made.append(draw_partition(labels, dealt.parts, out / "partition.png"))
    except UndriftError:
        return None
    if is_continuous(labels):
        return Partition([[len(part)] for part in dealt.parts], ("examples",), summary)
    classes = find_classes(labels, 1, "report")
    counts = count_table(classes, dealt.parts).tolist()
    names = dealt.examples.info.class_names or tuple(map(str, range(len(classes.counts))))
    return Partition(counts, tuple(names[: len(counts[0])]), summary)


def _page(
    comparison: Comparison,
    groups: tuple[Group, ...],
    partition: Partition | None,
    runs: Sequence[Reported],
    command: str,
    out: Path,
) -> Page:
    lines = comparison.lines()
    rows = [TableRow(tuple(comparison.cells(line)), _sort(comparison, line)) for line in lines]
    rows += _baseline_rows(comparison)
    table = Table(tuple(comparison.header()), tuple(rows), " ".join(comparison.remarks()))
    metrics = {m: None for g in groups for r in g.runs for m in r.values}
    ordered = [comparison.metric, *(m for m in metrics if m != comparison.metric)]
    targets = {} if comparison.target is None else {comparison.metric: comparison.target}
    return Page(
        title=comparison.name,
        command=command,
        facts=_facts(runs, out),
        groups=groups,
        table=table,
        verdict=tuple(comparison.verdict()),
        partition=partition,
        experiment=runs[0].written,
        metrics=tuple(ordered),
        targets=targets,
        baselines=tuple(_baseline_line(b) for b in comparison.baselines.rows),
        judged=judged_of(comparison, runs, out),
    )


def _baseline_rows(comparison: Comparison) -> list[TableRow]:
    """Give the rows of baselines; what they have no value of comes last."""
    rows = []
    for cells in comparison.baseline_cells():
        baseline = next(b for b in comparison.baselines.rows if b.label == cells[0])
        last = _number(baseline.last(comparison.metric).mean)
        nothing = [None] * (len(cells) - 2)
        rows.append(TableRow(tuple(cells), (cells[0], last, *nothing), beside=True))
    return rows


def _baseline_line(baseline: Baseline) -> BaselineLine:
    means = {m: _number(baseline.last(m).mean) for m in baseline.metrics}
    return BaselineLine(baseline.label, means)


def _sort(comparison: Comparison, line: Line) -> tuple[float | str | None, ...]:
    made: list[float | str | None] = [line.label, _number(line.last.mean), _number(line.best.mean)]
    if line.reached is not None:
        made += [line.reached.typical, line.reached.on_mean]
    gap = line.difference
    return (*made, None if gap is None else gap.mean, None if gap is None else gap.low)


def _facts(runs: Sequence[Reported], out: Path) -> tuple[tuple[str, str], ...]:
    first = runs[0].experiment
    facts = [("runs", str(len(runs))), ("rounds", str(first.rounds)),
             ("undrift", __version__)]  # fmt: skip
    with suppress(UndriftError, OSError, ValueError, KeyError, IndexError, TypeError):
        # facts are a courtesy
        place = open_run(run_folder(out, first)).path / "environment.json"
        start = dict(read_json(place)["starts"][0])
        named = ("at", "device", "gpu", "cpus", "torch", "python", "system")
        facts += [(n, str(start[n])) for n in named if start.get(n) is not None]
    return tuple(facts)
