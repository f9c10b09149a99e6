"""Requests that no partition can fulfil are refused at once, with the reason."""

import time

import numpy as np
import pytest
import torch

from undrift.data.partitions import (
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
from undrift.errors import ConfigError, DataError

BY_CLASS = [
    Iid(2, equal_classes=True),
    DirichletClient(2, 0.5),
    DirichletClass(2, 0.5),
    Similarity(2, 0.5),
    DominantClass(2, 0.5),
    Shards(2),
    LabelSubset(2),
]
TEN = np.arange(10) % 2
IMPOSSIBLE = [
    (Iid(11), TEN, "10 examples cannot give 11 clients"),
    (DirichletClient(11, 0.1), TEN, "10 examples cannot give 11 clients"),
    (DirichletClient(11, 0.1, sigma=0.3), TEN, "10 examples cannot give 11 clients"),
    (Similarity(11, 0.0), TEN, "10 examples cannot give 11 clients"),
    (Shards(11), TEN, "10 examples cannot give 11 clients"),
    (DominantClass(11, 0.5), TEN, "10 examples cannot give 11 clients"),
    (LabelSubset(11), TEN, "10 examples cannot give 11 clients"),
    (QuantitySkew(11), TEN, "10 examples cannot give 11 clients|needs 11 examples"),
    (Iid(2), np.zeros(0), "no examples"),
    (Iid(6, equal_classes=True), TEN, "class 0 has 5 examples for 6 clients"),
    (QuantitySkew(3, min_size=4), TEN, "min_size = 4 for 3 clients needs 12 examples"),
    (DirichletClass(2, 0.1), TEN, "min_size = 10 for 2 clients needs 20 examples"),
    (Similarity(7, 0.5), TEN, "neither the 5 IID examples nor the 5 sorted"),
    (Shards(4, 3), TEN, "needs 12 examples"),
    (LabelSubset(2, 3), TEN, "hold 2 classes"),
    (LabelSubset(10, 1), [0] * 2 + [1] * 8, "fewer examples than owners"),
    (DominantClass(2, 0.5), np.zeros(10, int), "one class"),
    (DominantClass(2, 0.9), [0] + [1] * 99, "class 0 is the scarcest, with 1"),
    (DominantClass(2, 0.5, size=9), TEN, "the classes allow 5"),
    (DirichletClient(3, 0.1), np.arange(10_001), "are they ids"),
    (ByKey(), TEN, "pass keys="),
]


@pytest.mark.parametrize(("partition", "labels", "why"), IMPOSSIBLE)
def test_the_impossible_is_explained(partition, labels, why):
    with pytest.raises(DataError, match=why):
        partition.split(np.asarray(labels), seed=0)


def test_hopeless_rejection_stops_soon_and_says_what_to_do():
    start = time.perf_counter()
    with pytest.raises(DataError, match=r"never had min_size = 10 .* Lower min_size, raise alpha"):
        DirichletClass(100, alpha=0.001).split(np.arange(2000) % 10, seed=0)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("partition", BY_CLASS)
@pytest.mark.parametrize("labels", [np.linspace(0, 1, 20), torch.rand(20, dtype=torch.bfloat16)])
def test_regression_targets_have_no_classes(partition, labels):
    with pytest.raises(DataError, match="floating-point"):
        partition.split(labels, seed=0)


@pytest.mark.parametrize("partition", [Iid(4), QuantitySkew(4), ByKey()])
def test_partitions_without_classes_take_any_target(partition):
    targets = torch.full((20, 3), torch.nan)
    parts = partition.split(targets, 0, keys=np.arange(20) % 4)
    assert sorted(np.concatenate(parts)) == list(range(20))


@pytest.mark.parametrize("partition", BY_CLASS)
def test_one_hot_labels_are_refused(partition):
    with pytest.raises(DataError, match="argmax"):
        partition.split(np.eye(20, dtype=int), seed=0)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["a", None, "b"], "entry 1 is missing"),
        (np.array([1.0, 2.0, np.nan]), "entry 2 is missing"),
        (np.array(["a", float("nan"), "b"], dtype=object), "entry 1 is missing"),
        (np.array(["a", 3, "b"], dtype=object), "several types"),
        (["a", "b"], "2 keys for 3 examples"),
        (np.zeros((3, 2)), "flat list"),
        ([[1], [2, 3], [4]], "cannot be made an array"),
    ],
)
def test_bad_keys_are_named(keys, why):
    with pytest.raises(DataError, match=why):
        ByKey().split(np.zeros(3), seed=0, keys=keys)


def test_a_minimum_that_nobody_reaches():
    with pytest.raises(DataError, match="leaves out all 2 owners; the largest has 3"):
        ByKey(min_examples=4).split(np.zeros(5), 0, ["a", "a", "a", "b", "b"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Iid(0),
        lambda: Iid(2.5),
        lambda: Iid(True),
        lambda: Iid(3, equal_classes="yes"),
        lambda: DirichletClient(3, alpha=0),
        lambda: DirichletClient(3, alpha=-1),
        lambda: DirichletClient(3, alpha=float("nan")),
        lambda: DirichletClient(3, alpha="0.1"),
        lambda: DirichletClient(3, alpha=0.1, sigma=-1),
        lambda: DirichletClass(3, alpha=float("inf")),
        lambda: DirichletClass(3, alpha=1.0, min_size=-1),
        lambda: Similarity(3, s=1.5),
        lambda: DominantClass(3, fraction=0),
        lambda: DominantClass(3, fraction=0.5, size=0),
        lambda: Shards(3, 0),
        lambda: QuantitySkew(3, alpha=0),
        lambda: LabelSubset(3, 0),
        lambda: ByKey(min_examples=0),
        lambda: ByKey(max_clients=0),
        lambda: ByKey(choose="smallest"),
    ],
)
def test_values_out_of_range_are_refused_when_built(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("seed", [-1, 0.5, "0", None])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ConfigError, match="seed must be a whole number"):
        Iid(2).split(TEN, seed)


@pytest.mark.parametrize("fraction", [0, 1, -0.5, float("nan"), "half", True])
@pytest.mark.parametrize("helper", [hold_out, per_client_test])
def test_fractions_lie_between_none_and_all(helper, fraction):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        helper([np.arange(4), np.arange(4, 8)], fraction, seed=0)


def test_holding_out_everybody_is_refused():
    with pytest.raises(DataError, match="leave none to train"):
        hold_out([np.arange(4)], 0.5, seed=0)
