"""nn.RNN and nn.GRU: torch's own numbers, and every rule in every engine."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from core.nets import KEY, close, numbers, seeded
from undrift.core.ops import Pass, prepare, running
from undrift.errors import TaskError
from undrift.testing.compare import difference
from undrift.testing.world import numbers as numbers_of

KINDS = {
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "gru": nn.GRU,
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
def test_they_equal_torch(name, layers):
    for both, bias, first, given in itertools.product((False, True), repeat=4):
        options = {"bidirectional": both, "bias": bias, "batch_first": first}
        plain = seeded(KINDS[name], 3, 4, layers, **options)
        x = numbers(2, 5, 3) if first else numbers(5, 2, 3)
        state = numbers(layers * (2 if both else 1), 2, 4) if given else None
        found = []
        for module in (plain, prepare(plain)):
            inputs = [x.clone().requires_grad_(), *module.parameters()]
            with running(Pass(key=KEY, training=True)):
                y, h = module(inputs[0], state)
            found.append([y, h, *torch.autograd.grad(y.sin().sum() + (h * h).sum(), inputs)])
        for a, b in zip(*found, strict=True):
            close(a, b)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("first", [False, True])
def test_they_take_a_single_sequence(name, first):
    plain = seeded(KINDS[name], 3, 4, 2, batch_first=first)
    for state in (None, numbers(2, 4)):
        with running(Pass()):
            found = prepare(plain)(numbers(5, 3), state)
        for a, b in zip(found, plain(numbers(5, 3), state), strict=True):
            close(a, b)


def test_dropout_between_layers_is_keyed():
    ours = prepare(seeded(nn.GRU, 3, 4, 3, dropout=0.5))
    x, padded = numbers(7, 5, 3), numbers(7, 9, 3)
    padded[:, :5] = x

    def run(x: Tensor, key: Tensor) -> Tensor:
        with running(Pass(key=key, training=True)):
            return ours(x)[0]

    close(run(padded, KEY)[:, :5], run(x, KEY))
    assert not torch.allclose(run(x, KEY), run(x, KEY + 1))


def test_what_they_cannot_take_is_refused():
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3, 3)])
    with pytest.raises(TaskError, match=r"GRU .* got a PackedSequence"), running(Pass()):
        prepare(nn.GRU(3, 4))(packed)
    with pytest.raises(RuntimeError, match="hidden"), running(Pass()):
        prepare(nn.GRU(3, 4))(torch.zeros(5, 2, 3), torch.zeros(1, 1, 4))


class Last(nn.Module):
    """The last output of a recurrent layer, through a linear one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


PROBING = {
    "mime": fl.mime,
    "mimelite": fl.mimelite,
    "scaffold I": lambda lr: fl.scaffold(lr, option="I"),
    "qfedavg": fl.qfedavg,
    "rfedavg+": fl.rfedavg_plus,
    "moon": fl.moon,
}


@pytest.mark.parametrize("name", PROBING)
@pytest.mark.parametrize("kind", ["tanh", "gru"])
def test_rules_that_probe_agree_in_every_engine(name, kind):
    clients = [(numbers(n, 3, 3) + n, torch.arange(n) % 3) for n in (5, 8, 3)]
    net = Last(seeded(KINDS[kind], 3, 4, 2, dropout=0.2, batch_first=True))
    found = []
    for options in ({"engine": "reference"}, {}, {"graph": True}):
        task = fl.Task(net, dtype=torch.float64, feature="head:input")
        run = fl.Trainer(task, fl.Federation.of(clients), PROBING[name](0.1),
                         work=fl.Work(epochs=1, batch=4), **options)  # fmt: skip
        run.run(2)
        found.append(numbers_of(run))
        assert not difference(found[-1], found[0], 1e-11)
