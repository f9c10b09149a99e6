"""A silo that is cut off, killed, stopped or slow: right numbers, or an error, and in time.

Slow: the longest cut takes five minutes, and what follows it.
"""

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="pip install 'undrift[flower]'")

import torch
from safetensors.torch import load_file

from flower.proxy import Cable
from flower.test_flower import wait_for_rounds
from undrift.cli import main
from undrift.deploy.local import Local
from undrift.experiment.folder import RunFolder
from undrift.experiment.spec import Experiment
from undrift.experiment.tables import read_table, write_table
from undrift.experiment.world import build

pytestmark = [pytest.mark.slow, pytest.mark.reliability]

SETTINGS = ["partition.clients=3", "sampler.count=3", "task.dtype=float64", "work.epochs=1"]
SETTINGS += ["algorithm.use=scaffold"]
VICTIM = 2


class Tried:
    """A federation of three silos, one of which is behind a cable of its own."""

    def __init__(self, place, rounds, prepared=None, **patience):
        settings = [*SETTINGS, f"rounds={rounds}"]
        assert main(["deploy", "init", str(place), "digits", *settings]) == 0
        path = place / "app" / "silos" / "federation.toml"
        table = read_table(path)
        path.write_text(write_table({**table, "patience": {**table["patience"], **patience}}))
        if prepared is not None:
            prepared(place)
        self.out, self.local = place / "run", Local(place)
        self.local.superlink()
        self.local.register()
        self.cable = Cable(self.local.port)
        for client in range(3):
            port = self.cable.port if client == VICTIM else self.local.port
            self.local.node(client, SUPERLINK=f"127.0.0.1:{port}")
        self.victim = self.local.running[f"node-{VICTIM}"]
        run = ["/bin/sh", str(place / "operator" / "run.sh")]
        self.run = self.local.start("run", run, FOLDER=str(self.out))

    def wait(self, seconds):
        """Give the exit code of run.sh; an error if it does not end in time."""
        return self.run.wait(seconds)

    def said(self, name):
        return (self.local.work / f"{name}.log").read_text(errors="replace")

    def missing(self):
        """The reports that did not come: (round, client)."""
        return missing_from(self.out)

    def assert_right(self):
        """Every number is that of a simulation that misses the same reports."""
        assert_right(self.local.place, self.out)


def missing_from(out):
    return {(r["round"], c) for r in RunFolder(out).history() for c in r["skipped"]}


def assert_right(place, out):
    """Every number is that of a simulation that misses the same reports; tells which."""
    table = read_table(place / "app" / "silos" / "experiment.toml")
    trainer = build(Experiment.from_table({**table, "engine": {"use": "reference"}})).trainer
    inner, missing = trainer.engine.run_clients, missing_from(out)

    def skipping(algo, broadcast, clients, work):
        for ids, states, reports, rows in inner(algo, broadcast, clients, work):
            if (trainer.rounds_done + 1, ids[0]) in missing:
                rows = rows._replace(accepted=torch.zeros_like(rows.accepted))
            yield ids, states, reports, rows

    trainer.engine.run_clients = skipping
    trainer.run(table["rounds"])
    found = load_file(out / "model.safetensors")
    for name, value in trainer.model().state_dict().items():
        assert float((found[name] - value).abs().max()) <= 1e-10
    return missing


@pytest.fixture
def tried(tmp_path):
    made = []

    def make(rounds, **patience):
        made.append(Tried(tmp_path / "silos", rounds, **patience))
        return made[-1]

    yield make
    for one in made:
        one.cable.close()
        with one.local:
            pass  # ends every process


def supernode_of(script):
    """The process that a node's script has started, and those that it has started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found, level = [], [script]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        found += level
    return found


@pytest.mark.parametrize("seconds", [5, 45, 300])
def test_a_silo_that_is_cut_off_is_there_again_when_it_can_be(seconds, tried):
    one = tried(rounds=6)
    wait_for_rounds(one.out, 1)
    one.cable.cut()
    time.sleep(seconds)
    one.cable.heal()
    assert one.wait(900) == 0, one.said("run")[-3000:]
    one.assert_right()
    last = max((round for round, _ in one.missing()), default=0)
    assert last < 6 and {client for _, client in one.missing()} <= {VICTIM}
    if seconds == 5:
        assert not one.missing()
    if seconds == 300:
        assert one.missing()  # it was not waited for


def test_a_silo_whose_process_is_killed_starts_it_again(tried):
    one = tried(rounds=4)
    wait_for_rounds(one.out, 1)
    for pid in supernode_of(one.victim.pid):
        os.kill(pid, signal.SIGKILL)
    assert one.wait(600) == 0, one.said("run")[-3000:]
    one.assert_right()
    assert not one.missing()


def test_a_silo_whose_starter_of_apps_is_killed_starts_again(tried):
    one = tried(rounds=4)
    wait_for_rounds(one.out, 1)
    superexec = supernode_of(one.victim.pid)[1]
    os.kill(superexec, signal.SIGKILL)
    assert one.wait(600) == 0, one.said("run")[-3000:]
    assert "the process that starts apps has ended" in one.said(f"node-{VICTIM}")
    one.assert_right()
    assert not one.missing()


def test_a_silo_that_is_killed_for_good_is_left_out(tried):
    one = tried(rounds=3, returning=10.0)
    wait_for_rounds(one.out, 1)
    one.local.stop(f"node-{VICTIM}", signal.SIGKILL)
    assert one.wait(300) == 0, one.said("run")[-3000:]
    one.assert_right()
    assert (3, VICTIM) in one.missing() and "reports are missing" in one.said("run")


@pytest.mark.parametrize("seconds", [30, 100, None])
def test_a_silo_that_is_stopped_is_left_out_until_it_goes_on(seconds, tried):
    one = tried(rounds=5 if seconds else 3, returning=10.0 if seconds is None else 120.0)
    wait_for_rounds(one.out, 1)
    os.killpg(one.victim.pid, signal.SIGSTOP)
    if seconds:
        time.sleep(seconds)
        os.killpg(one.victim.pid, signal.SIGCONT)
    assert one.wait(600) == 0, one.said("run")[-3000:]
    one.assert_right()
    assert (max((r for r, _ in one.missing()), default=0) == 3) == (seconds is None)


def test_a_slow_silo_is_waited_for(tried):
    one = tried(rounds=3)
    one.cable.delay = 0.5
    assert one.wait(900) == 0, one.said("run")[-3000:]
    one.assert_right()
    assert not one.missing()


def test_when_all_but_one_are_gone_the_run_ends_with_an_error_in_time(tried):
    """Two reports make a round."""
    one = tried(rounds=6, returning=5.0)
    wait_for_rounds(one.out, 1)
    for client in (0, VICTIM):
        one.local.stop(f"node-{client}", signal.SIGKILL)
    assert one.wait(400) == 2
    assert one.said("run").splitlines()[-1].startswith("undrift: 3 rounds in a row")
