"""Which experiments a table asks for, and which of them are run together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from undrift.data.checks import check_whole
from undrift.errors import ConfigError, unknown_name
from undrift.experiment.family import (
    Setting,
    paper_files,
    paper_settings,
    seed_list,
    setting_table,
)
from undrift.experiment.pool import Task, run_folder
from undrift.experiment.spec import Experiment, load
from undrift.experiment.sweep import algorithm_label, expand
from undrift.experiment.tables import Table, parse_value
from undrift.papers.counted import COUNTED
from undrift.papers.figures import CURVES_OF, drawn_from
from undrift.papers.stand_in import few_table

MOST_RUNS = 60  # of one batch: more would not train faster, and must fit into memory together
TINY_ROUNDS, TINY_CLIENTS, TINY_EXAMPLES, TINY_BATCH = 2, 6, 120, 8


@dataclass(frozen=True)
class Options:
    """What of a table is run, and how far."""

    seeds: int | None = None
    rounds: int | None = None
    tiny: bool = False
    only: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()  # of settings, NAME=VALUE
    device: str | None = None
    precision: str | None = None

    def __post_init__(self) -> None:
        for name in ("seeds", "rounds"):
            if getattr(self, name) is not None:
                check_whole(f"--{name}", getattr(self, name))

    def kind(self, setting: Setting) -> str:
        """Tell a full record from others: tiny, shortened, altered."""
        if self.tiny:
            return "tiny"
        rounds, seeds = full_rounds(setting), setting.paper["seeds"]
        if (self.rounds or rounds) < rounds or (self.seeds or seeds) < seeds:
            return "shortened"
        return "altered" if self.changes or (self.rounds or rounds) > rounds else "full"


class Group(NamedTuple):
    """Settings whose runs share their local work, so that a device trains them as one batch."""

    settings: list[Setting]
    tasks: dict[str, list[Task]]  # by setting

    @property
    def all_tasks(self) -> list[Task]:
        """List the runs of all settings."""
        return [task for some in self.tasks.values() for task in some]


def full_rounds(setting: Setting) -> int:
    """Tell how many rounds the paper has."""
    return int(setting.table["rounds"])


def chosen_settings(names: Sequence[str]) -> list[Setting]:
    """Find settings: by the name of a table or figure, of one setting, or by how names begin.

    >>> [s.name for s in chosen_settings(["adabest-table2-cifar10-1pc"])][1:]
    ['adabest-table2-cifar10-1pc-a0.3', 'adabest-table2-cifar10-1pc-iid']
    """
    known, found = paper_settings(), dict[str, Setting]()
    for name in [n for given in names for n in drawn_from(given)]:
        some = [s for s in known.values() if s.family == name]  # though others may begin like it
        some = some or [s for n, s in known.items() if n.startswith(f"{name}-")]
        some = [known[name]] if name in known else some
        if not some:
            names = list(dict.fromkeys([*paper_files(), *CURVES_OF, *COUNTED, *known]))
            raise unknown_name("table or setting", name, names, "reproduce")
        found |= {one.name: one for one in some}
    return list(found.values())


def methods_of(setting: Setting, only: Sequence[str]) -> list[str]:
    """List the labels of a setting's methods, or of those that `only` names."""
    names: Mapping[str, str] = setting.paper["methods"]
    if not only:
        return list(names)
    by_name = {n.lower(): label for label, title in names.items() for n in (label, title)}
    for one in only:
        if one.lower() not in by_name:
            raise unknown_name("method", one, [*names, *names.values()], setting.name)
    wanted = {by_name[one.lower()] for one in only}
    return [label for label in names if label in wanted]


