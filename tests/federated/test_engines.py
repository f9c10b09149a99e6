"""The same numbers from clients elsewhere: participants, batches, server, client states."""

import pytest
import torch
from torch import nn

import undrift as fl
from federated.silos import Silos, distance
from rules.needs import built, world_for
from undrift.core.algorithm import init_client
from undrift.core.rule import Sizes
from undrift.core.tree import named_leaves
from undrift.data import Arrival, Federation, Uniform, Work
from undrift.federated.shelf import Shelf
from undrift.federated.wire import Form
from undrift.testing.engines import standard_algorithms
from undrift.testing.world import tiny_world

FEW = [
    *("fedavg", "fedprox", "fednova", "qfedavg"),  # stateless, one with a probe
    *("scaffold", "feddyn", "adabest", "moon", "fedvra_u"),  # with client states
    *("mime", "rfedavg", "rfedavg_plus", "fedrl"),  # probes, second looks, rows
]
REST = [n for n in fl.catalogue() if n not in FEW]
NAMES = [*FEW, *(pytest.param(n, marks=pytest.mark.slow) for n in REST)]


def world_of(name):
    world = tiny_world()
    return world._replace(**world_for(name, world.sampler, world.work))


def simulated(world, algorithm, engine, rounds=3):
    trainer = world.trainer(algorithm, engine=engine)
    return trainer, trainer.run(rounds)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_algorithm_is_the_same_in_every_engine(name, tmp_path):
    world, algorithm = world_of(name), built(name, lr=0.05)
    silos = Silos(world, algorithm, tmp_path)
    server = silos.server()
    found = server.run(3)
    assert not silos.refusals.refused
    for engine in ("reference", "vectorised"):
        trainer, results = simulated(world, algorithm, engine)
        assert distance(server, trainer) <= 1e-10
        for ours, theirs in zip(found, results, strict=True):
            assert (ours.ids, ours.skipped, ours.steps) == (
                theirs.ids,
                theirs.skipped,
                theirs.steps,
            )
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-10)
            assert (ours.floats_down, ours.floats_up) == (theirs.floats_down, theirs.floats_up)


@pytest.mark.parametrize("label", ["scaffold/m", "every hook"])
def test_algorithms_with_every_hook_are_the_same(label, tmp_path):
    world, algorithm = tiny_world(), standard_algorithms()[label]
    server = Silos(world, algorithm, tmp_path).server()
    server.run(3)
    assert distance(server, simulated(world, algorithm, "reference")[0]) <= 1e-10


@pytest.mark.parametrize("name", ["scaffold", "moon", "fedvra_u"])
def test_client_states_on_the_nodes_are_those_of_the_simulator(name, tmp_path):
    world, algorithm = world_of(name), built(name, lr=0.05)
    silos = Silos(world, algorithm, tmp_path)
    server = silos.server()
    server.run(3)
    trainer, _ = simulated(world, algorithm, "reference")
    w, _ = world.task.initial()
    for client in trainer.store.seen:
        sizes = Sizes(6, silos.nodes[client].size, server.sizes.features)
        form = Form(init_client(algorithm, w, sizes))
        mark = server.engine._bases([client])[client]
        ours = named_leaves(Shelf(silos.nodes[client].folder, silos.run).state(mark, form))
        theirs = trainer.store.gather([client])
        for leaf, wanted in zip(ours.values(), named_leaves(theirs).values(), strict=True):
            kept = tuple(slice(0, n) for n in leaf.shape)  # one row per example: its own only
            assert torch.allclose(leaf, wanted[0][kept], rtol=0, atol=1e-10)


def test_batchnorm_dropout_and_examples_that_arrive(tmp_path):
    net = nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3)
    )
    task = fl.Task(net, dtype=torch.float64)
    world = tiny_world(task, sizes=(8, 12, 10, 9))
    clients = [world.federation.client(i) for i in range(4)]
    federation = Federation.of(clients, arrival=Arrival(rounds=3, first=0.5))
    world = world._replace(federation=federation, work=Work(epochs=2, batch=4), sampler=Uniform(3))
    server = Silos(world, fl.scaffold(lr=0.05), tmp_path).server()
    server.run(3)
    assert distance(server, simulated(world, fl.scaffold(lr=0.05), "reference")[0]) <= 1e-10


def test_asking_a_few_at_a_time_changes_nothing(tmp_path):
    from undrift.federated.exchange import Patience

    world, algorithm = tiny_world(), fl.scaffold(lr=0.05)
    one = Silos(world, algorithm, tmp_path / "a").server()
    few = Silos(world, algorithm, tmp_path / "b").server(patience=Patience(30, at_once=1))
    one.run(2)
    few.run(2)
    assert distance(few, one) == 0


def test_no_example_and_no_state_is_sent(tmp_path):
    """What goes up is what the algorithm says, number by number."""
    world, algorithm = tiny_world(), fl.feddyn(lr=0.05)
    server = Silos(world, algorithm, tmp_path).server()
    names = set(server.engine.forms["train"].leaves)
    kinds = {name.split(".")[0] + "." + name.split(".")[1] for name in names}
    assert kinds <= {
        *("0.total", "0.uploads", "0.buffers", "0.path", "0.count"),
        *("1.notes", "1.counters", "1.accepted", "1.steps", "1.loss", "1.scores", "1.length"),
    }
    assert server.store.row_floats == 5  # which report was counted, and two norms of what came
