"""Trackers by name, and what happens when one fails."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from undrift.errors import ConfigError, MissingExtra
from undrift.trackers import TRACKERS, Guarded, open_trackers
from undrift.trackers.kept import Kept, keep, recall
from undrift.trackers.values import file_name, scalars, settings


def test_an_unknown_tracker_is_named_with_the_nearest_one(tmp_path):
    with pytest.raises(ConfigError, match=r"no tracker named 'tensorbord'. Did you mean 'tensor"):
        open_trackers(["tensorbord"], tmp_path)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_a_sentence_with_the_install_command(name, tmp_path, monkeypatch):
    for loaded in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'undrift\[{name}\]'"):
        open_trackers([name], tmp_path)


def test_an_unknown_setting_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no setting named 'projekt'\. Did you mean 'project'"):
        open_trackers(["wandb"], tmp_path, wandb={"projekt": "x"})
    with pytest.raises(ConfigError, match="no tracker named 'wand'"):
        open_trackers([], tmp_path, wand={})
    with pytest.raises(ConfigError, match="the folder is the same for all trackers"):
        open_trackers(["wandb"], tmp_path, wandb={"folder": "x"})


def test_no_name_is_no_tracker(tmp_path):
    assert open_trackers([], tmp_path) == []


def test_no_package_is_imported_before_its_tracker_is_opened():
    program = "import sys, undrift.trackers; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert not {"tensorboard", "wandb", "mlflow"} & set(shown.decode().split())


# ---- a tracker that fails ------------------------------------------------------------------------


class Broken:
    def __init__(self, at):
        self.at, self.heard = at, []

    def __getattr__(self, name):
        def told(*_):
            self.heard.append(name)
            if name in self.at:
                raise OSError(28, "No space left on device")

        return told


@pytest.mark.parametrize("at", ["started", "round", "finished", "close"])
def test_a_tracker_that_fails_is_switched_off_with_one_warning(at, story, caplog):
    tracker = Guarded(Broken([at]), "broken")
    for seed in (1, 2):
        story.tell(tracker, story.run(seed=seed), [], story.records(1, 6))
    tracker.close()
    (warning,) = caplog.records
    assert warning.name == "undrift" and warning.levelno == logging.WARNING
    assert "broken failed and is switched off, training goes on: OSError" in warning.getMessage()
    assert tracker.listener.heard[-1] == "close"
    assert tracker.listener.heard.count(at) <= 2


def test_a_tracker_that_cannot_even_close_does_no_harm(story, caplog):
    tracker = Guarded(Broken(["round", "close"]))
    story.tell(tracker, story.run(), [], story.records(1, 6))
    tracker.close()
    assert len(caplog.records) == 1


def test_ctrl_c_in_a_tracker_is_the_users(story):
    class Slow:
        def started(self, run, past):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guarded(Slow()).started(story.run(), [])


# ---- values --------------------------------------------------------------------------------------


def test_only_numbers_are_logged(story):
    (record,) = story.records(3, 3)
    assert set(scalars(record | {"flag": True})) == {"test_accuracy", "train_loss", "client_steps"}


def test_settings_are_flat():
    assert settings({"a": {"b": {"c": 1}}, "d": {}, "e": None, "f": True}) == {
        "a.b.c": 1,
        "d": "{}",
        "e": "null",
        "f": True,
    }


@pytest.mark.parametrize(
    "label", ["a/b", "../../etc", "..", ".", "a\x00b", "x" * 300, "a b", "\ud800"]
)
def test_a_label_is_always_one_safe_folder(label, tmp_path):
    made = tmp_path / file_name(label)
    made.mkdir()
    assert made.parent == tmp_path and made.resolve().parent == tmp_path.resolve()


def test_different_labels_have_different_folders():
    labels = ["a b", "a_b", "a/b", "a:b", ".a_b", "x" * 300, "x" * 301]
    assert len({file_name(label) for label in labels}) == len(labels)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"id": 1}', b"\xff"])
def test_a_damaged_id_counts_as_none(damage, story):
    run = story.run()
    keep(run, "mlflow", Kept("abc", 3))
    assert recall(run, "mlflow") == Kept("abc", 3)
    (run.folder / "mlflow.json").write_bytes(damage)
    assert recall(run, "mlflow") is None


# ---- the manual ----------------------------------------------------------------------------------


def test_the_manuals_own_tracker_works(capsys):
    manual = Path(__file__).parents[2] / "docs" / "trackers.md"
    *_, example = re.findall(r"```python\n(.*?)```", manual.read_text(), re.DOTALL)
    exec(compile(example, str(manual), "exec"), {"__name__": "example"})
    first, *rounds = capsys.readouterr().out.splitlines()
    assert first.endswith("begins after round 0 of 2")
    assert len(rounds) == 2
