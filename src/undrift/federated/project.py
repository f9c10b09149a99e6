"""An experiment and the federation it is deployed to, read from two files."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undrift.core.task import Task
from undrift.data import Federation
from undrift.data.checks import check_whole
from undrift.describe import describe_own
from undrift.errors import ConfigError, DataError, FederationError, UndriftError
from undrift.experiment.losses import balanced_weights
from undrift.experiment.sections import Choice
from undrift.experiment.spec import Experiment
from undrift.experiment.tables import read_table
from undrift.experiment.world import deal, make_task
from undrift.federated.alone import Example
from undrift.federated.answering import Answering
from undrift.federated.checks import Limits
from undrift.federated.declared import read_example, read_keys, read_names
from undrift.federated.enrol import Door
from undrift.federated.exchange import Patience
from undrift.federated.node import Node
from undrift.federated.shelf import mark_of
from undrift.federated.table_node import TableNode, written
from undrift.sources.examples import Examples, Info
from undrift.tabular import Frame, Preparation
from undrift.tabular.holders import Asked, experiments_rows, is_a_table, own_rows
from undrift.version import __version__

EXPERIMENT, FEDERATION = "experiment.toml", "federation.toml"
TABLE = "table"  # stands for x in federation.toml where silos hold tables
_NOT_DECIDING = ("name", "label", "rounds", "evaluate", "engine")  # may change while a run goes on


@dataclass(frozen=True, eq=False)
class Project:
    """What server and nodes have in common."""

    experiment: Experiment
    clients: int
    declared: Example | None  # what an example looks like; of a table only its preparation knows
    classes: int
    keys: tuple[str, ...]  # public keys in PEM, client after client; none in a try-out
    limits: Limits
    patience: Patience
    joining: float  # seconds for nodes to come before the first round
    judge: bool  # whether the server has the experiment's own test examples
    names: tuple[str, ...] = ()  # of the clients, where they have any
    asked: Asked | None = None  # of a table: what the experiment says of it
    preparation: Preparation | None = None  # of a table, once it is agreed on

    @property
    def example(self) -> Example:
        """Tell what an example looks like."""
        if self.declared is None:
            raise FederationError("a table's examples are known once it is prepared")
        return self.declared

    def prepared(self, made: Preparation) -> Project:
        """Give the same project where the table's preparation is agreed on."""
        y = (torch.int64, ()) if made.classes else (torch.float32, (1,))
        example = Example((made.inputs,), torch.float32, y[1], y[0])
        return replace(self, declared=example, classes=made.classes, preparation=made)

    @property
    def door(self) -> Door:
        """Tell who may come in."""
        least = self.patience.minimum
        trust = not self.keys
        return Door(self.clients, least, self.joining, trust=trust, names=self.names)

    @property
    def plan(self) -> str:
        """Name everything that both sides must agree on."""
        table = {n: v for n, v in self.experiment.to_table().items() if n not in _NOT_DECIDING}
        there = {
            n: v for n, v in table.items() if n not in ("data", "partition")
        }  # a node has its own
        code = describe_own(there, self.experiment.home)
        shape = [None, 0] if self.asked is not None else [self.example.words(), self.classes]
        told = [table, self.clients, *shape, __version__, code]
        name = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        made = self.preparation
        return name if made is None else f"{name}:{mark_of(written(made))}"

    def task(self) -> Task:
        """Make the task, without an example."""
        return make_task(self._weighted(), self.blank())

    def _weighted(self) -> Experiment:
        """Give the experiment with balanced class weights as numbers: sums tell the counts."""
        experiment, made = self.experiment, self.preparation
        if made is None or experiment.task.class_weights != "balanced":
            return experiment
        weights = tuple(balanced_weights(made.target.counts))
        return replace(experiment, task=replace(experiment.task, class_weights=weights))

    def blank(self) -> Examples:
        """Make one example of zeros, as silos have them."""
        x, y = self.example.blank(1).client(0)
        info = Info("declared", "federation.toml")
        if self.preparation is not None:
            made = self.preparation
            info = info._replace(
                source="table", class_names=made.target.class_names, client_names=self.names,
                feature_names=made.feature_names, preparation=made,
                target_scale=(made.target.mean, made.target.std),
            )  # fmt: skip
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
    clients = table["clients"]
    check_whole("federation.toml: clients", clients)
    asked = asked_of(experiment) if table["x"] == TABLE else None
    example = read_example(table) if asked is None else None
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
        experiment, clients, example, int(table.get("classes", 0)), read_keys(table, clients),
        Limits(**table.get("limits", {})).checked(), patience,
        float(joining), bool(table.get("judge", False)), read_names(table, clients), asked,
    )  # fmt: skip


