"""`undrift list` and `undrift show`: what there is, and what its settings are."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from undrift.cli.common import Commands, add_trust, say
from undrift.core.losses import LOSSES
from undrift.errors import unknown_name
from undrift.experiment.comparison import aligned
from undrift.experiment.family import paper_files, paper_settings
from undrift.experiment.folder import RunFolder, open_run, whole_history
from undrift.experiment.history import main_metric
from undrift.experiment.names import parameters, records, sections
from undrift.experiment.shipped import shipped_experiments
from undrift.experiment.spec import load, read_source
from undrift.experiment.tables import write_table, write_value
from undrift.metrics import METRICS
from undrift.rules.named import catalogue

KINDS = {
    "algorithms": "algorithm",
    "partitions": "partition",
    "sources": "data",
    "models": "model",
    "samplers": "sampler",
}


def add_commands(commands: Commands) -> None:
    """Describe the commands that look things up."""
    known = [*KINDS, "losses", "metrics", "rules", "experiments", "tables"]
    listing = commands.add_parser("list", help="name every algorithm, partition, source, model ...")
    listing.add_argument("kind", nargs="?", metavar="KIND", help=f"one of: {', '.join(known)}")
    listing.set_defaults(action=do_list)
    show = commands.add_parser("show", help="show settings of a name, an experiment or a run")
    show.add_argument("name", metavar="NAME", help="a name of `undrift list`, a file or a folder")
    show.add_argument(
        "changes", nargs="*", default=[], metavar="NAME=VALUE", help="overrides, as for `run`"
    )
    add_trust(show)
    show.set_defaults(action=do_show)


def everything() -> dict[str, dict[str, str]]:
    """List every name with one line about it, kind by kind."""
    found: dict[str, dict[str, str]] = {}
    papers = {name: entry.paper for name, entry in catalogue().items()}
    for kind, section in KINDS.items():
        names = sections()[section]
        found[kind] = {n: papers.get(n) or _first_line(f) for n, f in names.items()}
    found["losses"] = {n: _first_line(loss) for n, loss in LOSSES.items()}
    found["metrics"] = {n: _first_line(metric.function) for n, metric in METRICS.items()}
    found["rules"] = {n: _first_line(kind) for n, kind in records().items()}
    found["experiments"] = {n: _comment(p) for n, p in shipped_experiments().items()}
    found["tables"] = {n: _comment(p) for n, p in paper_files().items()}
    return found


def _first_line(function: Callable[..., Any]) -> str:
    target = getattr(function, "func", function)
    return (inspect.getdoc(target) or "").split("\n")[0]


def _comment(path: Path) -> str:
    first = path.read_text("utf-8").split("\n")[0]
    return first.removeprefix("#").strip()


def do_list(chosen: argparse.Namespace) -> int:
    """Print names, of one kind or of all."""
    found = everything()
    if chosen.kind is not None and chosen.kind not in found:
        raise unknown_name("kind", chosen.kind, list(found), "undrift list")
    for kind, names in found.items():
        if chosen.kind in (None, kind):
            print(("" if kind == next(iter(found)) or chosen.kind else "\n") + f"{kind}:")
            width = max(map(len, names))
            print("\n".join(f"  {n:<{width}}  {line}".rstrip() for n, line in names.items()))
    return 0


def do_show(chosen: argparse.Namespace) -> int:
    """Print what a name stands for."""
    path = Path(chosen.name)
    if (path / "rounds.jsonl").is_file():
        return _show_run(RunFolder(path))
    names = {n: (k, f) for k, s in KINDS.items() for n, f in sections()[s].items()}
    names |= {n: ("rules", f) for n, f in records().items() if n not in names}
    if chosen.name in names and not chosen.changes and chosen.name not in shipped_experiments():
        _show_name(chosen.name, *names[chosen.name])
        return 0
    papers = [*paper_settings(), *paper_files()]
    experiments = [*shipped_experiments(), *papers]
    if path.suffix == ".toml" or path.exists() or chosen.name in experiments:
        return _show_experiment(chosen)
    raise unknown_name("name, experiment or run", chosen.name, [*names, *experiments])


def _show_name(name: str, kind: str, function: Callable[..., Any]) -> None:
    entry = catalogue().get(name)
    paper = f" ({entry.paper})" if entry is not None else ""
    print(f"{name}, one of the {kind}{paper}\n")
    target = getattr(function, "func", function)
    print((inspect.getdoc(target) or "").split("\n\n>>>")[0])
    settings = parameters(function)
    if settings:
        rows = [["setting", "default"], *([n, _default(p)] for n, p in settings.items())]
        print("\n" + "\n".join(aligned(rows)))


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return "needed"
    plain = isinstance(parameter.default, bool | int | float | str)
    return write_value(parameter.default) if plain else "-"


def _show_experiment(chosen: argparse.Namespace) -> int:
    source = read_source(chosen.name)
    strangers = [] if chosen.trust else source.strangers(chosen.changes)
    if strangers:
        say(f"# as it is written, for reading never imports code of others: {strangers[0]}\n")
        say(write_table(source.changed(chosen.changes)), end="")
        return 0
    experiments = load(source, chosen.changes, trust=True)
    say(experiments[0].to_toml(), end="")
    if len(experiments) > 1:
        say(f"\n# and {len(experiments) - 1} more of this sweep:")
        for one in experiments[1:]:
            say(f"# {one.label}, seed {one.seed_number}")
    return 0


def _show_run(folder: RunFolder) -> int:
    table = open_run(folder.path).table() or {}
    history = whole_history(folder)
    state = "complete" if folder.summary() is not None else "not complete: run it again to go on"
    label = table.get("label")
    say(f"{folder.path}: {label}, {len(history)} of {table.get('rounds')} rounds, {state}")
    if len(history):
        metric = main_metric(history)
        say(f"{metric}: last {history.last(metric):.4f}, best {history.best(metric):.4f}")
    return 0
