"""Run variants over seeds, compare them, leave the results in a folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from undrift.errors import ConfigError
from undrift.experiment.comparison import Comparison, comparison_of
from undrift.experiment.events import Listener
from undrift.experiment.history import main_metric
from undrift.experiment.pool import run_all
from undrift.experiment.spec import Experiment, check_apart
from undrift.report.results import write_results


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
    out = Path(folder)
    histories = run_all(experiments, out, jobs=jobs, listeners=listeners)
    goal = experiments[0].evaluate.target if target is None else target
    if target is None and metric is not None and metric != main_metric(histories[0]):
        goal = None  # the experiment's target is one of its main metric
    pairs = zip(experiments, histories, strict=True)
    runs = [(e.label, e.seed_number, history) for e, history in pairs]
    comparison = comparison_of(experiments[0].name, runs, goal, metric)
    write_results(out, comparison, experiments, command or f"undrift report {out}")
    return comparison
