"""Clipping and noise: never longer, and as much noise as asked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import undrift as fl
from undrift.core.local import Sgd
from undrift.core.rule import Mean
from undrift.errors import ConfigError
from undrift.rules.bounded import Clipped, Private, clipped
from undrift.testing import tiny_world


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=9), st.floats(1e-3, 1e3))
def test_nothing_is_ever_longer_than_the_bound(values, norm):
    found = clipped(torch.tensor(values), norm)
    assert float(torch.linalg.vector_norm(found.double())) <= norm
    assert bool(torch.isfinite(found).all())


def test_what_is_short_enough_is_left_alone():
    short = torch.tensor([0.3, -0.4])
    assert torch.equal(clipped(short, 1.0), short)
    assert torch.equal(clipped(torch.zeros(3), 1.0), torch.zeros(3))


def trained(rule, rounds=1, sampler=None, engine="reference"):
    world = tiny_world()._replace(sampler=sampler or fl.Everyone())
    algorithm = fl.Algorithm((rule,), Sgd(lr=0.5), Mean(by_size=False))
    trainer = world.trainer(algorithm, engine=engine)
    trainer.run(rounds)
    return trainer


@pytest.mark.parametrize("count", [6, 2])  # of 6
def test_the_sum_is_divided_by_a_fixed_number(count):
    """Without noise and with a wide bound: the plain mean, scaled by count over cohort."""
    some = {"sampler": fl.Uniform(count=count)}
    start = trained(Clipped(1e6), rounds=0).server.w
    plain = start - trained(Clipped(1e6), **some).server.w
    private = start - trained(Private(norm=1e6, noise=0.0, cohort=24.0), **some).server.w
    assert torch.allclose(private, plain * count / 24, rtol=1e-9)


def test_the_models_noise_is_norm_times_noise_over_cohort():
    quiet = trained(Private(norm=0.1, noise=0.0, cohort=6.0)).server.w
    drawn = torch.stack(
        [trained(Private(norm=0.1, noise=3.0, cohort=6.0)).server.w - quiet for _ in range(24)]
    )
    assert float(drawn.std()) == pytest.approx(0.1 * 3.0 / 6, rel=0.1)


def test_one_client_moves_the_model_by_no_more_than_its_share():
    for engine in ("reference", "vectorised"):
        start = trained(Clipped(0.01), rounds=0).server.w
        moved = trained(Clipped(0.01), engine=engine).server.w - start
        assert float(moved.norm()) <= 0.01


def test_what_the_noise_does_not_cover_is_refused():
    with pytest.raises(ConfigError, match="weigh the same"):
        fl.Algorithm((Private(),), Sgd(lr=0.1))
    with pytest.raises(ConfigError, match="Scaffold sends more"):
        fl.Algorithm((fl.Scaffold(), Private()), Sgd(lr=0.1), Mean(by_size=False))
    for before in (fl.Step(lr=10.0), fl.Adaptive(), fl.ServerMomentum()):
        with pytest.raises(ConfigError, match="put Private first"):
            fl.Algorithm((before, Private()), Sgd(lr=0.1), Mean(by_size=False))
        fl.Algorithm((Private(), before), Sgd(lr=0.1), Mean(by_size=False))  # of what is public
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    world = tiny_world(fl.Task(net, dtype=torch.float64))
    with pytest.raises(ConfigError, match="running statistics"):
        algorithm = fl.Algorithm((Private(),), Sgd(lr=0.1), Mean(by_size=False))
        world.trainer(algorithm, engine="reference").run(1)
