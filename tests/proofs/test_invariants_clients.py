"""I-40, I-41, I-46: who the clients are, and runs that go on."""

import numpy as np
import pytest

import undrift as fl
from longhand.cases import below
from proofs.bridge import gap, run
from proofs.common import ALL5, SOME5, equal, unequal
from rules.needs import KINDS, built, every, world_for
from undrift.core.tree import replace
from undrift.rules.observe import LastModel
from undrift.testing import tiny_world
from undrift.testing.compare import distance
from undrift.testing.world import numbers
from undrift.verify.longhand.worlds import World, step_batches

ONE = {  # AdaBest without memory; the others need no setting to treat equals equally
    "adabest": {"mu": 0.0, "beta": 0.0},
    "fedvra": {"a": 0.5, "d": 1.0},
    **{name: {} for name in ("fedavg", "fedprox", "fednova", "scaffold", "rfedavg_plus")},
    **{name: {} for name in ("comfed:scaf-sgd", "feddyn", "mime", "slowmo")},
}


@pytest.mark.parametrize("name", ONE)
def test_i40_identical_clients_behave_as_one(mlp, name):
    alone = World(mlp.data[:1], mlp.gradient, mlp.loss, mlp.w0)
    many = World(mlp.data[:1] * 5, mlp.gradient, mlp.loss, mlp.w0)
    once, everyone = [[0]] * 5, [list(range(5))] * 5
    b, algo = unequal(alone, once), built(name, lr=0.05, **ONE[name])
    batches = {(r, i): b[r, 0] for r in range(5) for i in range(5)}
    watched = replace(algo, rules=(LastModel(), *algo.rules))
    five = run(many, everyone, batches, watched, feature="1")
    if name == "rfedavg_plus":  # alone there is nobody else, and no pull without the own mean
        algo = replace(algo, rules=(fl.RFedAvgPlus(include_self=True),))
    below(f"I-40 {name}", gap(run(alone, once, b, algo, feature="1"), five), 1e-12)
    for states in five.clients:
        for key, first in states[0].items():
            assert all(np.array_equal(first, other[key]) for other in states[1:]), key


@pytest.mark.parametrize("name", every(KINDS))
def test_i41_numbering_the_clients_otherwise_changes_nothing(mlp, name):
    algo, order = built(name, lr=0.05), [3, 0, 5, 1, 4, 2]  # new number of each client
    needs = fl.catalogue()[name].needs
    asked = ALL5 if needs == "everybody" else SOME5
    batches = {"scaffold_m": equal, "qfedsgd": lambda *w: step_batches(*w, steps=1)}
    b = batches.get(name, unequal)(mlp, asked)
    data = [mlp.data[order.index(i)] for i in range(6)]
    other = World(data, mlp.gradient, mlp.loss, mlp.w0)
    rounds = [[order[i] for i in sampled] for sampled in asked]
    moved = {(r, order[i]): batches for (r, i), batches in b.items()}
    feature = "1" if needs == "features" else None
    found = run(other, rounds, moved, algo, feature=feature)
    below(f"I-41 {name}", gap(run(mlp, asked, b, algo, feature=feature), found), 1e-12)


# ---- runs that go on -----------------------------------------------------------------------------
def tiny(name: str) -> fl.Trainer:
    world = tiny_world()
    chosen = world_for(name, world.sampler, world.work)
    return fl.Trainer(world.task, world.federation, built(name, lr=0.05), **chosen)


@pytest.mark.parametrize("name", every(KINDS))
def test_i46_a_resumed_run_repeats_every_bit(name, tmp_path):
    straight, first, second = tiny(name), tiny(name), tiny(name)
    sent = [result.floats_down for result in straight.run(5)]
    first.run(2)
    first.save(tmp_path)
    second.load(tmp_path)
    assert [result.floats_down for result in second.run(3)] == sent[2:]
    wanted = numbers(straight)
    below(f"I-46 {name}", distance(list(numbers(second).values()), list(wanted.values())), 0.0)
