"""Stacks of linear layers, trained without vmap, against one client at a time."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from undrift.core import linear
from undrift.core.tree import record
from undrift.engines import capacity, vectorised
from undrift.engines.dense_steps import FEW_CLASSES, is_dense

TARGETS = {"classes": "cross_entropy", "numbers": "mse"}


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 5, bias=False)),
        nn.Identity(),
        nn.ReLU(),
        nn.Linear(5, 3),
    )


def sequence() -> nn.Module:
    """Examples [2, 3]: the same layers at each of two places, which are the classes."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def federation(target: str, places: int = 0) -> fl.Federation:
    maker = torch.Generator().manual_seed(1)

    def client(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 2, 3, generator=maker)
        if places:
            return x, torch.randint(0, places, (n, 1), generator=maker)
        if target == "numbers":
            return x, torch.randn(n, 3, generator=maker)
        return x, torch.randint(0, 3, (n,), generator=maker)

    return fl.Federation.of([client(n) for n in (9, 4, 13, 1, 7)])


def trained(task: fl.Task, data: fl.Federation, decay: float, **options: object) -> fl.Trainer:
    algorithm = fl.fedavg(local=fl.Sgd(lr=0.2, weight_decay=decay, schedule=fl.Exponential(0.9)))
    work = fl.Work(epochs=2, batch=4)  # clients differ in steps; last batches are padded
    made = fl.Trainer(task, data, algorithm, work=work, **options)
    for _ in range(3):
        made.round()
    return made


@pytest.mark.parametrize("chunk", [None, 2, 1])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("target", TARGETS)
def test_equals_one_client_at_a_time(target: str, decay: float, chunk: int | None) -> None:
    torch.manual_seed(0)
    task = fl.Task(mlp(), TARGETS[target], dtype=torch.float64)
    assert is_dense(task, 2)
    data = federation(target)
    fast = trained(task, data, decay, chunk=chunk)
    slow = trained(task, data, decay, engine="reference")
    assert (fast.server.w - slow.server.w).abs().max() < 1e-12
    a, b = fast.round(), slow.round()
    assert a.loss == pytest.approx(b.loss, abs=1e-12)
    assert a.scores == pytest.approx(b.scores, abs=1e-12)


def test_examples_may_have_places() -> None:
    torch.manual_seed(0)
    task = fl.Task(sequence(), dtype=torch.float64)
    assert is_dense(task, 2)
    data = federation("classes", places=2)
    fast, slow = trained(task, data, 0.1), trained(task, data, 0.1, engine="reference")
    assert (fast.server.w - slow.server.w).abs().max() < 1e-12


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output - output.mean(0), target, reduction="none")


