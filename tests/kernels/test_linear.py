"""Linear layers and steps by the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="the kernels need triton")

from undrift.core.blocks import find_block, moving
from undrift.core.convolution import Seam, Way
from undrift.core.dense import dense
from undrift.core.linear import Descent, take_step
from undrift.core.ops import Pass, prepare
from undrift.core.task import Task
from undrift.kernels import interpreted, linear
from undrift.kernels.linear import LinearProblem
from undrift.kernels.problem import Lying, Terms
from undrift.testing.compare import distance

C = 2
BOUND = {"float32": 1e-5, "fp16": 4e-3, "tf32": 4e-3}


def error_of(trial, config) -> float:
    for output in trial.outputs:
        output.fill_(float("nan"))
    trial.prepare()
    for launch in trial.launches(config):
        launch.run()
    return trial.error()


@pytest.mark.parametrize("precision", ["float32", "fp16", "tf32"])
@pytest.mark.parametrize("sizes", [(2, 3, 50, 20), (3, 17, 64, 32), (1, 1, 7, 70)])
def test_programs(sizes, precision, device):
    p = LinearProblem(*sizes, precision)
    forward, backward = linear._forward_trial(p, device), linear._backward_trial(p, device)
    tile = dict(num_warps=4, num_stages=2)
    most = max(c["SPLIT"] for c in forward.candidates)
    for split in {1, most}:
        config = dict(tile, SPLIT=split, BO=32, BK=16)
        assert error_of(forward, config) < BOUND[precision], config
        if precision == "fp16":
            assert error_of(linear._narrowing_trial(p, device), config) < BOUND[precision], config
    assert error_of(backward, dict(tile, BI=32, BO=16)) < BOUND[precision]
    assert error_of(linear._step_trial(p, device), dict(tile, BI=32, BO=32)) < BOUND[precision]
    assert error_of(linear._adding_trial(p, device), dict(tile, BI=32, BO=16)) < BOUND[precision]
    if precision == "fp16":
        tile = dict(tile, BI=32, BO=16)
        assert error_of(linear._rebuilding_trial(p, device), tile) < BOUND[precision]
    backward.outputs[1][-1, 0, 0] += 1
    assert backward.error() > 1e-3, "the comparison must be able to fail"


@pytest.mark.parametrize("sizes", [(3, 5, 64, 32), (3, 5, 50, 20)])  # whole tiles, and others
def test_weights_are_narrowed_on_the_way(sizes, device):
    """Read where they lie, in longer vectors: as if they had been narrowed first."""
    p = LinearProblem(*sizes, "fp16")
    far, size = 7, p.outputs * p.inputs
    source = torch.Generator().manual_seed(0)
    vectors = torch.randn((2 * p.clients, far + size), generator=source).to(device)
    x = torch.randn((p.clients, p.rows, p.inputs), generator=source).half().to(device)
    mine = vectors[[4, 0, 3]]
    at = torch.tensor([vectors[i].data_ptr() for i in (4, 0, 3)], device=device)
    narrow = mine[:, far:].unflatten(1, (p.outputs, p.inputs)).half()
    copy = torch.full_like(narrow, torch.nan)
    wanted = linear.forward(p, x, narrow, None, torch.float32)
    found = linear.forward(
        p, x, copy, None, torch.float32, lying=Lying(at, aligned=False, column=far)
    )
    assert torch.equal(found, wanted) and torch.equal(copy, narrow)


class Sizes(TorchDispatchMode):
    """Notes how many bytes every result has."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.bytes += [made.nbytes] if isinstance(made, Tensor) else []
        return made


def test_rebuilt_weights_are_compared_where_a_cohort_has_no_room_twice(device):
    """All are looked at, but only some are compared: in float64 they take more than all do."""
    p, tile = LinearProblem(16, 3, 20, 30, "fp16"), dict(BI=32, BO=32, num_warps=4, num_stages=2)
    trial = linear._rebuilding_trial(p, device)
    (w,) = trial.outputs
    assert error_of(trial, tile) < BOUND["fp16"]
    with Sizes() as made:
        trial.error()
    assert max(made.bytes) < w.nbytes
    for client, value in ((-1, 1.0), (3, float("nan"))):
        error_of(trial, tile)
        w[client, 0, 0] += value
        assert trial.error() > 1e-3, "the comparison must be able to fail"


