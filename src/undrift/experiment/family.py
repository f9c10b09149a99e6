"""One file for a whole table of a paper: an experiment, and what each of its settings changes.

A file in `papers/` is an experiment with three sections more: `[paper]` tells what the table
prints, `[part.NAME]` holds what a part of a setting's name stands for, and each `[[setting]]` lists
its parts and the printed cells.  FILE-PART-PART names an ordinary experiment.  A setting without
cells, as those of figures are, shows every method, or those that it lists as `only`; it may have
its own `metric`, `targets` and `seeds`.  A file that says `like = "OTHER"` begins with OTHER's
experiment, parts and methods.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from undrift.core.random import Seeds
from undrift.errors import ConfigError, unknown_name
from undrift.experiment.sweep import algorithm_label
from undrift.experiment.tables import Table, read_table

FOLDER = Path(str(files("undrift") / "papers"))
ONLY_HERE = ("paper", "part", "setting")
OF_A_SETTING = ("metric", "targets", "seeds")  # of [paper], where settings differ in them


class Setting(NamedTuple):
    """One block or column of a paper's table: an experiment, and what the paper prints of it."""

    name: str  # "fedvra-table3-noniid-hlu"
    family: str  # "fedvra-table3"
    title: str
    table: Table  # an ordinary experiment, all methods and seeds
    paper: Table  # the [paper] section
    cells: Mapping[str, Sequence[float | int | str]]  # printed, by the method's label


def paper_files() -> dict[str, Path]:
    """List the papers' tables in the package by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


@cache
def paper_settings() -> Mapping[str, Setting]:
    """List every setting of every table by name."""
    listed = [one for path in paper_files().values() for one in read_family(path)]
    return {one.name: one for one in listed}


def settings_of(family: str) -> list[Setting]:
    """List the settings of one table."""
    return [one for one in paper_settings().values() if one.family == family]


def is_figure(family: str) -> bool:
    """Tell a figure, which has curves, from a table, which has printed cells."""
    return any(one.paper["shows"] == "curve" for one in settings_of(family))


def setting_table(name: str) -> Table | None:
    """Give the experiment of a setting; None if no setting has this name."""
    found = paper_settings().get(name)
    if found is not None:
        return {"name": name, **copy.deepcopy(found.table)}
    if name in paper_files():
        names = ", ".join(one.name for one in settings_of(name))
        raise ConfigError(
            f"{name} is a table of several experiments: name one of {names}, or run all of them "
            f"with `undrift reproduce {name}`"
        )
    return None


def read_family(path: Path) -> list[Setting]:
    """Read one file and write out its settings."""
    whole = _read_whole(path)
    base = {k: v for k, v in whole.items() if k not in ONLY_HERE}
    paper, parts = whole["paper"], whole.get("part", {})
    made = []
    for one in whole["setting"]:
        table, titles = base, []
        for name in one.get("parts", []):
            if name not in parts:
                raise unknown_name("part", name, list(parts), path.name)
            changes = dict(parts[name])
            titles.append(str(changes.pop("title", name)))
            table = merged(table, changes)
        full = "-".join([path.stem, *one.get("parts", [])])
        own = {name: one[name] for name in OF_A_SETTING if name in one}
        table, told = _narrowed(table, {**paper, **own}, one.get("only"))
        table = {**table, "seed": seed_list(told["seeds"], told["varies"])}
        cells = one.get("cells", {label: [] for label in told["methods"]})
        made.append(Setting(full, path.stem, ", ".join(titles), table, told, cells))
    return made


def _read_whole(path: Path) -> Table:
    own = read_table(path)
    if "like" not in own:
        return own
    other = _read_whole(path.with_name(f"{own.pop('like')}.toml"))
    paper = {"methods": other.pop("paper")["methods"], **own.pop("paper")}
    settings, _ = own.pop("setting"), other.pop("setting")
    return {**merged(other, own), "paper": paper, "setting": settings}


def _narrowed(table: Table, paper: Table, only: Sequence[str] | None) -> tuple[Table, Table]:
    """Keep some of the methods."""
    if only is None:
        return table, paper
    some = [one for one in table["algorithm"] if algorithm_label(one) in only]
    methods = {label: paper["methods"][label] for label in only}
    return {**table, "algorithm": some}, {**paper, "methods": methods}


def seed_list(count: int, varies: Sequence[str]) -> list[dict[str, int]]:
    """Number the repetitions; what does not vary between them has seed 0.

    >>> seed_list(2, ["model"])[1]
    {'partition': 0, 'model': 1, 'run': 0}
    """
    return [{n: i if n in varies else 0 for n in Seeds._fields} for i in range(count)]


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Table:
    """Change a table: tables go into tables, but one that says `use` stands for itself.

    Changes of `algorithm` name the methods by label, or `all` of them.

    >>> merged({"data": {"use": "a", "n": 1}}, {"data": {"n": 2}})
    {'data': {'use': 'a', 'n': 2}}
    >>> merged({"data": {"use": "a", "n": 1}}, {"data": {"use": "b"}})
    {'data': {'use': 'b'}}
    >>> merged({"algorithm": [{"use": "fedavg"}]}, {"algorithm": {"all": {"lr": 0.1}}})
    {'algorithm': [{'use': 'fedavg', 'lr': 0.1}]}
    """
    made = copy.deepcopy(dict(base))
    for name, value in changes.items():
        old = made.get(name)
        if isinstance(old, list) and isinstance(value, Mapping):
            made[name] = [_method_changed(one, value) for one in old]
        elif isinstance(old, dict) and isinstance(value, Mapping) and "use" not in value:
            made[name] = merged(old, value)
        else:
            made[name] = copy.deepcopy(value)
    return made


def _method_changed(method: Mapping[str, Any], changes: Mapping[str, Any]) -> Table:
    own = changes.get(algorithm_label(method), {})
    return merged(merged(method, changes.get("all", {})), own)
