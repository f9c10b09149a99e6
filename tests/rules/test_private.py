"""Noise on feature means: how much, and where."""

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.engines import engine as engine_module
from undrift.rules.accounting import gaussian_epsilon
from undrift.testing import tiny_world
from undrift.testing.compare import distance
from undrift.testing.world import numbers

NOISE = fl.FeatureNoise(sigma=2.0, clip=0.5, batch=8.0)
NOISE_OFF = fl.FeatureNoise(sigma=0.0, clip=0.5, batch=8.0)


def tables(algorithm: fl.Algorithm, seed: int = 0, rounds: int = 1) -> list[torch.Tensor]:
    """The server's table of feature means after every round of everybody."""
    world = tiny_world()
    work = fl.Work(steps=1, batch=None)  # what is trained does not matter here
    run = fl.Trainer(world.task, world.federation, algorithm, work=work, seed=seed)
    made = []
    for _ in range(rounds):
        run.round()
        made.append(run.server.states[0].rows.clone())
    return made


def means(algorithm: fl.Algorithm) -> torch.Tensor:
    return tables(algorithm)[-1]


@pytest.mark.parametrize(
    "build", [fl.rfedavg, pytest.param(fl.rfedavg_plus, marks=pytest.mark.slow)]
)
def test_noise_has_the_asked_spread(build):
    """sigma C0 / L = 0.125, whatever the size of a client and the number of pieces."""
    drawn, quiet = (
        [t for s in range(6) for t in tables(build(0.1, strength=0.0, noise=noise), s, rounds=10)]
        for noise in (NOISE, NOISE_OFF)
    )
    noise = torch.stack(drawn) - torch.stack(quiet)
    spread = noise.std(dim=(0, 2))
    assert torch.allclose(spread, torch.full((6,), 0.125).double(), rtol=0.15)
    assert float(noise.mean().abs()) < 0.01
    assert len(noise.unique()) == noise.numel()  # no draw is used twice


def test_features_are_clipped_before_the_mean():
    table = means(fl.rfedavg(0.1, noise=NOISE_OFF))
    assert float(table.norm(dim=1).max()) <= 0.5 + 1e-12
    free = means(fl.rfedavg(0.1))
    assert float(free.norm(dim=1).max()) > 0.5


@pytest.mark.parametrize("build", [fl.rfedavg, fl.rfedavg_plus])
def test_pieces_and_engines_bring_the_same_noise(build, monkeypatch, tmp_path):
    world, found = tiny_world(), []
    for piece, engine in ((256, "reference"), (2, "reference"), (2, "vectorised")):
        monkeypatch.setattr(engine_module, "PIECE", piece)
        key = {"private_key": tmp_path / "key", "engine": engine}
        trainer = world.trainer(build(0.1, strength=0.3, noise=NOISE), **key)
        trainer.run(3)
        found.append(numbers(trainer))
    for other in found[1:]:
        for name, value in other.items():
            assert distance([value], [found[0][name]]) <= 1e-12, name


def moved_by_one_example(algorithm: fl.Algorithm) -> torch.Tensor:
    """How far client 0's mean goes when one example is exchanged for its opposite."""
    task, x = fl.Task(nn.Sequential(nn.Identity(), nn.Linear(3, 2)), feature="0"), torch.zeros(4, 3)
    rows = []
    for sign in (1.0, -1.0):
        own = x.clone()
        own[0, 0] = 100.0 * sign
        data = fl.Federation.of([(own, torch.zeros(4).long()), (x, torch.zeros(4).long())])
        run = fl.Trainer(task, data, algorithm, work=fl.Work(steps=1, batch=None))
        run.round()
        rows.append(run.server.states[0].rows[0])
    return rows[0] - rows[1]


@pytest.mark.parametrize("build", [fl.rfedavg, fl.rfedavg_plus])
def test_one_example_moves_a_mean_by_what_is_accounted_for(build):
    """2 C0 / n: the worst that exchanging one example does."""
    moved = float(moved_by_one_example(build(0.0001, strength=0.0, noise=NOISE_OFF)).norm())
    bound = 2 * 0.5 / 4
    assert bound * (1 - 1e-4) < moved <= bound
    scale = 2.0 * 0.5 / 8.0  # sigma C0 / L: the noise, over what one example does, is accounted for
    told = fl.spent_on_features(NOISE, 4, 1).epsilon
    assert told == pytest.approx(gaussian_epsilon(scale / moved, 1, 1e-5), rel=1e-4)


@pytest.mark.parametrize("build", [fl.rfedavg, fl.rfedavg_plus])
def test_clients_with_the_same_data_do_not_pull_at_each_other(build):
    """The own batch is clipped as the others' means are."""
    world = tiny_world()
    x, y = world.federation.client(0)
    same = fl.Federation.of([(x, y)] * 3)
    work, found = fl.Work(steps=1, batch=None), []
    for strength in (0.0, 5.0):
        algorithm = build(0.1, strength=strength, noise=NOISE_OFF)
        run = fl.Trainer(world.task, same, algorithm, work=work)
        run.run(1)
        found.append(run.server.w)
    assert torch.allclose(*found, rtol=0, atol=1e-14)
