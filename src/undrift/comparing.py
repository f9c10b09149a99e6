"""Run variants over seeds, compare them, leave the results in a folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from undrift.errors import ConfigError, unknown_name
from undrift.experiment.baselines import Tell, baselines_of
from undrift.experiment.comparison import Comparison, aim_of, comparison_of
from undrift.experiment.events import Listener, Record, RunInfo
from undrift.experiment.pool import run_all
from undrift.experiment.spec import Experiment, check_apart
from undrift.metrics.named import metric_named
from undrift.report.results import Reported, write_results


def compare(
    experiments: Sequence[Experiment],
    folder: Path | str,
    *,
    metric: str | None = None,
    target: float | None = None,
    jobs: int | None = None,
    listeners: Sequence[Listener] = (),
    command: str = "",
) -> Comparison:
    """Run every experiment below `folder`, going on where it stopped; write table and report.

    The first experiment's label is what the others are compared with.
    """
    listed = isinstance(experiments, Sequence) and experiments
    if not listed or not all(isinstance(e, Experiment) for e in experiments):
        raise ConfigError("compare takes a list of experiments, at least one")
    check_apart(experiments)
    if not isinstance(folder, str | Path):
        raise ConfigError(f"folder must be a path, got {folder!r}")
    if target is not None and (not isinstance(target, int | float) or not math.isfinite(target)):
        raise ConfigError(f"target must be a number, got {target!r}")
    if metric is not None:
        _check_measured(metric, experiments)
    out = Path(folder)
    asked = [] if metric is None else [Asked(metric)]
    histories = run_all(experiments, out, jobs=jobs, listeners=[*listeners, *asked])
    aim = aim_of(histories[0], metric, target, experiments[0].evaluate.target)
    pairs = zip(experiments, histories, strict=True)
    runs = [(e.label, e.seed_number, history) for e, history in pairs]
    baselines = baselines_of(experiments, out, telling(listeners))
    comparison = comparison_of(
        experiments[0].name, runs, aim.target, aim.metric, baselines=baselines
    )
    write_results(
        out, comparison, [*map(Reported.of, experiments)], command or f"undrift report {out}"
    )
    return comparison


def _check_measured(metric: str, experiments: Sequence[Experiment]) -> None:
    """Refuse, before anything is trained, a metric that exists and that nobody measures."""
    known = metric_named(metric.removeprefix("test_"))
    if known is None or known.name == "accuracy":
        return
    if not metric.startswith("test_"):
        raise ConfigError(f"metric {metric!r}: say of which examples, e.g. test_{known.name}")
    for one in experiments:
        asked = [metric_named(name) for name in one.evaluate.metrics]
        if known.name not in [m.name for m in asked if m is not None]:
            raise ConfigError(
                f"{metric} is not measured: add {known.name!r} to `metrics` in [evaluate], or say "
                f"evaluate.metrics='[\"{known.name}\"]'"
            )


def telling(listeners: Sequence[Listener]) -> Tell:
    """Give a function that hands a line to whoever listens."""
    notes = [note for one in listeners if (note := getattr(one, "note", None)) is not None]

    def tell(text: str) -> None:
        for note in notes:
            note(text)

    return tell


class Asked:
    """A listener that refuses a metric nobody tells of when the first round was judged."""

    def __init__(self, metric: str) -> None:
        self.metric = metric

    def started(self, run: RunInfo, past: Sequence[Record]) -> None:
        """Nothing is known yet."""

    def round(self, run: RunInfo, record: Record) -> None:
        """Look for the metric in a round that was judged."""
        every = run.experiment.get("evaluate", {}).get("every", 1)
        judged = record["round"] % every == 0 or record["round"] == run.rounds
        if judged and self.metric not in record:
            numbers = [n for n, v in record.items() if isinstance(v, float)]
            raise unknown_name("metric", self.metric, numbers, f"round {record['round']}")

    def finished(self, run: RunInfo, history: Sequence[Record]) -> None:
        """Its last round was judged."""

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """Told by others."""

    def close(self) -> None:
        """Nothing to close."""