def experiments_of(setting: Setting, options: Options) -> list[Experiment]:
    """Write out the runs of a setting: methods times seeds."""
    table = setting_table(setting.name)
    assert table is not None
    seeds = options.seeds or (1 if options.tiny else setting.paper["seeds"])
    table["seed"] = seed_list(seeds, setting.paper["varies"])
    if options.tiny:
        table = _tiny(table)
    if options.rounds is not None:
        table["rounds"] = options.rounds
    changes = [*options.changes]
    changes += [f"engine.device={options.device}"] if options.device else []
    changes += [f"engine.precision={options.precision}"] if options.precision else []
    _check_changes(options.changes)
    wanted = methods_of(setting, options.only)
    # only theirs: a change may be of a setting that other methods do not have
    methods = [one for method in table["algorithm"] for one in _written_out(method)]
    table["algorithm"] = [one for one in methods if algorithm_label(one) in wanted]
    return load(table, changes)


def _written_out(method: Mapping[str, Any]) -> list[Table]:
    """Write out the sweeps of one [[algorithm]]; a label stays what it is, whatever is changed."""
    found = expand({"algorithm": method})
    return [{**one.table["algorithm"], "label": one.label} for one in found]


def _check_changes(changes: Sequence[str]) -> None:
    """Refuse what would give a record a wrong name."""
    for change in changes:
        name, equals, text = change.partition("=")
        if name in ("seed", "rounds", "name", "label"):
            raise ConfigError(f"{change!r}: seeds and rounds of a table are set by options")
        if equals and isinstance(parse_value(text), list) and name != "evaluate.models":
            raise ConfigError(f"{change!r}: a record has one value of each setting, not a sweep")


def _tiny(table: Table) -> Table:
    """Make the same experiment small: few rounds, clients, examples and steps."""
    partition: dict[str, Any] = {**table["partition"]}
    clients = TINY_CLIENTS + 5 if "hold" in table else TINY_CLIENTS
    partition["max_clients" if partition["use"] == "by_key" else "clients"] = clients
    if "min_size" in partition:
        partition["min_size"] = 1
    work = {**table["work"], "batch": TINY_BATCH}
    work["epochs"] = {"low": 1, "high": 2} if isinstance(work["epochs"], dict) else 1
    sampler = dict(table.get("sampler", {}))
    if "count" in sampler:
        sampler["count"] = min(2, sampler["count"])
    data = few_table(table["data"], TINY_EXAMPLES)
    new = {"data": data, "partition": partition, "work": work, "sampler": sampler}
    return {**table, **new, "rounds": TINY_ROUNDS}


# -------------------------------------------------------------------------------------- groups
def groups(settings: Sequence[Setting], options: Options, out: Path) -> list[Group]:
    """Put settings with the same local work together, in the order of the tables."""
    made: dict[str, list[Group]] = {}
    for setting in settings:
        experiments = experiments_of(setting, options)
        if not experiments:
            continue
        place = out / folder_of(setting, options)
        tasks = [Task(one, run_folder(place, one)) for one in experiments]
        # what is timed, or fills a device's memory by itself, shares with nobody
        own = setting.name if setting.paper.get("alone") else ""
        found = made.setdefault(_common(experiments[0]) + own, [])
        fits = found and len(found[-1].all_tasks) + len(tasks) <= MOST_RUNS
        if not fits:
            found.append(Group([], {}))
        found[-1].settings.append(setting)
        found[-1].tasks[setting.name] = tasks
    return [group for found in made.values() for group in found]


def _common(experiment: Experiment) -> str:
    """Name what runs of one batch have in common."""
    table = experiment.to_table()
    parts = ("data", "model", "task", "work", "rounds", "engine")
    return json.dumps([table[part] for part in parts], sort_keys=True)


def folder_of(setting: Setting, options: Options) -> str:
    """Name the folder of a setting's runs; changed ones have folders of their own."""
    told = "".join(f"@{change}" for change in options.changes)
    plain = "".join(c if c.isalnum() or c in "@=._-+," else "_" for c in told)
    return ("tiny-" if options.tiny else "") + setting.name + plain[:120]
