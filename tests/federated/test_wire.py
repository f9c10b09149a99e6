"""Bytes are read strictly: lengths, tables, names, places, and the words in front."""

import json

import pytest
import torch

from undrift.core.tree import EMPTY
from undrift.federated.letters import Down, DownOwn, Up, read_words, words
from undrift.federated.wire import (
    MARK,
    SLACK,
    Form,
    Leaf,
    Malformed,
    as_leaf,
    pack,
    unpack,
    words_of,
)

FORM = Form({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.float64)})
GOOD = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.float64)}


def parts_of(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_parts(table, body):
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + body


def refused(data, form=FORM):
    with pytest.raises(Malformed) as found:
        unpack(data, form)
    return str(found.value)


def test_what_is_written_is_read_and_nobody_shares_its_memory():
    data = pack(GOOD, {"round": 3})
    about, tree = unpack(data, FORM)
    assert about == {"round": 3} == words_of(data)
    assert all(torch.equal(tree[n], GOOD[n]) and tree[n].dtype == GOOD[n].dtype for n in GOOD)
    tree["a"].zero_()
    assert torch.equal(unpack(data, FORM)[1]["a"], GOOD["a"])


def test_a_message_is_plain_safetensors():
    from safetensors.torch import load

    found = load(pack(GOOD, {}))
    assert all(torch.equal(found[n], GOOD[n]) for n in GOOD)
    table, _ = parts_of(pack(GOOD, {}))
    assert table["b"]["data_offsets"][0] == 0  # wide types first: all are aligned
    assert len(json.dumps(table)) and (len(pack(EMPTY, {})) - 8) % 8 == 0


def test_views_of_all_kinds_are_written_as_they_look():
    form = Form({"v": torch.zeros(3, 2)})
    view = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(unpack(pack({"v": view}, {}), form)[1]["v"], view)
    one = Form({"v": torch.zeros(1)})
    assert unpack(pack({"v": torch.arange(9.0)[4::7]}, {}), one)[1]["v"].tolist() == [4.0]
    alone = Form(torch.zeros(2))
    assert unpack(pack(torch.ones(2), {}), alone)[1].tolist() == [1.0, 1.0]
    none = Form({"v": torch.zeros(0, 5)})
    assert unpack(pack({"v": torch.zeros(0, 5)}, {}), none)[1]["v"].shape == (0, 5)


def test_numbers_keep_their_value():
    assert as_leaf(0.1).dtype == torch.float64 and as_leaf(3).dtype == torch.int64
    assert not as_leaf(torch.ones(1, requires_grad=True)).requires_grad


def test_forms_count_their_bytes():
    assert Leaf("F32", (2, 3)).num_bytes == 24 and FORM.num_bytes == 24 + 32
    table = len(pack(GOOD, {})) - FORM.num_bytes
    assert FORM.most_words == int(1.1 * table) + SLACK
    assert FORM.most_bytes == int(1.1 * (table + FORM.num_bytes)) + SLACK
    zeros = FORM.zeros(5, 2)
    assert zeros["a"].shape == (5, 2, 2, 3) and not zeros["b"].any()


def padded(form, tree, length):
    """A message of exactly this many bytes, by a word that grows."""
    start = max(0, length - len(pack(tree, {"w": ""})) - 8)
    for count in range(start, length):
        data = pack(tree, {"w": "x" * count})
        if len(data) >= length:
            return data
    raise AssertionError


def test_length_and_table_may_be_as_long_as_declared_and_no_longer():
    form, tree = Form({"w": torch.zeros(1000)}), {"w": torch.ones(1000)}
    most = form.most_words // 8 * 8  # tables come in eights
    data = padded(form, tree, 8 + most + form.num_bytes)
    assert int.from_bytes(data[:8], "little") == most
    assert unpack(data, form)[0]["w"]
    assert "a table of" in refused(padded(form, tree, len(data) + 8), form)
    assert "bytes where at most" in refused(bytes(FORM.most_bytes + 1))
    assert "bytes where at most" not in refused(bytes(FORM.most_bytes))
    short = padded(Form(EMPTY), EMPTY, 64 * SLACK + 8)
    assert words_of(short)["w"]
    with pytest.raises(Malformed, match="a table of"):
        words_of(padded(Form(EMPTY), EMPTY, len(short) + 8))


@pytest.mark.parametrize("length", [0, 1, 7])
def test_fewer_bytes_than_a_length_takes_are_no_message(length):
    assert "are no message" in refused(b"\0" * length)


def test_what_is_cut_off_is_refused_wherever_it_is():
    data = pack(GOOD, {"round": 1})
    for end in range(len(data)):
        refused(data[:end])
    refused(data + b"\0")
    length = int.from_bytes(data[:8], "little")
    assert "makes no sense" in refused((8).to_bytes(8, "little") + b"\0" * 8)
    assert "cut off" in refused((length + 1).to_bytes(8, "little") + data[8 : 8 + length])


def test_tables_that_make_no_sense():
    table, body = parts_of(pack(GOOD, {}))
    for words_given in ("[]", "1", '{"a": 1, "a": 2}', '{"a": NaN}', "{", '{"a": Infinity}'):
        told = with_parts({**table, "__metadata__": {MARK: words_given}}, body)
        assert "makes no sense" in refused(told)
    assert "makes no sense" in refused(with_parts({**table, "__metadata__": {}}, body))
    assert "makes no sense" in refused(with_parts([table], body))


def test_names_must_be_those_that_are_expected():
    table, body = parts_of(pack(GOOD, {}))
    assert "'a' missing" in refused(pack({"b": GOOD["b"]}, {}))
    more = {f"n{i}": torch.zeros(0) for i in range(5)}
    told = refused(pack({**GOOD, **more}, {}))
    assert "'n0', 'n1', 'n2' and 2 more nobody asked for" in told
    three = {n: more[n] for n in ("n0", "n1", "n2")}
    assert "more" not in refused(pack({**GOOD, **three}, {}))
    assert "'a' is not described" in refused(with_parts({**table, "a": 3}, body))
    assert "'a' is not described" in refused(with_parts({**table, "a": {"dtype": "F32"}}, body))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F64"},
        {"dtype": ["F32"]},
        {"shape": [3, 2]},
        {"shape": [6]},
        {"shape": [1, 3]},
        {"shape": [2, 3, 1]},
        {"shape": [2, 3.0]},
        {"shape": [True, 3]},
        {"shape": "23"},
        {"shape": None},
        {"data_offsets": "ab"},
        {"data_offsets": [32]},
        {"data_offsets": [32, 56, 56]},
        {"data_offsets": [-24, 0]},
        {"data_offsets": [32, 57]},
        {"data_offsets": [33, 57]},
        {"data_offsets": [31, 55]},
        {"data_offsets": [0, 24]},
        {"data_offsets": [32.0, 56.0]},
        {"data_offsets": [10**30, 10**30 + 24]},
    ],
)
def test_a_tensor_is_of_its_type_and_shape_and_in_its_place(entry):
    table, body = parts_of(pack(GOOD, {}))
    assert table["a"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [32, 56]}
    told = refused(with_parts({**table, "a": {**table["a"], **entry}}, body))
    assert "'a'" in told or "'b'" in told


