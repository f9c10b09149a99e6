"""The first experiment file for somebody's own table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from undrift import sources
from undrift.experiment.tables import write_value

TEMPLATE = """\
# {rows} examples of {clients}, to predict {target_value}: {kinds}.
rounds = 50
seed = 0

[data]
use = "table"
path = {path}
target = {target_value}
{client_line}{more}
{partition}[model]
use = "mlp"
hidden = 32

[algorithm]
use = "fedavg"        # `undrift list algorithms` names the others
lr = 0.1

[work]
epochs = 2
batch = 16

[sampler]
use = "uniform"
fraction = {fraction}

[evaluate]
every = 1
clients = {judge_clients}
"""

PARTITION = """\
[partition]           # the table names no clients: deal it
use = "dirichlet_client"
clients = 10
alpha = 0.5

"""


def starter_file(
    table: Path, client: str | None, target: str, out: Path, **settings: Any
) -> tuple[str, str]:
    """Write an experiment file for a table, after reading it once; tell what it is about too."""
    data = sources.load("table", path=str(table), client=client, target=target, **settings)
    count = 0 if data.train_clients is None else int(data.train_clients.unique().numel())
    total = len(data.train_x) + len(data.test_x)
    path = str(table) if table.is_absolute() else os.path.relpath(table, out.parent)
    kinds = f"{data.classes} classes" if data.classes else "numbers"
    text = TEMPLATE.format(
        rows=total,
        clients=f"{count} clients" if count else "nobody in particular",
        kinds=kinds,
        more="".join(f"{n} = {write_value(v)}\n" for n, v in settings.items()),
        path=write_value(path),
        target_value=write_value(target),
        client_line=f"client = {write_value(client)}\n" if client is not None else "",
        partition="" if client is not None else PARTITION,
        fraction="1.0" if count <= 10 else "0.5",
        judge_clients="true" if client is not None else "false",
    )
    return text, f"{total} examples, {data.train_x.shape[1]} inputs, to predict {kinds}"
