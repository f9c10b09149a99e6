"""The first experiment file for somebody's own table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from undrift import sources
from undrift.errors import ConfigError, unknown_name
from undrift.experiment.tables import write_key, write_value
from undrift.tabular.propose import Proposal, propose
from undrift.tabular.reading import open_table
from undrift.tabular.schema import table_of

TEMPLATE = """\
# {rows} examples of {clients}, to predict {target_value}: {kinds}.
rounds = 50
seed = 0

[data]
use = "table"
path = {path}
target = {target_value}
{client_line}{more}
[columns]             # how each column is read; say it otherwise here
{columns}

{partition}[model]
use = "tabular_mlp"   # or "logistic", "tabular_resnet"

[algorithm]
use = "fedavg"        # `undrift list algorithms` names the others
lr = {lr}

[work]
epochs = 2
batch = 16

[sampler]
use = "uniform"
fraction = {fraction}

[evaluate]
every = 1
clients = {judge_clients}
metrics = {metrics}
"""

# beside loss and accuracy, which is high for whoever always guesses a common class
METRICS = {
    "classes": ["balanced_accuracy", "auc"],
    "number": ["mae", "r2"],
    "count": ["mae", "poisson_deviance"],
}
PARTITION = """\
[partition]           # the table names no clients: deal it
use = "dirichlet_client"
clients = 10
alpha = 0.5

"""


class Starter(NamedTuple):
    """An experiment file, what it is about, and what was noticed about its table."""

    text: str
    about: str
    proposal: Proposal


def starter_file(
    table: Path,
    client: str | None,
    target: str,
    out: Path,
    *,
    features: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    kinds: Mapping[str, str] | None = None,
    missing: Sequence[str] | None = None,
) -> Starter:
    """Write an experiment file for a table, after looking at all its columns."""
    if features is not None:
        if exclude:
            raise ConfigError("--features and --exclude both choose columns: use one of them")
        exclude = _others(table, features, target, client)
    made = propose(table, target, client, exclude, kinds, missing)
    settings: dict[str, Any] = {"exclude": made.exclude} if made.exclude else {}
    settings |= {} if missing is None else {"missing": list(missing)}
    settings |= {"missing_target": "drop"} if made.dropped else {}
    columns = made.schema.table()
    data = sources.load(
        "table", path=str(table), client=client, target=target, columns=columns, **settings
    )
    count = 0 if data.train_clients is None else int(data.train_clients.unique().numel())
    total = len(data.train_x) + len(data.test_x)
    path = str(table) if table.is_absolute() else os.path.relpath(table, out.parent)
    kind = made.schema.goal.kind
    told = f"{data.classes} classes" if data.classes else f"{kind}s"
    text = TEMPLATE.format(
        rows=total,
        clients=f"{count} clients" if count else "nobody in particular",
        kinds=told,
        more="".join(f"{n} = {write_value(v)}{_why(n, made)}\n" for n, v in settings.items()),
        columns=_lines(made),
        path=write_value(path),
        target_value=write_value(target),
        client_line=f"client = {write_value(client)}\n" if client is not None else "",
        partition="" if client is not None else PARTITION,
        fraction="1.0" if count <= 10 else "0.5",
        judge_clients="true" if client is not None else "false",
        metrics=write_value(METRICS[kind]),
        lr=0.01 if kind == "count" else 0.1,  # a rate is an exponential: larger steps diverge
    )
    about = f"{total} examples, {data.train_x.shape[1]} inputs, to predict {told}"
    return Starter(text, about, made)


def _others(table: Path, features: Sequence[str], target: str, client: str | None) -> list[str]:
    names = open_table(table).names
    absent = [name for name in features if name not in names]
    if absent:
        raise unknown_name("column", absent[0], names, str(table))
    return [name for name in names if name not in (*features, target, client)]


def _why(name: str, made: Proposal) -> str:
    if name != "missing_target":
        return ""
    rows = "1 row has" if made.dropped == 1 else f"{made.dropped} rows have"
    return f"    # {rows} none"


def _lines(made: Proposal) -> str:
    keys = {name: write_key(name) for name in made.schema.names}
    width = max(map(len, keys.values()))
    shown = [(key, write_value(table_of(made.schema[name]))) for name, key in keys.items()]
    return "\n".join(f"{key:<{width}} = {value}" for key, value in shown)