@pytest.mark.parametrize("own", [False, True])
def test_weights_are_rebuilt_from_all_they_are_made_of(own, device):
    clients, rows, inputs, outputs, shared = 4, 6, 20, 12, 3
    source = torch.Generator().manual_seed(0)

    def some(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=source).to(device)

    x, g = some(clients, rows, inputs).half(), some(clients, rows, outputs).half()
    far = some(clients, outputs * inputs + 5)[:, 5:].unflatten(1, (outputs, inputs))
    weights = some(clients, shared + 2)
    terms = Terms(
        some(2, shared, outputs, inputs), weights[:, :shared],
        *(([far], [weights[:, shared]]) if own else ()),
    )  # fmt: skip
    wanted = torch.empty((clients, outputs, inputs), device=device)
    terms.write(wanted)
    by_hand = [
        sum(weights[c, j] * terms.shared[c // 2, j] for j in range(shared)) for c in range(clients)
    ]
    if own:
        by_hand = [v + weights[c, shared] * far[c] for c, v in enumerate(by_hand)]
    assert distance([wanted], [torch.stack(by_hand)]) < 1e-5
    wanted -= 0.5 * (g.float().transpose(1, 2) @ x.float())
    found = torch.full_like(wanted, torch.nan)
    linear.rebuild(LinearProblem(clients, rows, inputs, outputs, "fp16"), g, x, terms, found, -0.5)
    assert distance([found], [wanted]) < 1e-3
    first, rest = terms._replace(own=[far, far], own_weights=[weights[:, 0], weights[:, 1]]).apart()
    assert len(first.own) == 1 and len(rest) == 1 and torch.equal(rest[0][1], weights[:, 1])


def rows_of(*sizes: int, device) -> Tensor:
    source = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, generator=source).half().float().to(device)


@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_every_mode(precision, device):
    matrix = rows_of(C, 4 * 9 + 4 + 3, device=device)
    w, b, x = matrix[:, 2:38].view(C, 4, 9), matrix[:, -4:], rows_of(C, 3, 9, device=device)

    def mine(w, b, x):
        return (dense(x, w, b, Way("triton", precision)) ** 2).mean()

    def torchs(w, b, x):
        return (F.linear(x, w, b) ** 2).mean()

    wanted = vmap(grad(torchs, (0, 1, 2)))(w, b, x)
    assert distance(vmap(grad(mine, (0, 1, 2)))(w, b, x), wanted) <= BOUND[precision]
    leaves = [t.clone().requires_grad_() for t in (w, b, x)]
    found = torch.autograd.grad(vmap(mine)(*leaves).sum(), leaves)
    assert distance(found, wanted) <= BOUND[precision]
    shared = vmap(grad(mine), (None, None, 0))(w[0], b[0], x)
    other = vmap(grad(torchs), (None, None, 0))(w[0], b[0], x)
    assert distance([shared], [other]) <= BOUND[precision]


@pytest.mark.parametrize("precision", ["float32", "fp16", "tf32"])
@pytest.mark.parametrize("name", ["triton", "grouped"])
def test_a_relu_before_a_layer_is_the_same_to_the_bit(name, precision, device):
    matrix, x = rows_of(C, 4 * 9 + 4, device=device), rows_of(C, 3, 9, device=device)
    w, b = matrix[:, :36].view(C, 4, 9), matrix[:, -4:]
    x[0, 0, 0], x[1, 2, 3] = 0.0, 1e-9  # no slope; one that fp16 does not hold

    def mine(w, b, x):
        return (dense(x, w, b, Way(name, precision, rectify=True)) ** 2).sum()

    def torchs(w, b, x):
        return (dense(x.relu(), w, b, Way(name, precision)) ** 2).sum()

    found, wanted = (vmap(grad(f, (0, 1, 2)))(w, b, x) for f in (mine, torchs))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert bool((found[2] == 0).any()) and float(found[2][1, 2, 3]) != 0
    descended = []
    for rectify in (True, False):
        own, rows = matrix.clone(), x.clone().requires_grad_()
        w, b = own[:, :36].view(C, 4, 9).requires_grad_(), own[:, -4:].requires_grad_()
        how = Way(name, precision, descent=Descent(0.5, 0.9), rectify=rectify)
        vmap(lambda w, b, x, how=how: dense(x if how.rectify else x.relu(), w, b, how))(
            w, b, rows
        ).square().sum().backward()
        descended.append((own.detach(), rows.grad))
    assert all(torch.equal(one, other) for one, other in zip(*descended, strict=True))
    assert not torch.equal(descended[0][0], matrix)


def test_a_relu_goes_with_the_linear_layer_behind_it():
    layers = [*prepare(network()).children()]
    blocks = [find_block(layers, at) for at in (4, 5, 6, 7, 8)]
    assert [b and (b.relu, b.length) for b in blocks] == [
        None, None, (False, 1), (True, 2), (False, 1)
    ]  # fmt: skip
    seen = layers[7].register_forward_hook(lambda *_: None)
    assert find_block(layers, 7) is None, "somebody looks at what comes out of the ReLU"
    seen.remove()
    layers[8].register_forward_hook(lambda *_: None)
    assert find_block(layers, 7) is None, "or at what goes into the layer"
    layers = [*prepare(network()).children()]
    layers[7].inplace = True
    assert find_block(layers, 7) is None, "it writes over what others may read"


@pytest.mark.parametrize("precision", ["float32", "fp16", "tf32", "bf16"])
def test_every_configuration_rectifies(precision, device, monkeypatch):
    outputs = 40 if interpreted() else 70  # two tiles, the second one cut
    p = LinearProblem(2, 17, 130, outputs, precision)
    if not linear.takes(p, rows_of(2, outputs, 130, device=device)):
        pytest.skip("the interpreter does not know bf16")
    x, w, b, g = linear.random_of(p, device)
    for made in (linear._forward_candidates(p), linear._backward_candidates(p)):
        for config in made:
            monkeypatch.setattr(linear, "configuration", lambda *_, config=config: config)
            wide = torch.float32
            if "SPLIT" in config:
                found, wanted = (
                    [linear.forward(p, v, w, b, wide, rectify)]
                    for v, rectify in ((x, True), (x.relu(), False))
                )
            else:
                every = (True, True, True)
                found = linear.backward(p, g, x, w, every, wide, True)
                wanted = linear.backward(p, g, x.relu(), w, every, wide)
                wanted[0] = torch.where(x <= 0, 0.0, wanted[0])
            assert all(map(torch.equal, found, wanted)), config


def test_many_rows_are_left_to_torch(monkeypatch, device):
    monkeypatch.setattr(linear, "forward", None)
    x, w = rows_of(200, 4, device=device), rows_of(3, 4, device=device)
    assert distance([dense(x, w, None, Way("triton"))], [F.linear(x, w)]) <= 1e-5


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(36, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)),
    )


