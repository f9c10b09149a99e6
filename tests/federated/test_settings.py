"""Files of a federation that cannot work, and doors that would not open: refused, with one line."""

import os
import subprocess
import time

import pytest

import undrift as fl
from federated.silos import FIRST, Silos
from undrift.cli import main
from undrift.deploy.folder import Wanted
from undrift.deploy.local import Local
from undrift.errors import ConfigError, FederationError, MissingExtra
from undrift.experiment.tables import read_table, write_table
from undrift.federated.checks import Limits
from undrift.federated.enrol import Door, enrol
from undrift.federated.project import read_project
from undrift.testing.world import tiny_world

SETTINGS = ["digits", "rounds=2", "partition.clients=3", "sampler.count=2"]


def init(place, *more):
    return main(["deploy", "init", str(place), *SETTINGS, *more])


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    place = tmp_path_factory.mktemp("settings") / "silos"
    assert init(place, "--insecure") == 0
    return place


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"clients": 0}, "clients must be a whole number"),
        ({"clients": 2.5}, "clients must be a whole number"),
        ({"clients": "three"}, "clients must be a whole number"),
        ({"keys": ["a", "b", "a"]}, "clients 0 and 2 have the same key"),
        ({"keys": ["a", "b"]}, "2 keys for 3 clients"),
        ({"joining": float("nan")}, "joining = nan"),
        ({"joining": float("inf")}, "joining = inf"),
        ({"patience": {"seconds": float("inf")}}, "patience.seconds = inf"),
        ({"patience": {"seconds": float("nan")}}, "patience.seconds = nan"),
        ({"patience": {"at_once": 2.5}}, "patience.at_once = 2.5 must be a whole number"),
        ({"patience": {"minimum": True}}, "patience.minimum = True"),
        ({"patience": {"empty_rounds": 0}}, "patience.empty_rounds = 0"),
        ({"patience": {"minimum": 3}}, "a round has at most 2 clients"),
        ({"patience": {"minutes": 3}}, "minutes"),
        ({"patience": 3}, "undrift deploy init"),
        ({"limits": {"norm": "wide"}}, "limits.norm = 'wide'"),
        ({"limits": {"size": True}}, "limits.size = True"),
        ({"limits": {"upload": -1.0}}, "limits.upload = -1.0"),
        ({"limits": {"relative": 0.5}}, "limits.relative = 0.5 must be at least 1"),
        ({"limits": {"relative": float("nan")}}, "limits.relative = nan"),
        ({"limits": {"norm": float("inf")}}, "limits.norm = inf"),
        ({"x": {"shape": [8], "dtype": "float31"}}, "no type 'float31'"),
        ({"x": {"dtype": "float32"}}, "shape"),
    ],
)
def test_a_federation_that_cannot_work_is_refused(changes, told, project, tmp_path):
    app = project / "app" / "silos"
    (tmp_path / "experiment.toml").write_text((app / "experiment.toml").read_text())
    table = {**read_table(app / "federation.toml"), **changes}
    (tmp_path / "federation.toml").write_text(write_table(table))
    with pytest.raises(ConfigError) as found:
        read_project(tmp_path)
    assert told in str(found.value)


def test_a_cohort_of_one_is_enough_where_one_client_is_sampled(tmp_path):
    assert init(tmp_path / "one", "--insecure", "sampler.count=1") == 0
    assert read_project(tmp_path / "one/app/silos").patience.minimum == 1
    assert init(tmp_path / "few", "--insecure", "--clients", "1") == 2  # of whom 2 are sampled


def test_a_claim_of_many_examples_is_bounded_from_the_start(project):
    """A client's weight, and the steps that a server follows, grow with what it says it holds."""
    assert read_project(project / "app/silos").limits.size == 10_000


