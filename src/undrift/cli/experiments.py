"""`undrift run`, `undrift compare`, `undrift partition`."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from undrift.cli.common import (
    DONE,
    FOUND,
    Commands,
    add_experiment,
    add_running,
    count_seeds,
    finite,
    listening,
    load_experiments,
    out_folder,
    say,
    tell_empty,
    to_stderr,
)
from undrift.comparing import compare
from undrift.data.summary import summarise
from undrift.experiment.baselines import baselines_of
from undrift.experiment.history import main_metric
from undrift.experiment.pool import run_all, run_folder
from undrift.experiment.spec import Experiment
from undrift.experiment.tables import write_value
from undrift.experiment.world import deal
from undrift.report.partition_picture import draw_partition


def add_commands(commands: Commands) -> None:
    """Describe the commands that take an experiment."""
    run = commands.add_parser("run", help="run an experiment; going on where it stopped")
    add_experiment(run)
    add_running(run)
    run.set_defaults(action=do_run)
    compare = commands.add_parser(
        "compare", help="run algorithms x seeds and say who is better by more than luck"
    )
    add_experiment(compare)
    compare.add_argument(
        "--algorithms", metavar="A,B,...", help="short for algorithm.use=A,B,...; first: baseline"
    )
    compare.add_argument(
        "--seeds", type=count_seeds, metavar="N", help="short for seed=0,1,...,N-1"
    )
    compare.add_argument("--metric", help="compare this metric (default: test_accuracy)")
    compare.add_argument("--target", type=finite, help="rounds until the metric reaches this")
    add_running(compare)
    compare.set_defaults(action=do_compare)
    partition = commands.add_parser(
        "partition", help="show how an experiment deals its data to clients"
    )
    add_experiment(partition)
    partition.add_argument("--out", metavar="PICTURE", help="also draw it: .png, .svg or .pdf")
    partition.set_defaults(action=do_partition)


def do_run(chosen: argparse.Namespace) -> int:
    """Run an experiment and each variant of its sweep."""
    experiments = load_experiments(chosen)
    out = out_folder(chosen, experiments)
    with listening(chosen, out, len(experiments)) as listeners:
        histories = run_all(experiments, out, jobs=chosen.jobs, listeners=listeners)
    for experiment, history in zip(experiments, histories, strict=True):
        metric = main_metric(history)
        numbers = f"{metric} {history.last(metric):.4g}, best {history.best(metric):.4g}"
        say(f"{run_folder(out, experiment)}: {len(history)} rounds, {numbers}")
    if len(experiments) > 1:
        _tell_baselines(experiments, out, main_metric(histories[0]))
    names = [str(run_folder(out, experiment)) for experiment in experiments]
    some, _ = tell_empty(zip(names, histories, strict=True))
    return FOUND if some else DONE


def _tell_baselines(experiments: Sequence[Experiment], out: Path, metric: str) -> None:
    """Print what the runs are to beat."""
    found = baselines_of(experiments, out, to_stderr)
    for baseline in found.rows:
        mean, std = baseline.last(metric)
        if not math.isnan(mean):
            more = "" if math.isnan(std) else f" ± {std:.4g}"
            say(f"{baseline.label}: {metric} {mean:.4g}{more}")
    for note in found.notes:
        say(note)


def do_compare(chosen: argparse.Namespace) -> int:
    """Run algorithms x seeds; print the table, leave it, pictures and a page in the folder."""
    more = [] if chosen.algorithms is None else [f"algorithm.use={chosen.algorithms}"]
    more += [] if chosen.seeds is None else [f"seed={write_value(chosen.seeds)}"]
    experiments = load_experiments(chosen, more)
    out = out_folder(chosen, experiments)
    with listening(chosen, out, len(experiments)) as listeners:
        comparison = compare(
            experiments,
            out,
            metric=chosen.metric,
            target=chosen.target,
            jobs=chosen.jobs,
            listeners=listeners,
            command=shlex.join(["undrift", *sys.argv[1:]]),
        )
    say(comparison.text())
    print(f"\nTable, curves, partition and page are in {out}: open {out / 'report.html'}")
    _, never = tell_empty(
        (f"{variant.label} seed {seed}", history)
        for variant in comparison.variants
        for seed, history in zip(variant.seeds, variant.histories, strict=True)
    )
    return FOUND if never else DONE


def do_partition(chosen: argparse.Namespace) -> int:
    """Print the summary of a partition, and draw it."""
    experiment = load_experiments(chosen)[0]
    dealt = deal(experiment)
    labels = dealt.examples.train_y.numpy()
    say(str(summarise(labels, dealt.parts)))
    if chosen.out is not None:
        title = f"{experiment.name}: {type(experiment.partition).__name__}"
        print(draw_partition(labels, dealt.parts, Path(chosen.out), title))
    return 0
