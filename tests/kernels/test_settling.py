"""Steps of a chain of rules where kernels make gradients, against the same numbers by torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

pytest.importorskip("triton", reason="the kernels need triton")

from undrift.core.blocks import moving
from undrift.core.chain import Chain, Chains
from undrift.core.linear import Descent
from undrift.core.ops import Pass
from undrift.core.seam import Seam
from undrift.core.task import Task
from undrift.kernels import linear, linear_step, settling
from undrift.kernels.linear import LinearProblem
from undrift.testing.compare import distance

C, E = 4, 2  # clients, experiments
BOUND = {"tf32": 2e-2, "fp16": 2e-2, "float32": 1e-5}  # rounding turns signs behind ReLU
FORMS = [(1, 0, 0), (1, 1, 1), (2, 1, 0), (2, 2, 2)]  # vectors that move, shared, own


def network() -> nn.Sequential:
    """A first layer, a convolution with pooling, and linear layers, one behind a ReLU."""
    return nn.Sequential(
        *(nn.Conv2d(2, 5, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(5, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(36, 10), nn.ReLU(), nn.Linear(10, 3, bias=False)),
    )


def a_chain(task: Task, form: tuple[int, int, int], device: torch.device) -> Chain:
    """Random vectors and numbers; some numbers do not count, and one client stands still."""
    carried, shared, own = form
    source = torch.Generator().manual_seed(3)

    def some(*sizes: int) -> Tensor:
        return (0.3 * torch.randn(sizes, generator=source)).to(device)

    size, number = sum(task.sizes), carried + 1 + shared + own
    ends = torch.tensor(task.sizes).cumsum(0).tolist()
    pairs = zip(task.names, task.sizes, ends, strict=True)
    vectors = [
        [some(rows, size + 5)[:, :size] for _ in range(count)]  # rows that lie apart
        for rows, count in ((C, carried), (E, shared), (C, own))
    ]
    needs = [tuple(range(number)), tuple(t for t in range(number) if t != number - 1)]
    live = torch.tensor([True, True, False, True], device=device)
    return Chain(
        *vectors, tuple(needs[:carried]), {n: slice(end - k, end) for n, k, end in pairs}, 2.0,
        some(carried, C, number), live,
    )  # fmt: skip


def copied(chain: Chain, kind: torch.dtype) -> Chain:
    twins = [[v.to(kind).clone() for v in w] for w in (chain.carried, chain.shared, chain.own)]
    rest = (chain.needs, chain.places, chain.scale, chain.table.to(kind), chain.live)
    return Chain(*twins, *rest)


def step(task: Task, chain: Chain, x: Tensor, y: Tensor, seam: Seam | None) -> None:
    """Take one step: going back under a seam, from gradients without one."""
    parts = task.named(chain.carried[0])
    leaves = {n: p.detach().requires_grad_() for n, p in parts.items()}
    _, buffers = task.initial()
    descent = None if seam is None else Descent(chain=chain)

    def loss(parts, x, y):
        run = Pass(None, None, True, descent=descent, seam=seam)
        return 2 * task.losses(task.forward_named(parts, buffers, x, run).value, y).mean()

    vmap(loss)(leaves, x, y).sum().backward()
    for name, leaf in leaves.items():
        if seam is None:
            chain._take(chain.places[name], leaf.grad.flatten(1))
        else:
            assert leaf.grad is None and name in moving(task.module)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", ["tf32", "fp16", "float32"])
def test_a_whole_network_steps(precision, form, device):
    task = Task.build(network, seed=0).to(device)
    chain = a_chain(task, form, device)
    wanted, before = copied(chain, torch.float32), copied(chain, torch.float32)
    source = torch.Generator().manual_seed(0)
    x = torch.randn((C, 2, 2, 6, 6), generator=source).to(device)
    y = torch.randint(0, 3, (C, 2), generator=source).to(device)
    step(task, chain, x, y, Seam(precision, default="triton"))
    step(task, wanted, x, y, None)
    for found, one, old in zip(chain.carried, wanted.carried, before.carried, strict=True):
        assert distance([found], [one]) <= BOUND[precision]
        assert torch.equal(found[2], old[2]) and distance([found], [old]) > 0.01
    held = zip([*chain.shared, *chain.own], [*before.shared, *before.own], strict=True)
    assert all(torch.equal(a, b) for a, b in held)


def section(chain: Chain, own: slice) -> Chain:
    """Take some clients, with the vectors that their own experiments share."""
    each = C // E
    parts = ([v[own] for v in chain.carried], [v[own.start // each : own.stop // each]
             for v in chain.shared], [v[own] for v in chain.own])  # fmt: skip
    rest = (chain.needs, chain.places, chain.scale, chain.table[:, own], chain.live[own])
    return Chain(*parts, *rest)


@pytest.mark.parametrize("precision", ["tf32", "float32"])
def test_chains_of_neighbours_step_together(precision, device):
    """Each some under a chain of its own: as if they were alone."""
    task = Task.build(network, seed=0).to(device)
    parts = [slice(0, 2), slice(2, 4)]
    chains = [a_chain(task, form, device) for form in ((2, 1, 0), (1, 1, 1))]
    # models stand side by side
    models = chains[0].carried[0].clone()
    for chain in chains:
        chain.carried = [models, *chain.carried[1:]]
    wanted = [copied(section(c, own), torch.float32) for c, own in zip(chains, parts, strict=True)]
    mixed = Chains([(own, section(c, own)) for c, own in zip(chains, parts, strict=True)])
    source = torch.Generator().manual_seed(0)
    x = torch.randn((C, 2, 2, 6, 6), generator=source).to(device)
    y = torch.randint(0, 3, (C, 2), generator=source).to(device)
    step(task, SimpleNamespace(carried=[models], step=mixed.step, take=mixed.take), x, y,
         Seam(precision, default="triton"))  # fmt: skip
    for (own, chain), one in zip(mixed.sections, wanted, strict=True):
        step(task, one, x[own], y[own], None)
        for found, right in zip(chain.carried, one.carried, strict=True):
            assert distance([found], [right]) <= BOUND[precision]


def test_who_stands_still_may_have_any_gradient_and_what_is_not_read_any_value(device):
    task = Task.build(network, seed=0).to(device)
    chain = a_chain(task, (2, 1, 1), device)
    chain.needs = ((0, 1, 2, 3), (1, 2, 3))  # neither its own vector, nor the second of the first
    chain.own[0].fill_(torch.nan)
    p, name = LinearProblem(C, 3, 36, 10, "fp16"), "6"
    own, behind = chain.places[f"{name}.weight"], chain.places[f"{name}.bias"]
    before = copied(chain, torch.float32)
    w, b = chain.carried[0][:, own].view(C, 10, 36), chain.carried[0][:, behind]
    x, g = torch.randn(C, 3, 36, device=device).half(), torch.randn(C, 3, 10, device=device).half()
    g[2] = torch.nan
    linear.descend(p, g, x, w, b, chain.step(f"{name}.weight", f"{name}.bias"), True, torch.half)
    wanted = copied(before, torch.float64)
    wanted.own[0].zero_()
    gradient = (g.double().transpose(1, 2) @ x.double()).flatten(1)
    wanted._take(own, gradient)
    wanted._take(behind, g.double().sum(1))
    assert distance(chain.carried, wanted.carried) < 1e-5
    assert torch.equal(chain.carried[1][2], before.carried[1][2])


@pytest.mark.parametrize("form", [None, *FORMS])
def test_a_gradient_that_is_known(form, device):
    task = Task.build(network, seed=0).to(device)
    chain = a_chain(task, form or (1, 0, 0), device)
    columns = chain.places["2.weight"]
    gradient = torch.randn((C, columns.stop - columns.start), device=device)
    wanted, w = copied(chain, torch.float64), chain.carried[0][:, columns]
    if form is None:  # plain SGD, rates by client
        rates = torch.tensor([0.5, 0.1, 0.0, 0.2], device=device)
        gradient[2] = torch.nan
        settling.take((rates, 0.9), w, gradient)
        moved = torch.where(rates[:, None] == 0, 0.0, rates[:, None] * gradient).double()
        wanted.carried[0][:, columns] = 0.9 * wanted.carried[0][:, columns] - moved
    else:
        settling.take(chain.step("2.weight"), w, gradient)
        wanted._take(columns, gradient.double())
    assert distance(chain.carried, wanted.carried) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_the_trial_can_fail(form, device):
    trial = linear_step._trial(LinearProblem(3, 20, 40, 36, "fp16"), device, form)
    for output in trial.outputs:
        output.fill_(torch.nan)
    trial.prepare()
    for launch in trial.launches(dict(BI=32, BO=32, num_warps=4, num_stages=1)):
        launch.run()
    assert trial.error() < 1e-3 and len(trial.outputs) == form[0]
    for output in trial.outputs:
        held = output[..., 3].clone()
        output[..., 3] += 9
        assert trial.error() > 1e-2
        output[..., 3] = held


def test_the_programs_compile_for_a_card_that_is_not_here(compiled):
    lines = compiled("steps")
    names = ["sum_parts", "sum_pairs", "take", "linear_backward", "linear_step"]
    assert [name for name, _ in lines] == names
    assert all("v4.b32" in widths for name, widths in lines if name in ("take", "linear_step"))
