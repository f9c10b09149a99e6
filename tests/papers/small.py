"""A paper's table that takes milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from undrift.experiment import family

SMALL = """\
# Nobody's table: two methods in two settings.
rounds = 4

[data]
use = "synthetic"
clients = 6
sizes = 20
features = 5
classes = 3

[model]
use = "mlp"
hidden = 4

[work]
steps = 2
batch = 5

[sampler]
use = "uniform"
count = 3

[engine]
device = "cpu"

[[algorithm]]
use = "fedavg"
lr = 0.1

[[algorithm]]
use = "fedprox"
lr = 0.1
mu = 0.1

[paper]
of = "Nobody"
table = "Table 0"
shows = "last"
targets = [0.01, 0.999]
seeds = 2
varies = ["model", "run"]
ours = ["everything"]

[paper.methods]
fedavg = "FedAvg"
fedprox = "FedProx"

[part.slow]
title = "slow"
algorithm = { all = { lr = 0.01 }, fedprox = { mu = 1.0 } }

[part.fast]
title = "fast"

[[setting]]
parts = ["slow"]
cells = { fedavg = [50.0, 1.0, 1, ">4"], fedprox = [60.0, 1.0, 2, ">4"] }

[[setting]]
parts = ["fast"]
cells = { fedavg = [50.0, 1.0, 1, ">4"], fedprox = [60.0, 1.0, 2, ">4"] }
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put the small table in the place of the papers'; gives the folder that we are in."""
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "small.toml").write_text(SMALL)
    monkeypatch.setattr(family, "FOLDER", tmp_path / "papers")
    monkeypatch.chdir(tmp_path)
    family.paper_settings.cache_clear()
    yield tmp_path
    family.paper_settings.cache_clear()
