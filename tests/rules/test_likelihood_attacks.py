"""Whoever knows everything but one example, or one client, may not tell better than epsilon says.

The best attack there is, by Neyman and Pearson: a threshold on the likelihood ratio of what leaves.
With epsilon and delta, hits <= exp(epsilon) false alarms + delta for every threshold.
"""

import math

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.core.rule import Mean
from undrift.rules.accounting import gaussian_epsilon

SIZE, DELTA = 4, 0.05
LUCK = 3.0  # standard deviations; keys are fixed, so that a test has its luck once


@pytest.fixture
def key(tmp_path):
    """A key file like any other, but for that everybody can read it here."""
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text("5e" * 32)
    return path


def excess(inside, outside, epsilon):
    """Hits - exp(epsilon) false alarms of the best threshold, and its deviation.

    The likelihood ratio of two normal laws passes exp(epsilon) at one place.
    """
    gap, spread = inside.mean() - outside.mean(), (inside.var() + outside.var()) / 2
    at = (inside.mean() + outside.mean()) / 2 + epsilon * spread / gap
    hit, alarm = (
        float((v * gap.sign() > at * gap.sign()).double().mean()) for v in (inside, outside)
    )
    luck = hit * (1 - hit) + math.exp(2 * epsilon) * alarm * (1 - alarm)
    return hit - math.exp(epsilon) * alarm, math.sqrt(luck / len(inside))


def sent_means(build, sign, noise, rounds, key, clients):
    """Feature means of many clients alike, of each round; one example is `sign` times far away."""
    net = nn.Sequential(nn.Identity(), nn.Linear(3, 2))
    with torch.no_grad():
        net[1].weight.zero_()
    task = fl.Task(net, feature="0", dtype=torch.float64)
    x = torch.zeros(SIZE, 3, dtype=torch.float64)
    x[0, 0] = 100.0 * sign
    data = fl.Federation.of([(x, torch.zeros(SIZE).long())] * clients)
    algorithm = build(1e-9, strength=0.0, noise=noise)
    work = fl.Work(steps=1, batch=None)
    run, found = fl.Trainer(task, data, algorithm, work=work, private_key=key), []
    opened = run.open_round()
    found.append(opened.server.states[0].rows[:, 0])
    for _ in range(rounds):
        run.round()
        found.append(run.server.states[0].rows[:, 0])
    return found


@pytest.mark.parametrize(("build", "clients"), [(fl.rfedavg, 600), (fl.rfedavg_plus, 1500)])
def test_nobody_tells_an_example_from_another_better_than_epsilon(build, clients, key):
    """All that a client sends in two rounds and in the look before them."""
    noise, seen = fl.FeatureNoise(4.0, 0.5, 4.0), []
    for sign in (1.0, -1.0):
        # the data differ, so the noise of one key does, too
        seen.append(sum(sent_means(build, sign, noise, 2, key, clients)))
    told = fl.spent_on_features(noise, SIZE, 3, delta=DELTA).epsilon
    found, spread = excess(*seen, told)
    assert found <= DELTA + LUCK * spread
    # and it is no more than that: with a bound of C0 / n, half of it, the attack wins
    found, spread = excess(*seen, gaussian_epsilon(4.0 * SIZE / 4.0, 3, DELTA))
    assert found > DELTA + LUCK * spread


def test_noise_of_two_rounds_is_not_shared(key):
    """Else its difference would tell, whatever each of them hides."""
    noise = fl.FeatureNoise(2.0, 0.5, 4.0)
    first, second, third = sent_means(fl.rfedavg_plus, 1.0, noise, 2, key, 400)
    scale = 2.0 * 0.5 / 4.0
    for one, other in ((first, second), (second, third), (first, third)):
        assert float((one - other).std()) == pytest.approx(2**0.5 * scale, rel=0.15)


class Far(nn.Module):
    """One parameter whose loss falls by the target, wherever it is: every change is clipped."""

    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.at * x


def pull(out, y):
    return -(out[:, 0] * y.to(out.dtype))


ROUNDS = 400


def released(with_it, sigma, key):
    """What each round moves the model by, with a client that pulls as it can, or without."""
    x, y = torch.ones(2, 1, dtype=torch.float64), torch.full((2,), 100.0)
    own = [(x, torch.zeros(2))] + [(x, y)] * with_it
    task = fl.Task(Far(), loss=pull, metrics={}, dtype=torch.float64)
    rule = fl.Private(norm=0.5, noise=sigma, cohort=2.0)
    algorithm = fl.Algorithm((rule,), fl.Sgd(lr=0.1), Mean(by_size=False))
    work = fl.Work(steps=1, batch=None)
    run, found = fl.Trainer(task, fl.Federation.of(own), algorithm, work=work, private_key=key), []
    for _ in range(ROUNDS):
        before = run.server.w
        run.round()
        found.append(run.server.w - before)
    return torch.cat(found)


def test_nobody_tells_whether_a_client_took_part_better_than_epsilon(key):
    seen = [released(with_it, 1.0, key) for with_it in (True, False)]
    gap = float(seen[0].mean() - seen[1].mean())
    assert gap == pytest.approx(0.5 / 2, rel=0.2)  # the most that a client may do
    told = fl.spent_on_updates(fl.Private(noise=1.0), 1, delta=DELTA)
    found, spread = excess(*seen, told)
    assert found <= DELTA + LUCK * spread
    promised = fl.spent_on_updates(fl.Private(noise=3.0), 1, delta=DELTA)
    found, spread = excess(*seen, promised)
    assert found > DELTA + LUCK * spread  # the attack has the strength to refute