def test_gaps_and_remainders_are_refused():
    table, body = parts_of(pack(GOOD, {}))
    later = {**table, "a": {**table["a"], "data_offsets": [40, 64]}}
    assert "starts at byte 40 instead of 32" in refused(with_parts(later, body[:32] + b"\0" * 32))
    assert "64 bytes of tensors where 56" in refused(with_parts(table, body + b"\0" * 8))


def test_a_truth_value_is_true_or_false():
    form = Form({"t": torch.zeros(3, dtype=torch.bool)})
    data = pack({"t": torch.tensor([True, False, True])}, {})
    assert unpack(data, form)[1]["t"].tolist() == [True, False, True]
    assert "neither" in refused(data[:-1] + b"\2", form)


# ---- words ---------------------------------------------------------------------------------------
def test_words_are_exactly_those_of_their_kind():
    up = Up("train", "r", 1, 2)
    assert read_words(Up, words(up)) == up
    down = DownOwn("hello", "r", 0, -1, "")
    assert read_words(DownOwn, words(down)) == down
    with pytest.raises(Malformed, match="its words are"):
        read_words(Down, words(up))
    with pytest.raises(Malformed, match="its words are"):
        read_words(Up, {**words(up), "more": 1})
    for name, value in (("round", True), ("round", 1.0), ("client", "2"), ("run", 3)):
        with pytest.raises(Malformed, match=f"{name} is"):
            read_words(Up, {**words(up), name: value})
    with pytest.raises(Malformed, match="none of hello, sums, prepare, probe"):
        read_words(Up, {**words(up), "phase": "dance"})
