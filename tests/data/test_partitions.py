"""What each partition promises by its definition."""

import numpy as np
import pytest
import torch

from undrift.data.partitions import (
    PARTITIONS,
    ByKey,
    DirichletClass,
    DirichletClient,
    DominantClass,
    Iid,
    LabelSubset,
    QuantitySkew,
    Shards,
    Similarity,
    hold_out,
    per_client_test,
)
from undrift.data.partitions.chance import key_of, log_gamma_draws, shares

LABELS = np.arange(2000) % 10
CIFAR10 = np.repeat(np.arange(10), 5000)
KEYS = np.arange(2000) // 130
EXAMPLES = {
    "iid": Iid(20),
    "dirichlet_client": DirichletClient(20, alpha=0.1, sigma=0.3),
    "dirichlet_class": DirichletClass(20, alpha=0.3),
    "similarity": Similarity(20, s=0.1),
    "dominant_class": DominantClass(20, fraction=0.5),
    "by_key": ByKey(max_clients=9),
    "shards": Shards(20),
    "quantity_skew": QuantitySkew(20),
    "label_subset": LabelSubset(20, 3),
}


def sizes(parts):
    return [len(part) for part in parts]


def table(labels, parts):
    return np.stack([np.bincount(labels[p], minlength=labels.max() + 1) for p in parts])


def covering(counts):
    """Classes, largest first, that cover 80 % of each row; the mean over rows."""
    heaped = np.cumsum(-np.sort(-counts, axis=1), axis=1)
    return float((1 + (heaped < 0.8 * heaped[:, -1:] - 1e-9).sum(axis=1)).mean())


def test_every_name_is_tried_here():
    assert set(EXAMPLES) == set(PARTITIONS)
    assert all(type(EXAMPLES[name]) is PARTITIONS[name] for name in PARTITIONS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_split_is_a_function_of_the_seed(name):
    first, again, other = (EXAMPLES[name].split(LABELS, seed, KEYS) for seed in (4, 4, 5))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=False))
    assert all(part.dtype == np.int64 for part in first)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_split_leaves_global_generators_alone(name):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    EXAMPLES[name].split(LABELS, 0, KEYS)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


@pytest.mark.parametrize("name", EXAMPLES)
def test_tensors_and_names_are_split_like_numbers(name):
    words = np.array(list("abcdefghij"))[LABELS]
    plain, tensor, named = (
        EXAMPLES[name].split(y, 0, KEYS) for y in (LABELS, torch.from_numpy(LABELS), words)
    )
    for a, b, c in zip(plain, tensor, named, strict=True):
        assert np.array_equal(a, b) and np.array_equal(a, c)


def test_iid_deals_everything_evenly():
    parts = Iid(7).split(np.zeros(100), seed=0)
    assert sizes(parts) == [15, 15, 14, 14, 14, 14, 14]
    assert sorted(np.concatenate(parts)) == list(range(100))


def test_iid_with_equal_classes_is_exact():
    labels = np.arange(1037) % 10
    counts = table(labels, Iid(5, equal_classes=True).split(labels, seed=0))
    assert (counts == counts[0]).all() and counts[0].tolist() == [20] * 10


def test_dirichlet_client_has_exact_sizes_and_drops_the_remainder():
    assert sizes(DirichletClient(30, alpha=0.03).split(LABELS, seed=0)) == [66] * 30


def test_log_normal_sizes_have_their_spread_and_deal_everything():
    parts = DirichletClient(400, alpha=0.3, sigma=0.3).split(np.arange(60_000) % 10, seed=0)
    assert sorted(np.concatenate(parts)) == list(range(60_000))
    logs = np.log(sizes(parts)[1:])  # the first takes what truncation left over
    assert abs(logs.std() - 0.3) < 0.03


def test_log_normal_clients_are_never_empty():
    for seed in range(20):
        assert min(sizes(DirichletClient(10, 0.3, sigma=3.0).split(np.arange(13), seed))) == 1


