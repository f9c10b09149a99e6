"""A real SuperLink and four SuperNodes on the loopback interface: TLS, keys, no network.

Slow: Flower starts a process for every message.
"""

import os
import shutil
import signal
import socket
import ssl
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="pip install 'undrift[flower]'")

from cryptography.hazmat.primitives import serialization

from undrift.cli import main
from undrift.deploy.certificates import new_authority, node_key, write_secret
from undrift.deploy.check import check
from undrift.deploy.folder import silo
from undrift.deploy.local import Local, free_port
from undrift.experiment.folder import RunFolder
from undrift.experiment.run import run
from undrift.experiment.spec import Experiment, load
from undrift.experiment.tables import read_table, write_table

pytestmark = [pytest.mark.slow, pytest.mark.reliability]

SETTINGS = ["partition.clients=4", "sampler.count=3", "task.dtype=float64", "work.epochs=1"]
SECONDS = 600.0


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    place = tmp_path_factory.mktemp("federation") / "silos"
    assert main(["deploy", "init", str(place), "digits", "rounds=3", *SETTINGS]) == 0
    with Local(place) as made:
        made.up()
        yield made
    assert not made.running


def app_with(local, *settings, name):
    """The same federation with another experiment."""
    app = local.place / f"app-{name}"
    shutil.copytree(local.place / "app", app)
    [experiment] = load("digits", ["rounds=3", *SETTINGS, *settings])
    (app / "silos" / "experiment.toml").write_text(write_table(experiment.to_table()))
    return app


def start(local, app, out, name="run"):
    config = f'folder="{out}"'
    command = ["flwr", "run", str(app), "federation", "--stream", "--run-config", config]
    return local.start(name, command)


def wait_for_rounds(out, count, seconds=SECONDS):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if len(RunFolder(out).history()) >= count if (out / "rounds.jsonl").is_file() else False:
            return
        time.sleep(0.2)
    raise AssertionError(f"no round {count} within {seconds} s")


def finish(local, out, name="run", seconds=SECONDS):
    local.running[name].wait(timeout=seconds)
    local.stop(name)
    said = (local.work / f"{name}.log").read_text(errors="replace")
    assert (out / "summary.json").is_file(), said[-3000:]


def simulated(app, folder):
    experiment = Experiment.from_table(read_table(app / "silos" / "experiment.toml"))
    run(experiment, folder)
    return experiment


def assert_same(out, app, folder):
    """Model and history are those of the simulation."""
    simulated(app, folder)
    ours, theirs = list(RunFolder(out).history()), list(RunFolder(folder).history())
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert (one["clients"], one["skipped"]) == (other["clients"], other["skipped"])
        for name in ("test_accuracy", "test_loss", "train_loss"):
            assert one[name] == pytest.approx(other[name], abs=1e-10)
    from safetensors.torch import load_file

    one, other = (load_file(place / "model.safetensors") for place in (out, folder))
    assert max(float((one[n] - other[n]).abs().max()) for n in other) <= 1e-10


# ---- the same numbers ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "adabest", "mime"])
def test_an_algorithm_reaches_the_simulators_numbers(name, local, tmp_path):
    app, out = app_with(local, f"algorithm.use={name}", name=name), tmp_path / "run"
    start(local, app, out)
    finish(local, out)
    assert_same(out, app, tmp_path / "simulated")
    assert not (out / "refused.jsonl").exists()


def test_check_finds_everybody(local, capsys):
    found = list(check(local.place, local.port, local.work / "flower"))
    assert all(one.good for one in found), [str(one) for one in found]
    assert sum("answers, 359 examples" in one.text for one in found) == 4


# ---- killed and restarted ------------------------------------------------------------------------
def test_a_node_killed_and_restarted_keeps_its_state(local, tmp_path):
    """It is killed while it is not in the cohort, so that every number must be the simulator's."""
    app = app_with(local, "algorithm.use=scaffold", "rounds=5", "seed=2", name="killed-node")
    out = tmp_path / "run"
    experiment = simulated(app, tmp_path / "simulated")
    cohorts = [set(r["clients"]) for r in RunFolder(tmp_path / "simulated").history()]
    victim, at = next(
        (client, r)
        for r in range(1, 4)
        for client in range(4)
        if client not in cohorts[r]
        and client in set().union(*cohorts[:r])
        and client in cohorts[r + 1]
    )
    start(local, app, out)
    wait_for_rounds(out, at)
    local.stop(f"node-{victim}", signal.SIGKILL)
    local.node(victim)
    finish(local, out)
    assert experiment.rounds == 5
    assert_same(out, app, tmp_path / "again")


