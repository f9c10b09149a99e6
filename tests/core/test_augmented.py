"""Augmentation: the same in every engine and chunking, and only in training steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from undrift.core.random import fold, uniform
from undrift.describe import describe
from undrift.errors import ChangedExperiment, ConfigError, TaskError
from undrift.sources import augment
from undrift.testing.world import numbers

F64 = torch.float64
SIZES = (9, 3, 7, 2, 5)


def clients(shape: tuple[int, ...] = (4,)) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(n, *shape, generator=draw, dtype=F64),
            torch.randint(0, 3, (n,), generator=draw),
        )
        for n in SIZES
    ]


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3))


def pictures() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))


def scaled(x: Tensor, key: Tensor) -> Tensor:
    """Scale every row by a factor of its own."""
    chance = uniform(key, torch.arange(len(x), device=x.device)).to(x.dtype)
    return x * (0.5 + chance).view(-1, *[1] * (x.dim() - 1))


def make(algorithm: fl.Algorithm, change: Any = scaled, **options: Any) -> fl.Trainer:
    shape, module = options.pop("world", ((4,), network))
    return fl.Trainer(
        fl.Task(module(), dtype=F64, feature="0", augment=change),
        fl.Federation.of(clients(shape)),
        algorithm,
        work=options.pop("work", fl.Work(epochs=1, batch=4)),  # 9, 3, 7: padded batches
        **options,
    )


def largest_difference(one: fl.Trainer, other: fl.Trainer) -> float:
    mine, theirs = numbers(one), numbers(other)
    return max(float((v - theirs[n]).abs().max()) for n, v in mine.items() if v.numel())


@fl.record
class Pulls(fl.Rule):
    """A penalty on features and another gradient of the same batch."""

    def penalty(self, out: fl.Output, view: fl.ClientView) -> Tensor:
        kept = fl.masked_mean(out.features.flatten(1), view.batch.mask)
        return 0.1 * kept.square().sum()

    def direction(self, g: Tensor, view: fl.ClientView) -> Tensor:
        return g + 0.5 * view.grad_at(view.w0)


ALGORITHMS = {
    "fedavg": fl.fedavg(0.2),
    "scaffold": fl.scaffold(0.1),
    "pulls": fl.Algorithm((Pulls(),), local=fl.sgd(0.1)),
}
WORLDS = {"rows": ((4,), network), "pictures": ((2, 6, 6), pictures)}
CHANGES = {"rows": scaled, "pictures": partial(augment, flip=0.5, crop=0.5, pad=2)}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("world", WORLDS)
def test_engines_and_chunks_agree(world: str, name: str) -> None:
    def trained(**options: Any) -> fl.Trainer:
        made = {"change": CHANGES[world], "world": WORLDS[world], **options}
        trainer = make(ALGORITHMS[name], **made)
        trainer.run(2)
        return trainer

    plain = trained(engine="reference")
    for chunk in (1, 3, None):
        assert largest_difference(trained(chunk=chunk), plain) < 1e-12
    assert largest_difference(trained(chunk=3, in_place=False), plain) < 1e-12
    assert (trained(change=None).server.w - plain.server.w).abs().max() > 1e-4


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_a_step_is_the_gradient_at_the_augmented_batch(engine: str) -> None:
    trainer = make(fl.fedavg(0.2), work=fl.Work(steps=1, batch=None), engine=engine)
    server, work = trainer.server, trainer.roster.cohort(0)
    moved = torch.zeros_like(server.w)
    for c, i in enumerate(work.ids):
        x, y = trainer.federation.client(i)
        order = work.order[c, 0][: len(x)]
        key = fold(trainer.seeds.run, "step", 0, i, 0)  # round, client, step
        batch = fl.Batch(x[order], y[order], torch.ones(len(x)).bool(), order)
        changed = batch._replace(x=scaled(batch.x, fold(key, "augment")))
        moved += len(x) / sum(SIZES) * 0.2 * gradient(trainer, changed, key)
    trainer.round()
    assert (server.w - moved - trainer.server.w).abs().max() < 1e-12


def gradient(trainer: fl.Trainer, batch: fl.Batch, key: Tensor) -> Tensor:
    task, (w, buffers) = trainer.task, trainer.task.initial()
    run = fl.core.ops.Pass(batch.mask, key, True)
    return torch.func.grad(lambda v: task.mean_loss(task.forward(v, buffers, batch.x, run), batch))(
        w
    )


@fl.record
class SameGradient(fl.Rule):
    """Goes astray where the gradient is not the one that it can compute itself."""

    def direction(self, g: Tensor, view: fl.ClientView) -> Tensor:
        return g + 1e6 * (g - view.grad_at(view.w))


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_rules_see_the_batch_that_the_loss_saw(engine: str) -> None:
    plain, checked = (
        make(fl.Algorithm(rules, local=fl.sgd(0.1)), engine=engine)
        for rules in ((), (SameGradient(),))
    )
    plain.run(2)
    checked.run(2)
    assert (plain.server.w - checked.server.w).abs().max() < 1e-8


@fl.record
class Watches(fl.Rule):
    """Remembers the mean of x that each look at own data saw."""

    def init_client(self, w: Tensor, sizes: fl.Sizes) -> Tensor:
        return w.new_zeros(3)

    def _mean(self, view: fl.ClientView) -> Tensor:
        return fl.masked_mean(view.batch.x.mean(1), view.batch.mask)

    def probe(self, view: fl.ClientView) -> Tensor:
        return self._mean(view)

    def begin(self, view: fl.ClientView) -> Tensor:
        return view.mine + self._mean(view) * torch.tensor([0.0, 1.0, 0.0], dtype=F64)

    def review(self, view: fl.ClientView) -> Tensor:
        return self._mean(view)

    def finish(self, delta: Tensor, view: fl.ClientView) -> tuple[Tensor, Tensor, fl.Tree]:
        return delta, torch.stack([view.probe, view.mine[1], view.review]), fl.EMPTY


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_looks_at_own_data_see_it_plain(engine: str) -> None:
    trainer = make(fl.Algorithm((Watches(),)), engine=engine)
    trainer.round()
    for i in range(len(SIZES)):
        mean = trainer.federation.client(i)[0].mean()
        assert torch.allclose(trainer.client_state(i)["0.Watches"], mean.expand(3), atol=1e-12)


def test_evaluation_sees_plain_data() -> None:
    with_it, without = (make(fl.fedavg(0.1), change) for change in (scaled, None))
    x, y = clients()[0]
    assert with_it.evaluate(x, y) == without.evaluate(x, y)


def test_every_step_and_client_draws_anew() -> None:
    seen = []

    def watch(x: Tensor, key: Tensor) -> Tensor:
        seen.append(int(key))
        return x

    make(fl.fedavg(0.1), watch, engine="reference", work=fl.Work(steps=2, batch=3)).run(2)
    keys = seen[3:]  # three while trying it out
    assert len(keys) == 2 * 2 * len(SIZES) == len(set(keys))


# ---- what can go wrong ---------------------------------------------------------------------------
WRONG = {
    "fails": (lambda x, key: x.nothing, "Task.augment fails on .*nothing"),
    "no tensor": (lambda x, key: (x, key), "must give back x, got tuple"),
    "another shape": (lambda x, key: x[:, :2], "shape and type must stay"),
    "another type": (lambda x, key: x.float(), "shape and type must stay"),
    "no key": (lambda x, key: x + torch.rand(1), "another result for the same x and key"),
    "mixes rows": (lambda x, key: x - x.mean(0), "row i may depend on the key, i and its own"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_refused_before_training(name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(TaskError, match=message):
        make(fl.fedavg(), change)


@pytest.mark.parametrize("change", [3, "flip"])
def test_an_augmentation_is_a_function(change: Any) -> None:
    with pytest.raises(ConfigError, match=r"Task\.augment must be a function of \(x, key\)"):
        fl.Task(network(), augment=change)


def test_one_that_reads_its_key_runs_in_the_reference_engine() -> None:
    def picky(x: Tensor, key: Tensor) -> Tensor:
        return x if int(key) % 2 else -x

    with pytest.raises(TaskError, match="reference"):
        make(fl.fedavg(), picky).round()
    assert make(fl.fedavg(), picky, engine="reference").round().round == 1


def test_a_checkpoint_knows_the_augmentation(tmp_path: Path) -> None:
    settings = {"world": WORLDS["pictures"]}
    make(fl.fedavg(), partial(augment, pad=2), **settings).save(tmp_path)
    assert make(fl.fedavg(), partial(augment, pad=2), **settings).load(tmp_path)
    for other in (partial(augment, pad=3), None):
        with pytest.raises(ChangedExperiment, match="augment"):
            make(fl.fedavg(), other, **settings).load(tmp_path)
    assert describe(fl.Task(network()))["augment"] is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("world", WORLDS)
def test_cuda_augments_alike(world: str) -> None:
    settings = {"change": CHANGES[world], "world": WORLDS[world]}
    fast = make(fl.fedavg(0.2), device="cuda", **settings)
    plain = make(fl.fedavg(0.2), engine="reference", **settings)
    fast.run(2)
    plain.run(2)
    assert (fast.server.w.cpu() - plain.server.w).abs().max() < 1e-11
