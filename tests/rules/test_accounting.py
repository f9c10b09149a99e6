"""What noise is worth, against derivations that share nothing with the code."""

import math
import sys

import numpy as np
import pytest

import undrift as fl
from undrift.errors import ConfigError, MissingExtra
from undrift.rules.accounting import gaussian_epsilon


def normal_tail(x):
    return 0.5 * math.erfc(x / math.sqrt(2))


def integrated_delta(multiplier, releases, epsilon):
    """The hockey-stick divergence of the releases, each a coordinate, by its definition."""
    shift = math.sqrt(releases)  # all coordinates together: a shift along their diagonal
    x = np.linspace(-12 * multiplier, 12 * multiplier + shift, 400_001)
    p, q = (np.exp(-(((x - at) / multiplier) ** 2) / 2) for at in (shift, 0.0))
    scale = multiplier * math.sqrt(2 * math.pi)
    return float(np.clip(p - math.exp(epsilon) * q, 0, None).sum() * (x[1] - x[0]) / scale)


def sampled_delta(sigma, rate, rounds, epsilon):
    """The same for sampled clients: losses on a grid, convolved; both directions, the worse."""
    width, x = 2e-4, np.linspace(-12 * sigma, 12 * sigma + 1, 2_000_001)
    plain = np.exp(-((x / sigma) ** 2) / 2)
    mixed = (1 - rate) * plain + rate * np.exp(-(((x - 1) / sigma) ** 2) / 2)
    found = []
    for of, under in ((mixed, plain), (plain, mixed)):
        mass = of / of.sum()
        at = np.rint(np.log(of / under) / width).astype(int)
        low, size = at.min(), 2 ** math.ceil(math.log2((np.ptp(at) + 1) * 4 * rounds))
        law = np.zeros(size)
        np.add.at(law, at - low, mass)
        total = np.fft.irfft(np.fft.rfft(law) ** rounds, size).clip(0)
        loss = (np.arange(size) + low * rounds) * width
        kept = loss > epsilon
        found.append(float((total[kept] * -np.expm1(epsilon - loss[kept])).sum()))
    return max(found)


# ---- without sampling ------------------------------------------------------------------------
CASES = [(1.0, 1, 1e-5), (5.0, 50, 1e-5), (10.0, 20, 1e-6), (0.5, 3, 1e-3), (9.375, 61, 1e-5)]


@pytest.mark.parametrize(("multiplier", "releases", "delta"), CASES)
def test_epsilon_by_its_definition(multiplier, releases, delta):
    epsilon = gaussian_epsilon(multiplier, releases, delta)
    assert integrated_delta(multiplier, releases, epsilon) == pytest.approx(delta, rel=1e-4)


@pytest.mark.parametrize(("multiplier", "releases", "delta"), CASES)
def test_epsilon_by_dp_accounting(multiplier, releases, delta):
    """Two ways that the code does not go: losses on a grid, and Renyi divergences, a bound."""
    pytest.importorskip("dp_accounting")
    from dp_accounting import dp_event, pld, rdp

    event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(multiplier), releases)
    epsilon, found = gaussian_epsilon(multiplier, releases, delta), []
    for made in (pld.PLDAccountant(), rdp.RdpAccountant()):
        made.compose(event)
        found.append(made.get_epsilon(delta))
    assert found[0] == pytest.approx(epsilon, rel=1e-6)
    assert epsilon <= found[1] <= 1.3 * epsilon


@pytest.mark.parametrize("multiplier", [1e-3, 1e-2, 1e2, 1e4, 1e9])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
def test_epsilon_where_numbers_are_extreme(multiplier, delta):
    epsilon, m = gaussian_epsilon(multiplier, 1, delta), 1 / multiplier
    assert 0 <= epsilon < 2 * m * m + 10 * m
    if epsilon < 500:
        below, above = normal_tail(epsilon / m - m / 2), normal_tail(epsilon / m + m / 2)
        found = below - math.exp(epsilon) * above
        assert (
            found <= delta * (1 + 1e-6) if epsilon == 0 else found == pytest.approx(delta, rel=1e-3)
        )