# ---- where silos knock ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wanted", "address"),
    [
        (Wanted(), "127.0.0.1:8000"),
        (Wanted(port=9000), "127.0.0.1:9000"),
        (Wanted(host="fl.example.org"), "fl.example.org:443"),
        (Wanted(host="fl.example.org", port=444), "fl.example.org:444"),
        (Wanted(host="2001:db8::1"), "[2001:db8::1]:443"),
    ],
)
def test_silos_knock_where_the_door_is(wanted, address):
    wanted.check()
    assert wanted.address == address


def test_door_and_nodes_agree_on_the_port(tmp_path):
    pytest.importorskip("cryptography")
    assert init(tmp_path / "far", "--host", "fl.example.org") == 0
    node = (tmp_path / "far/silos/client-0/node.sh").read_text()
    assert "fl.example.org:443" in node
    assert "listen 443 ssl" in (tmp_path / "far/operator/door.conf").read_text()


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (Wanted(host="fl.example.org", port=8000), "the SuperLink's own"),
        (Wanted(host="fl.example.org", insecure=True), "for one machine"),
        (Wanted(port=70000), "no address"),
    ],
)
def test_an_address_that_cannot_work_is_refused(wanted, told):
    with pytest.raises(ConfigError, match=told):
        wanted.check()


# ---- programs ------------------------------------------------------------------------------------
def stand_in(folder, name, text):
    """A program of Flower's, as far as a test needs it."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def registered(project, folder):
    """Run the operator's script with what is in a folder in front of all programs."""
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["/bin/sh", str(project / "operator/register.sh")],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_keys_that_are_registered_already_do_not_keep_new_ones_out(tmp_path):
    pytest.importorskip("cryptography")
    assert init(tmp_path / "p") == 0
    stand_in(tmp_path, "flwr", 'case "$*" in *client-0*) echo Public key already in use.; exit 1;;'
             ' esac; echo "did: $*"')  # fmt: skip
    done = registered(tmp_path / "p", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "client-0/key.pub is registered already" in done.stdout
    assert "register ../silos/client-2/key.pub" in done.stdout and "list" in done.stdout
    stand_in(tmp_path, "flwr", "echo no such server; exit 1")
    done = registered(tmp_path / "p", tmp_path)
    assert done.returncode == 1 and "no such server" in done.stderr


def test_without_flower_a_try_out_says_what_is_missing(project, monkeypatch):
    monkeypatch.setattr("undrift.deploy.local.shutil.which", lambda *_, **__: None)
    with Local(project) as local, pytest.raises(MissingExtra, match=r"undrift\[flower\]"):
        local.superlink()


def test_a_command_without_an_end_is_cut_off(project):
    with Local(project) as local, pytest.raises(FederationError, match=r"run did not end within"):
        local.command("run", ["/bin/sh", "-c", "echo busy; sleep 30"], seconds=0.3)


def test_a_try_out_leaves_the_operators_records_alone(project, tmp_path, monkeypatch):
    stand_in(tmp_path, "flower-superlink", f'echo "$@" > {tmp_path}/told; sleep 30')
    monkeypatch.setattr(Local, "wait_for", lambda *_: None)
    with Local(project) as local:
        monkeypatch.setattr(
            Local, "environment", lambda *_, **more: {"PATH": f"{tmp_path}:/usr/bin:/bin", **more}
        )
        local.superlink()
        while not (tmp_path / "told").is_file() or not (tmp_path / "told").read_text():
            time.sleep(0.02)
    assert f"--database {project}/try/superlink.db" in (tmp_path / "told").read_text()


def test_who_is_refused_again_and_again_is_named_once(tmp_path, monkeypatch):
    monkeypatch.setattr("undrift.federated.enrol.PAUSE", 0.02)
    silos = Silos(tiny_world(), fl.fedavg(lr=0.05), tmp_path)
    silos.nodes[0].plan = "another experiment"
    silos.grid.handlers = {FIRST: silos.nodes[0].answer}
    with pytest.raises(FederationError, match="0 of 6"):
        enrol(silos.grid, Door(6, 1, 0.3), silos.run, "", Limits(), silos.refusals)
    assert [e.client for e in silos.refusals.refused] == [0]