def asked_of(experiment: Experiment) -> Asked:
    """Read what an experiment says of its table; silos need all of it beforehand."""
    assert isinstance(experiment.data, Choice)
    if experiment.columns is None:
        raise ConfigError(
            "silos agree on a table's columns beforehand, and this experiment has no [columns]: "
            "`undrift init TABLE` writes them"
        )
    given = {n: v for n, v in experiment.data.table().items() if n != "use"}
    return Asked.of({**given, "columns": experiment.columns})


def is_table(experiment: Experiment) -> bool:
    """Whether the experiment learns from a table."""
    return isinstance(experiment.data, Choice) and experiment.data.use == "table"


def check_deployable(experiment: Experiment) -> None:
    """Refuse what needs everybody's examples or states in one place."""
    evaluate, hold = experiment.evaluate, experiment.hold
    table = is_table(experiment) and experiment.columns is not None
    if experiment.task.class_weights == "balanced" and not table:
        raise ConfigError(
            "task.class_weights = 'balanced' needs everybody's counts of classes, which only "
            "tables with [columns] tell: write the weights as a list"
        )
    beyond = set(evaluate.models) != {"cloud"} or evaluate.drift
    if beyond or hold.validation_clients or hold.client_test:
        raise ConfigError(
            "a deployed run is judged by its server's model alone: evaluate.models, drift and hold "
            "need everybody's examples in one place"
        )


# ---------------------------------------------------------------------------------------- silos
def load_silo(loader: str, client: int, place: Path) -> Federation:
    """Call a silo's own loader, `file.py:function` or `module:function`, and take what it gives."""
    given = _function(loader)(client, place)
    if isinstance(given, Frame) or is_a_table(given):
        raise DataError(
            "the loader gives a table, and this federation was made for tensors: write it again "
            "from an experiment with [columns]"
        )
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


def share(experiment: Path | Experiment, client: int) -> tuple[Tensor, Tensor] | Frame:
    """Give what a simulation deals to one client: examples, or rows of a table."""
    if not isinstance(experiment, Experiment):
        experiment = _experiment(experiment, trust=True)  # a silo's own loader asks for it
    dealt = deal(experiment)
    if not 0 <= client < len(dealt.parts):
        raise DataError(f"no client {client}: the experiment deals to {len(dealt.parts)}")
    if is_table(experiment) and experiment.columns is not None:
        return experiments_rows(asked_of(experiment)).train.take(dealt.parts[client])
    rows = torch.as_tensor(dealt.parts[client])
    x = dealt.examples.train_x[rows]
    y = x.flatten(1) if experiment.task.target == "input" else dealt.examples.train_y[rows]
    return x, y


def load_rows(loader: str, client: int, place: Path, asked: Asked) -> Frame:
    """Call a silo's own loader, and read the table that it names."""
    given = _function(loader)(client, place)
    if isinstance(given, Frame):
        return given  # the experiment's own rows
    if not is_a_table(given):
        raise DataError(
            f"the loader gives {type(given).__name__}: this federation learns from tables, so give "
            "the path of a .csv, .tsv or .parquet file, or a pandas DataFrame"
        )
    file, _, _ = loader.rpartition(":")
    if isinstance(given, str | Path) and file.endswith(".py"):
        given = Path(file).parent / Path(given).expanduser()
    return own_rows(given, asked, client)


def try_table(file: str, client: int, place: Path) -> str | None:
    """Read a silo's table as its node will, and say how many rows it has, or all that is wrong."""
    try:
        project = read_project(place, trust=True)
        if project.asked is None:
            return "this federation was made for tensors, not for tables"
        frame = load_rows(f"{Path(file).absolute()}:load", client, place, project.asked)
    except UndriftError as error:
        return str(error)
    gone = {name: int(column.empty.sum()) for name, column in frame.columns.items()}
    missing = ", ".join(f"{name} {count}" for name, count in gone.items() if count)
    print(f"{len(frame)} rows to train on; missing cells: {missing or 'none'}")
    return None


def node_of(project: Project, place: Path, client: int, folder: Path, loader: str) -> Answering:
    """Make a silo's node from its files."""
    if project.asked is not None:
        return _table_node(project, project.asked, place, client, folder, loader)
    return _node(project, client, folder, load_silo(loader, client, place))


def _table_node(
    project: Project, asked: Asked, place: Path, client: int, folder: Path, loader: str
) -> TableNode:
    def trains(made: Preparation, frame: Frame) -> Node:
        pair = torch.from_numpy(made.encode(frame)), made.encode_target(frame)
        return _node(project.prepared(made), client, folder, Federation.of([pair]))

    def rows() -> Frame:
        return load_rows(loader, client, place, asked)

    return TableNode(client, rows, asked.schema, asked.least, folder, trains, project.plan)


def _node(project: Project, client: int, folder: Path, federation: Federation) -> Node:
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
