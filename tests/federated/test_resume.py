"""Whatever is killed goes on at the round boundary, with the same numbers."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import undrift as fl
from federated.silos import Silos, distance, make_node
from federated.test_hostile import Wire
from undrift.core.tree import EMPTY
from undrift.errors import ChangedExperiment, FederationError
from undrift.experiment.folder import RunFolder
from undrift.experiment.spec import load
from undrift.federated.letters import DownOwn, Up, words
from undrift.federated.project import node_of, read_project
from undrift.federated.running import run_deployed
from undrift.federated.shelf import Shelf, mark_of
from undrift.federated.wire import Form, pack, words_of
from undrift.state import disk
from undrift.testing.world import tiny_world


class Crash(BaseException):
    pass


# ---- nodes ---------------------------------------------------------------------------------------
def test_a_node_that_is_restarted_before_every_message_loses_nothing(tmp_path):
    algorithm = fl.testing.engines.standard_algorithms()["every hook"]
    silos = Silos(tiny_world(), algorithm, tmp_path)
    server = silos.server()
    for _ in range(3):
        for client in silos.nodes:
            silos.restart(client)
        server.round()
    steady = Silos(tiny_world(), algorithm, tmp_path / "steady").server()
    steady.run(3)
    assert distance(server, steady) == 0


def requests_of(silos, rounds=2):
    """Record what one client is asked, message by message."""
    asked, grid = [], silos.grid
    inner = grid.handlers[1000]

    def spy(common, own):
        asked.append((common, own))
        return inner(common, own)

    grid.handlers[1000] = spy
    silos.server().run(rounds)
    return asked


def test_asked_twice_a_node_gives_the_same_report_and_trains_once(tmp_path):
    world = tiny_world()._replace(sampler=fl.Everyone())
    silos = Silos(world, fl.scaffold(lr=0.05), tmp_path)
    common, own = requests_of(silos)[-1]
    node = make_node(world, fl.scaffold(lr=0.05), 0, tmp_path)
    node.engine.trained = None  # it would fail if it trained
    first = node.answer(common, own)
    assert first == node.answer(common, own) and words_of(first)["failed"] == ""


@pytest.mark.parametrize("name", ["scaffold", "mime"])
def test_a_node_killed_at_any_file_operation_gives_the_same_report_after_it(
    name, tmp_path, monkeypatch
):
    world = tiny_world()._replace(sampler=fl.Everyone())
    algorithm = fl.catalogue()[name].build(lr=0.05)
    asked = requests_of(Silos(world, algorithm, tmp_path / "asked"), rounds=2)
    steady = make_node(world, algorithm, 0, tmp_path / "steady")
    wanted, folder = [steady.answer(*one) for one in asked], tmp_path / "killed"
    for number, request in enumerate(asked):
        for point in range(1, 100):
            count = [point]

            def dying(*arguments, real, count=count):
                count[0] -= 1
                if not count[0]:
                    raise Crash
                return real(*arguments)

            with monkeypatch.context() as patch:
                for operation in ("_os_write", "_os_fsync", "_os_replace"):
                    real = getattr(disk, operation)
                    patch.setattr(disk, operation, lambda *a, real=real: dying(*a, real=real))
                try:
                    make_node(world, algorithm, 0, folder).answer(*request)
                except Crash:
                    continue
            break
        assert point > 3  # it was killed at least a few times
        assert make_node(world, algorithm, 0, folder).answer(*request) == wanted[number]


def test_a_round_done_again_starts_from_the_state_before_it(tmp_path):
    """The server goes back two rounds; nodes find the states that belong there."""
    algorithm, folder = fl.adabest(lr=0.05), tmp_path / "checkpoints"
    silos = Silos(tiny_world(), algorithm, tmp_path)
    server = silos.server()
    server.run(2)
    server.save(folder)
    server.run(2)
    wanted = {n: v.clone() for n, v in fl.core.tree.named_leaves(server.server).items()}
    again = silos.server()
    assert again.load(folder) and again.rounds_done == 2
    again.run(2)
    for name, value in fl.core.tree.named_leaves(again.server).items():
        assert torch.equal(value, wanted[name])


def test_a_node_whose_folder_is_gone_is_left_out_and_says_so(tmp_path):
    import shutil

    world = tiny_world()._replace(sampler=fl.Everyone())
    silos = Silos(world, fl.scaffold(lr=0.05), tmp_path)
    server = silos.server()
    server.round()
    shutil.rmtree(tmp_path / "client-2")
    assert server.round().skipped == [2]
    assert "is not on this node" in silos.refusals.refused[0].cause


def test_a_damaged_state_is_noticed(tmp_path):
    world = tiny_world()._replace(sampler=fl.Everyone())
    silos = Silos(world, fl.scaffold(lr=0.05), tmp_path)
    server = silos.server()
    server.round()
    [state] = (tmp_path / "client-3" / silos.run).glob("state-*")
    data = bytearray(state.read_bytes())
    data[-3] ^= 4
    state.write_bytes(data)
    assert server.round().skipped == [3]
    assert silos.refusals.refused[0].cause == "the node failed (CorruptCheckpoint)"


def test_a_shelf_keeps_few_states_and_never_drops_the_one_that_counts(tmp_path):
    shelf, form = Shelf(tmp_path, "0" * 32), Form({"c": torch.zeros(2)})
    marks = [mark_of(bytes([i])) for i in range(12)]
    for round, mark in enumerate(marks):
        shelf.keep_state(round, mark, {"c": torch.full((2,), float(round))}, marks[0])
    assert shelf.state(marks[0], form)["c"][0] == 0 and shelf.state(marks[-1], form)["c"][0] == 11
    assert len(list((tmp_path / ("0" * 32)).iterdir())) == 6
    with pytest.raises(FederationError, match="not on this node"):
        shelf.state(marks[3], form)


# ---- the server ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def project(tmp_path_factory):
    from undrift.deploy.folder import Wanted, init

    place = tmp_path_factory.mktemp("project") / "p"
    settings = ["rounds=4", "partition.clients=4", "sampler.count=3", "task.dtype=float64"]
    settings += ["algorithm.use=scaffold", "work.epochs=1", "work.batch=64", "model.hidden=4"]
    settings += ["evaluate.metrics=auc,log_loss"]
    [experiment] = load("digits", settings)
    init(place, experiment, Wanted(insecure=True))
    return read_project(place / "app" / "silos")


def local(project, folder):
    from undrift.federated.grid import LocalGrid
    from undrift.federated.project import share

    class Ready(LocalGrid):
        """Nodes that say themselves which client they are."""

        def nodes(self):
            return dict.fromkeys(self.handlers)

    handlers = {}
    for client in range(project.clients):
        loader = f"{__name__}:loaded"
        LOADED[client] = share(project.experiment, client)
        node = node_of(project, Path(), client, folder / f"client-{client}", loader)
        handlers[77 + client] = node.answer
    return Ready(handlers)


LOADED = {}


def loaded(client, place):
    return LOADED[client]


def model_of(folder):
    return (folder / "model.safetensors").read_bytes()


def test_a_deployed_run_has_the_numbers_and_the_folder_of_a_simulation(project, tmp_path):
    history = run_deployed(project, local(project, tmp_path / "nodes"), tmp_path / "run")
    simulated = fl.run(project.experiment, tmp_path / "simulated")
    for name in ("test_accuracy", "test_loss", "train_loss", "test_auc", "test_log_loss"):
        assert history[name] == pytest.approx(simulated[name], rel=1e-10)
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {
        *("experiment.toml", "rounds.jsonl", "summary.json", "model.safetensors", "members.json"),
    }
    assert model_of(tmp_path / "run") == model_of(tmp_path / "simulated")
    told = [RunFolder(tmp_path / name).evaluation() for name in ("run", "simulated")]
    assert told[0] is not None and told[0] == told[1] and "sites" not in told[0]
    again = run_deployed(project, local(project, tmp_path / "nodes"), tmp_path / "run")
    assert len(again) == 4  # nothing is left to do


@pytest.mark.reliability
@pytest.mark.parametrize("points", [[3, 6, 15], pytest.param(range(1, 20), marks=pytest.mark.slow)])
def test_a_server_killed_after_some_answer_goes_on_with_the_same_numbers(points, project, tmp_path):
    """4 greetings and 12 reports: the 17th answer never comes."""
    run_deployed(project, local(project, tmp_path / "nodes-0"), tmp_path / "steady")
    wanted = model_of(tmp_path / "steady")
    for point in points:
        nodes, folder, count = tmp_path / f"nodes-{point}", tmp_path / f"run-{point}", [point]

        def dying(phase, answer, count=count):
            count[0] -= 1
            if not count[0]:
                raise Crash
            return [answer]

        try:
            run_deployed(project, Wire(local(project, nodes), dying), folder)
        except Crash:
            run_deployed(project, local(project, nodes), folder)
        assert model_of(folder) == wanted
        assert (count[0] > 0) == (point > 16)


@pytest.mark.reliability
@pytest.mark.slow
def test_a_server_killed_at_random_moments_goes_on_with_the_same_numbers(project, tmp_path):
    started = time.monotonic()
    run_deployed(project, local(project, tmp_path / "nodes-0"), tmp_path / "steady")
    seconds, kills, number = time.monotonic() - started, 0, 0
    while kills < 20:
        number += 1
        nodes, folder = tmp_path / f"nodes-{number}", tmp_path / f"run-{number}"
        pid = os.fork()
        if not pid:
            try:
                run_deployed(project, local(project, nodes), folder)
            finally:
                os._exit(0)
        time.sleep(seconds * (number * 0.37 % 1))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        kills += os.WIFSIGNALED(status)
        run_deployed(project, local(project, nodes), folder)
        assert model_of(folder) == model_of(tmp_path / "steady")


def test_another_experiment_does_not_go_on_in_the_same_folder(project, tmp_path):
    import dataclasses

    run_deployed(project, local(project, tmp_path / "nodes"), tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    other = dataclasses.replace(project.experiment, work=fl.Work(epochs=2, batch=64), rounds=6)
    changed = dataclasses.replace(project, experiment=other)
    with pytest.raises(ChangedExperiment):
        run_deployed(changed, local(changed, tmp_path / "nodes"), tmp_path / "run")


# ---- no pickle -----------------------------------------------------------------------------------
def test_a_whole_run_unpickles_nothing(project, tmp_path):
    found, watching = [], [True]

    def hook(event, arguments):
        if watching[0] and event == "pickle.find_class":
            found.append(arguments)

    sys.addaudithook(hook)
    grid = local(project, tmp_path / "nodes")  # copies modules, which is no message
    run_deployed(project, grid, tmp_path / "run")
    watching[0] = False
    assert not found


def test_a_greeting_tells_the_number_of_examples_and_nothing_else(tmp_path):
    node = make_node(tiny_world(), fl.fedavg(lr=0.1), 2, tmp_path)
    from undrift.federated.letters import ANYBODY, FRESH, Down

    run = "0" * 32
    common = pack(EMPTY, words(Down("hello", run, 0, "", 6, 0)))
    own = pack(EMPTY, words(DownOwn("hello", run, 0, ANYBODY, FRESH)))
    assert words_of(node.answer(common, own)) == words(Up("hello", run, 0, 2, size=3))
