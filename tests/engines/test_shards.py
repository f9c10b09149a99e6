"""Who owns which clients, and sums that do not depend on it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from undrift.data import Federation
from undrift.engines.shards import ShardSum, deal_shards, examples_of, interleaved, merged
from undrift.engines.sums import SHARDS, OrderedSum, summing_order


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200), st.integers(1, 70))
@settings(max_examples=100, deadline=None)
def test_every_shard_with_examples_has_one_owner(sizes, owners):
    if not sum(sizes):
        sizes[0] = 1
    dealt = deal_shards(torch.tensor(sizes), owners)
    used = {i % SHARDS for i, n in enumerate(sizes) if n}
    assert sorted(s for shards in dealt for s in shards) == sorted(used)
    assert all(dealt) and len(dealt) == min(owners, len(used))
    loads = [sum(n for i, n in enumerate(sizes) if i % SHARDS in shards) for shards in dealt]
    largest = max(sum(n for i, n in enumerate(sizes) if i % SHARDS == s) for s in used)
    assert max(loads) - min(loads) <= largest


def total_of(ids, values, owners):
    """Add up what owners add up, each its own clients."""
    sums = []
    for shards in deal_shards(torch.ones(max(ids) + 1, dtype=torch.int64), owners):
        mine = [i for i in summing_order(ids) if i % SHARDS in shards]
        if mine:
            one = ShardSum()
            one.add(mine, (values[mine], values[mine, :1]))
            sums.append(one.sums())
    return merged(sums)


@pytest.mark.parametrize("owners", [2, 3, 7, 64])
def test_a_sum_has_the_same_bits_whoever_owns_which_shards(owners):
    make = torch.Generator().manual_seed(owners)
    values = torch.randn(200, 100, generator=make, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-12, 12, (200, 1), generator=make)
    ids = torch.randperm(200, generator=make)[:150].tolist()
    one, several = total_of(ids, values, 1), total_of(ids, values, owners)
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))


def test_plain_sums_of_owners_would_differ():
    """The test above can fail: without what rounding lost, bits depend on the owners."""
    make = torch.Generator().manual_seed(2)
    values = torch.randn(200, 100, generator=make, dtype=torch.float64)
    halves = []
    for first in (0, 1):
        one = OrderedSum()
        one.add([i for i in summing_order(range(200)) if i % 2 == first], values[first::2])
        halves.append(one.result())
    whole = OrderedSum()
    whole.add(summing_order(range(200)), values[summing_order(range(200))])
    assert not torch.equal(halves[0] + halves[1], whole.result())


def test_shards_are_added_without_any_loss():
    make = torch.Generator().manual_seed(5)
    values = torch.randn(SHARDS, 3, generator=make, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-9, 9, (SHARDS, 1), generator=make)
    found = total_of(list(range(SHARDS)), values, 5)[0]
    assert found.tolist() == [math.fsum(column) for column in values.T.tolist()]


def test_refused_clients_are_not_added():
    one = ShardSum()
    one.add([0, 1, 65], torch.tensor([[1.0], [math.nan], [4.0]]), [True, False, True])
    assert merged([one.sums()]).item() == 5.0
    none = ShardSum()
    none.add([3], torch.tensor([[math.inf]]), [False])
    assert merged([one.sums(), none.sums()]).item() == 5.0


@pytest.mark.parametrize("kind", ["of", "split", "streamed"])
def test_an_owner_sees_its_own_clients_and_nobody_elses(kind, tmp_path):
    make = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(i % 4, 3, generator=make), torch.arange(i % 4) + 100 * i) for i in range(130)
    ]
    if kind == "of":
        whole = Federation.of(clients)
    elif kind == "streamed":
        full = [
            [(x, y)] if len(x) else [(torch.zeros(1, 3), torch.zeros(1).long())] for x, y in clients
        ]
        whole = Federation.from_datasets(full, keep="disk", folder=tmp_path)
    else:
        x, y = torch.randn(300, 3, generator=make), torch.arange(300)
        parts = [list(range(2 * i, 2 * i + 2)) for i in range(130)]
        whole = Federation.split(x, y, [*parts[:-1], [0, 1]], allow_shared=True)
    shards = [1, 5, 40]
    part = examples_of(whole, shards)
    assert part.num_clients == whole.num_clients
    for i in range(whole.num_clients):
        x, y = part.client(i)
        if i % SHARDS in shards:
            assert torch.equal(x, whole.client(i)[0]) and torch.equal(y, whole.client(i)[1])
        else:
            assert not len(x)
    if kind != "streamed":
        assert len(part.x) == int(part.sizes.sum()) < len(whole.x)


def test_rows_of_owners_stand_in_the_order_of_the_cohort():
    rows = [{"a": torch.tensor([10, 30])}, {"a": torch.tensor([0, 20, 40])}]
    found = interleaved(rows, [torch.tensor([1, 3]), torch.tensor([0, 2, 4])])
    assert found["a"].tolist() == [0, 10, 20, 30, 40]
