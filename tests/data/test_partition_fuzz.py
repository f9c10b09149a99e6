"""Bar B27: whatever the labels, a partition gives a proper split or a typed error, and soon."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undrift.data import Federation
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
from undrift.data.summary import summarise
from undrift.errors import ConfigError, DataError

FEW, MANY = 120, 500
FUZZ = settings(
    max_examples=FEW,
    deadline=5000,
    derandomize=True,  # the same examples in every run: a failure stays a failure
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
clients = st.integers(1, 6) | st.integers(1, 24)
alphas = st.sampled_from([1e-6, 1e-3, 0.03, 0.1, 0.5, 1, 10, 1e5, 1e12])
shares = st.sampled_from([0.0, 0.01, 0.1, 1 / 3, 0.5, 0.8, 0.99, 1.0])
minima = st.integers(0, 4)
PARTITIONS = {
    "iid": st.builds(Iid, clients, st.booleans()),
    "dirichlet_client": st.builds(
        DirichletClient, clients, alphas, st.sampled_from([None, 0.0, 0.3, 3.0, 100.0])
    ),
    "dirichlet_class": st.builds(DirichletClass, clients, alphas, minima, st.booleans()),
    "similarity": st.builds(Similarity, clients, shares),
    "dominant_class": st.builds(
        DominantClass, clients, shares.filter(bool), st.none() | st.integers(1, 6)
    ),
    "by_key": st.builds(
        ByKey,
        st.integers(1, 4),
        st.none() | clients,
        st.sampled_from(["random", "largest"]),
        st.booleans(),
    ),
    "shards": st.builds(Shards, clients, st.integers(1, 4)),
    "quantity_skew": st.builds(QuantitySkew, clients, alphas, minima),
    "label_subset": st.builds(LabelSubset, clients, st.integers(1, 4)),
}


@st.composite
def some_labels(draw):
    """From nothing to 60 labels: one class, all distinct, skewed, odd types, NaN, wrong shapes."""
    n = draw(st.integers(0, 60) | st.integers(24, 60))
    classes = draw(st.sampled_from([1, 2, 3, 10, 60]))
    codes = np.array(draw(st.lists(st.integers(0, classes - 1), min_size=n, max_size=n)), dtype=int)
    if draw(st.booleans()):
        codes = codes * (codes % 2)  # one class holds half
    kind = draw(st.sampled_from("iiiiiiiiibuswtofn2"))
    return {
        "i": lambda: codes,
        "b": lambda: codes > 0,
        "u": lambda: codes.astype(np.uint8),
        "s": lambda: codes.astype(str),
        "w": lambda: (codes - 2**62) * 2,  # huge, negative
        "t": lambda: torch.from_numpy(codes),
        "o": lambda: codes.astype(object),
        "f": lambda: codes / 3,
        "n": lambda: np.full(n, np.nan),
        "2": lambda: codes[:, None],
    }[kind]()


def deals_everything(partition, labels):
    if isinstance(partition, Iid):
        return not partition.equal_classes
    if isinstance(partition, DirichletClient):
        return partition.sigma is not None
    if isinstance(partition, LabelSubset):
        return partition.clients >= len(np.unique(labels))
    if isinstance(partition, ByKey):
        return partition.min_examples == 1 and partition.max_clients is None
    return isinstance(partition, DirichletClass | Shards | QuantitySkew)


def check(partition, labels, parts):
    dealt = np.concatenate(parts)
    n = len(labels)
    assert len(np.unique(dealt)) == len(dealt) and dealt.dtype == np.int64
    assert dealt.min() >= 0 and dealt.max() < n
    assert len(parts) == getattr(partition, "clients", len(parts))
    if getattr(partition, "min_size", 1):
        assert min(map(len, parts)) >= getattr(partition, "min_size", 1)
    if deals_everything(partition, labels):
        assert len(dealt) == n


@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PARTITIONS)
def test_a_proper_split_or_a_typed_error(name, examples):
    @settings(FUZZ, max_examples=examples)
    @given(PARTITIONS[name], some_labels(), st.integers(0, 2**53), st.integers(1, 30))
    def fuzz(partition, labels, seed, owners):
        keys = (np.arange(len(labels)) * 7) % owners
        try:
            parts = partition.split(labels, seed, keys)
        except (DataError, ConfigError) as error:
            assert len(str(error)) > 20
            return
        check(partition, labels, parts)
        again = partition.split(labels, seed, keys)
        assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))

    fuzz()


@settings(FUZZ, max_examples=MANY)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
    st.integers(0, 2**53),
)
def test_helpers_lose_and_repeat_nothing(sizes, fraction, seed):
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    for helper in (hold_out, per_client_test):
        try:
            one, other = helper(parts, fraction, seed)
        except DataError:
            continue
        assert sorted(np.concatenate(one + other)) == list(range(sum(sizes)))


@settings(FUZZ, max_examples=MANY)
@given(st.integers(2, 60), st.integers(1, 9), clients, alphas, st.integers(0, 2**53))
def test_summaries_stay_within_their_bounds(n, classes, num_clients, alpha, seed):
    labels = np.arange(n) % classes
    parts = QuantitySkew(num_clients, alpha, min_size=0).split(labels, seed)
    summary = summarise(labels, parts)
    skew = summary.skew
    assert summary.sizes.sum() == n
    assert (skew.effective_classes > 0.999).all()
    assert (skew.effective_classes < min(n, classes) + 1e-6).all()
    assert (skew.classes_for_80 >= 1).all() and (skew.classes_for_80 <= classes).all()
    assert (skew.distance_to_all >= 0).all() and (skew.distance_to_all <= 1).all()
    assert 0 <= skew.mean_distance <= 1 + 1e-9
    assert "nan" not in str(summary)


def test_a_split_makes_a_federation():
    labels = torch.arange(200) % 10
    parts = DirichletClient(10, 0.1).split(labels, seed=0)
    assert Federation.split(torch.zeros(200, 2), labels, parts).num_clients == 10
