"""`undrift deploy try` while a part of it is killed or stopped: it ends in time and says the truth.

Slow: Flower starts a process for every message.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="pip install 'undrift[flower]'")

import undrift as fl
from flower.test_cut_off import SETTINGS, VICTIM, assert_right, supernode_of
from flower.test_flower import wait_for_rounds
from undrift.cli import main
from undrift.deploy.folder import silo
from undrift.experiment.tables import read_table, write_table

pytestmark = [pytest.mark.slow, pytest.mark.reliability]

SECONDS = 240  # that a try may take
SOURCE = Path(fl.__file__).parent.parent


def processes(parent, *words):
    """The processes that a try has started whose command has all these words."""
    found = []
    for pid in supernode_of(parent):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(word in command for word in words):
            found.append(pid)
    return found


@pytest.fixture
def trying(tmp_path):
    """A try of three silos, after its first round."""
    place = tmp_path / "silos"
    assert main(["deploy", "init", str(place), "digits", "rounds=4", *SETTINGS]) == 0
    path = place / "app" / "silos" / "federation.toml"
    table = read_table(path)
    patience = {**table["patience"], "returning": 10.0}
    path.write_text(write_table({**table, "patience": patience}))
    command = [sys.executable, "-m", "undrift", "deploy", "try", str(place)]
    with (tmp_path / "try.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--seconds", str(SECONDS)], stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )  # fmt: skip
    try:
        wait_for_rounds(place / "try" / "run", 1, SECONDS)
        yield place, process, tmp_path / "try.log"
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it ends what it has started
            process.wait(60)


def ended(process, log):
    """Its exit code, which it must give in time, and its last words."""
    began = time.monotonic()
    code = process.wait(SECONDS + 90)
    assert time.monotonic() - began < SECONDS + 90
    return code, log.read_text(errors="replace").strip().splitlines()[-1]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_without_one_silo_the_others_numbers_are_right(how, trying):
    place, process, log = trying
    nodes = processes(process.pid, str(silo(place.resolve(), VICTIM) / "node.sh"))
    os.killpg(nodes[0], how)
    code, _ = ended(process, log)
    assert code == 0
    missing = assert_right(place, place / "try" / "run")
    assert (4, VICTIM) in missing and {client for _, client in missing} == {VICTIM}


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("part", ["flower-superlink", "flwr-serverapp"])
def test_without_the_server_it_is_no_success(part, how, trying):
    _, process, log = trying
    victims = processes(process.pid, part)
    assert victims
    for pid in {*victims, *(child for one in victims for child in supernode_of(one))}:
        with contextlib.suppress(ProcessLookupError):  # it ended with another one
            os.kill(pid, how)
    code, last = ended(process, log)
    assert code not in (0, None) and last.startswith("undrift: ")
