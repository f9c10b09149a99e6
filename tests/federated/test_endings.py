"""What did not succeed never ends with exit code 0, and what has stopped working ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import undrift as fl
from federated.test_hostile import Wire
from federated.test_resume import local
from undrift.cli import main
from undrift.deploy.folder import silo
from undrift.deploy.local import Local
from undrift.errors import EmptyRoundError, FederationError
from undrift.experiment.folder import RunFolder
from undrift.federated.project import read_project
from undrift.federated.running import run_deployed

SOURCE = Path(fl.__file__).parent.parent
SETTINGS = ["rounds=4", "partition.clients=3", "sampler.count=2", "work.epochs=1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = tmp_path_factory.mktemp("endings") / "silos"
    assert main(["deploy", "init", str(made), "digits", *SETTINGS, "--insecure"]) == 0
    return made


# ---- runs ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("lost", [{1}, {2, 3}, {1, 2, 4}])
def test_a_run_whose_rounds_did_not_all_count_is_an_error_and_keeps_the_others(
    lost, place, tmp_path
):
    project, reports = read_project(place / "app" / "silos"), [0]

    def refused(phase, answer):
        if phase == "train":
            reports[0] += 1
        bad = phase == "train" and (reports[0] + 1) // 2 in lost
        return [answer._replace(data=b"no report")] if bad else [answer]

    grid = Wire(local(project, tmp_path / "nodes"), refused)
    told = f"{len(lost)} of 4 rounds .* had fewer than 2 reports"
    for _ in range(2):  # asked again, it is no success either
        with pytest.raises(EmptyRoundError, match=told):
            run_deployed(project, grid, tmp_path / "run")
    history = RunFolder(tmp_path / "run").history()
    assert history.empty_rounds() == sorted(lost) and len(history) == 4
    assert (tmp_path / "run" / "refused.jsonl").is_file()


FLWR = r"""#!{python}
import json, sys, time
with open({calls!r}, "a") as calls:
    print(*sys.argv[1:2], *([sys.argv[2]] if sys.argv[1] == "stop" else []), file=calls)
if sys.argv[1] == "run":
    print("Starting logstream for run_id `1234567890`", flush=True)
    settings = sys.argv[sys.argv.index("--run-config") + 1]
    ended = json.loads(settings.partition("ended=")[2])
    told = {told!r}
    if told == "sleep":
        time.sleep(60)
    elif told is not None:
        open(ended, "w").write(told)
sys.exit({code})
"""


@pytest.fixture
def flwr(tmp_path, monkeypatch):
    """Flower's command, and its server's app that says how it ended."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name in ("python", "python3", "undrift"):  # `undrift` is not installed beside the sources
        text = (
            f'#!/bin/sh\nexec {sys.executable} {"-m undrift " if name == "undrift" else ""}"$@"\n'
        )
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def made(told, code=0):
        text = FLWR.format(python=sys.executable, calls=str(calls), told=told, code=code)
        (folder / "flwr").write_text(text)
        (folder / "flwr").chmod(0o755)
        environment = "undrift.deploy.operate.flower_environment"
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        monkeypatch.setattr(environment, lambda home: {"PATH": path})
        return calls

    return made


