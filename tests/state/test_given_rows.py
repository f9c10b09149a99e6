"""States are read straight into given rows, and written straight from them."""

from __future__ import annotations

import pytest
import torch
from states import PLACES, digest, make, some_states

from undrift.core.tree import tree_map
from undrift.errors import DataError
from undrift.state.packing import Packing
from undrift.state.store import ClientStateStore


def rows_of(buffer, part):
    return tree_map(lambda v: None if v is None else v[part], buffer)


def other_layouts(states):
    """The same numbers: as they are, in rows that are further apart, and with turned axes."""

    def apart(v):
        if v is None:
            return None
        flat = torch.zeros(len(v), v[0].numel() + 3, dtype=v.dtype)[:, 1 : 1 + v[0].numel()]
        return flat.view(v.shape).copy_(v)

    def turned(v):
        return None if v is None else v.mT.contiguous().mT if v.dim() == 3 else v

    return [states, *(tree_map(change, states) for change in (apart, turned))]


@pytest.mark.parametrize("layout", range(3))
def test_states_are_read_into_given_rows_and_into_no_others(store, layout):
    store.stage([4, 2], some_states([4, 2], 1))
    store.commit()
    buffer = other_layouts(some_states(range(6), 2))[layout]
    before = [digest(buffer, i) for i in range(6)]
    out = rows_of(buffer, slice(1, 4))
    assert store.gather([2, 9, 4], out=out) is out
    wanted = store.gather([2, 9, 4])
    after = [digest(buffer, i) for i in range(6)]
    assert after == [before[0], *(digest(wanted, i) for i in range(3)), *before[4:]]
    assert after[1:4] != before[1:4]


def test_states_may_stand_in_several_rows(store):
    store.stage([4], some_states([4], 1))
    store.commit()
    got = store.gather([4, 4], out=some_states([0, 1], 5))
    assert digest(got, 0) == digest(got, 1) == digest(some_states([4], 1), 0)


def test_rows_of_another_shape_are_refused(store):
    with pytest.raises(DataError, match="expected"):
        store.gather([1, 2], out=some_states([1, 2, 3], 1))
    with pytest.raises(DataError, match="structure"):
        store.gather([1], out={"m": torch.zeros(1)})


@pytest.mark.parametrize("layout", range(3))
def test_staged_states_may_change_afterwards(store, layout):
    states = other_layouts(some_states([3, 5], 1))[layout]
    wanted = [digest(states, i) for i in range(2)]
    store.stage([3, 5], states)
    tree_map(lambda v: None if v is None else v.zero_(), states)
    store.commit()
    got = store.gather([3, 5])
    assert [digest(got, i) for i in range(2)] == wanted


@pytest.mark.parametrize("place", ["device", "host"])
def test_states_beside_the_table_are_copied_once(tmp_path, monkeypatch, place):
    def refuse(*_):
        raise AssertionError("a copy in between")

    store = make(place, tmp_path)
    for name in ("pack", "unpack_into"):
        monkeypatch.setattr(Packing, name, refuse)
    store.stage([3], some_states([3], 1))
    store.commit()
    assert digest(store.gather([3]), 0) == digest(some_states([3], 1), 0)


def test_equal_states_are_equal_rows_whatever_lay_there_before():
    like, tables = {"c": torch.zeros(3), "d": torch.zeros(5, dtype=torch.bool)}, []
    for salt in (0, 7):
        store = ClientStateStore(like, dtype=torch.float32)
        store._tier._table[1:].fill_(salt)
        store.stage([1], {"c": torch.ones(1, 3), "d": torch.ones(1, 5, dtype=torch.bool)})
        store.commit()
        tables.append(store.snapshot()[0]["rows"])
    assert torch.equal(*tables)


def test_what_the_template_was_made_of_may_change(tmp_path):
    for place in PLACES:
        like = torch.zeros(4)
        store = make(place, tmp_path, like={"c": like})
        like.fill_(3)
        assert not store.gather([1])["c"].any()
