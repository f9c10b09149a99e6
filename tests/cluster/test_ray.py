"""A real Ray cluster on this machine: the same numbers, whoever is killed, and nobody gets in."""

import gc
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch

import undrift as fl
from rules.needs import built, far, world_of
from undrift.data.partitions import Iid
from undrift.engines import ray_cluster as launcher
from undrift.experiment import EngineSettings
from undrift.testing.engines import standard_algorithms
from undrift.testing.world import numbers, tiny_world

if importlib.util.find_spec("ray") is None:  # not importorskip: Ray reads settings when imported
    pytest.skip("Ray is not installed", allow_module_level=True)

TWELVE = [
    *("fedavg", "fedprox", "fednova", "fedyogi", "qfedavg"),  # stateless, one with a probe
    *("scaffold", "feddyn", "adabest", "moon"),  # with client states
    *("mime", "rfedavg_plus", "fedrl"),  # a shared probe, second looks, rows
]
pytestmark = [pytest.mark.slow, pytest.mark.reliability]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of Ray's own processes
        yield launcher.connect()
        import ray

        ray.shutdown()
        gc.collect()


def everything(world, actors=2, label="every hook", **options):
    return world.trainer(standard_algorithms()[label], engine="ray", actors=actors, **options)


@pytest.mark.parametrize("name", TWELVE)
@pytest.mark.parametrize("actors", [2, 1, 3])
def test_a_named_algorithm_is_the_same_as_in_the_reference_engine(actors, name):
    world, algorithm = world_of(name), built(name, lr=0.05)
    wanted = world.trainer(algorithm, engine="reference")
    trainer = world.trainer(algorithm, engine="ray", actors=actors)
    assert len(trainer.engine.crew.about) == actors
    for ours, theirs in zip(trainer.run(3), wanted.run(3), strict=True):
        assert ours[:3] == theirs[:3] and ours[5:7] == theirs[5:7]
    assert far(trainer, wanted) <= 1e-10


# ---- actors that are killed ----------------------------------------------------------------------
def kill(trainer, owner):
    os.kill(trainer.engine.crew.about[owner]["process"], signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Every number after 3 rounds of two actors that live on."""
    trainer = everything(tiny_world())
    trainer.run(3)
    return numbers(trainer)


def same_bits(trainer, wanted):
    return all(torch.equal(found, wanted[name]) for name, found in numbers(trainer).items())


@pytest.mark.parametrize("what", ["probe", "train", "look"])
def test_an_actor_killed_in_the_middle_of_a_question_changes_no_bit(what, undisturbed):
    trainer = everything(tiny_world())
    trainer.round()
    crew = trainer.engine.crew
    original, timers = crew.ask, []

    def ask(asked, common, own):
        if asked == what and not timers:
            timers.append(threading.Timer(0.01, kill, (trainer, 0)))
            timers[0].start()
        return original(asked, common, own)

    crew.ask = ask
    trainer.run(2)
    timers[0].join()
    trainer.client_state(0)  # if it was killed after its answer, this question finds out
    assert trainer.engine.replaced == [0] and same_bits(trainer, undisturbed)


def test_actors_killed_in_turn_for_twenty_rounds():
    world = tiny_world(sizes=(5, 9, 3, 7, 1, 6, 4, 8))._replace(sampler=fl.Everyone())
    undisturbed = world.trainer(standard_algorithms()["scaffold II"])
    undisturbed.run(20)
    trainer = everything(world, label="scaffold II")
    for r in range(20):
        kill(trainer, r % 2)
        trainer.round()
    assert trainer.engine.replaced == [r % 2 for r in range(20)]
    assert far(trainer, undisturbed) <= 1e-12


def test_an_actor_that_hangs_is_cut_off(undisturbed):
    trainer = everything(tiny_world(), timeout=20.0)
    trainer.round()
    os.kill(trainer.engine.crew.about[1]["process"], signal.SIGSTOP)
    trainer.run(2)
    assert trainer.engine.replaced == [1] and same_bits(trainer, undisturbed)


def test_rows_are_deleted_with_their_trainer_even_if_an_actor_is_gone():
    trainer = everything(tiny_world())
    trainer.round()
    folders = [Path(told["folder"]) for told in trainer.engine.crew.about.values()]
    assert all(folder.is_dir() for folder in folders)
    kill(trainer, 1)
    del trainer
    gc.collect()
    assert not any(folder.exists() for folder in folders)


# ---- checkpoints ---------------------------------------------------------------------------------
@pytest.mark.parametrize("state", ["device", "file"])
def test_a_run_goes_on_with_another_number_of_actors(state, tmp_path):
    world = tiny_world()
    whole = world.trainer(standard_algorithms()["every hook"], engine="reference")
    whole.run(4)
    rows = {"state": state, **({"state_path": tmp_path / "rows"} if state == "file" else {})}
    first = everything(world, **rows)
    first.run(2)
    first.save(tmp_path / "kept")
    first.run(2)
    wanted = numbers(first)
    del first
    for actors in (2, 3):
        second = everything(world, actors, **rows)
        assert second.load(tmp_path / "kept")
        second.run(2)
        assert far(second, whole) <= 1e-12
        assert actors == 3 or same_bits(second, wanted)
        del second


# ---- what users bring ----------------------------------------------------------------------------
def test_a_rule_of_a_script_works_and_its_error_comes_back(tmp_path):
    """Rules and networks that only exist in the user's script travel too."""
    script = tmp_path / "mine.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, undrift as fl
            from torch import nn

            @fl.record
            class Shrink(fl.Rule):
                by: float = 0.9
                def init_client(self, w, sizes): return torch.zeros_like(w)
                def direction(self, g, view): return self.by * g + 0.1 * view.mine
                def finish(self, delta, view): return delta, view.mine + delta, ()

            @fl.record
            class Breaks(fl.Rule):
                def direction(self, g, view): raise ZeroDivisionError("deliberate")

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layer = nn.Linear(4, 3)
                def forward(self, x): return torch.tanh(self.layer(x))

            torch.manual_seed(0)
            task = fl.Task(Net(), loss=lambda out, y: (out - y).square(), dtype=torch.float64)
            clients = [(torch.randn(5, 4), torch.randn(5, 3)) for _ in range(4)]
            data = fl.Federation.of(clients)
            found = []
            for engine in ("vectorised", "ray"):
                trainer = fl.Trainer(task, data, fl.Algorithm((Shrink(),)), engine=engine)
                trainer.run(2)
                found.append(trainer.server.w)
            print(float((found[0] - found[1]).abs().max()) < 1e-12)
            try:
                fl.Trainer(task, data, fl.Algorithm((Breaks(),)), engine="ray").round()
            except fl.errors.ClientError as error:
                print(error)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()
    assert first == "True"
    assert (
        second
        == "client 0, stage 'direction', rule 'Breaks', step 0: ZeroDivisionError: deliberate"
    )


def test_an_experiment_runs_and_goes_on_with_another_number_of_actors(tmp_path):
    def experiment(rounds, **engine):
        return fl.Experiment(
            "digits",
            {"use": "mlp", "hidden": 8},
            fl.scaffold(0.1),
            Iid(6),
            rounds=rounds,
            engine=EngineSettings(device="cpu", **engine),
        )

    wanted = fl.run(experiment(4))
    fl.run(experiment(2, use="ray", actors=2), tmp_path / "run")
    found = fl.run(experiment(4, use="ray", actors=3), tmp_path / "run")
    assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-4)


