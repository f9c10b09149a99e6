"""What computes the same, and what only looks so."""

import functools
import random
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from undrift.identity import same


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


@dataclass
class Settings:
    value: torch.Tensor


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Both(Slotted):
    pass


class Named(list):
    pass


def with_attribute(value, made):
    made.note = value
    return made


def shown(x):
    return x


def labelled(value):
    def made(x):
        return x

    made.label = value
    return made


HELD = [
    lambda v: Settings(torch.tensor([v, 1.0])),
    Slotted,
    Both,
    lambda v: with_attribute(v, Named([1])),
    lambda v: defaultdict(int if v == 1 else list, a=1),
    labelled,
    lambda v: 0.0 if v == 1 else -0.0,
    lambda v: with_attribute({"own_hooks": v}, nn.ReLU()),
    # not registered: nobody trains it
    lambda v: with_attribute([nn.Parameter(torch.tensor(v))], nn.ReLU()),
    lambda v: functools.partial(add, y=frozen(v).requires_grad_(True)),
]


@pytest.mark.parametrize("make", HELD)
def test_nothing_that_is_held_is_overlooked(make):
    torch.manual_seed(0)
    one = make(1.0)
    torch.manual_seed(0)
    assert same(one, make(1.0))
    torch.manual_seed(0)
    assert not same(one, make(2.0))


def test_what_cannot_be_looked_into_is_one_or_another():
    assert not same(random.Random(1), random.Random(1))
    held = random.Random(1)
    assert same(with_attribute(held, nn.ReLU()), with_attribute(held, nn.ReLU()))

    def never(x):
        return later(x) if x else None

    assert same(never, never)
    if never is None:
        later = shown  # an empty cell
    assert not same(never, shown)


def test_only_the_parameters_of_the_module_may_start_elsewhere():
    def tied(first, second):
        layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
        layers[first].weight = layers[second].weight
        return nn.Sequential(*layers)

    assert same(tied(0, 1), tied(0, 1)) and not same(tied(0, 1), tied(1, 2))
    assert not same(nn.Linear(2, 2), frozen(1.0)) and not same(frozen(1.0), nn.Linear(2, 2))

    def loss(module):
        return lambda out: out - module.weight

    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert same(loss(one), loss(other), within=(one, other))  # what is trained, by reference
    assert not same(loss(nn.Linear(2, 2)), loss(nn.Linear(2, 2)), within=(one, other))
