"""TensorBoard: what its own reader finds in the files."""

import json

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

PLACE = "tensorboard/scaffold/seed-1"


def opened(story):
    return story.open("tensorboard")


def read(story, place=PLACE):
    found = EventAccumulator(str(story.folder / place))
    found.Reload()
    return found


def curve(story, tag, place=PLACE):
    return [(event.step, pytest.approx(event.value)) for event in read(story, place).Scalars(tag)]


def accuracies(first, last, accuracy=0.1):
    return [(number, accuracy * number) for number in range(first, last + 1)]


def test_every_number_is_there_with_its_round(story):
    story.tell(opened(story), story.run(), [], story.records(1, 6))
    assert curve(story, "test_accuracy") == accuracies(1, 6)
    assert set(read(story).Tags()["scalars"]) == {"test_accuracy", "train_loss", "client_steps"}


def test_rounds_can_be_read_while_the_run_goes_on(story):
    story.tell(opened(story), story.run(), [], story.records(1, 3), end=None)
    assert curve(story, "test_accuracy") == accuracies(1, 3)


def test_runs_that_interleave_have_a_folder_each(story):
    tracker = opened(story)
    runs = [story.run(seed=1), story.run(seed=2), story.run("fed/avg")]
    for run in runs:
        tracker.started(run, [])
    for record in story.records(1, 3):
        for run in runs:
            tracker.round(run, record)
    tracker.close()
    places = sorted(p.parent for p in story.folder.rglob("events.out.tfevents*"))
    assert len(set(places)) == 3
    for place in places:
        assert curve(story, "test_accuracy", place) == accuracies(1, 3)


def test_a_resumed_run_logs_nothing_twice(story):
    story.tell(opened(story), story.run(), [], story.records(1, 3), end=KeyboardInterrupt())
    story.tell(opened(story), story.run(), story.records(1, 3), story.records(4, 6))
    assert curve(story, "test_accuracy") == accuracies(1, 6)
    assert len(stored(story, "test_accuracy")) == 6


def stored(story, tag):
    """Everything in the files, also what TensorBoard hides."""
    found = EventAccumulator(str(story.folder / PLACE), purge_orphaned_data=False)
    found.Reload()
    return found.Scalars(tag)


def test_rounds_that_were_cut_off_are_superseded(story):
    story.tell(opened(story), story.run(), [], story.records(1, 5), end=KeyboardInterrupt())
    new = story.records(3, 4, accuracy=0.2)
    story.tell(opened(story), story.run(), story.records(1, 2), new, end=KeyboardInterrupt())
    assert curve(story, "test_accuracy") == accuracies(1, 2) + accuracies(3, 4, 0.2)
    newer = story.records(4, 6, accuracy=0.3)
    story.tell(opened(story), story.run(), story.records(1, 2) + new[:1], newer)
    expected = accuracies(1, 2) + accuracies(3, 3, 0.2) + accuracies(4, 6, 0.3)
    assert curve(story, "test_accuracy") == expected


def test_a_run_that_starts_anew_supersedes_everything(story):
    story.tell(opened(story), story.run(), [], story.records(1, 5), end=ValueError())
    story.tell(opened(story), story.run(), [], story.records(1, 2, accuracy=0.2), end=None)
    assert curve(story, "test_accuracy") == accuracies(1, 2, 0.2)


def test_rounds_from_before_the_tracker_was_switched_on_are_there(story):
    story.tell(opened(story), story.run(), story.records(1, 3), story.records(4, 6))
    assert curve(story, "test_accuracy") == accuracies(1, 6)


def test_a_round_that_a_kill_kept_from_the_files_is_added(story):
    story.tell(opened(story), story.run(), [], story.records(1, 3), end=None)
    (file,) = (story.folder / PLACE).iterdir()
    file.write_bytes(file.read_bytes()[:-7])  # the last record was cut in the middle
    story.tell(opened(story), story.run(), story.records(1, 3), story.records(4, 6))
    assert curve(story, "test_accuracy") == accuracies(1, 6)


def test_a_run_that_is_complete_is_left_alone(story):
    story.tell(opened(story), story.run(), [], story.records(1, 6))
    story.tell(opened(story), story.run(), story.records(1, 6), [])
    assert len(list((story.folder / PLACE).iterdir())) == 1


def test_the_experiment_is_there_once_as_text_and_as_settings(story):
    story.tell(opened(story), story.run(), [], story.records(1, 3), end=KeyboardInterrupt())
    story.tell(opened(story), story.run(), story.records(1, 3), story.records(4, 6))
    found = read(story)
    (text,) = found.Tensors("experiment")
    shown = text.tensor_proto.string_val[0].decode()
    assert json.loads(shown.removeprefix("```json").removesuffix("```"))["seeds"] == [1, 2]
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["algorithm.lr"].number_value == 0.1
    assert settings["algorithm.nesterov"].bool_value


def test_a_full_disk_stops_the_tracker_and_nothing_else(story, caplog):
    tracker = opened(story)
    tracker.started(story.run(), [])
    (file,) = tracker.listener.files.values()
    file.file.close()  # from here on every write fails
    for record in story.records(1, 6):
        tracker.round(story.run(), record)
    tracker.close()
    assert len(caplog.records) == 1
