"""The parts the loops are made of: gradients, local optimisers (against torch), ||a||_1.

Measured: finite differences 2.6e-11 softmax, 2.4e-10 mlp, 1.9e-10 regression, 1.5e-10 quadratic;
local training against torch.optim with prox, correction, decay and clipping 1.2e-15 at worst;
I-3 heavy ball 8.5e-14 relative (rho .99, closed form), 23.046721 exactly, prox 6.7e-16;
option II on constant gradients 2.0e-15; heavy ball + prox (eta .01, rho .9, mu 1, K 60):
sum a_k = 99.60, sum |a_k| = 131.03, smallest a_k = -0.848.
"""

import dataclasses

import numpy as np
import pytest
import torch

from undrift.verify.longhand.control import option_two_divisor, scaffold
from undrift.verify.longhand.local import (
    Local,
    closed_form_norm,
    full_gradient,
    impulse_coefficients,
    impulse_norm,
    local_training,
)
from undrift.verify.longhand.worlds import World, epoch_batches, quadratic_world

from .cases import HEAVY, LINEAR, NESTEROV, SGD, WORLDS, below

NETS = {
    "softmax": lambda: torch.nn.Linear(5, 3),
    "mlp": lambda: torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)
    ),
    "regression": lambda: torch.nn.Linear(5, 1),
}


@pytest.mark.parametrize("name", WORLDS)
def test_gradient_matches_central_differences(name):
    world = WORLDS[name]()
    worst = 0.0
    for x, y in world.data:
        gradient = world.gradient(world.w0, x, y)
        for j in range(len(world.w0)):
            e = np.zeros_like(world.w0)
            e[j] = 1e-5
            slope = (world.loss(world.w0 + e, x, y) - world.loss(world.w0 - e, x, y)) / 2e-5
            worst = max(worst, abs(slope - gradient[j]))
    below(f"finite differences, {name}", worst, 1e-8)


def test_quadratic_optimum_has_no_gradient():
    world = quadratic_world(4, clients=3, dim=4, sizes=[1, 2, 5])
    weights = [1 / 8, 2 / 8, 5 / 8]
    best = world.optimum(weights)
    total = sum(
        q * world.gradient(best, x, y) for q, (x, y) in zip(weights, world.data, strict=True)
    )
    below("quadratic optimum", np.abs(total).max(), 1e-12)


def torch_loss(name, net, x, y):
    if name == "regression":
        return torch.nn.functional.mse_loss(net(x), y)
    return torch.nn.functional.cross_entropy(net(x), y)


def torch_optimizer(local: Local, parameters):
    kwargs = {"lr": local.lr, "weight_decay": local.weight_decay}
    if local.optimizer == "sgd":
        return torch.optim.SGD(parameters, **kwargs)
    if local.optimizer in ("heavy_ball", "nesterov"):
        nesterov = local.optimizer == "nesterov"
        return torch.optim.SGD(parameters, momentum=local.rho, nesterov=nesterov, **kwargs)
    if local.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, alpha=local.alpha, eps=local.eps, **kwargs)
    return torch.optim.AdamW(parameters, betas=(local.b1, local.b2), eps=local.eps, **kwargs)


