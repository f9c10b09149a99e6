"""Modules are exchanged without a trace, and serve many clients at once."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from core.nets import F64, KEY, Cnn, Reader, close, gradients, numbers, seeded
from undrift.core.ops import Pass, current_pass, prepare, read_buffers, running
from undrift.errors import TaskError


# --- prepare --------------------------------------------------------------------------------------
def test_names_shapes_and_flags_stay():
    model = nn.ModuleDict({"cnn": Cnn(), "reader": Reader(bidirectional=True)})
    model["cnn"].norm.weight.requires_grad_(False)
    model["cnn"].drop.eval()
    twin = prepare(model)
    facts = [
        [(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()]
        + [(n, b.shape, b.dtype) for n, b in m.named_buffers()]
        + [(n, part.training) for n, part in m.named_modules()]
        for m in (model, twin)
    ]
    assert facts[0] == facts[1]
    assert list(model.state_dict()) == list(twin.state_dict())
    model.load_state_dict(twin.state_dict())


def test_the_original_is_left_alone():
    model = Cnn()
    prepare(model)
    assert type(model.norm) is nn.BatchNorm2d
    model(torch.zeros(2, 2, 4, 4))


def test_shared_submodules_stay_shared():
    norm = nn.BatchNorm1d(3)
    twin = prepare(nn.Sequential(norm, nn.Linear(3, 3), norm))
    assert twin[0] is twin[2]


def test_a_shared_batch_norm_updates_twice():
    norm = nn.BatchNorm1d(3).to(F64)
    model, x = nn.Sequential(norm, nn.Tanh(), norm), numbers(6, 3)
    with running(Pass(training=True)) as p:
        prepare(model)(x)
    model(x)
    close(p.new_buffers["0.running_mean"], norm.running_mean)
    close(p.new_buffers["0.running_var"], norm.running_var)
    assert p.new_buffers["0.num_batches_tracked"] == 2


def test_an_own_forward_is_left_alone_and_other_subclasses_are_not():
    class Own(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:
            return input

    class Named(nn.BatchNorm1d):
        def half(self) -> float:
            return self.eps / 2

    twin = prepare(nn.Sequential(Own(), Named(3)))
    assert type(twin[0]) is Own
    assert isinstance(twin[1], Named)
    assert twin[1].half() > 0
    assert list(read_buffers(twin)) == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]


def test_preparing_twice_changes_nothing():
    once = prepare(nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
    twice = prepare(once)
    assert type(twice[1]) is type(once[1])
    assert list(read_buffers(twice)) == list(read_buffers(once))


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_prepared_module_copies_and_pickles(twin_of):
    module = prepare(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.LSTM(3, 2)))
    x = torch.randn(4, 3)
    results = []
    for m in (module, twin_of(module)):
        with running(Pass(key=KEY, training=True)):
            results.append(m(x)[0])
    assert torch.equal(*results)


def test_the_root_itself_may_be_exchanged():
    assert "running_mean" in read_buffers(prepare(nn.BatchNorm1d(3)))


def test_a_lazy_module_is_refused():
    with pytest.raises(TaskError, match="lazy"):
        prepare(nn.LazyBatchNorm1d())


def test_a_call_outside_of_a_pass_is_refused():
    with pytest.raises(TaskError, match="outside of a pass"):
        prepare(nn.BatchNorm1d(3))(torch.zeros(2, 3))


# --- many clients at once -------------------------------------------------------------------------
def world(make, x: Tensor):
    """Three clients with their own parameters, buffers, data, masks and keys."""
    module = prepare(seeded(make))
    params = {
        n: p.detach() + 0.1 * torch.stack([numbers(*p.shape, c + 1)[..., 0] for c in range(3)])
        for n, p in module.named_parameters()
    }
    buffers = {n: torch.stack([b, b + 1, b + 2]) for n, b in read_buffers(module).items()}
    y = torch.arange(3 * x.shape[1]).reshape(3, -1) % 3
    mask = torch.arange(x.shape[1]) < torch.tensor([[4], [6], [0]])
    return module, (params, buffers, x, y, mask, torch.tensor([3, 4, 5]))


def client_gradient(module: nn.Module):
    """A step of one client: gradients, loss and new buffers."""

    def loss(params, buffers, x, y, mask, key):
        with running(Pass(mask, key, True)) as p:
            out = functional_call(module, {**params, **buffers}, (x,))
        each = torch.where(mask, F.cross_entropy(out, y, reduction="none"), 0.0)
        value = each.sum() / mask.sum().clamp(min=1)
        return value, (value, p.new_buffers)

    return grad(loss, has_aux=True)


def one(tree, c: int):
    return {n: v[c] for n, v in tree.items()} if isinstance(tree, dict) else tree[c]


WORLDS = {
    "cnn": (Cnn, numbers(3, 6, 2, 4, 4)),
    "reader": (
        lambda: Reader(dropout=0.4, bidirectional=True),
        torch.arange(90).view(3, 6, 5) % 11,
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_together_equals_one_after_the_other(name):
    module, args = world(*WORLDS[name])
    step = client_gradient(module)
    together_g, (together_loss, together_b) = vmap(step)(*args)
    assert together_b.keys() == read_buffers(module).keys()
    for c in range(3):
        g, (loss, b) = step(*(one(a, c) for a in args))
        close(together_loss[c], loss)
        for n in [*g]:
            close(together_g[n][c], g[n])
        for n in [*b]:
            close(together_b[n][c], b[n])


@pytest.mark.parametrize("name", WORLDS)
def test_the_unpadded_client_alone_gives_the_same(name):
    module, args = world(*WORLDS[name])
    together_g, (_, together_b) = vmap(client_gradient(module))(*args)
    params, buffers, x, y, mask, key = (one(a, 0) for a in args)
    g, (_, b) = client_gradient(module)(params, buffers, x[:4], y[:4], mask[:4], key)
    for n in [*g]:
        close(together_g[n][0], g[n])
    for n in [*b]:
        close(together_b[n][0], b[n])


def test_a_client_without_examples_stands_still():
    module, args = world(*WORLDS["cnn"])
    g, (_, b) = vmap(client_gradient(module))(*args)
    assert all((v[2] == 0).all() for v in g.values())
    assert all(torch.equal(v[2], args[1][n][2]) for n, v in b.items())


def test_the_whole_network_equals_torch():
    plain = seeded(Cnn)
    plain.drop.p = 0.0
    x = numbers(6, 2, 4, 4)
    run = Pass(torch.ones(6, dtype=torch.bool), KEY, True)
    y, g = gradients(prepare(plain), x, run, 6)
    expected, h = gradients(plain, x, Pass(), 6)
    close(y, expected)
    for a, b in zip(g, h, strict=True):
        close(a, b)
    close(run.new_buffers["norm.running_var"], plain.norm.running_var)


def test_threads_do_not_see_each_other():
    module, args = world(*WORLDS["cnn"])
    clients = [tuple(one(a, c) for a in args) for c in range(2)]
    alone = [client_gradient(module)(*client) for client in clients]
    found: dict[int, list[bool]] = {0: [], 1: []}
    ready = threading.Barrier(2)

    def work(c: int) -> None:
        step = client_gradient(copy.deepcopy(module))
        ready.wait()
        for _ in range(20):
            g, (loss, _) = step(*clients[c])
            same = all(torch.equal(g[n], alone[c][0][n]) for n in g)
            found[c].append(same and torch.equal(loss, alone[c][1][0]))

    threads = [threading.Thread(target=work, args=(c,)) for c in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == {0: [True] * 20, 1: [True] * 20}


def test_passes_nest():
    outer, inner = Pass(), Pass()
    with running(outer):
        with running(inner):
            assert current_pass() is inner
        assert current_pass() is outer
