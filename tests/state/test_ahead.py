"""Rows that are read before they are asked for."""

import threading

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.errors import CorruptCheckpoint
from undrift.state.store import ClientStateStore
from undrift.testing.world import numbers


@pytest.fixture(params=["host", "file"])
def store(request, tmp_path):
    path = tmp_path / "rows" if request.param == "file" else None
    made = ClientStateStore(
        {"c": torch.zeros(3), "n": 0.0},
        dtype=torch.float64,
        place=request.param,
        path=path,
        reads_ahead=True,
    )
    # as if a device trained: rows do not lie where they are wanted
    made._beside = lambda given, count: (None, [])
    put(made, range(6), 1.0)
    yield made
    made.close()


def put(store, ids, value):
    ids = list(ids)
    rows = torch.tensor([[value * (i + 1)] for i in ids])
    store.stage(ids, {"c": rows.expand(-1, 3), "n": rows[:, 0].double()})
    store.commit()


def reads(store, monkeypatch):
    """List whose rows the tier reads."""
    seen, original = [], store.tier.read

    def read(ids, entries):
        seen.append((list(ids), threading.current_thread() is threading.main_thread()))
        return original(ids, entries)

    monkeypatch.setattr(store.tier, "read", read)
    return seen


def firsts(store, ids):
    return store.gather(ids)["n"].tolist()


def test_they_are_read_by_another_thread_and_once(store, monkeypatch):
    seen = reads(store, monkeypatch)
    store.prefetch([4, 2, 9])
    assert firsts(store, [4, 2, 9]) == [5.0, 3.0, 0.0]
    assert seen == [([4, 2, 9], False)]


def test_some_of_them_in_another_order_and_twice(store, monkeypatch):
    seen = reads(store, monkeypatch)
    store.prefetch([4, 2, 9, 0])
    assert firsts(store, [0, 4]) == [1.0, 5.0]
    assert firsts(store, [2, 2, 9, 0]) == [3.0, 3.0, 0.0, 1.0]
    assert len(seen) == 1


def test_who_got_a_new_state_in_between_is_read_again(store, monkeypatch):
    store.prefetch([0, 1, 2, 7])
    put(store, [1, 7], 10.0)
    seen = reads(store, monkeypatch)
    assert firsts(store, [0, 1, 2, 7]) == [1.0, 20.0, 3.0, 80.0]
    assert seen == [([1, 7], True)]


def test_others_are_read_as_ever(store, monkeypatch):
    store.prefetch([0, 1])
    seen = reads(store, monkeypatch)
    assert firsts(store, [0, 5]) == [1.0, 6.0]
    assert seen == [([0, 5], True)]
    tensors, meta = store.snapshot()
    store.restore(tensors, meta)
    assert firsts(store, [0, 1]) == [1.0, 2.0] and len(seen) == 2


def test_what_cannot_be_read_is_told_to_who_asks(store, monkeypatch):
    original = store.tier.read

    def read(ids, entries):
        if 3 in ids:
            raise CorruptCheckpoint("row 3")
        return original(ids, entries)

    monkeypatch.setattr(store.tier, "read", read)
    store.prefetch([0, 3])
    assert firsts(store, [0]) == [1.0]
    with pytest.raises(CorruptCheckpoint, match="row 3"):
        store.gather([3, 0])


@pytest.mark.parametrize("place", ["host", "file"])
@pytest.mark.parametrize("sampler", [fl.Uniform(4), fl.Explicit([[0, 1, 2], [2, 3, 1], [0, 3, 2]])])
def test_a_run_is_the_same(tmp_path, monkeypatch, place, sampler):
    maker = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(8, 4, generator=maker), torch.randint(0, 2, (8,), generator=maker))
        for _ in range(6)
    ]
    found, begun = [], []
    for ahead in (False, True):
        torch.manual_seed(0)
        path = tmp_path / str(ahead) if place == "file" else None
        trainer = fl.Trainer(
            fl.Task(nn.Linear(4, 2), dtype=torch.float64), fl.Federation.of(data),
            fl.scaffold(0.1), sampler=sampler, work=fl.Work(steps=2, batch=4), state=place,
            state_path=path,
        )  # fmt: skip
        trainer.store.reads_ahead = ahead
        if ahead:
            monkeypatch.setattr(trainer.store, "_beside", lambda given, count: (None, []))
            original = trainer.store._ahead.begin
            monkeypatch.setattr(
                trainer.store._ahead, "begin", lambda *a, o=original: begun.append(o(*a))
            )
        trainer.run(3)
        found.append(numbers(trainer))
        trainer.store.close()
    assert found[0].keys() == found[1].keys() and len(begun) >= 2
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