def test_the_server_killed_and_restarted_goes_on(local, tmp_path):
    app = app_with(local, "algorithm.use=adabest", "rounds=4", name="killed-server")
    out = tmp_path / "run"
    start(local, app, out)
    wait_for_rounds(out, 2)
    local.stop("superlink", signal.SIGKILL)
    local.stop("run")
    done = len(RunFolder(out).history())
    assert 2 <= done < 4
    local.superlink()
    start(local, app, out, name="again")
    finish(local, out, name="again")
    assert_same(out, app, tmp_path / "simulated")


# ---- who is turned away --------------------------------------------------------------------------
def said_by(local, name):
    return (local.work / f"{name}.log").read_text(errors="replace")


def wait_for_word(local, name, words, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        said = said_by(local, name).lower()
        if any(word in said for word in words):
            return said
        time.sleep(0.3)
    raise AssertionError(f"{name} said nothing of {words}: {said_by(local, name)[-2000:]}")


def copy_of_silo(local, client, folder, **files):
    """A silo's folder that differs in some files."""
    left = shutil.ignore_patterns("state", "flower")
    shutil.copytree(silo(local.place, client), folder, ignore=left)
    for name, data in files.items():
        write_secret(folder / name, data)
    return folder


def start_node(local, name, folder, home):
    told = {"SUPERLINK": f"127.0.0.1:{local.port}", "PORT": str(free_port())}
    local.start(name, ["/bin/sh", str(folder / "node.sh")], FLWR_HOME=str(home), **told)


def turned_away(local, name, words):
    try:
        assert "supernode id" not in wait_for_word(local, name, words)
    finally:
        local.stop(name)


def test_a_key_that_is_not_registered_is_turned_away_and_a_registered_one_is_not(local, tmp_path):
    private, public = node_key()
    folder = copy_of_silo(local, 0, tmp_path / "silo", key=private)
    start_node(local, "unregistered", folder, tmp_path / "home")
    turned_away(local, "unregistered", ["failed to activate supernode"])
    (folder / "key.pub").write_bytes(public)
    command = ["flwr", "supernode", "register", str(folder / "key.pub"), "federation"]
    local.command("register", command)
    start_node(local, "registered", folder, tmp_path / "home")
    try:
        wait_for_word(local, "registered", ["supernode id"])
        found = [str(one) for one in check(local.place, local.port, local.work / "flower")]
        # Flower lets it in; who may be a client is written in federation.toml
        assert sum("its key is not in federation.toml" in one for one in found) == 1, "; ".join(
            found
        )
        assert sum("answers, 359 examples" in one for one in found) == 4, found
    finally:
        local.stop("registered")


def test_a_server_of_another_authority_is_not_trusted(local, tmp_path):
    other = new_authority("somebody else").certificate
    pem = other.public_bytes(serialization.Encoding.PEM)
    folder = copy_of_silo(local, 3, tmp_path / "silo", **{"ca.crt": pem})
    start_node(local, "wrong-ca", folder, tmp_path / "home")
    turned_away(local, "wrong-ca", ["certificate verify failed", "connection attempt failed"])
    with socket.create_connection(("127.0.0.1", local.port), timeout=5) as plain:
        context = ssl.create_default_context(cadata=pem.decode())
        with pytest.raises(ssl.SSLCertVerificationError):
            context.wrap_socket(plain, server_hostname="localhost")


def test_a_client_in_the_clear_is_turned_away(local, tmp_path):
    command = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{local.port}"]
    command += ["--max-retries", "2", "--host", "127.0.0.1", "--port", str(free_port())]
    local.start("plaintext", command, FLWR_HOME=str(tmp_path / "home"))
    turned_away(local, "plaintext", ["connection attempt failed", "failed to", "exit code"])


def test_every_process_is_ours_and_on_the_loopback_interface(local):
    for process in local.running.values():
        assert os.getpgid(process.pid) == process.pid
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
    port = f"{local.port:04X}"
    assert [one for one in listening if one.endswith(port)] == [f"0100007F:{port}"]
