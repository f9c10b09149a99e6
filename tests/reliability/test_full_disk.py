"""B4: a full disk costs one checkpoint, never an earlier one and never the run."""

from __future__ import annotations

import errno
import hashlib
import os

import pytest

from undrift.errors import CheckpointError
from undrift.state import disk

from .forked import ask
from .tiny import assert_same_bits, everything, stored, train, trainer


def hashes(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def room_for(patch, name, real, room):
    """Let the disk take `room` bytes more."""
    left = [room]

    def write(fd, data, *offset):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(fd, data[: left[0]], *offset)
        left[0] -= count
        return count

    patch.setattr(disk, name, write)


@pytest.mark.parametrize("store", ["device", "file"])
def test_a_save_on_a_full_disk_changes_nothing(tmp_path, monkeypatch, store):
    run = train(trainer(**stored(store, tmp_path)), tmp_path / "run", 2)
    before, size = (
        hashes(tmp_path / "run"),
        (tmp_path / "run/round-00000002.undrift").stat().st_size,
    )
    for k in range(20):
        run.round()
        room_for(monkeypatch, "_os_write", os.write, k * size // 20)
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/run/round-.*no space.*Free some"):
            run.save(tmp_path / "run")
        assert hashes(tmp_path / "run") == before
    monkeypatch.undo()
    run.save(tmp_path / "run")
    again = trainer(**stored(store, tmp_path))
    assert again.load(tmp_path / "run") and again.rounds_done == 22
    assert_same_bits(everything(again), everything(run))
    whole = trainer()
    whole.run(22)
    assert_same_bits(everything(run), everything(whole))


def test_a_round_on_a_full_disk_can_be_repeated(tmp_path, monkeypatch):
    run = train(trainer(**stored("file", tmp_path)), tmp_path / "run", 2)
    before, row = everything(run), 8 * len(run.store._tier.fresh)
    for room in (0, 1, row, row + 1, 3 * row - 1):
        room_for(monkeypatch, "_os_pwrite", os.pwrite, room)
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/rows: no space left"):
            run.round()
        assert_same_bits(everything(run), before)
    monkeypatch.undo()
    whole = train(trainer(), tmp_path / "whole", 4)
    assert_same_bits(everything(train(run, tmp_path / "run", 4)), everything(whole))


def test_a_file_size_limit_changes_nothing(tmp_path):
    told = ask("limited", tmp_path)
    assert told == {"refused": 20, "unchanged": 20, "same after": True}
