"""The row file beside the checkpoints: nothing the user may do quietly destroys what they need."""

from __future__ import annotations

import pytest

from undrift.data import Everyone
from undrift.errors import CheckpointError, CorruptCheckpoint
from undrift.state import disk
from undrift.state.checkpoint import CheckpointFolder

from .tiny import assert_same_bits, everything, stored, train, trainer


def on_file(place):
    return trainer(sampler=Everyone(), **stored("file", place))


@pytest.mark.xfail(
    strict=True,
    raises=CorruptCheckpoint,
    reason="a new trainer writes into slots that old checkpoints need",
)
def test_a_run_begun_anew_by_mistake_leaves_the_old_checkpoints_whole(tmp_path):
    before = everything(train(on_file(tmp_path), tmp_path / "run", 2))
    forgetful = on_file(tmp_path)
    with pytest.raises(CheckpointError):
        forgetful.run(4)  # load() was forgotten
        forgetful.save(tmp_path / "run")
    again = on_file(tmp_path)
    again.load(tmp_path / "run")
    assert_same_bits(everything(again), before)


@pytest.mark.xfail(
    strict=True, raises=CorruptCheckpoint, reason="Trainer._keep mixes the rounds of all folders"
)
def test_two_folders_may_be_saved_to_in_turn(tmp_path):
    run = on_file(tmp_path)
    run.round()
    run.save(tmp_path / "seldom")
    before = everything(run)
    train(run, tmp_path / "often", 6)
    again = on_file(tmp_path)
    again.load(tmp_path / "seldom")
    assert_same_bits(everything(again), before)


@pytest.mark.xfail(
    strict=True,
    raises=CorruptCheckpoint,
    reason="Trainer.save skips _keep although the file is there",
)
def test_a_checkpoint_whose_folder_could_not_be_synced_is_still_whole(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error")

    run = train(on_file(tmp_path), tmp_path / "run", 2)
    run.round()
    before = everything(run)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "fsync_directory", fail)
        with pytest.raises(CheckpointError, match="may not survive"):
            run.save(tmp_path / "run")
    run.run(2)  # and then the process ends
    again = on_file(tmp_path)
    again.load(tmp_path / "run")
    assert again.rounds_done == 3
    assert_same_bits(everything(again), before)


TOO_MANY = pytest.mark.xfail(
    strict=True, raises=CheckpointError, reason="Trainer always asks for 4 slots"
)


@pytest.mark.parametrize("keep", [1, 2, *(pytest.param(k, marks=TOO_MANY) for k in (3, 4))])
def test_any_number_of_checkpoints_may_be_kept(tmp_path, keep):
    run, folder = on_file(tmp_path), CheckpointFolder(tmp_path / "run", keep=keep)
    for _ in range(keep + 2):
        run.run(2)
        run.save(folder)
    again = on_file(tmp_path)
    again.load(tmp_path / "run")
    assert_same_bits(everything(again), everything(run))


@pytest.mark.xfail(
    strict=True, raises=CorruptCheckpoint, reason="Trainer._keep mixes the rounds of all folders"
)
def test_going_back_to_an_older_folder_keeps_its_rows(tmp_path):
    old = everything(train(on_file(tmp_path), tmp_path / "old", 2))
    run = on_file(tmp_path)
    run.load(tmp_path / "old")
    train(run, tmp_path / "new", 6)
    run.load(tmp_path / "old")
    run.run(3)
    again = on_file(tmp_path)
    again.load(tmp_path / "old")
    assert_same_bits(everything(again), old)


@pytest.mark.xfail(
    strict=True, raises=pytest.fail.Exception, reason="rows are checked only when they are read"
)
def test_a_file_whose_rows_are_damaged_is_not_loaded(tmp_path):
    train(on_file(tmp_path), tmp_path / "run", 3)
    rows = bytearray((tmp_path / "rows").read_bytes())
    (tmp_path / "rows").write_bytes(bytes(b ^ 1 for b in rows))
    with pytest.raises(CheckpointError):
        on_file(tmp_path).load(tmp_path / "run")
