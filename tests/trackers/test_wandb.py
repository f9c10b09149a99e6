"""Weights & Biases: what is in its offline files."""

import json
import struct

import pytest

wandb = pytest.importorskip("wandb")
internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")

BLOCK = 32768  # a file is a row of blocks, after a heading of 7 bytes in the first
FULL, LAST = 1, 4  # a record that does not fit goes on in the next block


@pytest.fixture(scope="module", autouse=True)
def service():
    yield
    wandb.teardown()


def folders(story):
    return sorted((story.folder / "wandb").glob("offline-run-*"))


def records_in(folder):
    (path,) = folder.glob("run-*.wandb")
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # too little for a heading: filled up with zeros
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST):
            yield internal.Record.FromString(record)
            record = b""


def history_in(folder):
    rows = [record.history for record in records_in(folder) if record.HasField("history")]
    items = [{i.key or i.nested_key[0]: json.loads(i.value_json) for i in r.item} for r in rows]
    return [(row["_step"], row["test_accuracy"]) for row in items]


def run_in(folder):
    return next(record.run for record in records_in(folder) if record.HasField("run"))


def exit_code_in(folder):
    return next(r.exit.exit_code for r in records_in(folder) if r.HasField("exit"))


def accuracies(first, last):
    return [(number, pytest.approx(0.1 * number)) for number in range(first, last + 1)]


def test_every_number_is_there_with_its_round(story):
    story.tell(story.open("wandb"), story.run(), [], story.records(1, 6))
    (folder,) = folders(story)
    assert history_in(folder) == accuracies(1, 6)
    run = run_in(folder)
    assert (run.run_group, run.display_name, run.project) == (
        "digits",
        "scaffold/seed-1",
        "undrift",
    )
    assert {item.key for item in run.config.update} >= {"algorithm", "seeds"}
    assert exit_code_in(folder) == 0


def test_runs_that_interleave_are_kept_apart(story):
    tracker = story.open("wandb", project="thesis")
    runs = [story.run(seed=seed) for seed in (1, 2)]
    for run in runs:
        tracker.started(run, [])
    for record in story.records(1, 4):
        for run in runs:
            tracker.round(run, record)
    tracker.failed(runs[0], ValueError("no"))
    tracker.close()
    one, two = sorted(folders(story), key=lambda folder: run_in(folder).display_name)
    assert history_in(one) == history_in(two) == accuracies(1, 4)
    assert (exit_code_in(one), exit_code_in(two)) == (1, 255)
    assert run_in(one).project == "thesis"
    assert run_in(one).run_id != run_in(two).run_id


def test_a_resumed_run_has_the_same_id_and_all_rounds_once(story):
    story.tell(story.open("wandb"), story.run(), [], story.records(1, 5), KeyboardInterrupt())
    (before,) = folders(story)
    story.tell(story.open("wandb"), story.run(), story.records(1, 3), story.records(4, 6))
    # Two folders of the same second have one name, and the second is the one that is left.
    after = folders(story)[-1]
    assert run_in(after).run_id in before.name
    assert history_in(after) == accuracies(1, 6)


def test_a_run_that_is_complete_is_left_alone(story):
    story.tell(story.open("wandb"), story.run(), [], story.records(1, 6))
    story.tell(story.open("wandb"), story.run(), story.records(1, 6), [])
    assert len(folders(story)) == 1


def test_a_run_that_starts_anew_is_a_new_one(story):
    for _ in range(2):
        story.tell(story.open("wandb"), story.run(), [], story.records(1, 2))
    assert len({run_in(folder).run_id for folder in folders(story)}) == 2


def test_the_users_own_mode_is_respected(story, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    story.tell(story.open("wandb"), story.run(), [], story.records(1, 2))
    assert folders(story) == []


def test_nothing_is_printed(story, capfd):
    story.tell(story.open("wandb"), story.run(), [], story.records(1, 2))
    shown = capfd.readouterr()
    assert shown.out + shown.err == ""
