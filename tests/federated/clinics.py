"""A table of four sites, as a simulation has it and as silos have it: a file each."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from undrift.deploy.folder import Wanted, init
from undrift.experiment.spec import Experiment, load
from undrift.federated.grid import LocalGrid
from undrift.federated.project import Project, node_of, read_project

SITES = {"north": 60, "south": 45, "east": 20, "west": 6}
HEADER = ["clinic", "age", "dose", "blood", "smoker", "visited", "outcome"]
COLUMNS = """
[columns]
age = { kind = "number", fill = "median", indicator = true }
dose = { kind = "number", fill = "mean" }
blood = { kind = "category" }
smoker = { kind = "flag" }
visited = { kind = "date", format = "iso" }
outcome = { kind = "classes", levels = ["well", "ill"] }
"""
EXPERIMENT = """
rounds = 2
[data]
use = "table"
path = "clinics.csv"
client = "clinic"
target = "outcome"
[model]
use = "logistic"
[algorithm]
use = "fedavg"
lr = 0.1
[work]
epochs = 1
batch = 16
[task]
dtype = "float64"
[evaluate]
clients = true
"""


def cells(seed: int = 0) -> list[list[str]]:
    """Rows of all sites, mixed; `west` has no one who is ill."""
    draw, rows = random.Random(seed), list[list[str]]()
    for site, count in SITES.items():
        for k in range(count):
            rows.append([
                site,
                str(draw.randrange(18, 90)),
                repr(draw.gauss(1e-3 * len(site), 3e-4)),
                draw.choice(["A", "A", "B", "0"]) if k else "rare",
                draw.choice(["yes", "no"]),
                f"2024-{draw.randrange(1, 13):02d}-{draw.randrange(1, 29):02d}",
                "ill" if site != "west" and draw.random() < 0.3 else "well",
            ])  # fmt: skip
    for row in rows:
        for column in range(1, 6):
            row[column] = "" if draw.random() < 0.08 else row[column]
    draw.shuffle(rows)
    return rows


def write(path: Path, rows: list[list[str]], header: list[str]) -> Path:
    path.write_text("\n".join(",".join(row) for row in [header, *rows]) + "\n")
    return path


def experiment(folder: Path, *changes: str, columns: str = COLUMNS) -> Experiment:
    folder.mkdir(exist_ok=True)
    write(folder / "clinics.csv", cells(), HEADER)
    (folder / "clinics.toml").write_text(EXPERIMENT + columns)
    [made] = load(folder / "clinics.toml", list(changes))
    return made


def deployed(folder: Path, *changes: str, **more: Any) -> Project:
    """Write a federation, and each silo's own file into its folder, without the clients' column."""
    place = init(folder / "p", experiment(folder, *changes, **more), Wanted(insecure=True))
    project = read_project(place / "app" / "silos")
    for client, name in enumerate(project.names):
        own = [row[1:] for row in cells() if row[0] == name]
        write(own_file(folder, client), own, HEADER[1:])
    return project


def own_file(folder: Path, client: int) -> Path:
    return folder / "p" / "silos" / f"client-{client}" / "mine.csv"


def loader_of(folder: Path, client: int) -> str:
    """The loader of a silo, after its owner has written where the table is."""
    path = folder / "p" / "silos" / f"client-{client}" / "loader.py"
    text = path.read_text()
    path.write_text(text.replace('return share(place / "experiment.toml", client)',
                                 'return "mine.csv"'))  # fmt: skip
    return f"{path}:load"


class Nodes(LocalGrid):
    """Nodes within this process, made again for every message unless they are lasting."""

    def __init__(
        self, folder: Path, project: Project, state: Path, loader: Callable[[int], str],
        lasting: bool = False,
    ) -> None:  # fmt: skip
        def answering(client: int) -> Callable[[bytes, bytes], bytes]:
            place, where = folder / "p" / "app" / "silos", state / f"client-{client}"

            def made() -> Any:
                return node_of(project, place, client, where, loader(client))

            if lasting:
                answer: Callable[[bytes, bytes], bytes] = made().answer
                return answer
            return lambda common, own: made().answer(common, own)

        super().__init__(
            {70 + i: answering(i) for i in range(project.clients)},
            {70 + i: i for i in range(project.clients)},
        )


def own_files(folder: Path, project: Project, state: Path, lasting: bool = False) -> Nodes:
    return Nodes(folder, project, state, lambda client: loader_of(folder, client), lasting)


# ---- the same numbers ----------------------------------------------------------------------------
def preparation(folder):
    return json.loads((folder / "preparation.json").read_text())


def numbers(value, name=""):
    """Every number of plain data, by its place."""
    if isinstance(value, dict):
        value = list(value.items())
        return {k: v for n, one in value for k, v in numbers(one, f"{name}.{n}").items()}
    if isinstance(value, list):
        return {k: v for i, one in enumerate(value) for k, v in numbers(one, f"{name}.{i}").items()}
    return {name: value}


def assert_close(ours, theirs, most=1e-9):
    ours, theirs = numbers(ours), numbers(theirs)
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        other = theirs[name]
        if isinstance(one, float) and one != int(one):
            assert one == pytest.approx(other, rel=most, abs=0), name
        else:
            assert one == other, name


def furthest(one, other):
    ours, theirs = (load_file(place / "model.safetensors") for place in (one, other))
    return max(float((ours[n] - theirs[n]).abs().max()) for n in theirs)


def brief(project, **more):
    """The same project with less patience."""
    patience = project.patience._replace(seconds=20.0, returning=0.0, **more)
    return dataclasses.replace(project, patience=patience, joining=0.5)
