"""What computes the same, and what only looks so."""

import functools

import pytest
import torch
from torch import nn

from undrift.core.same import same


def add(x, y=1):
    return x + y


def adder(y):
    return lambda x: x + y


class Held:
    def __init__(self, value):
        self.value = value

    def call(self, x):
        return self.value + x


def frozen(value):
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, value)
    made.weight.requires_grad_(False)
    return made


def hooked(value):
    made = nn.Linear(2, 2)
    made.register_forward_hook(functools.partial(add, y=value))
    return made


def running(mean, training):
    made = nn.BatchNorm1d(2).train(training)
    nn.init.constant_(made.running_mean, mean)
    return made


ALIKE = [
    lambda v: adder(v),
    lambda v: functools.partial(add, y=v),
    lambda v: Held(v),
    lambda v: Held(v).call,
    lambda v: Held(torch.tensor([v])),
    lambda v: [v, {"a": (v, torch.ones(2))}],
    lambda v: nn.CrossEntropyLoss(label_smoothing=v / 10),
    lambda v: nn.Sequential(nn.Linear(3, 2), nn.Dropout(v / 10)),
    lambda v: nn.Linear(3, int(v)),
    frozen,
    hooked,
    lambda v: running(v, training=False),
]


@pytest.mark.parametrize("make", ALIKE)
def test_two_are_the_same_if_they_hold_the_same(make):
    assert same(make(1.0), make(1.0))
    assert not same(make(1.0), make(2.0))


def test_what_a_run_changes_does_not_count():
    assert same(nn.Linear(3, 2), nn.Linear(3, 2))  # with other weights
    assert same(running(1.0, training=True), running(2.0, training=True))


def test_kinds_differ_and_circles_end():
    assert not same(1, 1.0) and not same(add, adder(1)) and not same(nn.ReLU(), nn.GELU())
    some, other = Held(None), Held(None)
    some.value, other.value = some, other
    assert same(some, other)
    assert not same(torch.Generator(), torch.Generator())  # who knows where they stand


def test_every_part_is_looked_at_however_many_there_are():
    def net(last):
        return nn.Sequential(*(frozen(float(i)) for i in range(200)), frozen(last))

    assert same(net(1.0), net(1.0)) and not same(net(1.0), net(2.0))
    assert not same([adder(i) for i in range(200)], [adder(i) for i in range(1, 201)])


def test_a_recurrent_layer_holds_its_weights_twice_more():
    def net(dropout=0.0, trained=True):
        made = nn.LSTM(3, 4, 2, dropout=dropout)
        made.weight_hh_l1.requires_grad_(trained)
        return made

    assert same(net(), net()) and not same(net(), net(dropout=0.1))
    assert not same(net(trained=False), net(trained=False))  # frozen, and drawn apart