def moved(task: Task, rows: Tensor, x: Tensor, y: Tensor, seam: Seam | None, how: Descent) -> None:
    """Take one step: going back under a seam, from gradients without one."""
    pieces = zip(task.names, rows.split(task.sizes, 1), task.shapes, strict=True)
    parts = {n: p.view(C, *s) for n, p, s in pieces}
    leaves = {n: p.detach().requires_grad_() for n, p in parts.items()}
    _, buffers = task.initial()

    def loss(parts, x, y):
        run = Pass(None, None, True, descent=None if seam is None else how, seam=seam)
        return task.losses(task.forward_named(parts, buffers, x, run).value, y).mean()

    vmap(loss)(leaves, x, y).sum().backward()
    for name, part in parts.items():
        if seam is None or name not in moving(task.module):
            take_step(part, leaves[name].grad, how)


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
@pytest.mark.parametrize("rates", ["numbers", "per client"])
def test_a_whole_network_descends(precision, rates, device):
    task = Task.build(network, seed=0).to(device)
    size = len(task.initial()[0])
    matrix = rows_of(C, size + 3, device=device) * 0.3
    x, y = rows_of(C, 2, 2, 6, 6, device=device), torch.tensor([[0, 1], [2, 1]], device=device)
    how = Descent(0.5, 0.9)
    if rates == "per client":
        how = Descent(
            torch.tensor([0.5, 0.0], device=device), torch.tensor([0.9, 1.0], device=device)
        )
    found, wanted = matrix.clone()[:, :size], matrix.clone()[:, :size]
    moved(task, found, x, y, Seam(precision, default="triton"), how)
    moved(task, wanted, x, y, None, how)
    assert distance([found], [wanted]) <= BOUND[precision]
    assert torch.equal(found[1], matrix[1, :size]) == (rates == "per client")
    assert distance([found[:1]], [matrix[:1, :size]]) > 0.01


def test_a_client_that_stands_still_may_have_any_gradient(device):
    p = LinearProblem(2, 3, 20, 6, "float32")
    w, b = rows_of(2, 6, 20, device=device), rows_of(2, 6, device=device)
    x, g = rows_of(2, 3, 20, device=device), rows_of(2, 3, 6, device=device)
    g[1].fill_(float("nan"))
    rates = torch.tensor([0.1, 0.0], device=device)
    before = w.clone(), b.clone()
    linear.descend(p, g, x, w, b, (rates, 1.0), False, torch.float32)
    assert torch.equal(w[1], before[0][1])
    assert torch.equal(b[1], before[1][1])
    assert distance([w[:1]], [before[0][:1] - 0.1 * g[:1].transpose(1, 2) @ x[:1]]) <= 1e-6
    assert distance([b[:1]], [before[1][:1] - 0.1 * g[:1].sum(1)]) <= 1e-6
