"""What a node keeps on its disk, file by file."""

import os
import stat

import pytest
import torch

from undrift.errors import CheckpointError, ConfigError, CorruptCheckpoint, FederationError
from undrift.federated.shelf import KEEP, Shelf, mark_of
from undrift.federated.wire import Form
from undrift.state.disk import TEMPORARY

RUN, FORM = "0123456789abcdef" * 2, Form({"c": torch.zeros(2)})


def state(value):
    return {"c": torch.full((2,), float(value))}


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path, RUN)


def damage(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_mark_is_half_of_a_sha256():
    assert mark_of(b"abc") == "ba7816bf8f01cfea414140de5dae2223"


@pytest.mark.parametrize("run", ["", RUN[:-1], RUN + "0", RUN.upper(), RUN[:-1] + "/", "../" + RUN])
def test_a_run_is_named_by_32_plain_letters(run, tmp_path):
    with pytest.raises(ConfigError, match="does not name a run"):
        Shelf(tmp_path, run)


def test_a_state_is_found_by_its_report(shelf):
    marks = [mark_of(bytes([i])) for i in range(3)]
    for round, mark in enumerate(marks):
        shelf.keep_state(round, mark, state(round), "")
    for round, mark in enumerate(marks):
        assert shelf.state(mark, FORM)["c"].tolist() == [round, round]
    with pytest.raises(FederationError, match="is not on this node"):
        shelf.state(mark_of(b"other"), FORM)
    with pytest.raises(FederationError, match="is not on this node"):
        Shelf(shelf.path.parent, "f" * 32).state(marks[0], FORM)


def test_the_oldest_go_first_by_round_and_not_by_name(shelf):
    marks = [mark_of(bytes([i])) for i in range(9)]
    rounds = [100_000_000 + i if i else 5 for i in range(9)]  # nine digits stand before eight
    for round, mark in zip(rounds, marks, strict=True):
        shelf.keep_state(round, mark, state(round), "")
    left = {p.name.split("-")[2] for p in shelf.path.iterdir()}
    assert left == set(marks[-KEEP - 1 :])


def test_the_state_that_counts_and_the_new_one_are_spared(shelf):
    marks = [mark_of(bytes([i])) for i in range(8)]
    for round, mark in enumerate(marks):
        shelf.keep_state(round, mark, state(round), marks[0])
    left = {p.name.split("-")[2] for p in shelf.path.iterdir()}
    assert left == {marks[0], marks[-1], *marks[-KEEP - 1 : -1]}


def test_other_files_are_no_states(shelf):
    mark = mark_of(b"a")
    shelf.keep_state(1, mark, state(1), "")
    (shelf.path / f"state-00000002-{mark}x").write_bytes(b"")
    (shelf.path / f"state-2-{mark}").write_bytes(b"")
    assert shelf.state(mark, FORM)["c"].tolist() == [1, 1]


@pytest.mark.parametrize("at", [0, 31, 32, -1])
def test_a_damaged_state_is_never_read(at, shelf):
    mark = mark_of(b"a")
    shelf.keep_state(1, mark, state(1), "")
    [path] = shelf.path.iterdir()
    damage(path, at)
    with pytest.raises(CorruptCheckpoint, match="is corrupt"):
        shelf.state(mark, FORM)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CorruptCheckpoint):
        shelf.state(mark, FORM)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        shelf.state(mark, FORM)


def test_a_state_of_another_kind_is_refused(shelf):
    mark = mark_of(b"a")
    shelf.keep_state(1, mark, {"d": torch.zeros(3)}, "")
    with pytest.raises(CorruptCheckpoint, match="another kind of state"):
        shelf.state(mark, FORM)


def test_an_answer_is_given_again_to_the_same_question_alone(shelf):
    asked, other = mark_of(b"1"), mark_of(b"2")
    assert shelf.answer("train", asked) is None
    shelf.keep_answer("train", asked, b"answer")
    assert shelf.answer("train", asked) == b"answer"
    assert shelf.answer("train", other) is None and shelf.answer("look", asked) is None
    damage(shelf.path / "answer-train")
    assert shelf.answer("train", asked) is None  # it is made again
    with pytest.raises(AssertionError):
        shelf.keep_answer("hello", asked, b"")


def test_an_own_probe_is_that_of_one_model(shelf):
    assert shelf.probe("m", FORM) is None
    shelf.keep_probe("m", state(4))
    assert shelf.probe("m", FORM)["c"].tolist() == [4, 4]
    assert shelf.probe("n", FORM) is None
    assert shelf.probe("m", Form({"d": torch.zeros(1)})) is None
    damage(shelf.path / "own-probe")
    assert shelf.probe("m", FORM) is None


def test_what_a_client_keeps_is_its_owners_alone(shelf):
    """States and answers tell about the examples."""
    before = os.umask(0)
    try:
        shelf.keep_state(1, mark_of(b"a"), state(1), "")
        shelf.keep_answer("train", mark_of(b"1"), b"answer")
        shelf.keep_probe("m", state(4))
    finally:
        os.umask(before)
    assert stat.S_IMODE(shelf.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in shelf.path.iterdir()} == {0o600}


def test_what_a_killed_process_left_half_written_is_swept(shelf):
    shelf.keep_answer("train", mark_of(b"1"), b"answer")
    left = shelf.path / f"{TEMPORARY}4194305-half"
    left.write_bytes(b"half")
    shelf.keep_answer("look", mark_of(b"1"), b"answer")
    assert not left.exists()
