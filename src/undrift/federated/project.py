"""An experiment and the federation it is deployed to, read from two files."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undrift.core.task import Task
from undrift.data import Federation
from undrift.data.checks import check_whole
from undrift.describe import describe_own
from undrift.errors import ConfigError, DataError, UndriftError
from undrift.experiment.spec import Experiment
from undrift.experiment.tables import read_table
from undrift.experiment.world import deal, make_task
from undrift.federated.alone import Example
from undrift.federated.checks import Limits
from undrift.federated.enrol import Door
from undrift.federated.exchange import Patience
from undrift.federated.node import Node
from undrift.sources.examples import Examples, Info
from undrift.version import __version__

EXPERIMENT, FEDERATION = "experiment.toml", "federation.toml"
_NOT_DECIDING = ("name", "label", "rounds", "evaluate", "engine")  # may change while a run goes on


@dataclass(frozen=True, eq=False)
class Project:
    """What server and nodes have in common."""

    experiment: Experiment
    clients: int
    example: Example
    classes: int
    keys: tuple[str, ...]  # public keys in PEM, client after client; none in a try-out
    limits: Limits
    patience: Patience
    joining: float  # seconds for nodes to come before the first round
    judge: bool  # whether the server has the experiment's own test examples

    @property
    def door(self) -> Door:
        """Tell who may come in."""
        least = self.patience.minimum
        return Door(self.clients, least, self.joining, trust=not self.keys)

    @property
    def plan(self) -> str:
        """Name everything that both sides must agree on."""
        table = {n: v for n, v in self.experiment.to_table().items() if n not in _NOT_DECIDING}
        there = {
            n: v for n, v in table.items() if n not in ("data", "partition")
        }  # a node has its own
        code = describe_own(there, self.experiment.home)
        told = [table, self.clients, self.example.words(), self.classes, __version__, code]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def task(self) -> Task:
        """Make the task, without an example."""
        return make_task(self.experiment, self.blank())

    def blank(self) -> Examples:
        """Make one example of zeros, as silos have them."""
        x, y = self.example.blank(1).client(0)
        info = Info("declared", "federation.toml")
        return Examples(x, y, x[:0], y[:0], self.classes, info)


def read_project(place: Path, *, trust: bool = False) -> Project:
    """Read `experiment.toml` and `federation.toml` in a folder; with `trust`, import own parts."""
    experiment = _experiment(place / EXPERIMENT, trust)
    check_deployable(experiment)
    table = read_table(place / FEDERATION)
    try:
        return _project(experiment, table)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UndriftError):
            raise
        raise ConfigError(
            f"{place / FEDERATION}: {type(error).__name__}: {error}; "
            "`undrift deploy init` writes a complete one"
        ) from error


def _experiment(path: Path, trust: bool) -> Experiment:
    return Experiment.from_table(read_table(path), trust=trust, home=path.parent.absolute())


def _project(experiment: Experiment, table: dict[str, Any]) -> Project:
    x, y, clients = table["x"], table["y"], table["clients"]
    check_whole("federation.toml: clients", clients)
    example = Example(tuple(x["shape"]), _dtype(x), tuple(y["shape"]), _dtype(y))
    joining = table.get("joining", 300.0)
    if not 0 < float(joining) < math.inf:
        raise ConfigError(f"federation.toml: joining = {joining!r} must be a number above 0")
    patience = Patience(**table.get("patience", {})).checked()
    most = min(clients, getattr(experiment.sampler, "count", None) or clients)
    if patience.minimum > most:
        raise ConfigError(
            f"patience.minimum = {patience.minimum}, but a round has at most {most} clients: it "
            "would never count"
        )
    return Project(
        experiment, clients, example, int(table.get("classes", 0)), _keys(table, clients),
        Limits(**table.get("limits", {})).checked(), patience,
        float(joining), bool(table.get("judge", False)),
    )  # fmt: skip


def _keys(table: dict[str, Any], clients: int) -> tuple[str, ...]:
    """Read the clients' public keys: as many as clients, and each a client's own."""
    keys = tuple(str(key).strip() for key in table.get("keys", ()))
    if not keys and not table.get("insecure", False):
        raise ConfigError(
            "federation.toml has no keys: without them anybody may say that he is any client; "
            "insecure = true allows it, for a try-out"
        )
    if keys and len(keys) != clients:
        raise ConfigError(f"federation.toml has {len(keys)} keys for {clients} clients")
    owner: dict[str, int] = {}
    for client, key in enumerate(keys):
        if owner.setdefault(key, client) != client:
            raise ConfigError(
                f"federation.toml: clients {owner[key]} and {client} have the same key; each silo "
                "makes its own, and `undrift deploy keys` takes them in"
            )
    return keys


def _dtype(table: dict[str, Any]) -> torch.dtype:
    found = getattr(torch, str(table["dtype"]), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"federation.toml: no type {table['dtype']!r}; 'float32' is one")
    return found


def check_deployable(experiment: Experiment) -> None:
    """Refuse what needs everybody's examples or states in one place."""
    evaluate, hold = experiment.evaluate, experiment.hold
    if experiment.task.class_weights == "balanced":
        raise ConfigError(
            "task.class_weights = 'balanced' needs everybody's counts of classes in one place: "
            "write the weights as a list"
        )
    beyond = set(evaluate.models) != {"cloud"} or evaluate.drift or evaluate.clients
    if beyond or hold.validation_clients or hold.client_test:
        raise ConfigError(
            "a deployed run is judged by its server's model alone: evaluate.models, drift, clients "
            "and hold need everybody's examples in one place"
        )


