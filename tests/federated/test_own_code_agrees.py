"""Server and nodes agree on the code that an experiment names, not only on its name."""

from __future__ import annotations

import torch

from undrift.experiment.spec import Experiment
from undrift.federated.alone import Example
from undrift.federated.checks import Limits
from undrift.federated.exchange import Patience
from undrift.federated.project import Project

TABLE = {
    "data": "digits",
    "model": {"use": "my_parts:net"},
    "algorithm": {"use": "FedAvg", "lr": 0.1},
    "partition": {"use": "Iid", "clients": 4},
    "task": {"loss": "my_parts:loss"},
    "rounds": 2,
}
PARTS = """
from torch import nn
from torch.nn import functional as F

def scaled(values):
    return 1.0 * values

def loss(output, target):
    return scaled(F.cross_entropy(output, target, reduction="none"))

def net(inputs=64, classes=10):
    return nn.Linear(inputs, classes)
"""


def plan(folder, text):
    folder.mkdir()
    (folder / "my_parts.py").write_text(text)
    experiment = Experiment.from_table(TABLE, trust=True, home=folder)
    example = Example((64,), torch.float32, (), torch.int64)
    parts = (4, example, 10, (), Limits(), Patience(), 1.0, False)
    return Project(experiment, *parts).plan


def test_a_node_with_other_code_has_another_plan(tmp_path):
    here = plan(tmp_path / "server", PARTS)
    assert here == plan(tmp_path / "node", PARTS.replace("def scaled", "# twice\n\ndef scaled"))
    assert here != plan(tmp_path / "other", PARTS.replace("1.0 *", "2.0 *"))
    assert here != plan(
        tmp_path / "wide", PARTS.replace("nn.Linear(inputs", "nn.Linear(1 * inputs")
    )
