"""Clipping and noise: never longer, as much noise as asked, and what it is worth."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import undrift as fl
from undrift.core.local import Sgd
from undrift.core.rule import Mean
from undrift.errors import ConfigError, MissingExtra
from undrift.rules.bounded import Clipped, Private, clipped, spent_on_updates, system_normal
from undrift.testing import tiny_world


def normal_tail(x):
    return 0.5 * math.erfc(x / math.sqrt(2))


def analytic_epsilon(sigma, rounds, delta):
    """The Gaussian mechanism, exactly (Balle and Wang 2018, theorem 8), by bisection."""
    s = sigma / math.sqrt(rounds)
    low, high = 0.0, 100.0
    for _ in range(200):
        eps = (low + high) / 2
        found = normal_tail(eps * s - 1 / (2 * s)) - math.exp(eps) * normal_tail(
            eps * s + 1 / (2 * s)
        )
        low, high = (eps, high) if found > delta else (low, eps)
    return high


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


def test_noise_has_the_asked_spread_and_never_comes_twice():
    drawn = system_normal(torch.zeros(1_000_000))
    assert float(drawn.std()) == pytest.approx(1.0, rel=0.005)
    assert abs(float(drawn.mean())) < 0.005
    tails = float((drawn.abs() > 3).double().mean())
    assert tails == pytest.approx(0.0027, rel=0.1)
    assert not torch.equal(system_normal(torch.zeros(5)), system_normal(torch.zeros(5)))


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


def test_epsilon_against_an_independent_value():
    assert analytic_epsilon(5.0, 50, 1e-5) == pytest.approx(6.573, abs=1e-3)
    pytest.importorskip("dp_accounting")
    for sigma, rounds in ((5.0, 50), (10.0, 20)):
        wanted = analytic_epsilon(sigma, rounds, 1e-5)
        assert spent_on_updates(Private(noise=sigma), rounds) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.slow
def test_only_a_bernoulli_samplers_chance_is_credited():
    pytest.importorskip("dp_accounting")
    found = spent_on_updates(Private(noise=1.0), 100, rate=0.1)
    assert found == pytest.approx(7.0466, abs=2e-3)
    assert spent_on_updates(Private(noise=1.0), 100) > 10 * found


def test_accounting_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtra, match=r"undrift\[privacy\]"):
        spent_on_updates(Private(), 1)


def test_without_noise_nothing_is_hidden():
    assert spent_on_updates(Private(noise=0.0), 1) == math.inf


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"rate": 0.0}, {"rate": 1.5}, {"delta": 1.0}])
def test_accounting_refuses_what_makes_no_sense(wrong):
    with pytest.raises(ConfigError, match="spent_on_updates"):
        spent_on_updates(Private(), **{"rounds": 1, **wrong})


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


def test_noise_is_never_recorded():
    """A traced round would add the same noise again."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with pytest.raises(ConfigError, match="one experiment at a time"):
        make_fx(lambda v: v + system_normal(v))(torch.zeros(3))
    with pytest.raises(ConfigError, match="one experiment at a time"):
        torch.func.vmap(lambda v: v + system_normal(v))(torch.zeros(2, 3))
