"""A damaged folder is refused before anything in it is touched; one that is half made goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from undrift.errors import ChangedExperiment, CheckpointError
from undrift.experiment.batch import run_together
from undrift.experiment.folder import RunFolder, whole_history
from undrift.experiment.run import run
from undrift.state import disk

from .test_run import Recorder, numbers
from .tiny import tiny

ROUNDS = 4
Damage = Callable[[Path], None]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def rounds_changed(change: Callable[[list[bytes]], list[bytes]]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "rounds.jsonl"
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return damage


def replaced(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data) and None


def halved(pattern: str) -> Damage:
    def damage(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return damage


LINES: dict[str, tuple[Damage, str]] = {
    **{
        f"cut after line {n}": (rounds_changed(lambda ls, n=n: ls[:n]), f"ends after line {n}")
        for n in range(ROUNDS)
    },
    "cut in line 3": (rounds_changed(lambda ls: [*ls[:2], ls[2][:9]]), "line 3 is not whole"),
    "line 2 has gone": (rounds_changed(lambda ls: [ls[0], *ls[2:]]), "line 2 tells of round 3"),
    "line 2 is there twice": (
        rounds_changed(lambda ls: [*ls[:2], *ls[1:]]),
        "line 3 tells of round 2",
    ),
    "a comment": (
        rounds_changed(lambda ls: [*ls[:2], b"# mine\n", *ls[2:]]),
        "line 3 is not whole",
    ),
    "no last newline": (
        rounds_changed(lambda ls: [*ls[:-1], ls[-1][:-1]]),
        f"line {ROUNDS} is not whole",
    ),
}
OTHERS: dict[str, tuple[Damage, str]] = {
    "half of the checkpoints": (halved("checkpoint/*.undrift"), "no checkpoint"),
    "half of environment.json": (halved("environment.json"), r"environment\.json is damaged"),
    "another environment.json": (replaced("environment.json", b"[]"), "environment.json"),
}


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize("name", [*LINES, *OTHERS])
def test_a_damaged_folder_is_refused_and_stays_as_it_was(
    tmp_path: Path, name: str, longer: bool
) -> None:
    damage, told = {**LINES, **OTHERS}[name]
    run(tiny(), tmp_path)
    damage(tmp_path)
    before = contents(tmp_path)
    asked = tiny(f"rounds={ROUNDS + 2}") if longer else tiny()
    if name == "half of the checkpoints" and not longer:
        assert len(run(asked, tmp_path)) == ROUNDS  # complete: what is damaged is not needed
    else:
        with pytest.raises(CheckpointError, match=told):
            run(asked, tmp_path)
        (error,) = run_together([(asked, tmp_path)])
        assert isinstance(error, CheckpointError) and told.split(" ")[-1] in str(error)
    assert contents(tmp_path) == before
    if name in LINES:  # nor is it shown as a result
        with pytest.raises(CheckpointError, match=told):
            whole_history(RunFolder(tmp_path))


def test_a_run_that_was_stopped_does_not_show_lost_rounds_as_a_result(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), tmp_path, listeners=[Recorder(3, KeyboardInterrupt)])
    assert len(whole_history(RunFolder(tmp_path))) == 3
    rounds_changed(lambda lines: lines[:2])(tmp_path)
    with pytest.raises(CheckpointError, match=r"rounds\.jsonl has 2 sound rounds of 3 \(it ends"):
        whole_history(RunFolder(tmp_path))


# ------------------------------------------------------------------- while the run is under way
class Meddler(Recorder):
    """Another program that changes the rounds of a run under way, after its second round."""

    def __init__(self, folder: Path, damage: Damage) -> None:
        super().__init__()
        self.folder, self.damage = folder, damage

    def round(self, run: Any, record: Any) -> None:
        if record["round"] == 2:
            self.damage(self.folder)


def renamed(folder: Path) -> None:
    """Save as many editors and sync tools do: a new file under the old name."""
    copy = folder / "copy"
    copy.write_bytes((folder / "rounds.jsonl").read_bytes())
    copy.replace(folder / "rounds.jsonl")


def blotted(folder: Path) -> None:
    """Change bytes and no length."""
    with (folder / "rounds.jsonl").open("r+b") as file:
        file.write(b"#")


MEDDLING: dict[str, Damage] = {
    "cut": rounds_changed(lambda lines: lines[:1]),
    "emptied": rounds_changed(lambda lines: []),
    "longer": rounds_changed(lambda lines: [*lines, b"\n"]),
    "replaced": renamed,
    "deleted": lambda folder: (folder / "rounds.jsonl").unlink(),
    "blotted": blotted,
}


@pytest.mark.parametrize("seconds", [0.0, 1e9])
@pytest.mark.parametrize("name", MEDDLING)
def test_rounds_that_another_program_changes_are_no_result(
    tmp_path: Path, name: str, seconds: float
) -> None:
    meddler = Meddler(tmp_path, MEDDLING[name])
    with pytest.raises(CheckpointError, match=r"rounds\.jsonl"):
        run(tiny(), tmp_path, listeners=[meddler], checkpoint_seconds=seconds)
    assert not (tmp_path / "summary.json").exists()
    try:  # either it goes on to the same end, or it says what is missing
        assert numbers(run(tiny(), tmp_path)) == numbers(run(tiny()))
    except CheckpointError as error:
        assert "restore the file" in str(error)
        assert not (tmp_path / "summary.json").exists()


# ------------------------------------------------------------------------------- half-made folders
DEAD = 4194305  # above the largest number of a process


@pytest.mark.parametrize("process", [DEAD, 1, 0])
def test_temporary_files_of_the_killed_are_swept_and_never_strangers(
    tmp_path: Path, process: int
) -> None:
    """Whoever has the number of the killed process now: the lock says that nobody writes here."""
    process = process or os.getpid()
    for name in ("experiment.toml", "environment.json"):
        (tmp_path / f"{disk.TEMPORARY}{process}-{name}").write_bytes(b"half")
    with pytest.raises(KeyError):
        run(tiny(), tmp_path, listeners=[Recorder(1)])
    half = tmp_path / "checkpoint" / f"{disk.TEMPORARY}{process}-round-00000002.undrift"
    half.write_bytes(b"half")
    assert numbers(run(tiny(), tmp_path)) == numbers(run(tiny()))
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(disk.TEMPORARY)]


def test_a_copied_policy_is_written_before_the_experiment_and_no_stranger(tmp_path: Path) -> None:
    (tmp_path / "policy-0123456789ab.safetensors").write_bytes(b"whole")
    assert len(run(tiny(), tmp_path)) == ROUNDS


@pytest.mark.parametrize("name", ["thesis.doc", ".tmp-1-a", ".undrift-tmp-notes", "policy.txt"])
def test_a_folder_of_others_gets_no_file_and_loses_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ChangedExperiment, match="holds other files"):
        run(tiny(), tmp_path)
    (error,) = run_together([(tiny(), tmp_path)])
    assert isinstance(error, ChangedExperiment)
    assert contents(tmp_path) == {name: b"mine"}


def test_a_complete_run_stays_complete_when_its_longer_one_is_refused(tmp_path: Path) -> None:
    run(tiny(), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    halved("checkpoint/*.undrift")(tmp_path)
    with pytest.raises(CheckpointError):
        run(tiny("rounds=9"), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert len(run(tiny(), tmp_path)) == ROUNDS
