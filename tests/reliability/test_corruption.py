"""B5: a damaged checkpoint costs the rounds since the one before it, and nothing else."""

from __future__ import annotations

import random

import pytest

from undrift.errors import CorruptCheckpoint
from undrift.state.rows import HEADER

from .tiny import assert_same_bits, everything, stored, train, trainer

ROUNDS = 4


def flipped(data, chance):
    changed = bytearray(data)
    changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(data, chance):
    return data[: chance.randrange(len(data))]


@pytest.mark.parametrize("damage, times", [(flipped, 14), (cut, 6)])
@pytest.mark.parametrize("store", ["device", "file"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog, store, damage, times):
    whole = everything(train(trainer(), tmp_path / "whole", ROUNDS))
    settings, chance = stored(store, tmp_path), random.Random(f"{store} {times}")
    train(trainer(**settings), tmp_path / "run", ROUNDS - 1)
    newest = tmp_path / "run" / "round-00000003.undrift"
    for _ in range(times):
        caplog.clear()
        newest.write_bytes(damage(newest.read_bytes(), chance))
        run = trainer(**settings)
        assert run.load(tmp_path / "run") and run.rounds_done == 2 and newest.name in caplog.text
        run.round()
        run.save(tmp_path / "run")  # a sound checkpoint of round 3 again
    assert_same_bits(everything(train(run, tmp_path / "run", ROUNDS)), whole)


@pytest.mark.parametrize("store", ["device", "file"])
def test_when_no_checkpoint_is_sound_the_run_says_so_and_stays_as_it_was(tmp_path, store):
    settings = stored(store, tmp_path)
    train(trainer(**settings), tmp_path / "run", 3)
    for path in (tmp_path / "run").iterdir():
        path.write_bytes(cut(path.read_bytes(), random.Random(path.name)))
    run = trainer(**settings)
    before = everything(run)
    with pytest.raises(CorruptCheckpoint, match=r"round-00000002(.|\n)*new folder"):
        run.load(tmp_path / "run")
    assert_same_bits(everything(run), before)


def test_damaged_rows_are_found_when_they_are_loaded(tmp_path):
    settings, chance = stored("file", tmp_path), random.Random(1)
    train(trainer(**settings), tmp_path / "run", 3)
    sound = (tmp_path / "rows").read_bytes()
    damaged = bytes(b ^ 1 << chance.randrange(8) for b in sound[HEADER:])
    (tmp_path / "rows").write_bytes(sound[:HEADER] + damaged)
    with pytest.raises(CorruptCheckpoint, match=r"rows: the state of client \d+ "):
        trainer(**settings).load(tmp_path / "run")


def test_a_damaged_header_is_found_at_once(tmp_path):
    settings = stored("file", tmp_path)
    train(trainer(**settings), tmp_path / "run", 1)
    sound = (tmp_path / "rows").read_bytes()
    (tmp_path / "rows").write_bytes(b"x" + sound[1:])
    with pytest.raises(CorruptCheckpoint, match="header is damaged"):
        trainer(**settings)


def test_damaged_rows_of_the_newest_checkpoint_alone_cost_one_round(tmp_path):
    settings = stored("file", tmp_path)
    run = train(trainer(**settings), tmp_path / "run", 2)
    before = run.store.visible
    straight = everything(train(run, tmp_path / "run", 3))
    with (tmp_path / "rows").open("r+b") as file:
        for client, entry in run.store.visible.items():
            if before.get(client) != entry:
                file.seek(run.store._tier._offset(client, entry.place))
                file.write(b"damaged!")
    again = trainer(**settings)
    assert again.load(tmp_path / "run") and again.rounds_done == 2
    again.round()
    assert_same_bits(everything(again), straight)


def test_a_row_file_that_is_too_short_is_refused(tmp_path):
    settings = stored("file", tmp_path)
    train(trainer(**settings), tmp_path / "run", 3)
    (tmp_path / "rows").write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match="beside its checkpoints"):
        trainer(**settings).load(tmp_path / "run")
