from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from undrift.engines.sums import SHARDS, OrderedSum, summing_order


def shard_by_shard(rows: dict[int, torch.Tensor]) -> torch.Tensor:
    """The sum as it is defined: ascending ids within a shard, then shard after shard."""
    total = torch.zeros(100, dtype=torch.float64)
    for shard in range(SHARDS):
        part = torch.zeros(100, dtype=torch.float64)
        for client in sorted(rows):
            if client % SHARDS == shard:
                part += rows[client]
        total += part
    return total


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=40, unique=True), st.integers(1, 9))
def test_the_sum_depends_on_the_ids_alone(ids: list[int], width: int) -> None:
    maker = torch.Generator().manual_seed(7)
    rows = {i: torch.randn(100, generator=maker) * 10.0 ** (i % 9) for i in ids}
    order, total = summing_order(ids), OrderedSum()
    for start in range(0, len(order), width):
        some = order[start : start + width]
        total.add(some, (torch.stack([rows[i] for i in some]), torch.ones(len(some))))
    summed, count = total.result()
    assert torch.equal(summed, shard_by_shard(rows))
    assert count == len(ids)


def test_refused_rows_are_not_touched() -> None:
    total = OrderedSum()
    total.add([1, 2], {"a": torch.tensor([float("nan"), 3.0])}, accepted=[False, True])
    assert total.result()["a"] == 3.0


def test_shapes_come_back() -> None:
    total = OrderedSum()
    total.add([0, 1], (torch.ones(2, 3, 50), torch.ones(2), torch.ones(2, 4), torch.ones(2, 0)))
    assert [tuple(v.shape) for v in total.result()] == [(3, 50), (), (4,), (0,)]


def test_leaves_of_every_size_come_back_with_their_numbers() -> None:
    """Small leaves are added as one; none may be lost at the edge."""
    rows = tuple(torch.randn(3, n, dtype=torch.float64) for n in (63, 64, 65, 1))
    total = OrderedSum()
    total.add([0, 1, 64], rows)
    for found, row in zip(total.result(), rows, strict=True):
        assert torch.allclose(found, row.sum(0), atol=1e-12)


def test_a_shard_is_all_ids_of_one_remainder_of_64() -> None:
    """Runs that were recorded must be added up in the same order by the next version."""
    assert summing_order([128, 65, 3, 64, 1, 0]) == [0, 64, 128, 1, 65, 3]
