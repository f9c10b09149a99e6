"""Experiments as one batch, states read ahead and chosen ways, on a device with the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.core import histories
from undrift.fleet import Fleet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


DEVICE = "cuda"


def trainer(
    algorithm: fl.Algorithm, seed: int = 0, net: nn.Module | None = None, **settings: object
) -> fl.Trainer:
    maker = torch.Generator().manual_seed(seed)
    sizes = (24, 40, 16, 33, 20, 28)
    clients = [
        (torch.randn(n, 3, 16, 16, generator=maker), torch.randint(0, 4, (n,), generator=maker))
        for n in sizes
    ]
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten())
    usual = nn.Sequential(first, second, nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 4))
    chosen = {"work": fl.Work(epochs=1, batch=8), "sampler": fl.Uniform(4), "device": DEVICE}
    return fl.Trainer(
        fl.Task(net or usual), fl.Federation.of(clients), algorithm, seed=seed, **chosen | settings
    )


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def grid(**settings: object) -> list[fl.Trainer]:
    local = fl.sgd(0.01, momentum=0.9, weight_decay=1e-4)
    cells = [(c, s) for c in ("sgd", "prox", "scaf", "nova") for s in ("sgd", "adam", "yogi")]
    return [
        trainer(fl.comfed(c, s, local=local), seed, **settings) for seed in (0, 1) for c, s in cells
    ]


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_the_same_batch_twice_gives_the_same_bits(precision: str) -> None:
    found = []
    for _ in range(2):
        fleet = Fleet(grid(precision=precision))
        fleet.run(5)
        assert fleet._together
        found.append([t.server.w.cpu() for t in fleet.trainers])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_after_one_step_in_float32_it_is_what_runs_alone_give() -> None:
    settings = {"precision": "float32", "work": fl.Work(steps=1, batch=8)}
    fleet, alone = Fleet(grid(**settings)), grid(**settings)
    fleet.run(1)
    for one, other in zip(alone, fleet.trainers, strict=True):
        start = one.server.w.clone()
        one.round()
        apart = one.server.w - other.server.w
        if type(one.algorithm.server).__name__ == "Step":
            moved = max(float((one.server.w - start).norm()), 1e-3)
            assert float(apart.norm()) <= 1e-5 * moved + 1e-6
        else:  # an adaptive server makes whole steps of differences that are next to nothing
            assert float((apart.abs() > 1e-5).float().mean()) < 0.01


MOMENTUM = fl.sgd(0.02, momentum=0.9)
CHAINS = {
    "plain": lambda: fl.fedavg(0.05),
    "momentum": lambda: fl.fedavg(local=MOMENTUM),
    "scaffold": lambda: fl.scaffold(local=MOMENTUM),
    "feddyn": lambda: fl.feddyn(0.05),
    "feddc": lambda: fl.feddc(0.05),  # two vectors of each client
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(
    ("precision", "bound"), [("float32", 1e-4), ("tf32", 3e-3), ("bf16", 0.01)]
)
def test_wide_layers_that_remember(name: str, precision: str, bound: float, monkeypatch) -> None:
    """Written at the end of a round, by a kernel or not, they are what moving ones are.

    Nothing in the network has a kink: one that rounding crosses moves a whole gradient.
    """

    def moved(precision: str, how: str) -> torch.Tensor:
        wide = 10 if how == "remembered" else 1000
        monkeypatch.setattr(histories, "pays", lambda layer, *rest: layer.out_features > wide)
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Flatten(), nn.Linear(768, 96), nn.Tanh(), nn.Linear(96, 64))
        work = fl.Work(steps=4, batch=8)
        one = trainer(
            CHAINS[name](), precision=precision, work=work,
            net=nn.Sequential(layers, nn.Tanh(), nn.Linear(64, 4)),
        )  # fmt: skip
        start = one.server.w.clone()
        one.run(4)
        (runner,) = one.engine._rounds
        assert bool(runner.histories) == (how == "remembered")
        return one.server.w - start

    wanted = moved("float32", "moving")
    for how in ("moving", "remembered"):
        assert apart(moved(precision, how), wanted) < bound, how


@pytest.mark.parametrize("place", ["host", "file"])
def test_states_that_are_read_ahead(place: str, tmp_path) -> None:
    away = {"state": place, "state_path": tmp_path / "rows" if place == "file" else None}
    found, wanted = trainer(fl.scaffold(0.05), **away), trainer(fl.scaffold(0.05))
    assert found.store.reads_ahead and not wanted.store.reads_ahead
    found.run(8)
    wanted.run(8)
    assert torch.equal(found.server.w, wanted.server.w)


@pytest.mark.parametrize("ways", ["auto", "grouped", {"0.0": "unfold"}])
def test_ways_that_are_named(ways: object) -> None:
    found = trainer(fl.fedavg(0.05), ways=ways, precision="float32")
    wanted = trainer(fl.fedavg(0.05), precision="float32")
    found.run(3)
    wanted.run(3)
    assert float((found.server.w - wanted.server.w).norm() / wanted.server.w.norm()) < 1e-4


def test_tf32_has_the_range_of_float32() -> None:
    """Compared layer by layer, in a network without kinks, where a layer moves at all."""
    for size in (1e5, 1e-6):
        found = []
        for precision in ("tf32", "float32"):
            torch.manual_seed(0)
            convolutions = nn.Sequential(nn.Conv2d(3, 16, 5), nn.Conv2d(16, 32, 3), nn.Flatten())
            one = trainer(
                fl.fedavg(1e-3 / size), precision=precision, work=fl.Work(steps=1),
                net=nn.Sequential(convolutions, nn.Linear(3200, 96), nn.Linear(96, 4)),
            )  # fmt: skip
            one.federation.x.mul_(size)
            start = one.task.named(one.server.w.clone())
            one.round()
            after = one.task.named(one.server.w)
            found.append({name: after[name] - start[name] for name in start})
        assert all(move.isfinite().all() for move in found[0].values())
        # a move of a few units in the last place says nothing
        told = [n for n, move in found[1].items() if move.norm() > 1e-5 * start[n].norm()]
        assert {"0.0.weight", "0.1.weight", "1.weight", "2.weight"} <= set(told)
        assert max(apart(found[0][name], found[1][name]) for name in told) < 0.01
