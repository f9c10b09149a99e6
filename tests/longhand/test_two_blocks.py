"""Two blocks: the projection, both gradients, and what the loops become without a second block.

No line of the library takes part. Measured: projection 1.5e-14, gradients against central
differences 5.1e-10, all-labelled loops against the one-block ones 6.7e-16.
"""

import numpy as np
import pytest

from undrift.verify.longhand.averaging import fedavg, fedprox
from undrift.verify.longhand.control import scaffold
from undrift.verify.longhand.duals import feddyn
from undrift.verify.longhand.features import Net
from undrift.verify.longhand.fedvra import fedvra
from undrift.verify.longhand.local import Local
from undrift.verify.longhand.steps import slopes
from undrift.verify.longhand.two_blocks import (
    Average,
    Dyn,
    PseudoLabels,
    Scaffold,
    Vra,
    cluster_world,
    project_simplex,
    pseudo_label_world,
    two_blocks,
)
from undrift.verify.longhand.worlds import World, epoch_batches

from .cases import CLIPPED, HEAVY, SGD, SIZES, SOME, WORLDS, above, below, gap

N, M = len(SIZES), len(SOME[0])


@pytest.fixture
def mlp() -> World:
    return WORLDS["mlp"]()


def unequal(world, rounds=SOME):
    return epoch_batches(world, rounds, 4, epochs=2)


def test_projection_is_the_nearest_point_of_the_simplex():
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.standard_normal((200, 4)), 5 * rng.standard_normal((200, 4))])
    z = project_simplex(rows)
    assert np.all(z >= 0)
    below("simplex, sum", np.abs(z.sum(axis=1) - 1).max(), 1e-12)
    # nearest point of a convex set: (v - z) . (u - z) <= 0 for every corner u
    for corner in np.eye(4):
        below("simplex, angle", float(((rows - z) * (corner - z)).sum(axis=1).max()), 1e-12)
    below("simplex, twice", np.abs(project_simplex(z) - z).max(), 1e-15)


def test_gradients_of_both_blocks_match_central_differences():
    for made in (pseudo_label_world(2, SIZES), cluster_world(3, SIZES, 3, 2)):
        world, objective = made
        rng = np.random.default_rng(1)
        for x, y in world.data[:2]:
            z = project_simplex(0.3 + 0.1 * rng.standard_normal((len(x), 3)))
            gradient = objective.model_gradient(world.w0, z, x, y)
            wanted = slopes(lambda w, z=z, x=x, y=y, f=objective: f.loss(w, z, x, y), world.w0)
            below("two blocks, x", np.abs(gradient - wanted).max(), 1e-8)
            gradient = objective.z_gradient(world.w0, z, x, y)
            wanted = slopes(lambda v, x=x, y=y, f=objective, w=world.w0: f.loss(w, v, x, y), z)
            below("two blocks, z", np.abs(gradient - wanted).max(), 1e-8)


@pytest.mark.parametrize("local", [SGD, HEAVY, CLIPPED])
def test_without_unlabelled_examples_the_second_block_does_nothing(mlp, local):
    b, run = unequal(mlp), {}
    plain = {"objective": PseudoLabels(Net.of(mlp))}
    for method in (Average(), Average(0.4), Scaffold(), Dyn(0.2), Vra(0.2, 1.5, 2.0), Vra(0.2)):
        run[len(run)] = two_blocks(mlp, SOME, b, local, method=method, **plain)
    below("two blocks = FedAvg", gap(run[0], fedavg(mlp, SOME, b, local)), 1e-12)
    below("two blocks = FedProx", gap(run[1], fedprox(mlp, SOME, b, local, mu=0.4)), 1e-12)
    below("two blocks = SCAFFOLD", gap(run[2], scaffold(mlp, SOME, b, local)), 1e-12)
    below("two blocks = FedDyn", gap(run[3], feddyn(mlp, SOME, b, local, alpha=0.2)), 1e-12)
    numbers = fedvra(mlp, SOME, b, local, gamma=0.2, a=1.5, d=2.0)
    below("two blocks = FedVRA", gap(run[4], numbers), 1e-12)
    below("two blocks = FedVRA", gap(run[5], fedvra(mlp, SOME, b, local, gamma=0.2)), 1e-12)


def test_pseudo_labels_come_to_rest_at_a_power_of_the_probabilities():
    """min over z of z.(-log p) - t H(z) is z ~ p^(1/t)."""
    world, objective = pseudo_label_world(2, SIZES)
    rounds = [[0]]
    b = {(0, 0): [np.arange(SIZES[0])]}
    settings = {"objective": objective, "eta_z": 0.1, "z_scale": "row", "steps_z": 2000}
    run = two_blocks(world, rounds, b, SGD, method=Average(), **settings)
    x, y = world.data[0]
    wanted = np.exp(objective.net.log_probabilities(world.w0, x) / objective.t)
    wanted = wanted / wanted.sum(axis=1, keepdims=True)
    z = run.client_states[0][0]["z"]
    below("pseudo-labels at rest", np.abs(z - wanted)[y < 0].max(), 1e-6)
    assert np.all(z[y >= 0] == 1 / 3)


def test_clusters_are_found():
    """One full-batch client with hard assignments: the centres go to the means of their points."""
    world, objective = cluster_world(3, [60], 3, 2)
    rounds = [[0]] * 60
    b = {(r, 0): [np.arange(60)] * 4 for r in range(60)}
    settings = {"objective": objective, "z_scale": "row", "eta_z": 10.0}
    run = two_blocks(world, rounds, b, Local(lr=0.5), method=Average(), **settings)
    z, centres = run.client_states[-1][0]["z"], run.x[-1].reshape(3, 2)
    points = world.data[0][0]
    assert np.all((z == 0) | (z == 1))
    means = (z.T @ points) / z.sum(axis=0)[:, None]
    below("clusters", np.abs(means - centres).max(), 1e-6)


def test_the_shared_block_stays_in_its_set():
    world, objective = cluster_world(3, SIZES, 3, 2)
    b = unequal(world)
    settings = {"objective": objective, "method": Vra(0.5, 1.0, N / M)}
    free = two_blocks(world, SOME, b, SGD, **settings)
    run = two_blocks(world, SOME, b, SGD, project=lambda w: np.clip(w, -1, 1), **settings)
    assert max(float(np.abs(x).max()) for x in run.x) <= 1.0
    above("projection of x", gap(free, run), 1e-2)
