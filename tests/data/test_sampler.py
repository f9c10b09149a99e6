import itertools
import math

import numpy as np
import pytest

from undrift.core.tree import leaves, structure
from undrift.data import (
    Bernoulli,
    Everyone,
    Explicit,
    Population,
    Sequential,
    Uniform,
    Weighted,
)
from undrift.errors import ConfigError, EmptyRoundError

ROUNDS = 1500
GAPS = Population.of([5, 1, 0, 20, 7, 40, 0, 3, 3, 9])  # ids 0 1 3 4 5 7 8 9
SAMPLERS = [
    Uniform(count=3),
    Uniform(fraction=0.4),
    Bernoulli(0.1),
    Bernoulli(1.0),
    Sequential(3),
    Weighted(count=1),
    Weighted(count=4),
    Weighted(count=3, by=[1, 2, 9, 0.5, 1, 0, 9, 3, 1, 1]),
    Everyone(),
]


def cohorts(sampler, population, rounds=ROUNDS, seed=0):
    return [sampler.sample(seed, r, population) for r in range(rounds)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_clients_are_drawn_as_often_as_promised(sampler):
    promised = sampler.probability(GAPS)
    drawn = np.concatenate([c.ids for c in cohorts(sampler, GAPS)])
    frequency = (drawn[:, None] == GAPS.ids).sum(0) / ROUNDS
    sigma = np.sqrt(promised * (1 - promised) / ROUNDS)
    assert (np.abs(frequency - promised) <= 4 * sigma + 1e-12).all()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_cohort_is_enrolled_ascending_and_knows_its_probability(sampler):
    promised = dict(zip(GAPS.ids.tolist(), sampler.probability(GAPS).tolist(), strict=True))
    for cohort in cohorts(sampler, GAPS, rounds=50):
        assert cohort.ids.dtype == np.int64 and cohort.probability.dtype == np.float64
        assert len(cohort.ids) and (np.diff(cohort.ids) > 0).all()
        assert cohort.probability.tolist() == [promised[i] for i in cohort.ids.tolist()]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_round_does_not_depend_on_earlier_calls(sampler):
    forward = [c.ids.tolist() for c in cohorts(sampler, GAPS, rounds=20)]
    backward = [sampler.sample(0, r, GAPS).ids.tolist() for r in reversed(range(20))]
    assert forward == backward[::-1]


@pytest.mark.parametrize("sampler", [SAMPLERS[0], SAMPLERS[2], SAMPLERS[6]], ids=repr)
def test_seeds_and_rounds_change_the_cohort(sampler):
    seen = {tuple(sampler.sample(s, r, GAPS).ids) for s, r in itertools.product(range(9), range(9))}
    assert len(seen) >= 8  # Weighted: two clients are certain, 15 cohorts exist
    assert [sampler.sample(0, r, GAPS).ids.tolist() for r in range(9)] != [
        sampler.sample(1, r, GAPS).ids.tolist() for r in range(9)
    ]


@pytest.mark.parametrize(
    ("sampler", "size"), [(0, 3), (1, 3), (4, 3), (5, 1), (6, 4), (7, 3), (8, 8)]
)
def test_sizes_are_exact(sampler, size):
    assert {len(c.ids) for c in cohorts(SAMPLERS[sampler], GAPS, rounds=300)} == {size}


@pytest.mark.parametrize(("count", "fraction", "size"), [(100, 0.1, 10), (5, 0.01, 1), (7, 0.5, 4)])
def test_a_fraction_is_rounded_and_never_gives_nobody(count, fraction, size):
    cohort = Uniform(fraction=fraction).sample(0, 0, Population.of([1] * count))
    assert len(cohort.ids) == size
    assert cohort.probability == pytest.approx(size / count)


def test_uniform_draws_every_subset_equally_often():
    drawn = [tuple(c.ids) for c in cohorts(Uniform(count=2), Population.of([1] * 4), rounds=6000)]
    counts = [drawn.count(pair) for pair in itertools.combinations(range(4), 2)]
    assert sum((c - 1000) ** 2 / 1000 for c in counts) < 5 + 5 * math.sqrt(10)


def test_bernoulli_coins_are_independent_but_for_the_redraw():
    n, p = 4, 0.3
    drawn = [len(c.ids) for c in cohorts(Bernoulli(p), Population.of([1] * n))]
    for size in range(n + 1):
        expected = math.comb(n, size) * p**size * (1 - p) ** (n - size) / (1 - (1 - p) ** n)
        expected *= size > 0
        assert drawn.count(size) / ROUNDS == pytest.approx(expected, abs=0.03)


def test_who_else_enrols_does_not_turn_a_client_s_coin():
    few, many = Population.of([1] * 50), Population.of([1] * 100)
    before, after = (Bernoulli(0.3).sample(0, 4, p).ids for p in (few, many))
    assert before.tolist() == [i for i in after if i < 50]


def test_sequential_takes_turns():
    rounds = [Sequential(3).sample(9, r, GAPS).ids.tolist() for r in range(4)]
    assert rounds == [[0, 1, 3], [4, 5, 7], [0, 8, 9], [1, 3, 4]]


def test_weights_above_one_are_clipped_and_redistributed():
    chance = Weighted(count=3).probability(Population.of([100, 60, 2, 4, 4]))
    assert chance == pytest.approx([1, 1, 0.2, 0.4, 0.4])
    chance = Weighted(count=3).probability(Population.of([1000, 20, 10, 6, 4]))
    assert chance == pytest.approx([1, 1, 0.5, 0.3, 0.2])


def test_equal_weights_are_uniform_sampling():
    assert Weighted(count=3, by=[2.0] * 10).probability(GAPS) == pytest.approx(3 / 8)
    assert Weighted(count=8).sample(0, 0, GAPS).ids.tolist() == GAPS.ids.tolist()


def test_neighbours_may_be_drawn_together():
    drawn = {tuple(c.ids) for c in cohorts(Weighted(count=2), Population.of([1] * 4), rounds=200)}
    assert drawn == set(itertools.combinations(range(4), 2))


def test_huge_and_tiny_weights_keep_the_size_exact():
    population = Population.of([1] * 50)
    weights = [10.0 ** (i * 12 - 290) for i in range(50)]
    sampler = Weighted(count=7, by=weights)
    assert {len(sampler.sample(0, r, population).ids) for r in range(50)} == {7}


def test_explicit_rounds_are_replayed():
    sampler = Explicit([[9, 0], [5]], chances=[0.5] * 10)
    assert sampler.sample(0, 0, GAPS).ids.tolist() == [0, 9]
    assert sampler.sample(7, 1, GAPS).probability.tolist() == [0.5]
    assert Explicit([[5]]).probability(GAPS).tolist() == [1.0] * 8


@pytest.mark.parametrize("sampler", [*SAMPLERS, Explicit([[0]])], ids=repr)
def test_an_empty_population_gives_no_round(sampler):
    with pytest.raises(EmptyRoundError, match="no enrolled client"):
        sampler.sample(0, 0, Population.of([0, 0]))


@pytest.mark.parametrize("sampler", [*SAMPLERS, Explicit([[0]])], ids=repr)
def test_samplers_are_structure_without_leaves(sampler):
    assert leaves(sampler) == []
    assert structure(sampler) == structure(sampler)
    assert isinstance(hash(sampler), int)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Uniform(), "either a count or a fraction"),
        (lambda: Uniform(count=2, fraction=0.5), "either a count or a fraction"),
        (lambda: Uniform(count=0), "Uniform.count must be a whole number"),
        (lambda: Uniform(count=2.5), "Uniform.count must be a whole number"),
        (lambda: Uniform(fraction=0.0), r"Uniform.fraction = 0.0 is outside \(0, 1\]"),
        (lambda: Bernoulli(1.5), "Bernoulli.fraction"),
        (lambda: Sequential(0), "Sequential.count"),
        (lambda: Weighted(count=0), "Weighted.count"),
        (lambda: Weighted(count=1, by="loss"), 'must be "size" or weights'),
        (lambda: Weighted(count=1, by=[1, -1]), "not negative"),
        (lambda: Weighted(count=1, by=[1, math.nan]), "not negative"),
        (lambda: Explicit([[0], []]), r"Explicit.rounds\[1\]"),
        (lambda: Explicit([[0, 0]]), "each client once"),
        (lambda: Explicit([[0]], chances=[0.0]), "Explicit.chances"),
        (lambda: Population(np.array([1, 0]), np.array([1, 1])), "ascend"),
        (lambda: Population(np.array([0]), np.array([1, 1])), "one size per id"),
        (lambda: Population.of([1, 1], [0]), "one size per id"),
    ],
)
def test_impossible_samplers_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (Uniform(count=9), "count = 9 but only 8 clients are enrolled"),
        (Sequential(9), "only 8 clients"),
        (Weighted(count=9), "only 8 clients"),
        (Weighted(count=1, by=[1.0]), "one weight per client id"),
        (Weighted(count=2, by=[1.0] + [0.0] * 9), "only 1 enrolled clients have a positive"),
        (Bernoulli(1e-9), "nearly every throw"),
        (Explicit([[0]] * 3), "add a list for round 3"),
        (Explicit([[2]] * 4), "names client 2, which is not enrolled"),
        (Explicit([[0]] * 4, chances=[1.0]), "one per client id"),
    ],
)
def test_a_population_that_does_not_fit_is_refused(sampler, message):
    with pytest.raises(ConfigError, match=message):
        sampler.sample(0, 3, GAPS)


def test_a_population_knows_its_totals():
    assert (GAPS.count, GAPS.total, GAPS.mean_size) == (8, 88, 11.0)
    late = Population.of([4, 0, 2], ids=[3, 5, 8])
    assert late.ids.tolist() == [3, 8] and late.sizes.tolist() == [4, 2]
