"""`undrift evaluate`, `undrift report`: what runs have left behind."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from undrift.cli.common import Commands, add_trust, finite, printable, say, to_stderr
from undrift.errors import CheckpointError, ConfigError, unknown_name
from undrift.experiment.baselines import Baselines, baselines_of
from undrift.experiment.comparison import aim_of, aligned, comparison_of
from undrift.experiment.folder import (
    RunFolder,
    find_runs,
    open_run,
    plain_json,
    whole_history,
)
from undrift.experiment.measure import watched
from undrift.experiment.spec import Experiment
from undrift.experiment.tables import override
from undrift.experiment.world import build
from undrift.guarded.text import read_json
from undrift.report.results import Reported, write_results

MOST_SITES = 50  # that are printed


def add_commands(commands: Commands) -> None:
    """Describe the commands that take a folder."""
    evaluate = commands.add_parser("evaluate", help="judge the model of a run")
    evaluate.add_argument("run", metavar="RUN", help="the folder of a run")
    evaluate.add_argument(
        "changes",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="judge otherwise, e.g. evaluate.batch=64",
    )
    evaluate.add_argument(
        "--json", action="store_true", help="print evaluation.json: all metrics, curves, sites"
    )
    add_trust(evaluate)
    evaluate.set_defaults(action=do_evaluate)
    report = commands.add_parser("report", help="write table, pictures and page of a folder anew")
    report.add_argument("folder", metavar="FOLDER", help="a folder with runs in it")
    report.add_argument("--metric", help="the metric to compare (default: test_accuracy)")
    report.add_argument("--target", type=finite, help="rounds until the metric reaches this")
    report.add_argument("--baseline", metavar="LABEL", help="compare the others with this one")
    add_trust(report)
    report.set_defaults(action=do_report)


def do_evaluate(chosen: argparse.Namespace) -> int:
    """Judge the newest checkpoint of a run: every class, and every site by its name."""
    folder = open_run(chosen.run)
    table = folder.table() or {}
    if "trainer" in table:
        raise ConfigError(
            f"{chosen.run} was run from Python with objects of your own: load its "
            "model.safetensors into your module and judge it there"
        )
    for change in chosen.changes:
        if not change.startswith(("evaluate.", "engine.device")):
            raise ConfigError(f"{change!r}: only evaluate.* and engine.device may change here")
    given = {"trust": chosen.trust, "home": folder.home()}
    experiment = Experiment.from_table(override(table, chosen.changes), **given)
    before = Experiment.from_table(table, **given)
    if watched(before.algorithm, experiment.evaluate) != watched(before.algorithm, before.evaluate):
        raise ConfigError(
            f"{chosen.run} did not keep what avg, all and drift need: run it with these "
            "evaluate settings from the start"
        )
    world = build(experiment, folder.rows)
    if not world.trainer.load(folder.checkpoint):
        raise ConfigError(f"{chosen.run} has no checkpoint yet: `undrift run` it first")
    whole = world.measure.whole()
    _keep(folder, whole)
    if chosen.json:
        print(plain_json(whole))
        return 0
    say(f"{table['name']}, {table['label']}, after round {world.trainer.rounds_done}")
    judged = world.measure.judged()
    _show(judged, world.dealt.examples.info.class_names)
    if whole is not None:
        prefix = whole["examples_of"]
        more = {f"{prefix}_{n}": v for n, v in whole["metrics"].items()}
        _show({n: v for n, v in more.items() if n not in judged}, ())
        _show_sites(whole)
    return 0


def _keep(folder: RunFolder, whole: dict[str, Any] | None) -> None:
    """Leave evaluation.json in the folder; one that nobody may write to can be judged, too."""
    try:
        folder.write_evaluation(whole)
    except (CheckpointError, OSError) as error:
        print(f"undrift evaluate: {printable(str(error))}", file=sys.stderr)


def _show(found: dict[str, Any], class_names: tuple[str, ...]) -> None:
    for name, value in found.items():
        if isinstance(value, list):
            names = class_names or tuple(str(i) for i in range(len(value)))
            for one, score in zip(names, value, strict=True):
                say(f"  {name} {one}: {_digits(score)}")
        else:
            say(f"  {name}: {_digits(value)}")


def _show_sites(whole: dict[str, Any]) -> None:
    """Print each site and its metrics, the worst first."""
    if not whole.get("sites"):
        return
    metrics = list(whole["metrics"])
    head = ["site", "examples", *metrics]
    rows = [
        [row["site"], str(row["examples"]), *(_digits(row[name]) for name in metrics)]
        for row in whole["sites"]
    ]
    say(f"\nSites by {metrics[0]}, the worst first:")
    for line in aligned([head, *rows[:MOST_SITES]]):
        say(f"  {line}")
    if len(rows) > MOST_SITES:
        say(f"  ... and {len(rows) - MOST_SITES} more, see --json")


def _digits(value: float | None) -> str:
    if isinstance(value, int):
        return str(value)
    return "-" if value is None else format(value, ".4f")


def _check_one(experiments: list[Experiment], folder: Path) -> None:
    names = sorted({experiment.name for experiment in experiments})
    if len(names) > 1:
        raise ConfigError(
            f"{folder} holds runs of several experiments ({', '.join(names)}): report the folder "
            "of one of them"
        )


def _order(folder: Path, baseline: str | None, labels: list[str]) -> list[str]:
    """Keep the order of the last comparison, the baseline first."""
    if baseline is not None and baseline not in labels:
        raise unknown_name("variant", baseline, sorted(set(labels)), str(folder))
    before: list[str] = []
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = read_json(folder / "comparison.json")
        before = [str(line["label"]) for line in found["variants"]]
    return [*([baseline] if baseline else []), *before]


def _baselines(folder: Path, reported: list[Reported], order: list[str]) -> Baselines:
    """Find the baselines of the first variant, or compute them where it is as it ran."""
    place = {label: at for at, label in enumerate(dict.fromkeys(order))}
    ordered = sorted(reported, key=lambda one: place.get(one.experiment.label, len(place)))
    experiments = [one.experiment for one in ordered]
    as_run = all(one.as_run for one in reported)
    return baselines_of(experiments, folder, to_stderr, compute=as_run)


def do_report(chosen: argparse.Namespace) -> int:
    """Compare all runs of a folder and write the report."""
    folder = Path(chosen.folder)
    runs, reported = [], []
    places: dict[tuple[str, int], list[str]] = {}
    for found in find_runs(folder):
        one = Reported.read(found.table() or {}, found.home(), trust=chosen.trust)
        one = one._replace(folder=found.path)
        experiment = one.experiment
        runs.append((experiment.label, experiment.seed_number, whole_history(found)))
        reported.append(one)
        places.setdefault(runs[-1][:2], []).append(str(found.path))
    twice = next((paths for paths in places.values() if len(paths) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{twice[0]} and {twice[1]} have one label and one seed: report them apart"
        )
    experiments = [one.experiment for one in reported]
    _check_one(experiments, folder)
    if not runs:
        raise ConfigError(f"{folder} holds no run: give the folder that `--out` named")
    usual = experiments[0].evaluate.target
    aim = aim_of(runs[0][2], chosen.metric, chosen.target, usual)
    order = _order(folder, chosen.baseline, [label for label, _, _ in runs])
    comparison = comparison_of(
        experiments[0].name,
        runs,
        aim.target,
        aim.metric,
        order,
        _baselines(folder, reported, order),
    )
    say(comparison.text())
    command = shlex.join(["undrift", "report", chosen.folder])
    say("\n" + "\n".join(map(str, write_results(folder, comparison, reported, command))))
    if not all(one.dealt for one in reported[:1]):
        say("their data are code of others, so no picture shows who has them: --trust imports it")
    return 0
