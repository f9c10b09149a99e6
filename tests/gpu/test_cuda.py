"""The same numbers on CUDA: run with `pytest -m gpu tests/gpu` where there is a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import undrift as fl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALGORITHMS = {
    "fedavg": fl.fedavg(0.1),
    "fedprox": fl.fedprox(0.1, mu=0.3),
    "scaffold": fl.scaffold(local=fl.sgd(0.05, momentum=0.9, weight_decay=1e-3)),
    "scaffold I": fl.scaffold(0.1, option="I"),
    "scaffold_m": fl.scaffold_m(0.1),
    "fednova": fl.fednova(local=fl.sgd(0.05, momentum=0.9)),
    "fedyogi": fl.fedyogi(local=fl.sgd(0.1, clip=1.0)),
    "fresh": fl.comfed("scaf", "sgd", mode="fresh"),
}


def make(algorithm: fl.Algorithm, device: str, **options: object) -> fl.Trainer:
    torch.manual_seed(0)
    sizes = (20, 7, 13, 30, 5, 11, 1)
    clients = [(torch.randn(n, 1, 8, 8), torch.randint(0, 3, (n,))) for n in sizes]
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.3), nn.Flatten(), nn.Linear(36, 3)),
    )
    return fl.Trainer(
        fl.Task(net, dtype=torch.float64),
        fl.Federation.of(clients),
        algorithm,
        work=fl.Work(epochs=(1, 3), batch=4),
        sampler=fl.Uniform(count=5),
        device=device,
        **options,
    )


def gap(a: fl.Trainer, b: fl.Trainer) -> float:
    pairs = [(a.server.w, b.server.w), (a.server.buffers.floats, b.server.buffers.floats)]
    pairs += [
        (a.client_state(i)[n], b.client_state(i)[n]) for i in range(7) for n in a.client_state(i)
    ]
    return max(float((x.cpu() - y.cpu()).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_cuda_equals_the_reference_engine_on_a_cpu(name: str) -> None:
    fast = make(ALGORITHMS[name], "cuda")
    plain = make(ALGORITHMS[name], "cpu", engine="reference")
    for _ in range(3):
        assert fast.round().ids == plain.round().ids
    assert gap(fast, plain) < 1e-11  # cuDNN and MKL sum in different orders


def test_chunks_and_pinned_state_change_nothing() -> None:
    whole = make(ALGORITHMS["scaffold"], "cuda")
    pieces = make(ALGORITHMS["scaffold"], "cuda", chunk=2, state="host")
    whole.run(3)
    pieces.run(3)
    assert gap(whole, pieces) < 1e-12


def test_the_reference_engine_runs_on_cuda_too() -> None:
    fast, plain = (
        make(ALGORITHMS["scaffold I"], "cuda", engine=e) for e in ("vectorised", "reference")
    )
    fast.run(2)
    plain.run(2)
    assert gap(fast, plain) < 1e-12


def test_a_run_resumes_bit_by_bit_on_cuda(tmp_path) -> None:
    straight, first, second = (make(ALGORITHMS["scaffold"], "cuda") for _ in range(3))
    straight.run(4)
    first.run(2)
    first.save(tmp_path)
    assert second.load(tmp_path)
    second.run(2)
    assert gap(straight, second) == 0.0


def test_one_local_step_in_float32_is_close() -> None:
    results = []
    for device, engine in (("cuda", "vectorised"), ("cpu", "reference")):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4))
        clients = [(torch.randn(12, 20), torch.randint(0, 4, (12,))) for _ in range(4)]
        trainer = fl.Trainer(
            fl.Task(net), fl.Federation.of(clients), fl.fedavg(0.1),
            work=fl.Work(steps=1, batch=6), device=device, engine=engine,
            **({"precision": "float32"} if engine == "vectorised" else {}),
        )  # fmt: skip
        trainer.round()
        results.append(trainer.server.w.cpu())
    assert (results[0] - results[1]).abs().max() < 1e-5
