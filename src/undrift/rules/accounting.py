"""What noise is worth: epsilon and delta after some releases.

Releases under Gaussian noise compose exactly, also where later ones depend on earlier ones: k of
them are as one whose noise is divided by sqrt(k) (Dong, Roth and Su 2022).  Only the credit for
sampled clients needs the `dp-accounting` package.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from undrift.errors import ConfigError, MissingExtra
from undrift.rules.bounded import Private
from undrift.rules.private import FeatureNoise


class Spent(NamedTuple):
    """What the releases of one client's feature means cost."""

    epsilon: float
    delta: float

    def __str__(self) -> str:
        return (
            f"epsilon = {self.epsilon:.4g} at delta = {self.delta:g} for one example, feature "
            "means alone: the model updates of the same client are not covered"
        )


def spent_on_features(
    noise: FeatureNoise, size: int, releases: int, *, delta: float = 1e-5
) -> Spent:
    """Account for a client of `size` examples that sent its feature mean `releases` times.

    The look at x_0 before the first round is a release too: under `rfedavg` and `rfedavg_plus` it
    is 1 and the rounds that the client took part in, with `refresh="all"` 1 and all rounds.
    Example level: one example is exchanged for another one, the client's size is public.  That
    moves a mean by 2 C0 / n_i at most, so the noise multiplier is sigma n_i / (2 L): small clients
    are hidden less.  It covers the feature means alone, NOT the model updates.
    """
    whole = all(isinstance(n, int) and n >= 1 for n in (size, releases))
    if not whole or not 0 < delta < 1 or float(noise.sigma) <= 0:
        raise ConfigError(
            f"spent_on_features(sigma={noise.sigma}, size={size}, releases={releases}, "
            f"delta={delta}): sizes and releases count from 1, delta lies in (0, 1), sigma above 0"
        )
    multiplier = float(noise.sigma) * size / (2 * float(noise.batch))
    return Spent(gaussian_epsilon(multiplier, releases, delta), delta)


def spent_on_updates(
    rule: Private,
    rounds: int,
    *,
    delta: float = 1e-5,
    rate: float | None = None,
    population: int | None = None,
) -> float:
    """Give epsilon after some rounds, for adding or removing one client.

    `rate` is the fraction of a `Bernoulli` sampler, `population` the number of its clients; no
    other way of sampling is credited.  The credit holds only towards those who do not know who
    took part: a cohort follows from the experiment's seed, which every node is sent, and a run's
    folder lists it.
    """
    chance = 1.0 if rate is None else rate
    if rounds < 1 or not 0 < delta < 1 or not 0 < chance <= 1:
        raise ConfigError(
            f"spent_on_updates(rounds={rounds}, delta={delta}, rate={rate}): rounds count from 1, "
            "delta lies in (0, 1), rate in (0, 1]"
        )
    if float(rule.noise) <= 0:
        return math.inf
    without_credit = gaussian_epsilon(float(rule.noise), rounds, delta)
    if chance == 1:
        return without_credit
    if population is None or population < 1:
        raise ConfigError(
            f"spent_on_updates(rate={rate}, population={population}): a Bernoulli sampler throws "
            "again while nobody takes part, so the credit depends on how many clients there are: "
            "give their number as `population`"
        )
    return min(without_credit, _sampled_epsilon(rule, rounds, delta, chance, population))


def gaussian_epsilon(multiplier: float, releases: int, delta: float) -> float:
    """Give the exact epsilon of Gaussian noise of `multiplier` times the sensitivity.

    delta(eps) = Phi(m/2 - eps/m) - exp(eps) Phi(-m/2 - eps/m) with m = sqrt(releases) / multiplier
    (Balle and Wang 2018, theorem 8).

    >>> round(gaussian_epsilon(1.0, 1, 1e-5), 2)
    4.38
    """
    m = math.sqrt(releases) / multiplier

    def spends(eps: float) -> bool:
        at = torch.tensor([m / 2 - eps / m, -m / 2 - eps / m], dtype=torch.float64)
        first, second = torch.special.log_ndtr(at).tolist()
        # in logarithms: exp(eps) alone overflows where the difference does not
        return first + math.log(-math.expm1(min(eps + second - first, -1e-300))) > math.log(delta)

    if not spends(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while spends(high):
        low, high = high, 2 * high
    for _ in range(60):  # halvings: as many as a number has digits
        middle = (low + high) / 2
        low, high = (middle, high) if spends(middle) else (low, middle)
    return high


def _sampled_epsilon(
    rule: Private, rounds: int, delta: float, rate: float, population: int
) -> float:
    """Give epsilon where each client takes part by its own coin.

    A round in which nobody would take part is drawn anew.  Its cohorts differ from those of plain
    coins with probability (1 - rate)^population; over all rounds that costs (1 + exp(eps)) times as
    much of delta.  Where it leaves less than half of it, nothing is credited.
    """
    try:
        from dp_accounting import dp_event, pld
    except ImportError as error:
        raise MissingExtra(
            "credit for sampling needs dp-accounting: pip install 'undrift[privacy]'"
        ) from error
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(float(rule.noise)))
    accountant = pld.PLDAccountant()
    accountant.compose(dp_event.SelfComposedDpEvent(event, rounds))
    redrawn = rounds * math.exp(population * math.log1p(-rate))
    for share in (1e-6, 0.5):  # of delta that may go to rounds that are drawn anew
        epsilon = float(accountant.get_epsilon(delta * (1 - share)))
        if epsilon < 700 and (1 + math.exp(epsilon)) * redrawn <= delta * share:
            return epsilon
    return math.inf