# ---------------------------------------------------------------------------------------- silos
def load_silo(loader: str, client: int, place: Path) -> Federation:
    """Call a silo's own loader, `file.py:function` or `module:function`, and take what it gives."""
    given = _function(loader)(client, place)
    if isinstance(given, Federation):
        return given
    if isinstance(given, tuple) and len(given) == 2:
        return Federation.of([given])
    return Federation.from_datasets([given])


def _function(loader: str) -> Callable[[int, Path], Any]:
    where, _, name = loader.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigError(f"loader {loader!r} must be 'file.py:function' or 'module:function'")
    if where.endswith(".py"):
        made = importlib.util.spec_from_file_location("undrift_silo_loader", where)
        if made is None or made.loader is None or not Path(where).is_file():
            raise ConfigError(f"loader {loader!r}: there is no file {where}")
        module = importlib.util.module_from_spec(made)
        sys.modules["undrift_silo_loader"] = module
        made.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"loader {loader!r}: {where} has no function {name}")
    return found


def share(experiment: Path | Experiment, client: int) -> tuple[Tensor, Tensor]:
    """Give the examples that a simulation of the experiment deals to one client."""
    if not isinstance(experiment, Experiment):
        experiment = _experiment(experiment, trust=True)  # a silo's own loader asks for it
    dealt = deal(experiment)
    if not 0 <= client < len(dealt.parts):
        raise DataError(f"no client {client}: the experiment deals to {len(dealt.parts)}")
    rows = torch.as_tensor(dealt.parts[client])
    x = dealt.examples.train_x[rows]
    y = x.flatten(1) if experiment.task.target == "input" else dealt.examples.train_y[rows]
    return x, y


def node_of(project: Project, place: Path, client: int, folder: Path, loader: str) -> Node:
    """Make a silo's node from its files."""
    federation = load_silo(loader, client, place)
    found, wanted = Example.of(federation), project.example
    if found.words() != wanted.words():
        raise DataError(
            f"the loader gives x {list(found.x_shape)} {found.x_dtype} and y {list(found.y_shape)} "
            f"{found.y_dtype}; federation.toml says {wanted.words()}"
        )
    arrived = Federation(
        federation.x, federation.y, federation.members, federation.offsets, federation.sizes,
        project.experiment.arrival,
    )  # fmt: skip
    experiment = project.experiment
    return Node(
        client, project.task(), arrived, experiment.algorithm, experiment.work, folder, project.plan
    )