@pytest.mark.parametrize(
    ("told", "code", "sentence"),
    [
        ('{"error": "3 rounds in a row had fewer than 2 reports"}', 0, "3 rounds in a row"),
        (None, 0, "did not say how it ended (flwr run: exit code 0)"),
        (None, 7, "did not say how it ended (flwr run: exit code 7)"),
        ("", 0, "did not say how it ended"),
        ("[]", 0, "did not say how it ended"),
    ],
)
def test_what_flower_calls_a_success_is_one_only_if_the_app_says_so(
    told, code, sentence, place, flwr, tmp_path, capsys
):
    flwr(told, code)
    assert main(["deploy", "run", str(place), "--out", str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_succeeded_says_what_it_reached(place, flwr, tmp_path, capsys):
    project = read_project(place / "app" / "silos")
    run_deployed(project, local(project, tmp_path / "nodes"), tmp_path / "run")
    flwr('{"error": ""}')
    assert main(["deploy", "run", str(place), "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert "4 rounds, test_accuracy" in said.out and "missing" not in said.out


def test_a_run_that_is_interrupted_is_stopped_in_the_server_too(place, flwr, tmp_path):
    from undrift.deploy import operate

    calls = flwr("sleep")
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            operate.operate(place, tmp_path / "run")
        except KeyboardInterrupt:
            os._exit(130)
        os._exit(0)
    end = time.monotonic() + 30
    while not calls.is_file() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)  # it reads the number of the run
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert calls.read_text().splitlines() == ["run", "stop 1234567890"]


def test_a_try_out_ends_with_the_sentence_of_what_failed(place):
    with Local(place) as here:
        (place / "operator" / "run.sh").write_text(
            "echo much talk; sleep 60 & echo 'undrift: 3 rounds in a row' >&2; exit 2\n"
        )
        with pytest.raises(FederationError, match=r"^3 rounds in a row$"):
            here.run(30.0)
        started = time.monotonic()
        (place / "operator" / "run.sh").write_text("sleep 60 & sleep 60\n")
        with pytest.raises(FederationError, match=r"run did not end within 0\.5 s"):
            here.run(0.5)
        assert time.monotonic() - started < 20
        assert not here.running


# ---- nodes ---------------------------------------------------------------------------------------
WORK = """
import logging, os, signal, subprocess, sys, threading, time
from undrift.deploy import supernode
supernode.LOOK = 0.2

def lives_on():  # as Flower's own server on the loopback interface does
    threading.Thread(target=time.sleep, args=(60,)).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

def returns():
    lives_on()

def raises():
    lives_on()
    raise OSError("The handshake operation timed out")

def loses_its_heartbeat():
    lives_on()
    threading.Thread(target=lambda: 1 / 0, name="heartbeat").start()
    time.sleep(60)

def loses_its_child():
    lives_on()
    child = subprocess.Popen(["true"])
    time.sleep(60)

def loses_a_report():
    lives_on()
    try:
        raise OSError("The handshake operation timed out")
    except Exception as error:
        logging.getLogger("flwr").error("Failed to send message %s: %s", "m", error)
    time.sleep(60)

def hangs_while_it_ends():
    threading.Thread(target=time.sleep, args=(60,)).start()
    signal.signal(signal.SIGTERM, lambda *_: time.sleep(60))
    supernode.GRACE = 0.5
    logging.getLogger("flwr").error("Failed to receive message m")
    time.sleep(60)

def is_stopped():
    lives_on()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

def cannot_start():
    lives_on()
    sys.exit(1)

supernode.watched(globals()[sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("way", "code", "told"),
    [
        ("returns", 1, "its connection has ended"),
        ("raises", 1, "OSError: The handshake operation timed out"),
        ("loses_its_heartbeat", 1, "heartbeat has failed: ZeroDivisionError"),
        ("loses_its_child", 1, "the process that starts apps has ended"),
        ("loses_a_report", 1, "Failed to send message m: The handshake operation timed out"),
        ("hangs_while_it_ends", 1, "Failed to receive message"),
        ("is_stopped", 0, ""),
        ("cannot_start", 1, ""),
    ],
)
def test_a_node_that_has_stopped_working_ends(way, code, told):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", WORK, way], env=environment, capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("undrift: the node ends: " in done.stderr) == bool(told) and told in done.stderr


@pytest.fixture
def node(place, tmp_path):
    """Runs node.sh with a SuperNode that is a script; pauses are short, no process outlives it."""
    running = []

    def started(script, **more):
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, text in (("undrift-supernode", script), ("sleep", f"echo $1 >> {folder}/pauses")):
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        settings = {"PATH": f"{folder}:/usr/bin:/bin", "FLWR_HOME": str(tmp_path / "home"), **more}
        process = subprocess.Popen(
            ["/bin/sh", silo(place, 0) / "node.sh"], env=settings, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        running.append(process)
        return process

    yield started
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("code", [0, 1, 139])
def test_a_node_is_started_again_however_it_ended_and_gives_up_at_last(code, node, tmp_path):
    process = node(f"exit {code}", TRIES="14")
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and said.count(f"exit code {code};") == 14
    assert "14 times in a row" in said.splitlines()[-1]
    pauses = [int(p) for p in (tmp_path / "bin/pauses").read_text().split()]
    assert pauses == [*range(5, 60, 5), 60, 60, 60]


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_node_script_that_is_stopped_takes_its_node_with_it(how, code, node, tmp_path):
    told = tmp_path / "told"
    script = f"trap 'echo ended >> {told}; exit 0' TERM; echo began >> {told}\n"
    process = node(script + "while :; do /bin/sleep 0.1; done")
    while not told.is_file():
        time.sleep(0.02)
    process.send_signal(how)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert told.read_text().split() == ["began", "ended"]
