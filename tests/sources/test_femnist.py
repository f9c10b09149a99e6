"""FEMNIST by writer, from LEAF's json files."""

import json

import numpy as np
import pytest
import torch

from undrift import sources
from undrift.errors import ConfigError, DataError

from . import people

COUNTS = (10, 20, 5, 1, 12, 8)
WRITERS = people.writers(COUNTS)
NAMES = sorted(WRITERS)


@pytest.fixture
def whole(tmp_path):
    """Two files that are not split."""
    half = len(NAMES) // 2
    people.leaf(
        tmp_path / "femnist/all_data/all_data_0.json", {n: WRITERS[n] for n in NAMES[:half]}
    )
    people.leaf(
        tmp_path / "femnist/all_data/all_data_1.json", {n: WRITERS[n] for n in NAMES[half:]}
    )
    return tmp_path


def load(folder, **settings):
    return sources.load("femnist", directory=folder, **settings)


def test_clients_are_writers_and_everybody_is_tested_on_own_pictures(whole):
    made = load(whole, normalise="unit")
    assert made.info.client_names == tuple(NAMES) and made.classes == 62
    assert torch.bincount(made.train_clients).tolist() == [9, 18, 4, 1, 11, 7]
    assert torch.bincount(made.test_clients, minlength=6).tolist() == [1, 2, 1, 0, 1, 1]
    assert made.train_x.shape == (50, 1, 28, 28) and made.train_x.dtype == torch.float32
    own = {tuple(row) for row in np.float32(WRITERS[NAMES[1]][0]).tolist()}
    seen = [made.train_x[made.train_clients == 1], made.test_x[made.test_clients == 1]]
    assert {tuple(row.flatten().tolist()) for rows in seen for row in rows} == own
    assert made.info.form == "LEAF json" and made.info.class_names[10] == "A"


def test_labels_stay_with_their_pictures(whole):
    made = load(whole, normalise="unit", test_share=0)
    rows = np.concatenate([np.float32(WRITERS[n][0]) for n in NAMES])
    assert np.array_equal(made.train_x.flatten(1).numpy(), rows) and not len(made.test_x)
    assert made.train_y.tolist() == [label for n in NAMES for label in WRITERS[n][1]]


def test_some_writers_by_luck_of_the_seed(whole):
    drawn = [load(whole, writers=3, seed=seed).info.client_names for seed in range(12)]
    assert all(len(names) == 3 and list(names) == sorted(names) for names in drawn)
    assert len(set(drawn)) > 3 and {n for names in drawn for n in names} == set(NAMES)
    assert drawn[0] == load(whole, writers=3, seed=0).info.client_names
    # a larger draw holds the smaller one
    assert set(drawn[0]) < set(load(whole, writers=5, seed=0).info.client_names)
    assert len(load(whole, writers=100).info.client_names) == 6


def test_writers_with_few_pictures_are_left_out(whole):
    assert load(whole, min_examples=8).info.client_names == tuple(
        n for n in NAMES if len(WRITERS[n][0]) >= 8
    )
    with pytest.raises(DataError, match=r"nobody in .*all_data has 99 examples or more: lower"):
        load(whole, min_examples=99)


def test_files_that_are_split_keep_their_split(tmp_path):
    sides = {"train": slice(0, -2), "test": slice(-2, None)}
    for side, rows in sides.items():
        some = {n: (x[rows], y[rows]) for n, (x, y) in WRITERS.items() if len(y) > 2}
        people.leaf(tmp_path / f"femnist/data/{side}/all_data_{side}_9.json", some)
    made = load(tmp_path, normalise="unit", test_share=0.5)
    assert torch.bincount(made.test_clients).tolist() == [2] * 5
    assert torch.bincount(made.train_clients).tolist() == [8, 18, 3, 10, 6]
    last = np.float32(WRITERS[NAMES[0]][0][-2:])
    assert np.array_equal(made.test_x[:2].flatten(1).numpy(), last)
    assert made.info.form == "LEAF json, split"


