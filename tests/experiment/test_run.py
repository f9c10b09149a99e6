"""A run is a folder that can be stopped at any moment."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import undrift as fl
from undrift.errors import ChangedExperiment, CheckpointError, ConfigError, CorruptCheckpoint
from undrift.experiment.folder import RunFolder, find_runs, open_run
from undrift.experiment.history import History
from undrift.experiment.run import finished, run
from undrift.experiment.spec import Experiment
from undrift.experiment.world import build

from .tiny import tiny


class Recorder:
    """A listener that writes down what it hears, and may stop a run."""

    def __init__(self, stop_after: int | None = None, how: type[BaseException] = KeyError) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.stop_after, self.how = stop_after, how

    def started(self, run: Any, past: Any) -> None:
        self.heard.append(("started", len(past)))

    def round(self, run: Any, record: Any) -> None:
        self.heard.append(("round", record["round"]))
        if record["round"] == self.stop_after:
            raise self.how

    def finished(self, run: Any, history: Any) -> None:
        self.heard.append(("finished", len(history)))

    def failed(self, run: Any, error: Any) -> None:
        self.heard.append(("failed", type(error)))

    def close(self) -> None: ...


def numbers(history: History) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in history]


def test_a_run_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    history = run(tiny("algorithm.use=scaffold"), tmp_path / "a")
    names = {p.name for p in (tmp_path / "a").iterdir()}
    assert names == {
        *("experiment.toml", "environment.json", "plan.json", "rounds.jsonl", "lock"),
        *("model.safetensors", "model.json", "evaluation.json", "checkpoint", "summary.json"),
    }
    assert [r["round"] for r in history] == [1, 2, 3, 4]
    assert Experiment.from_toml((tmp_path / "a/experiment.toml").read_text()) == tiny(
        "algorithm.use=scaffold"
    )
    starts = json.loads((tmp_path / "a/environment.json").read_text())["starts"]
    assert starts[0]["device"] == "cpu" and starts[0]["torch"] == torch.__version__


def test_the_model_loads_into_the_plain_module(tmp_path: Path) -> None:
    run(tiny(), tmp_path)
    world = build(tiny())
    world.trainer.load(tmp_path / "checkpoint")
    module = build(tiny()).trainer.model()
    module.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for mine, other in zip(module.parameters(), world.trainer.model().parameters(), strict=True):
        assert torch.equal(mine, other)


def test_in_memory_and_in_a_folder_are_the_same(tmp_path: Path) -> None:
    assert numbers(run(tiny())) == numbers(run(tiny(), tmp_path))


@pytest.mark.parametrize("how", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_stopped_run_goes_on_to_the_same_numbers(
    tmp_path: Path, how: type[BaseException], seconds: float
) -> None:
    experiment = tiny("algorithm.use=scaffold", "evaluate.models=cloud,all", "rounds=6")
    whole = numbers(run(experiment))
    for stop in (2, 3, 5):
        with pytest.raises(how):
            listeners = [Recorder(stop, how)]
            run(experiment, tmp_path, listeners=listeners, checkpoint_seconds=seconds)
    recorder = Recorder()
    assert numbers(run(experiment, tmp_path, listeners=[recorder])) == whole
    assert recorder.heard == [("started", 5), ("round", 6), ("finished", 6)]


def test_without_a_checkpoint_it_starts_anew(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        run(tiny(), tmp_path, listeners=[Recorder(1)])
    for path in (tmp_path / "checkpoint").iterdir():
        path.unlink()
    assert numbers(run(tiny(), tmp_path)) == numbers(run(tiny()))


def test_a_complete_run_is_only_read(tmp_path: Path) -> None:
    run(tiny(), tmp_path)
    recorder = Recorder()
    before = (tmp_path / "rounds.jsonl").stat().st_mtime_ns
    assert len(run(tiny(), tmp_path, listeners=[recorder])) == 4
    assert recorder.heard == [("started", 4), ("finished", 4)]
    assert (tmp_path / "rounds.jsonl").stat().st_mtime_ns == before
    assert finished(tiny(), tmp_path) is not None
    assert finished(tiny(), tmp_path / "elsewhere") is None


def test_more_rounds_are_the_same_run(tmp_path: Path) -> None:
    run(tiny(), tmp_path)
    longer = run(tiny("rounds=7"), tmp_path)
    assert numbers(longer) == numbers(run(tiny("rounds=7")))
    assert len(run(tiny(), tmp_path)) == 4  # the shorter one is a part of it
    assert len(open_run(tmp_path).history()) == 7


def test_a_changed_experiment_is_refused_with_the_difference(tmp_path: Path) -> None:
    run(tiny(), tmp_path)
    kept = (tmp_path / "rounds.jsonl").read_bytes()
    with pytest.raises(ChangedExperiment, match=r"algorithm.local.lr: 0.1 there, 0.2 now"):
        run(tiny("algorithm.lr=0.2"), tmp_path)
    with pytest.raises(ChangedExperiment, match=r"seed: 0 there, 1 now"):
        run(tiny("seed=1"), tmp_path)
    assert (tmp_path / "rounds.jsonl").read_bytes() == kept


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").write_text("mine")
    with pytest.raises(ChangedExperiment, match=r"holds other files \(thesis.doc\)"):
        run(tiny(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        run(tiny(), tmp_path / "file")


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path).locked(),
        pytest.raises(CheckpointError, match="run by another process"),
    ):
        run(tiny(), tmp_path)


def damage_line(path: Path) -> None:
    lines = (path / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (path / "rounds.jsonl").write_bytes(b"".join([lines[0], b"{half", *lines[2:]]))


def damage_checkpoint(path: Path) -> None:
    (found,) = (path / "checkpoint").iterdir()
    found.write_bytes(found.read_bytes()[:-7])


def damage_table(path: Path) -> None:
    (path / "experiment.toml").write_text("rounds = ")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (damage_line, CheckpointError),
        (damage_checkpoint, CorruptCheckpoint),
        (damage_table, CheckpointError),
    ],
)
def test_damage_is_noticed(tmp_path: Path, damage: Callable[[Path], None], error: type) -> None:
    run(tiny(), tmp_path)
    damage(tmp_path)
    with pytest.raises(error):
        run(tiny("rounds=6"), tmp_path)


def test_a_line_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        run(tiny(), tmp_path, listeners=[Recorder(2)], checkpoint_seconds=0)
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round": 3, "test_ac')
    assert numbers(run(tiny(), tmp_path)) == numbers(run(tiny()))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        path = Path("/proc/undrift")
    else:
        path = tmp_path / "closed" / "run"
        path.parent.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(CheckpointError, match="cannot create the folder"):
        run(tiny(), path)


def test_own_objects_run_in_a_folder_too(tmp_path: Path) -> None:
    def trainer() -> fl.Trainer:
        return build(tiny()).trainer

    x, y = build(tiny()).dealt.examples.test_x, build(tiny()).dealt.examples.test_y
    history = run(trainer(), tmp_path, rounds=3, test=(x, y))
    assert len(history) == 3
    assert history.last("test_accuracy") == pytest.approx(trainer_accuracy(trainer(), x, y))
    assert len(run(trainer(), tmp_path, rounds=5, test=(x, y))) == 5
    other = build(tiny("algorithm.lr=0.3")).trainer
    with pytest.raises(ChangedExperiment, match="lr"):
        run(other, tmp_path, rounds=5, test=(x, y))


def trainer_accuracy(trainer: fl.Trainer, x: torch.Tensor, y: torch.Tensor) -> float:
    trainer.run(3)
    return trainer.evaluate(x, y)["accuracy"]


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="needs rounds="):
        run(build(tiny()).trainer)
    with pytest.raises(ConfigError, match="an Experiment has its own"):
        run(tiny(), rounds=3)
    with pytest.raises(ConfigError, match="takes an Experiment or a Trainer"):
        run("digits")  # type: ignore[arg-type]


def test_histories_are_curves_and_tables(tmp_path: Path) -> None:
    history = run(tiny("evaluate.every=2"), tmp_path)
    assert history.curve("test_accuracy")[0] == [2, 4]
    assert len(history["train_loss"]) == 4
    assert history.best("test_loss") == min(history["test_loss"])
    assert history.rounds_to(0.0) == 2 and history.rounds_to(2.0) is None
    with pytest.raises(ConfigError, match="Did you mean 'test_accuracy'"):
        history.curve("test_acuracy")
    pandas = pytest.importorskip("pandas")
    frame = history.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and list(frame.index) == [1, 2, 3, 4]


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    run(tiny(), tmp_path / "a" / "seed-0")
    run(tiny("seed=1"), tmp_path / "a" / "seed-1")
    assert [f.path.name for f in find_runs(tmp_path)] == ["seed-0", "seed-1"]
    with pytest.raises(ConfigError, match="holds no run"):
        open_run(tmp_path)


def test_what_is_not_finite_is_null_in_the_file(tmp_path: Path) -> None:
    experiment = tiny("algorithm.lr=1e38", "work.steps=9", "rounds=1")
    run(experiment, tmp_path)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert len(records[0]["skipped"]) == 3 and records[0]["train_loss"] is None


def test_a_complete_run_gives_the_trainer_what_it_learned(tmp_path: Path) -> None:
    first, again = build(tiny()).trainer, build(tiny()).trainer
    run(first, tmp_path, rounds=3)
    run(again, tmp_path, rounds=3)
    assert again.rounds_done == 3
    assert torch.equal(first.server.w, again.server.w)


def test_a_trainer_with_a_past_needs_its_own_folder(tmp_path: Path) -> None:
    trainer = build(tiny()).trainer
    trainer.run(2)
    with pytest.raises(ConfigError, match="has done 2 rounds already"):
        run(trainer, tmp_path / "new", rounds=5)
    assert not (tmp_path / "new" / "experiment.json").exists()


def test_another_test_set_is_another_run(tmp_path: Path) -> None:
    examples = build(tiny()).dealt.examples
    x, y = examples.test_x, examples.test_y
    run(build(tiny()).trainer, tmp_path, rounds=2, test=(x, y))
    with pytest.raises(ChangedExperiment, match="test"):
        run(build(tiny()).trainer, tmp_path, rounds=4, test=(x[1:], y[1:]))


def test_asking_for_fewer_rounds_than_an_interrupted_run_has(tmp_path: Path) -> None:
    run(tiny(), tmp_path)
    with pytest.raises(KeyError):
        run(tiny("rounds=10"), tmp_path, listeners=[Recorder(7)])
    assert len(run(tiny(), tmp_path)) == 4
    assert RunFolder(tmp_path).summary() is None
    assert numbers(run(tiny("rounds=10"), tmp_path)) == numbers(run(tiny("rounds=10")))


def test_a_new_name_is_the_same_run(tmp_path: Path) -> None:
    run(tiny(), tmp_path)
    assert len(run(tiny("name=renamed", "evaluate.target=0.9"), tmp_path)) == 4