# ---- feature means ---------------------------------------------------------------------------
def test_one_release_of_a_feature_mean():
    """sigma = 1 and L = n / 2: noise as large as what one example does."""
    once = fl.spent_on_features(fl.FeatureNoise(1.0, 1.0, 50.0), size=100, releases=1)
    assert once.epsilon == pytest.approx(4.3772, abs=1e-4) and once.delta == 1e-5
    small = fl.spent_on_features(fl.FeatureNoise(1.0, 1.0, 50.0), size=50, releases=1)
    often = fl.spent_on_features(fl.FeatureNoise(1.0, 1.0, 50.0), size=100, releases=4)
    assert small.epsilon > once.epsilon
    assert small.epsilon == pytest.approx(often.epsilon, rel=1e-6)  # half of sigma, four releases
    assert "model updates of the same client are not covered" in str(once)


def test_exchanging_an_example_costs_more_than_leaving_it_out():
    """60 rounds and the look before them; half of it if exchanging counted as leaving out."""
    told = fl.spent_on_features(fl.FeatureNoise(5.0, 1.0, 32.0), size=120, releases=61)
    assert told.epsilon == pytest.approx(3.5475, abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [(1.5, 1, 1e-5), (2, 1.5, 1e-5), (0, 1, 1e-5), (1, 0, 1e-5), (1, 1, 0.0), (1, 1, 1.0)],
)
def test_accounting_of_no_feature_mean(settings):
    size, releases, delta = settings
    with pytest.raises(ConfigError, match="spent_on_features"):
        fl.spent_on_features(fl.FeatureNoise(), size, releases, delta=delta)


def test_no_noise_is_not_private():
    with pytest.raises(ConfigError, match="sigma above 0"):
        fl.spent_on_features(fl.FeatureNoise(sigma=0.0), 10, 1)
    assert fl.spent_on_updates(fl.Private(noise=0.0), 1) == math.inf


# ---- updates -----------------------------------------------------------------------------------
def test_updates_without_sampling():
    assert fl.spent_on_updates(fl.Private(noise=5.0), 50) == pytest.approx(6.573, abs=1e-3)


@pytest.mark.parametrize(("sigma", "rate", "rounds"), [(1.0, 0.1, 20), (2.0, 0.3, 10)])
def test_updates_of_sampled_clients(sigma, rate, rounds):
    """The convolution of losses, both directions: delta is what was asked for."""
    pytest.importorskip("dp_accounting")
    epsilon = fl.spent_on_updates(fl.Private(noise=sigma), rounds, rate=rate, population=10_000)
    assert sampled_delta(sigma, rate, rounds, epsilon) == pytest.approx(1e-5, rel=0.02)
    assert epsilon < fl.spent_on_updates(fl.Private(noise=sigma), rounds) / 2


def test_few_clients_get_no_credit_for_rounds_that_are_drawn_anew():
    """With 3 clients a round nobody is drawn for is likely, and drawing anew tells of who is there.

    The sampler's own words: somebody else in the population changes how often anybody is alone.
    """
    pytest.importorskip("dp_accounting")
    rule = fl.Private(noise=3.0)
    told = [fl.spent_on_updates(rule, 5, rate=0.1, population=n) for n in (3, 150, 10_000)]
    assert told[0] == fl.spent_on_updates(rule, 5)
    assert told[0] > told[1] > told[2]


def test_credit_for_sampling_needs_the_population():
    with pytest.raises(ConfigError, match="`population`"):
        fl.spent_on_updates(fl.Private(), 5, rate=0.1)


def test_credit_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtra, match=r"undrift\[privacy\]"):
        fl.spent_on_updates(fl.Private(), 1, rate=0.5, population=100)
    assert fl.spent_on_updates(fl.Private(), 1) > 0  # exact, without any package


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"rate": 0.0}, {"rate": 1.5}, {"delta": 1.0}])
def test_accounting_refuses_what_makes_no_sense(wrong):
    with pytest.raises(ConfigError, match="spent_on_updates"):
        fl.spent_on_updates(fl.Private(), **{"rounds": 1, **wrong})