OTHERS = {
    "loss of one's own": lambda: fl.Task(mlp(), own_loss),
    "metric of one's own": lambda: fl.Task(mlp(), metrics={"mine": own_loss}),
    "softmax over the batch": lambda: fl.Task(nn.Sequential(mlp(), nn.LogSoftmax(0))),
    "flattened batch": lambda: fl.Task(nn.Sequential(nn.Linear(3, 3), nn.Flatten(0))),
    "dropout": lambda: fl.Task(nn.Sequential(mlp(), nn.Dropout())),
    "feature": lambda: fl.Task(mlp(), feature="3"),
    "augmented": lambda: fl.Task(mlp(), augment=lambda x, key: x + key),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_beyond_an_example_takes_another_path(name: str) -> None:
    assert not is_dense(OTHERS[name](), 2)


def test_examples_that_are_one_number_take_another_path() -> None:
    assert not is_dense(fl.Task(nn.Linear(1, 1)), 0)


@pytest.mark.parametrize("first", [False, True])
def test_products_in_either_order(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is faster depends on who made the CPU."""
    data = federation("classes")
    wanted = trained(fl.Task(mlp(), dtype=torch.float64), data, 0.1, engine="reference", seed=3)
    monkeypatch.setattr(linear, "weights_first", lambda: first)
    found = trained(fl.Task(wanted.task.original, dtype=torch.float64), data, 0.1, seed=3)
    assert (found.server.w - wanted.server.w).abs().max() < 1e-12


def test_as_many_clients_at_a_time_as_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dense network that steps in place, and of no other."""
    data, task = federation("classes"), fl.Task(mlp(), dtype=torch.float64)
    whole = trained(task, data, 0.1)
    assert whole.engine.plan()["chunk"] is None
    monkeypatch.setattr(capacity, "CACHED", 3.5 * 8 * task.size)
    found = trained(fl.Task(task.original, dtype=torch.float64), data, 0.1)
    assert found.engine.plan()["chunk"] == 3
    assert (found.server.w - whole.server.w).abs().max() < 1e-12
    other = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    assert trained(fl.Task(other), data, 0.1).engine.plan()["chunk"] is None
    monkeypatch.setattr(capacity, "CACHED", 1.0)
    least = trained(fl.Task(task.original, dtype=torch.float64), data, 0.1)
    assert least.engine.plan()["chunk"] == 2


NETWORKS = {
    "ReLU first": lambda: nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(6, 5), nn.Linear(5, 3)),
    "ReLU last": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3), nn.ReLU()),
    "ReLU twice": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.ReLU(), nn.Tanh(), nn.Linear(5, 3))
    ),
    "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)),
    "flattened late": lambda: nn.Sequential(
        *(nn.Linear(3, 4), nn.SiLU(), nn.Flatten(), nn.Linear(8, 3), nn.Identity())
    ),
    "many classes": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 2 * FEW_CLASSES)),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_layers_in_any_order(name: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "weights_first", lambda: first)
    torch.manual_seed(0)
    task, data = fl.Task(NETWORKS[name](), dtype=torch.float64), federation("classes")
    assert is_dense(task, 2)
    fast, slow = (trained(task, data, 0.1, **k) for k in ({"chunk": 2}, {"engine": "reference"}))
    assert (fast.server.w - slow.server.w).abs().max() < 1e-12


@record
class LastModels(fl.Rule):
    """A rule whose clients keep the models that they ended with, as they were handed over."""

    def init_client(self, w: Tensor, sizes: object) -> Tensor:
        return torch.zeros_like(w)

    def finish(self, delta: Tensor, view: fl.ClientView) -> tuple[Tensor, Tensor, tuple[()]]:
        return delta, view.w, ()


def test_what_clients_keep_is_not_written_over_by_the_next_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all chunks train before anything of them is kept, as side by side they may."""

    def all_at_once(run: Any, jobs: Any, workers: Any) -> list[Any]:
        return [run(workers[0], job) for job in jobs]

    monkeypatch.setattr(vectorised, "in_order", all_at_once)
    task, data = fl.Task(mlp(), dtype=torch.float64), federation("classes")
    algorithm = fl.Algorithm((LastModels(),), local=fl.Sgd(lr=0.2))
    made = [
        fl.Trainer(fl.Task(task.original, dtype=torch.float64), data, algorithm,
                   work=fl.Work(steps=3, batch=4), **options)
        for options in ({"chunk": 2}, {"engine": "reference"})
    ]  # fmt: skip
    for one in made:
        one.run(2)
    fast, slow = (t.store.gather(range(5))[0] for t in made)
    assert (fast - slow).abs().max() < 1e-12 and len({float(row.sum()) for row in fast}) == 5


def test_nothing_of_a_round_is_kept_when_it_has_ended() -> None:
    """A trainer can be copied, though a layer's last step had a gradient of its own."""
    made = fl.Trainer(fl.Task(mlp()), federation("classes"), fl.fedavg(0.1), chunk=2)
    made.run(1)
    twin = deepcopy(made)
    assert all(not worker._paths for worker in made.engine._crew)
    made.run(1), twin.run(1)
    assert torch.equal(made.server.w, twin.server.w)


def test_every_worker_has_a_way_and_a_place_of_its_own() -> None:
    made = fl.Trainer(fl.Task(mlp()), federation("classes"), fl.fedavg(0.1), chunk=2, workers=2)
    made.run(1)
    places = [id(v) for w in made.engine._crew for v in (w._paths, w._workspace)]
    assert len(made.engine._crew) == 2 and len(set(places)) == 4
    assert id(made.engine._paths) not in places
