"""Noise on feature means: how much, where, and what it is worth."""

import builtins

import pytest
import torch

import undrift as fl
from undrift.engines import engine as engine_module
from undrift.errors import ConfigError, MissingExtra
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
def test_pieces_and_engines_bring_the_same_noise(build, monkeypatch):
    world, found = tiny_world(), []
    for piece, engine in ((256, "reference"), (2, "reference"), (2, "vectorised")):
        monkeypatch.setattr(engine_module, "PIECE", piece)
        trainer = world.trainer(build(0.1, strength=0.3, noise=NOISE), engine=engine)
        trainer.run(3)
        found.append(numbers(trainer))
    for other in found[1:]:
        for name, value in other.items():
            assert distance([value], [found[0][name]]) <= 1e-12, name


def test_accounting():
    """One release with a multiplier of 1: the Gaussian mechanism; more releases cost more."""
    once = fl.spent_on_features(fl.FeatureNoise(1.0, 1.0, 100.0), size=100, releases=1)
    assert 3.5 < once.epsilon < 6.0 and once.delta == 1e-5  # exactly 4.38; RDP is looser
    small = fl.spent_on_features(fl.FeatureNoise(1.0, 1.0, 100.0), size=50, releases=1)
    often = fl.spent_on_features(fl.FeatureNoise(1.0, 1.0, 100.0), size=100, releases=4)
    assert small.epsilon > once.epsilon and often.epsilon > once.epsilon
    assert small.epsilon == pytest.approx(often.epsilon, rel=1e-6)  # half of sigma, four releases
    assert "model updates of the same client are not covered" in str(once)


@pytest.mark.parametrize("settings", [(0, 1, 1e-5), (1, 0, 1e-5), (1, 1, 0.0), (1, 1, 1.0)])
def test_accounting_of_nothing(settings):
    size, releases, delta = settings
    with pytest.raises(ConfigError, match="spent_on_features"):
        fl.spent_on_features(NOISE, size, releases, delta=delta)


def test_no_noise_is_not_private():
    with pytest.raises(ConfigError, match="sigma above 0"):
        fl.spent_on_features(NOISE_OFF, 10, 1)


def test_accounting_names_what_is_missing(monkeypatch):
    original = builtins.__import__

    def without(name, *args, **more):
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return original(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"pip install 'undrift\[privacy\]'"):
        fl.spent_on_features(NOISE, 10, 1)
