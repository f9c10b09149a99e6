"""Datasets, loaders and iterables become federations; what is wrong names client and example."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

from undrift.data import Arrival, Federation
from undrift.data import gather as gather_module
from undrift.errors import DataError

from_datasets = Federation.from_datasets


def numbered(n: int, start: float = 0.0) -> TensorDataset:
    """n examples that count on from `start`, classes 0 and 1."""
    x = torch.arange(n, dtype=torch.float32)[:, None] + start
    return TensorDataset(x.repeat(1, 2), x[:, 0].long() % 2)


class Items(Dataset[Any]):
    """A map-style dataset of whatever it is given; an exception is raised."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, k: int) -> Any:
        if isinstance(self.items[k], Exception):
            raise self.items[k]
        return self.items[k]


class Stream(IterableDataset[Any]):
    """The same, without a length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        yield from self.items


def pairs(dataset: TensorDataset) -> list[Any]:
    return [dataset[k] for k in range(len(dataset))]


def same(one: Federation, other: Federation) -> bool:
    names = ("x", "y", "members", "offsets", "sizes")
    return all(torch.equal(getattr(one, n), getattr(other, n)) for n in names)


WAYS = {
    "tensors": numbered,
    "subset": lambda n, s=0.0: Subset(numbered(2 * n, s), list(range(n))),
    "subset of a subset": lambda n, s=0.0: Subset(
        Subset(numbered(n + 2, s - 1), range(1, n + 1)), np.arange(n)
    ),
    "items": lambda n, s=0.0: Items(pairs(numbered(n, s))),
    "arrays": lambda n, s=0.0: Items([(x.numpy(), int(y)) for x, y in pairs(numbered(n, s))]),
    "joined": lambda n, s=0.0: ConcatDataset([numbered(2, s), numbered(n - 2, s + 2)]),
    "stream": lambda n, s=0.0: Stream(pairs(numbered(n, s))),
    "loader": lambda n, s=0.0: DataLoader(numbered(n, s), batch_size=3),
    "loader of a stream": lambda n, s=0.0: DataLoader(Stream(pairs(numbered(n, s))), batch_size=2),
    "list of batches": lambda n, s=0.0: [numbered(n, s)[:3], numbered(n, s)[3:]],
    "generator": lambda n, s=0.0: (numbered(n, s)[k : k + 2] for k in range(0, n, 2)),
}


@pytest.mark.parametrize("keep", ["memory", "disk"])
@pytest.mark.parametrize("name", WAYS)
def test_every_way_gives_the_same_federation(name: str, keep: Any) -> None:
    made = from_datasets([WAYS[name](4), WAYS[name](6, 10.0)], keep=keep)
    expected = Federation.of([numbered(4).tensors, numbered(6, 10.0).tensors])
    assert made.sizes.tolist() == [4, 6] and made.offsets.tolist() == [0, 4, 10]
    assert torch.equal(made.x[made.members], expected.x)
    assert torch.equal(made.y[made.members], expected.y)


def test_the_shortcut_for_tensors_takes_no_item(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = from_datasets([Items(pairs(numbered(9)))])
    monkeypatch.setattr(gather_module, "PIECE", 40)
    monkeypatch.setattr(gather_module, "_put_together", None)
    assert same(from_datasets([numbered(9)]), expected)
    assert same(from_datasets([Subset(numbered(20), range(9))]), expected)
    assert from_datasets([Subset(numbered(5), [-1, 0, 0])]).y.tolist() == [0, 0, 0]


def test_a_dataset_with_its_own_items_is_asked_for_them() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, k: int) -> tuple[Tensor, ...]:
            x, y = super().__getitem__(k)
            return 2 * x, y

    made = from_datasets([Subset(Doubled(*numbered(3).tensors), [2, 1])])
    assert made.x[:, 0].tolist() == [4, 2]


@pytest.mark.parametrize(("most", "piece"), [(2, 10**9), (1000, 9), (1000, 1)])
def test_groups_of_items_change_nothing(
    monkeypatch: pytest.MonkeyPatch, most: int, piece: int
) -> None:
    expected = from_datasets([numbered(7)])
    monkeypatch.setattr(gather_module, "MOST", most)
    monkeypatch.setattr(gather_module, "PIECE", piece)
    assert same(from_datasets([Items(pairs(numbered(7)))]), expected)


@pytest.mark.parametrize(
    ("y", "dtype", "shape"),
    [
        (1, torch.int64, ()),
        (True, torch.int64, ()),
        (1.5, torch.float64, ()),
        (np.float32(1.5), torch.float32, ()),
        (np.uint8(3), torch.int64, ()),
        (torch.tensor(2, dtype=torch.int16), torch.int64, ()),
        (torch.tensor([1.0, 2.0]), torch.float32, (2,)),
    ],
)
def test_targets_may_be_numbers_arrays_or_tensors(y: Any, dtype: Any, shape: Any) -> None:
    made = from_datasets([Items([(torch.zeros(2), y)] * 3)])
    assert made.y.dtype == dtype and made.y.shape == (3, *shape)


def test_read_only_arrays_are_fine() -> None:
    x = np.zeros((3, 2), dtype=np.float32)
    x.flags.writeable = False
    assert from_datasets([Items([(row, 0) for row in x])]).x.shape == (3, 2)
    assert from_datasets([[(x, [0, 1, 2])]]).y.tolist() == [0, 1, 2]


def test_a_loader_that_fills_the_same_memory_again() -> None:
    def batches() -> Any:
        x = torch.zeros(2, 1)
        for k in range(3):
            yield x.fill_(k), torch.tensor([0, 1])

    assert from_datasets([batches()]).x[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_shuffling_loader_and_one_that_drops_the_last_batch() -> None:
    loaders = [DataLoader(numbered(7), batch_size=3, shuffle=s, drop_last=True) for s in (0, 1)]
    made = from_datasets(loaders)
    assert made.sizes.tolist() == [6, 6] and made.client(0)[0][:, 0].tolist() == [*range(6)]


def test_random_split_and_arrival() -> None:
    parts = random_split(numbered(10), [6, 4], generator=torch.Generator().manual_seed(0))
    made = from_datasets(parts, arrival=Arrival(rounds=9))
    assert made.available(0).tolist() == [1, 1] and sorted(made.x[:, 0].tolist()) == [*range(10)]


def test_a_detached_copy_is_kept() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    made = from_datasets([TensorDataset(x, torch.zeros(3))])
    assert not made.x.requires_grad and made.x.data_ptr() != x.data_ptr()


# ---- what is wrong ---------------------------------------------------------------------------
GOOD = (torch.zeros(2), 0)
WRONG = {
    "no pair": (Items([GOOD, torch.zeros(2)]), "client 1, example 1 must be a pair .* got Tensor"),
    "triple": (Items([(1, 2, 3)]), r"client 1, example 0 must be a pair \(x, y\), got tuple of 3"),
    "dictionary": (Items([GOOD, {"x": 0}]), "client 1, example 1 must be a pair .* got dict of 1"),
    "three tensors": (
        TensorDataset(*[torch.zeros(2)] * 3),
        "client 1, example 0 must be a pair .* got tuple of 3",
    ),
    "shapes": (
        Items([GOOD, GOOD, (torch.zeros(3), 0)]),
        r"x of client 1, example 2, is \[3\] float32 but example 0 is \[2\] float32",
    ),
    "types": (
        Items([GOOD, (torch.zeros(2).double(), 0)]),
        r"x of client 1, example 1, is \[2\] float64 but example 0 is \[2\] float32",
    ),
    "types of y": (Items([GOOD, (torch.zeros(2), 0.5)]), "y of client 1, example 1, is .*float64"),
    "another client's shape": (
        TensorDataset(torch.zeros(4, 3), torch.zeros(4).long()),
        r"x of client 1, example 0, is \[3\] float32 on cpu but client 0 begins with \[2\]",
    ),
    "a later batch": (
        [(torch.zeros(4, 2), torch.zeros(4).long()), (torch.zeros(4, 2).double(), [0] * 4)],
        r"x of client 1, example 4, is \[2\] float64",
    ),
    "NaN": (
        Items([GOOD, (torch.tensor([0, math.nan]), 0)]),
        "x of client 1, example 1, holds NaN or infinity",
    ),
    "infinity in a batch": (
        [(torch.zeros(2, 2), [0, 0]), (torch.tensor([[0, 0], [math.inf, 0]]), [0, 0])],
        "x of client 1, example 3, holds NaN or infinity",
    ),
    "empty dataset": (Items([]), "client 1 gave no example"),
    "empty stream": (Stream([]), "client 1 gave no example"),
    "empty loader": (
        DataLoader(numbered(2), batch_size=3, drop_last=True),
        "client 1 gave no example.*drop_last",
    ),
    "failing item": (
        Items([GOOD, KeyError("gone.png")]),
        "client 1, example 1 cannot be read .KeyError: 'gone.png'",
    ),
    "no length": (Dataset(), "client 1, example 0 cannot be read .*len"),
    "failing loader": (
        DataLoader(Items([GOOD, GOOD, OSError("disk")]), batch_size=2),
        "client 1, batch 1 cannot be read .OSError: disk",
    ),
    "loader without batches": (
        DataLoader(numbered(3), batch_size=None),
        "client 1, batch 0 is a single example: give the DataLoader a batch_size",
    ),
    "single examples": ([GOOD], "client 1, batch 0 is a single example.* Dataset"),
    "lengths": (
        [(torch.zeros(3, 2), [0, 0])],
        "client 1, batch 0: x has 3 examples but y has 2",
    ),
    "tensors": (
        (torch.zeros(3, 2), torch.zeros(3)),
        "client 1, batch 0 must be a pair .*`Federation.of` takes tensors",
    ),
    "a tensor": (torch.zeros(3, 2), "client 1 must be a Dataset, .* got Tensor; `Federation.of`"),
    "a number": (5, "client 1 must be a Dataset, a DataLoader or an iterable .* got int"),
    "strings": (Items([("cat.png", 0)]), "x of client 1, example 0 is a str: turn it into one"),
    "a list": (Items([([1.0, 2.0], 0)]), "x of client 1, example 0 is a list: turn it into one"),
    "objects": (Items([(object(), 0)]), "x of client 1, example 0 cannot be made a tensor"),
    "array of text": (Items([(np.array(["a"]), 0)]), "x of client 1, example 0 cannot be made"),
    "far subset": (
        Subset(numbered(3), [0, 3]),
        "client 1: a Subset asks for example 3 of a dataset that has 3",
    ),
}


@pytest.mark.parametrize("keep", ["memory", "disk"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, keep: Any, tmp_path: Any) -> None:
    client, message = WRONG[name]
    with pytest.raises(DataError, match=message):
        from_datasets([numbered(3), client], keep=keep, folder=tmp_path)
    assert not list(tmp_path.iterdir())  # nothing half written stays


def test_the_dataset_s_own_error_is_chained() -> None:
    with pytest.raises(DataError) as caught:
        from_datasets([Items([KeyError("gone.png")])])
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("clients", [numbered(3), DataLoader(numbered(3)), {0: numbered(3)}, 5])
def test_clients_are_a_list(clients: Any) -> None:
    with pytest.raises(DataError, match="clients are given as a list"):
        from_datasets(clients)
    with pytest.raises(DataError, match="at least one client"):
        from_datasets([])