@pytest.mark.parametrize("optimizer", ["sgd", "heavy_ball", "nesterov", "rmsprop", "adamw"])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_local_training_matches_torch(name, optimizer, clip):
    """Same layout of w, same loss, same optimiser, with a prox term and a correction on top."""
    world, net = WORLDS[name](), NETS[name]().double()
    local = Local(lr=0.03, optimizer=optimizer, weight_decay=0.02, clip=clip)
    correction = 0.1 * np.random.default_rng(0).standard_normal(world.w0.shape)
    steps = epoch_batches(world, [[2]], batch_size=6, epochs=2)[0, 2]
    y = local_training(world, 2, world.w0, steps, local, 0, mu=0.3, correction=correction)

    start, add = torch.tensor(world.w0), torch.tensor(correction)
    torch.nn.utils.vector_to_parameters(start.clone(), net.parameters())
    optim = torch_optimizer(local, net.parameters())
    inputs, labels = (torch.tensor(part) for part in world.data[2])
    for batch in steps:
        optim.zero_grad()
        torch_loss(name, net, inputs[batch], labels[batch]).backward()
        here = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
        gradient = torch.cat([p.grad.ravel() for p in net.parameters()])
        gradient = gradient + 0.3 * (here - start) + add
        if clip is not None:
            gradient = gradient * min(1.0, clip / (float(gradient.norm()) + 1e-6))
        at = 0
        for p in net.parameters():
            p.grad = gradient[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optim.step()
    final = torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy()
    below(f"torch {name} {optimizer} clip {clip}", np.abs(final - y).max(), 1e-12)


# ---- ||a||_1 -------------------------------------------------------------------------------------


def test_i3_recursions_and_closed_forms():
    worst = 0.0
    for rho in (0.0, 0.5, 0.9, 0.99):
        for steps in range(1, 40):
            local = dataclasses.replace(HEAVY, rho=rho)
            closed = closed_form_norm(local, 0, steps)
            cnt, norm = 0.0, 0.0  # the recursion printed in 1.5
            for _ in range(steps):
                cnt = rho * cnt + 1.0
                norm = norm + cnt
            impulse = impulse_norm(local, 0, steps)
            worst = max(worst, abs(closed / norm - 1), abs(impulse / norm - 1))
    below("I-3 heavy ball", worst, 1e-12)
    below("I-3 rho .9, K 7", abs(impulse_norm(HEAVY, 0, 7) - 23.046721), 1e-12 * 23)
    for r in (0, 3):
        norm, shrink = 0.0, SGD.lr * SGD.lr_decay**r * 0.4
        for _ in range(9):
            norm = norm * (1 - shrink) + 1
        below("I-3 prox", abs(impulse_norm(SGD, r, 9, mu=0.4) / norm - 1), 1e-12)
        below("I-3 prox closed", abs(closed_form_norm(SGD, r, 9, mu=0.4) / norm - 1), 1e-12)
    stepped = dataclasses.replace(SGD, step_factor=lambda k: 0.9**k)
    below(
        "I-3 lr in round", abs(impulse_norm(stepped, 2, 5) - sum(0.9**k for k in range(5))), 1e-12
    )


def test_the_norm_is_the_sum_of_the_coefficients_and_not_always_of_their_sizes():
    """Prox and heavy ball together oscillate: a_k < 0 occurs; section 2's rule gives sum a_k."""
    local = Local(lr=0.01, optimizer="heavy_ball", rho=0.9)
    a = impulse_coefficients(local, 0, 60, mu=1.0)
    print("sum a", sum(a), "sum |a|", sum(abs(v) for v in a), "smallest", min(a))
    below("sum a_k", abs(impulse_norm(local, 0, 60, mu=1.0) / sum(a) - 1), 1e-12)
    assert min(a) < -0.1
    assert sum(abs(v) for v in a) > 1.1 * sum(a)


@pytest.mark.parametrize(
    "local", [*LINEAR, dataclasses.replace(NESTEROV, step_factor=lambda k: 0.8**k)]
)
def test_option_two_recovers_a_constant_gradient(local):
    """If client i's gradient is always b_i then c_i must be b_i, whatever the linear optimiser."""
    local = dataclasses.replace(local, weight_decay=0.0)
    b = np.random.default_rng(3).standard_normal((4, 5))
    data = [(np.full((6, 1), float(i)), np.zeros((6, 1))) for i in range(4)]
    world = World(data, lambda w, x, y: b[int(x[0, 0])], lambda w, x, y: 0.0, np.zeros(5))
    rounds = [[0, 1], [1, 2, 3], [0, 3], [2, 3]]
    batches = epoch_batches(world, rounds, 2, epochs={0: 1, 1: 2, 2: 1, 3: 3})
    for correction in ("gradient", "post_step"):
        if correction == "post_step" and local.optimizer != "sgd":
            continue  # there c_i is the mean optimiser step, not the mean gradient
        run = scaffold(world, rounds, batches, local, correction=correction)
        worst = max(float(np.abs(run.client_states[-1][i]["c"] - b[i]).max()) for i in range(4))
        below(f"option II constant gradient {local.optimizer}", worst, 1e-12)


def test_full_gradient_holds_weight_decay_but_not_adamws():
    world = WORLDS["softmax"]()
    x, y = world.data[1]
    plain = world.gradient(world.w0, x, y)
    decayed = full_gradient(world, 1, world.w0, SGD)
    assert np.array_equal(decayed, plain + SGD.weight_decay * world.w0)
    adamw = Local(lr=0.1, optimizer="adamw", weight_decay=0.5)
    assert np.array_equal(full_gradient(world, 1, world.w0, adamw), plain)


def test_option_two_divisor_uses_the_lr_of_the_round():
    assert option_two_divisor(SGD, 3, 7) == 7 * SGD.lr * SGD.lr_decay**3
    assert option_two_divisor(SGD, 3, 7, base_lr=True) == 7 * SGD.lr