def longhand(labels, clients, alpha, chance):
    """Setups 1.1 word for word: one client, one class, one example at a time."""
    rows = [list(chance.permutation(np.flatnonzero(labels == c))) for c in range(labels.max() + 1)]
    quota = [len(labels) // clients] * clients
    prior = chance.dirichlet(np.full(len(rows), alpha), clients)
    parts = [[] for _ in range(clients)]
    while any(quota):
        i = chance.integers(clients)
        if quota[i]:
            p = prior[i] * [len(r) > 0 for r in rows]
            p = p if p.sum() > 0 else np.array([float(len(r)) for r in rows])
            parts[i].append(rows[chance.choice(len(rows), p=p / p.sum())].pop())
            quota[i] -= 1
    return [np.array(p) for p in parts]


@pytest.mark.parametrize("alpha", [0.1, 1.0])
@pytest.mark.slow
def test_the_fast_dirichlet_client_has_the_statistics_of_the_longhand_one(alpha):
    labels = np.repeat(np.arange(4), [150, 90, 40, 20])  # classes run out at different times
    chance = np.random.default_rng(0)

    def measures(parts):
        counts = table(labels, parts)
        p = counts / counts.sum(axis=1, keepdims=True)
        return [covering(counts), p.max(axis=1).mean(), p[:, 0].std(), (p[:, 3] > 0).mean()]

    slow = np.array([measures(longhand(labels, 10, alpha, chance)) for _ in range(80)])
    partition = DirichletClient(10, alpha)
    fast = np.array([measures(partition.split(labels, seed)) for seed in range(400)])
    error = np.sqrt(slow.var(axis=0) / 80 + fast.var(axis=0) / 400)
    assert (np.abs(slow.mean(axis=0) - fast.mean(axis=0)) < 3.5 * error).all()


@pytest.mark.parametrize(
    ("alpha", "classes"),
    [(0.03, 1.3), (0.05, 1.5), (0.1, 2.0), (0.15, 2.4), (0.2, 2.7), (0.3, 3.2), (0.6, 4.3)],
)
def test_classes_that_cover_80_percent_under_a_dirichlet_prior(alpha, classes):
    """Setups 1.5: of the prior, before classes run out."""
    prior = shares(log_gamma_draws(key_of(0, "prior"), alpha, (2500, 10)))
    assert abs(covering(prior) - classes) < 0.1


@pytest.mark.parametrize(
    ("balance", "quantiles", "classes"),
    [(False, (31, 363, 1414), 2.0), (True, (40, 446, 1260), 1.8)],
)
def test_dirichlet_class_has_the_measured_sizes(balance, quantiles, classes):
    """Setups 1.2: CIFAR-10's counts, 100 clients, alpha 0.1; before rejection."""
    split = DirichletClass(100, alpha=0.1, min_size=0, balance=balance).split
    runs = [split(CIFAR10, seed) for seed in range(12)]
    found = np.mean([np.quantile(sizes(parts), [0.05, 0.5, 0.95]) for parts in runs], axis=0)
    assert np.allclose(found, quantiles, rtol=0.12, atol=8)
    assert abs(np.mean([covering(table(CIFAR10, parts)) for parts in runs]) - classes) < 0.1


def test_dirichlet_class_deals_everything_and_keeps_its_minimum():
    for seed in range(5):
        parts = DirichletClass(100, alpha=0.1).split(CIFAR10, seed)
        assert min(sizes(parts)) >= 10
        assert sorted(np.concatenate(parts)) == list(range(50_000))


def test_balance_closes_full_clients():
    def largest(balance):
        split = DirichletClass(20, 0.3, balance=balance).split
        return np.mean([max(sizes(split(LABELS, seed))) for seed in range(10)])

    assert largest(True) < 0.9 * largest(False)


def test_similarity_zero_gives_half_a_class_each():
    counts = table(LABELS, Similarity(20, s=0.0).split(LABELS, seed=0))
    assert ((counts > 0).sum(axis=1) == 1).all()
    assert counts.argmax(axis=1).tolist() == [i // 2 for i in range(20)]


def test_similarity_mixes_its_share_and_drops_remainders():
    labels = np.arange(2013) % 10
    parts = Similarity(20, s=0.1).split(labels, seed=0)
    assert sizes(parts) == [201 // 20 + 1812 // 20] * 20
    own = table(labels, parts).max(axis=1)
    assert (own >= 0.5 * 90).all() and (table(labels, parts) > 0).sum(axis=1).mean() > 4


def test_similarity_one_is_iid():
    counts = table(LABELS, Similarity(4, s=1.0).split(LABELS, seed=0))
    assert counts.sum(axis=1).tolist() == [500] * 4 and counts.min() > 25


def test_similarity_splits_a_test_set_alike():
    test = np.arange(400) % 10
    split = Similarity(20, s=0.0).split
    for part, test_part in zip(split(LABELS, 3), split(test, 3), strict=True):
        assert set(LABELS[part]) == set(test[test_part])


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.8, 1.0])
def test_dominant_class_has_its_exact_share(fraction):
    counts = table(LABELS, DominantClass(20, fraction).split(LABELS, seed=0))
    dominant = counts[np.arange(20), np.arange(20) % 10]
    assert (counts.sum(axis=1) == 100).all()
    assert (dominant == round(100 * fraction)).all()


def test_dominant_class_draws_its_others_uniformly():
    parts = [DominantClass(20, 0.5).split(LABELS, seed) for seed in range(40)]
    counts = np.mean([table(LABELS, p) for p in parts], axis=0)
    others = counts[np.arange(10)[None, :] != np.arange(20)[:, None] % 10]
    assert abs(others.mean() - 50 / 9) < 1e-9 and others.std() < 0.6


def test_dominant_class_copes_with_classes_of_unequal_size():
    labels = np.repeat(np.arange(10), [54, 67, 60, 61, 58, 54, 59, 63, 59, 59])  # as in MNIST
    counts = table(labels, DominantClass(10, 0.8).split(labels, seed=0))
    assert (counts.sum(axis=1) == 59).all()
    assert (np.diagonal(counts) == 47).all()


def test_dominant_class_can_be_told_its_size():
    counts = table(LABELS, DominantClass(7, 0.5, size=40).split(LABELS, seed=0))
    assert (counts.sum(axis=1) == 40).all() and (np.diagonal(counts) == 20).all()


def test_by_key_keeps_owners_and_order():
    keys = torch.tensor([7, 3, 7, 3, 3, 9])
    parts = ByKey(min_examples=2).split(np.zeros(6), seed=0, keys=keys)
    assert [p.tolist() for p in parts] == [[1, 3, 4], [0, 2]]


def test_by_key_takes_the_largest_or_any():
    keys = [f"user{i}" for i in range(30) for _ in range(i + 1)]
    labels = np.zeros(len(keys))
    largest = ByKey(max_clients=3, choose="largest")
    assert sizes(largest.split(labels, 0, keys)) == [28, 29, 30]
    assert largest.owners(keys, 0).tolist() == ["user27", "user28", "user29"]
    chosen = {tuple(ByKey(max_clients=3).owners(keys, seed)) for seed in range(10)}
    assert len(chosen) > 5


def test_the_iid_control_deals_the_same_examples_evenly():
    natural = ByKey(max_clients=5).split(LABELS, 2, KEYS)
    control = ByKey(max_clients=5, iid_control=True).split(LABELS, 2, KEYS)
    assert sorted(np.concatenate(natural)) == sorted(np.concatenate(control))
    assert max(sizes(control)) - min(sizes(control)) <= 1


def test_shards_give_two_classes_at_most():
    counts = table(LABELS, Shards(100).split(LABELS, seed=0))
    assert (counts.sum(axis=1) == 20).all()
    assert (counts > 0).sum(axis=1).max() == 2


def test_shards_deal_the_remainder_too():
    parts = Shards(7, 3).split(np.arange(100) % 10, seed=0)
    assert sorted(np.concatenate(parts)) == list(range(100))
    assert max(sizes(parts)) - min(sizes(parts)) <= 3


def test_quantity_skew_skews_sizes_and_not_labels():
    parts = QuantitySkew(20, alpha=0.5, min_size=5).split(CIFAR10, seed=0)
    assert min(sizes(parts)) >= 5 and max(sizes(parts)) > 3 * 2500
    assert sorted(np.concatenate(parts)) == list(range(50_000))
    large = table(CIFAR10, [p for p in parts if len(p) > 2000])
    assert np.abs(large / large.sum(axis=1, keepdims=True) - 0.1).max() < 0.03


def test_quantity_skew_shares_are_dirichlet():
    split = QuantitySkew(10, alpha=0.5, min_size=0).split
    found = np.array([sizes(split(np.zeros(10_000), seed)) for seed in range(300)]) / 10_000
    # Var of a share under Dir(a, N) is (1/N)(1 - 1/N) / (a N + 1).
    assert abs(found.var() - 0.1 * 0.9 / 6) < 0.002


def test_label_subset_gives_each_client_its_number_of_classes():
    counts = table(LABELS, LabelSubset(20, 3).split(LABELS, seed=0))
    assert ((counts > 0).sum(axis=1) == 3).all() and counts.sum() == 2000
    for column in counts.T:
        owned = column[column > 0]
        assert owned.max() - owned.min() <= 1


def test_held_out_clients_are_whole_clients():
    parts = DirichletClient(110, 0.3).split(LABELS, seed=0)
    training, validation = hold_out(parts, 1 / 11, seed=0)
    assert (len(training), len(validation)) == (100, 10)
    both = sorted(np.concatenate(training + validation))
    assert both == sorted(np.concatenate(parts))
    assert hold_out(parts, 1 / 11, seed=1)[1][0].tolist() != validation[0].tolist()


def test_a_test_shard_comes_from_the_same_client():
    parts = QuantitySkew(30, alpha=0.3).split(LABELS, seed=0)
    training, test = per_client_test(parts, 0.1, seed=0)
    for part, kept, tested in zip(parts, training, test, strict=True):
        assert sorted(part) == sorted(np.concatenate([kept, tested]))
        assert len(kept) >= 1 and len(tested) == min(max(1, round(len(part) / 10)), len(part) - 1)


def test_a_test_set_is_dealt_by_the_shares_of_training() -> None:
    draw = np.random.default_rng(0)
    train, test = draw.integers(0, 10, 1200), draw.integers(0, 10, 400)
    for seed in range(6):
        partition = DirichletClass(10, alpha=0.3)
        mine = partition.split(train, seed)
        like = partition.split_like(train, test, seed)
        for part, other in zip(mine, like, strict=True):
            a, b = (np.bincount(v, minlength=10) for v in (train[part], test[other]))
            if len(other) >= 20:
                assert np.abs(a / a.sum() - b / b.sum()).sum() / 2 < 0.3
        assert sorted(np.concatenate(like).tolist()) == list(range(400))