def test_half_a_split_and_a_split_by_user_are_named(tmp_path):
    first, second = {NAMES[0]: WRITERS[NAMES[0]]}, {NAMES[1]: WRITERS[NAMES[1]]}
    people.leaf(tmp_path / "femnist/train/a.json", first)
    with pytest.raises(DataError, match=r"femnist is incomplete.*femnist/test/\*.json"):
        load(tmp_path)
    assert state(tmp_path) == "incomplete"
    people.leaf(tmp_path / "femnist/test/a.json", second)
    with pytest.raises(DataError, match="nobody can be tested: split by sample"):
        load(tmp_path)


def state(folder):
    return next(a.state for a in sources.available(folder) if a.name == "femnist")


def test_normalisations(whole):
    unit, half, default = (load(whole, normalise=n) for n in ("unit", "half", "default"))
    assert torch.allclose(half.train_x, unit.train_x * 2 - 1, atol=1e-6)
    assert torch.equal(default.train_x, half.train_x) and default.info.mean == (0.5,)
    own = load(whole, normalise="train")
    assert own.train_x.mean().abs() < 1e-5 and own.train_x.std().item() == pytest.approx(1, 1e-3)
    with pytest.raises(ConfigError, match=r"no normalisation named 'haf'. Did you mean 'half'"):
        load(whole, normalise="haf")


def test_missing_files_say_where_they_come_from(tmp_path):
    with pytest.raises(DataError, match=r"femnist is not in .*LEAF.*femnist/train/\*.json"):
        load(tmp_path)
    with pytest.raises(DataError, match=r"femnist is not in .*LEAF"):
        sources.get("femnist", directory=tmp_path)
    assert state(tmp_path) == "missing"


def test_get_verifies_what_is_there(whole):
    seen = []
    path = sources.get("femnist", lambda *step: seen.append(step), whole)
    assert path == whole / "femnist/all_data" and seen[0][0] == "femnist: verifying"
    assert state(whole) == "found"


def broken(change):
    made = {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[0.5] * 784] * 2}}}
    made["user_data"]["a"]["y"] = [0, 61]
    change(made, made["user_data"]["a"])
    return json.dumps(made)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no complete json file"),
        ("[1]", "no file of LEAF"),
        (broken(lambda m, a: m.pop("num_samples")), "no file of LEAF"),
        (broken(lambda m, a: m.update(num_samples=[3])), "lists x and y of 3 examples"),
        (broken(lambda m, a: m.update(users=["a", "b"])), "lists of the same length"),
        (broken(lambda m, a: m.update(users=["b"])), "user_data of 'b'"),
        (broken(lambda m, a: a.update(y=[0, 62])), "'a': y should hold class numbers below 62"),
        (broken(lambda m, a: a.update(x=[[0.5] * 784, [1]])), "user 'a'"),
        (broken(lambda m, a: a.update(x=[[0.5] * 783] * 2)), "rows of 784 numbers"),
        (broken(lambda m, a: a.update(x=[[1.5] * 784] * 2)), r"numbers in \[0, 1\]"),
        (broken(lambda m, a: a.update(x=[["k"] * 784] * 2)), "user 'a'"),
    ],
)
def test_broken_files_are_named(text, message, tmp_path):
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist/all_data_0.json").write_text(text)
    with pytest.raises(DataError, match=rf"all_data_0.json.*{message}"):
        load(tmp_path)


def test_a_writer_in_two_files_is_refused(tmp_path):
    for side in ("train", "test"):
        people.leaf(tmp_path / f"femnist/a_{side}.json", {"w": WRITERS[NAMES[0]]})
    with pytest.raises(DataError, match=r"'w' is in .*a_test.json and in .*a_train.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"writers": 0}, "writers must be at least 1"),
        ({"min_examples": 0}, "min_examples must be at least 1"),
        ({"test_share": 1}, "test_share must be a number in"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"users": 3}, "sources.femnist: no setting named 'users'"),
    ],
)
def test_mistakes_are_named(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **settings)
