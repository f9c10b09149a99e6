"""ComFed's sixteen cells against each other and against the loops that stand alone (I-44); C8.

Measured over three worlds: Prox mu 0 and literal Scaf equal Sgd bitwise; Nova with equal K 3.3e-16;
FedAvg, FedProx, FedAdam, FedAdagrad, FedYogi cells equal the stand-alone loops bitwise, FedNova
3.3e-16, SCAFFOLD (both options, both c updates) 8.9e-16; every other pair of cells differs by at
least 9.6e-4; fresh mode with one full step = delayed gradient descent 1.1e-16; C8 0.
"""

import dataclasses

import numpy as np
import pytest

from undrift.verify.longhand.averaging import fedavg, fednova, fedprox
from undrift.verify.longhand.comfed import CLIENTS, SERVERS, comfed
from undrift.verify.longhand.control import scaffold
from undrift.verify.longhand.local import impulse_norm
from undrift.verify.longhand.servers import fedavgm, fedopt
from undrift.verify.longhand.worlds import World, epoch_batches, step_batches

from .cases import ADAMW, ALL, HEAVY, RMSPROP, SGD, SOME, above, below, gap

ADAPT = {"eta_g": 0.05, "b1": 0.9, "b2": 0.99, "tau": 1e-3}


@pytest.mark.parametrize("server", SERVERS)
def test_i44_cells_that_must_agree(world, server):
    adapt = {} if server == "sgd" else ADAPT
    b = epoch_batches(world, SOME, 4, epochs=2)
    plain = comfed(world, SOME, b, HEAVY, client="sgd", server=server, **adapt)
    no_prox = comfed(world, SOME, b, HEAVY, client="prox", server=server, mu=0.0, **adapt)
    below("I-44 Prox mu 0", gap(no_prox, plain), 0.0)
    scaf = {"client": "scaf", "server": server, **adapt}
    below(
        "I-44 literal", gap(comfed(world, SOME, b, HEAVY, scaf_mode="literal", **scaf), plain), 0.0
    )
    equal = step_batches(world, SOME, steps=5, batch_size=4)
    plain5 = comfed(world, SOME, equal, HEAVY, client="sgd", server=server, **adapt)
    nova5 = comfed(world, SOME, equal, HEAVY, client="nova", server=server, **adapt)
    below(f"I-44 Nova equal K, {server}", gap(nova5, plain5), 1e-12)
    cells = [
        comfed(world, SOME, b, HEAVY, client=m, server=server, mu=0.5, **adapt) for m in CLIENTS
    ]
    cells.append(comfed(world, SOME, b, HEAVY, scaf_mode="fresh", **scaf))
    cells.append(comfed(world, SOME, b, HEAVY, c_weights="size", **scaf))
    for at, first in enumerate(cells):
        for second in cells[at + 1 :]:
            above("I-44 different cells", gap(first, second), 1e-5)


@pytest.mark.parametrize("server", SERVERS)
def test_i44_cells_are_the_stand_alone_algorithms(world, server):
    b = epoch_batches(world, SOME, 4, epochs=2)
    adapt = {} if server == "sgd" else ADAPT
    cell = comfed(world, SOME, b, HEAVY, client="sgd", server=server, **adapt)
    if server != "sgd":
        alone = fedopt(world, SOME, b, HEAVY, server=server, **ADAPT)
        below(f"I-44 FedOpt {server}", gap(cell, alone), 1e-12)
        return
    below("I-44 FedAvg", gap(cell, fedavg(world, SOME, b, HEAVY)), 1e-12)
    cell = comfed(world, SOME, b, HEAVY, client="prox", server="sgd", mu=0.3)
    below("I-44 FedProx", gap(cell, fedprox(world, SOME, b, HEAVY, mu=0.3)), 1e-12)
    cell = comfed(world, SOME, b, HEAVY, client="nova", server="sgd")
    below("I-44 FedNova", gap(cell, fednova(world, SOME, b, HEAVY)), 1e-12)
    for option in ("I", "II"):
        for c_update in ("population", "size"):
            grid = {"scaf_option": option, "c_weights": c_update, "eta_g": 0.7}
            cell = comfed(world, SOME, b, HEAVY, client="scaf", server="sgd", **grid)
            original = {"option": option, "c_update": c_update, "eta_g": 0.7}
            alone = scaffold(world, SOME, b, HEAVY, weighting="size", **original)
            below("I-44 SCAFFOLD", gap(cell, alone), 1e-12)
            worst = max(
                float(np.abs(p["c"] - q["c"]).max())
                for p, q in zip(cell.server_states, alone.server_states, strict=True)
            )
            below("I-44 SCAFFOLD c", worst, 1e-12)


def test_fresh_mode_with_one_full_step_is_gradient_descent_delayed_by_a_round(world):
    """Each step is -eta (g_i + c - g_i) = -eta c, and c is LAST round's gradient: x_1 = x_0."""
    b = step_batches(world, ALL, steps=1)
    run = comfed(
        world, ALL, b, SGD, client="scaf", server="sgd", scaf_mode="fresh", c_weights="size"
    )
    inputs = np.concatenate([x for x, _ in world.data])
    labels = np.concatenate([y for _, y in world.data])
    models = [world.w0, world.w0]
    for r in range(1, len(ALL)):
        old = models[-2]
        gradient = world.gradient(old, inputs, labels) + SGD.weight_decay * old
        models.append(models[-1] - SGD.lr * SGD.lr_decay**r * gradient)
    worst = max(float(np.abs(p - q).max()) for p, q in zip(run.x, models[1:], strict=True))
    below("fresh = delayed gradient descent", worst, 1e-12)


# ---- C8 ------------------------------------------------------------------------------------------


def test_empty_and_diverging_clients_are_left_out(world):
    """A run with a broken and an empty client equals the run without them."""
    inputs, labels = world.data[2]
    broken = [*world.data, (np.full_like(inputs, np.nan), labels), (inputs[:0], labels[:0])]
    sick = World(broken, world.gradient, world.loss, world.w0)
    with_them = [[*s, 6, 7] for s in SOME]
    b = epoch_batches(sick, with_them, 4, epochs=2)
    for algorithm in (fedavg, fednova, fedavgm):
        below("C8", gap(algorithm(sick, with_them, b, SGD), algorithm(sick, SOME, b, SGD)), 0.0)
    for option in ("I", "II"):
        skip = scaffold(sick, with_them, b, SGD, option=option)
        below("C8", gap(skip, scaffold(sick, SOME, b, SGD, option=option)), 0.0)
    for mechanism in CLIENTS:
        cell = {"client": mechanism, "server": "yogi", **ADAPT}
        below(
            "C8",
            gap(comfed(sick, with_them, b, SGD, **cell), comfed(sick, SOME, b, SGD, **cell)),
            0.0,
        )
    nobody = fedopt(sick, [[6, 7]], b | {(0, 6): b[0, 6], (0, 7): []}, SGD, server="adam", **ADAPT)
    below("C8 nobody", np.abs(nobody.x[0] - world.w0).max(), 0.0)


def test_norms_are_refused_where_they_do_not_exist():
    for local in (RMSPROP, ADAMW, dataclasses.replace(HEAVY, clip=1.0)):
        with pytest.raises(ValueError, match="does not exist"):
            impulse_norm(local, 0, 3)
