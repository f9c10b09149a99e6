"""The row file beside the checkpoints: nothing the user may do quietly destroys what they need."""

from __future__ import annotations

import pytest

from undrift.data import Everyone
from undrift.errors import CheckpointError
from undrift.state import disk
from undrift.state.checkpoint import CheckpointFolder

from .tiny import assert_same_bits, everything, stored, train, trainer


def on_file(place):
    return trainer(sampler=Everyone(), **stored("file", place))


def test_a_run_begun_anew_by_mistake_leaves_the_old_checkpoints_whole(tmp_path):
    before = everything(train(on_file(tmp_path), tmp_path / "run", 2))
    forgetful = on_file(tmp_path)
    with pytest.raises(CheckpointError):
        forgetful.run(4)  # load() was forgotten
        forgetful.save(tmp_path / "run")
    again = on_file(tmp_path)
    again.load(tmp_path / "run")
    assert_same_bits(everything(again), before)


def test_a_row_file_serves_one_folder(tmp_path):
    run = on_file(tmp_path)
    run.round()
    run.save(tmp_path / "one")
    before = everything(run)
    with pytest.raises(CheckpointError, match="'one'"):
        run.save(tmp_path / "other")
    with pytest.raises(CheckpointError, match="'one'"):
        on_file(tmp_path).load(tmp_path / "other")
    again = on_file(tmp_path)
    again.load(tmp_path / "one")
    assert_same_bits(everything(again), before)


def test_a_run_that_is_moved_with_its_rows_goes_on(tmp_path):
    (tmp_path / "here").mkdir()
    before = everything(train(on_file(tmp_path / "here"), tmp_path / "here" / "run", 2))
    (tmp_path / "here").rename(tmp_path / "there")
    again = on_file(tmp_path / "there")
    assert again.load(tmp_path / "there" / "run")
    assert_same_bits(everything(again), before)


def test_a_run_that_died_before_its_first_checkpoint_starts_over(tmp_path):
    on_file(tmp_path).run(2)
    again = on_file(tmp_path)
    assert not again.load(tmp_path / "run")
    fresh = trainer(sampler=Everyone())
    assert_same_bits(everything(train(again, tmp_path / "run", 3)), everything(run_of(fresh, 3)))


def run_of(trainer, rounds):
    trainer.run(rounds)
    return trainer


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


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_any_number_of_checkpoints_may_be_kept(tmp_path, keep):
    run, folder = on_file(tmp_path), CheckpointFolder(tmp_path / "run", keep=keep)
    for _ in range(keep + 2):
        run.run(2)
        run.save(folder)
    again = on_file(tmp_path)
    again.load(tmp_path / "run")
    assert_same_bits(everything(again), everything(run))


def test_loading_again_after_going_further_keeps_the_rows(tmp_path):
    run = on_file(tmp_path)
    old = everything(train(run, tmp_path / "run", 2))
    run.run(3)
    run.load(tmp_path / "run")
    run.run(3)
    again = on_file(tmp_path)
    again.load(tmp_path / "run")
    assert_same_bits(everything(again), old)


def test_a_file_whose_rows_are_damaged_is_not_loaded(tmp_path):
    train(on_file(tmp_path), tmp_path / "run", 3)
    rows = bytearray((tmp_path / "rows").read_bytes())
    (tmp_path / "rows").write_bytes(bytes(b ^ 1 for b in rows))
    with pytest.raises(CheckpointError):
        on_file(tmp_path).load(tmp_path / "run")