# ---- nobody gets in ------------------------------------------------------------------------------
def test_the_cluster_asks_for_a_token(cluster):
    """Another process of the same user is refused without the token, and with a wrong one."""
    assert launcher.asks_for_token()
    program = textwrap.dedent(
        """
        import sys
        from ray._raylet import GcsClient
        print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)))
        """
    )
    said = {}
    for token in (None, "0" * 64, os.environ[launcher.TOKEN]):
        env = {n: v for n, v in os.environ.items() if n != launcher.TOKEN}
        env |= {"HOME": "/nonexistent", launcher.MODE: "disabled" if token is None else "token"}
        env |= {} if token is None else {launcher.TOKEN: token}
        done = subprocess.run(
            [sys.executable, "-c", program, cluster],
            env=env, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        said[token] = done.stdout.strip() or done.stderr
    assert said.pop(os.environ[launcher.TOKEN]) == "1"
    assert len(said) == 2 and all("token" in words for words in said.values())


def test_the_dashboard_asks_for_a_token_too(tmp_path):
    pytest.importorskip("aiohttp_cors", reason="no dashboard without ray[default]")
    program = textwrap.dedent(
        """
        import os, urllib.error, urllib.request
        from undrift.engines import ray_cluster as launcher
        launcher.connect(dashboard=True)
        import ray
        place = ray._private.worker._global_node.webui_url
        assert place.startswith("127.0.0.1:")
        for token in (None, "wrong", os.environ["RAY_AUTH_TOKEN"]):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            asked = urllib.request.Request(f"http://{place}/api/jobs/", headers=headers)
            try:
                print(urllib.request.urlopen(asked).status)
            except urllib.error.HTTPError as error:
                print(error.code)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["401", "403", "200"], done.stderr[-1000:]


def test_everything_listens_on_this_machine_alone(cluster):
    assert cluster.startswith("127.0.0.1:")
    port = int(cluster.rpartition(":")[2])
    hosts = {a[4][0] for a in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for host in hosts - {"127.0.0.1", "127.0.1.1"}:
        with pytest.raises(OSError), socket.create_connection((host, port), timeout=2):
            pass


def test_an_address_where_nobody_is_and_a_wrong_token_are_told_soon(cluster):
    program = textwrap.dedent(
        """
        import sys
        from undrift.engines import ray_cluster as launcher
        for address in ("127.0.0.1:1", sys.argv[1]):
            try:
                launcher.connect(address)
            except launcher.FederationError as error:
                print(error)
        """
    )
    env = {**os.environ, launcher.TOKEN: "0" * 64, launcher.MODE: "token"}
    done = subprocess.run(
        [sys.executable, "-c", program, cluster],
        env=env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    nobody, wrong = done.stdout.splitlines()
    assert nobody.startswith("no Ray cluster at 127.0.0.1:1 (is it up") and "refused" in nobody
    assert wrong.startswith(f"no Ray cluster at {cluster} (is it up") and "token" in wrong[60:]


def test_a_cluster_that_is_up_is_joined_by_its_address(cluster):
    program = textwrap.dedent(
        """
        import os, sys, torch
        import undrift as fl
        from undrift.testing.compare import distance
        from undrift.testing.world import numbers, tiny_world
        world = tiny_world()
        there = world.trainer(fl.scaffold(0.1), engine="ray", actors=2, address=sys.argv[1])
        here = world.trainer(fl.scaffold(0.1))
        there.run(2), here.run(2)
        print(distance(*(list(numbers(t).values()) for t in (there, here))) < 1e-12)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, cluster],
        env={**os.environ, launcher.LOOPBACK: "0"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "True", done.stderr[-2000:]
