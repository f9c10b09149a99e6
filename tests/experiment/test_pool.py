"""Many runs side by side: stopped, killed, failing, and going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from undrift.errors import ConfigError, UndriftError
from undrift.experiment.folder import find_runs
from undrift.experiment.pool import run_all
from undrift.experiment.spec import Experiment, load
from undrift.experiment.tables import write_table

from .test_run import Recorder, numbers
from .tiny import TABLE

SWEEP = ["algorithm.use=fedavg,scaffold,fedadam,fedyogi,fedprox,fednova", "seed=0,1,2"]


def six_by_three(*changes: str) -> list[Experiment]:
    return load(TABLE, [*SWEEP, *changes])


def test_workers_and_one_process_give_the_same_numbers(tmp_path: Path, monkeypatch: Any) -> None:
    """A user's module that prints must not break the line protocol between them."""
    (tmp_path / "talkative.py").write_text(
        "from undrift.models import build\n"
        "def net(inputs, classes):\n"
        "    print('hello from the model')\n"
        "    return build('mlp', 0, inputs=inputs, hidden=4, classes=classes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    few = [*six_by_three()[:2], *load(TABLE, ["model={use='talkative:net'}", "label=talkative"])]
    alone = run_all(few, tmp_path / "alone", jobs=1)
    recorder = Recorder()
    together = run_all(few, tmp_path / "together", jobs=2, listeners=[recorder])
    assert [numbers(h) for h in alone] == [numbers(h) for h in together]
    assert sorted(h for h in recorder.heard if h[0] == "finished") == [("finished", 4)] * 3


def test_what_is_complete_is_not_run_again(tmp_path: Path) -> None:
    few = six_by_three()[:2]
    run_all(few, tmp_path, jobs=1)
    recorder = Recorder()
    run_all(few, tmp_path, jobs=2, listeners=[recorder])
    assert recorder.heard == [("started", 4), ("finished", 4)] * 2


def test_one_failing_run_does_not_stop_the_others(tmp_path: Path) -> None:
    bad = load(TABLE, ["model.classes=2", "label=bad", "seed=0,1"])
    good = load(TABLE, ["label=good", "seed=0,1"])
    with pytest.raises(UndriftError, match=r"2 of 4 runs failed.*the module has 2 outputs"):
        run_all([*bad, *good], tmp_path, jobs=2)
    assert [f.path.parent.name for f in find_runs(tmp_path)] == ["good", "good"]


def test_jobs_must_be_a_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="jobs = 0"):
        run_all(six_by_three(), tmp_path, jobs=0)


# ---------------------------------------------------------------------------- real processes
def start(tmp_path: Path) -> tuple[subprocess.Popen[str], list[str]]:
    file = tmp_path / "tiny.toml"
    file.write_text(write_table({**TABLE, "rounds": 120}))
    command = [sys.executable, "-m", "undrift", "compare", str(file), *SWEEP]
    command += ["--out", str(tmp_path / "out"), "--jobs", "2"]
    errors = (tmp_path / "errors.txt").open("a")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    errors.close()
    return process, command


def heed_ctrl_c() -> None:
    """Undo what tests in the background of a shell inherit: there it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def rounds_done(tmp_path: Path) -> int:
    return sum(len(f.history()) for f in find_runs(tmp_path / "out"))


def wait_for_rounds(tmp_path: Path, process: subprocess.Popen[str], more: int) -> None:
    until = time.monotonic() + 60
    while rounds_done(tmp_path) < more and process.poll() is None:
        assert time.monotonic() < until, (tmp_path / "errors.txt").read_text()
        time.sleep(0.02)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            if parent == process.pid:
                found.append(int(entry.name))
    return found


def gone(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_six_algorithms_by_three_seeds_survive_ctrl_c_and_kill(tmp_path: Path) -> None:
    expected = run_all(six_by_three("rounds=120"), tmp_path / "whole", jobs=1)
    # Ctrl-C: the terminal sends it to the whole group
    process, command = start(tmp_path)
    wait_for_rounds(tmp_path, process, 60)
    workers = workers_of(process)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in (tmp_path / "errors.txt").read_text()
    assert all(gone(pid) for pid in workers)
    done = rounds_done(tmp_path)
    assert 60 <= done < 18 * 120
    # kill -9 of the parent: workers notice and end, what they did is kept
    process, command = start(tmp_path)
    wait_for_rounds(tmp_path, process, done + 60)
    workers = workers_of(process)
    process.kill()
    process.communicate(timeout=60)
    until = time.monotonic() + 30
    while not all(gone(pid) for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.05)
    # kill -9 of a worker: the others go on, the error says so
    process, command = start(tmp_path)
    wait_for_rounds(tmp_path, process, rounds_done(tmp_path) + 30)
    if workers := workers_of(process):
        os.kill(workers[0], signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == 2
    assert "its process ended (signal SIGKILL)" in (tmp_path / "errors.txt").read_text()
    # and at last to the end
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = {f.path: numbers(f.history()) for f in find_runs(tmp_path / "out")}
    whole = six_by_three("rounds=120")
    for experiment, history in zip(whole, expected, strict=True):
        place = tmp_path / "out" / experiment.label / f"seed-{experiment.seed_number}"
        plain = json.loads(json.dumps(numbers(history)))
        assert found[place] == plain, experiment.label
