"""Layers that take the steps of a chain while going back, against compiled algebra on gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.engines import deciding, device_round, stepping

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MOMENTUM = fl.sgd(0.02, momentum=0.9, weight_decay=0.01)
CHAINS = {
    "scaffold": lambda: fl.scaffold(local=MOMENTUM),
    "momentum": lambda: fl.fedavg(local=MOMENTUM),
    "feddyn": lambda: fl.feddyn(0.05),
}


def network(seed: int) -> nn.Sequential:
    """Nothing has a kink: one that rounding crosses moves a whole gradient."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 5), nn.Tanh(), nn.Conv2d(16, 32, 3), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(3200, 48), nn.Tanh(), nn.Linear(48, 4, bias=False)),
    )


def trainer(name: str, seed: int = 0, **settings: object) -> fl.Trainer:
    maker = torch.Generator().manual_seed(seed)
    clients = [
        (torch.randn(n, 3, 16, 16, generator=maker), torch.randint(0, 4, (n,), generator=maker))
        for n in (40, 8, 16, 9, 12, 8)
    ]
    chosen = {"work": fl.Work(steps=4, batch=8), "sampler": fl.Uniform(4), "precision": "float32"}
    data = fl.Federation.of(clients)
    task = fl.Task(network(seed))
    return fl.Trainer(task, data, CHAINS[name](), seed=seed, device="cuda", **chosen | settings)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_inside_is_what_stored_gradients_give(precision: str, monkeypatch) -> None:
    moved = []
    for inside in (set(), {"cuda"}):
        monkeypatch.setattr(deciding, "STEPS_INSIDE", inside)
        one = trainer("scaffold", precision=precision)
        start = one.server.w.clone()
        one.run(4)
        (runner,) = one.engine._rounds
        assert bool(runner.stepping.chains) == bool(inside) and one.engine.plan()["graph"]
        moved.append(one.server.w - start)
    assert apart(moved[1], moved[0]) < {"float32": 1e-4, "bf16": 0.02}[precision]


@pytest.mark.parametrize("enough", [0, float("inf")])
def test_crews_on_lanes_side_by_side_or_in_one_pass(enough: float, monkeypatch) -> None:
    monkeypatch.setitem(stepping.ENOUGH, "cuda", enough)
    monkeypatch.setitem(device_round.IDLE, "cuda", 0.0)
    moved = []
    for inside in (set(), {"cuda"}):
        monkeypatch.setattr(deciding, "STEPS_INSIDE", inside)
        work = fl.Work(epochs=2, batch=4)
        fleet = fl.Fleet([trainer(name, s, work=work) for s, name in enumerate(CHAINS)])
        starts = [one.server.w.clone() for one in fleet.trainers]
        fleet.run(4)
        runner = fleet._runner
        assert runner.lanes is not None and len(runner.stepping.chains) == 3 * len(inside)
        moved.append([t.server.w - w for t, w in zip(fleet.trainers, starts, strict=True)])
    assert max(map(apart, *moved)) < 1e-4
