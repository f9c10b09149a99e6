"""Rounds as CUDA graphs: run with `pytest -m gpu tests/gpu` where there is a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.engines.lanes import IDLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trainer(
    algorithm: fl.Algorithm, seed: int = 0, sizes: tuple = (9, 14, 5, 20, 11), **settings: object
) -> fl.Trainer:
    maker = torch.Generator().manual_seed(seed)
    clients = [
        (torch.randn(n, 6, generator=maker).double(), torch.randint(0, 3, (n,), generator=maker))
        for n in sizes
    ]
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3))
    chosen = {"work": fl.Work(epochs=2, batch=4), "sampler": fl.Uniform(3), "device": "cuda"}
    task = fl.Task(net, dtype=torch.float64, feature="0")
    return fl.Trainer(task, fl.Federation.of(clients), algorithm, seed=seed, **chosen | settings)


def gap(a: fl.Trainer, b: fl.Trainer) -> float:
    pairs = [(a.server.w, b.server.w)]
    pairs += [
        (a.client_state(i)[n], b.client_state(i)[n]) for i in range(5) for n in a.client_state(i)
    ]
    return max(float((x.cpu() - y.cpu()).abs().max()) for x, y in pairs)


def test_replayed_rounds_are_those_of_the_reference() -> None:
    fast = trainer(fl.scaffold(local=fl.sgd(0.05, momentum=0.9)))
    plain = trainer(fl.scaffold(local=fl.sgd(0.05, momentum=0.9)), engine="reference", device="cpu")
    results = fast.run(6), plain.run(6)
    for a, b in zip(*results, strict=True):
        assert a.ids == b.ids and a.loss == pytest.approx(b.loss, abs=1e-10)
    assert gap(fast, plain) < 1e-10 and fast.engine.plan()["graph"]


def test_a_fleet_is_its_trainers_alone() -> None:
    def build() -> list[fl.Trainer]:
        algorithms = [fl.scaffold(0.1), fl.fedavgm(0.1), fl.fedyogi(0.1)]
        return [trainer(a, seed) for a in algorithms for seed in (0, 1)]

    fleet, alone = fl.Fleet(build()), build()
    fleet.run(5)
    for one, other in zip(fleet.trainers, alone, strict=True):
        other.run(5)
        assert gap(one, other) < 1e-10
    assert fleet._together


@pytest.mark.parametrize("build", [lambda: fl.scaffold(0.05, option="I"), lambda: fl.rfedavg(0.05)])
def test_lanes_of_steps_and_of_passes_over_own_data(build, monkeypatch) -> None:
    monkeypatch.setitem(IDLE, "cuda", 0.0)  # so that lanes are worth it for a small model
    sizes = (1300, 6, 30, 270, 12)
    fast = trainer(build(), sizes=sizes)
    plain = trainer(build(), sizes=sizes, engine="reference", device="cpu")
    for a, b in zip(fast.run(6), plain.run(6), strict=True):
        assert a.ids == b.ids and a.skipped == b.skipped == []
    runner = fast.engine._rounds[0]
    assert gap(fast, plain) < 1e-10 and runner.looks.lanes and runner.lanes


def test_it_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path) -> None:
    whole, first = (trainer(fl.feddyn(0.1)) for _ in range(2))
    whole.run(6)
    first.run(3)
    first.save(tmp_path)
    second = trainer(fl.feddyn(0.1))
    assert second.load(tmp_path)
    second.run(3)
    assert torch.equal(second.server.w, whole.server.w)


def test_judging_goes_on_after_all_who_judged_are_gone() -> None:
    from undrift.judging import Recorded

    device = torch.device("cuda")
    for number in range(3):
        doubled = Recorded(lambda t: t * 2, device)
        for _ in range(3):  # as it is, recorded, replayed
            found = doubled(torch.full((4,), float(number), device=device))
        assert found.tolist() == [2.0 * number] * 4
        del doubled
