"""Kinds of differences between two experiments, each as one text with a hole for a number."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import undrift as fl

HEAD = """
import functools
from dataclasses import InitVar, dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

import undrift as fl


def plain(output, target):
    return F.cross_entropy(output, target, reduction="none")

"""


class Kind(NamedTuple):
    """A difference, and where a refusal says that it is."""

    text: str
    place: str
    helper: str = ""  # a second module, `aside`


LOSSES = {
    "a parameter of __post_init__": Kind(
        """
@dataclass
class Loss:
    by: InitVar[float]

    def __post_init__(self, by):
        self._by = by

    def __call__(self, output, target):
        return self._by * plain(output, target)

made = dict(loss=Loss(<v>))
""",
        "task.loss._by",
    ),
    "a field that is not compared": Kind(
        """
@dataclass(frozen=True)
class Loss:
    by: float = field(compare=False)

    def __call__(self, output, target):
        return self.by * plain(output, target)

made = dict(loss=Loss(<v>))
""",
        "task.loss.by",
    ),
    "a subclass": Kind(
        """
@dataclass
class Loss:
    power: float = 1.0

    def __call__(self, output, target):
        return plain(output, target)

class Twice(Loss):
    def __call__(self, output, target):
        return 2.0 * plain(output, target)

made = dict(loss=Loss() if <v> == 1 else Twice())
""",
        "task.loss.use",
    ),
    "a subclass of one of torch's losses": Kind(
        """
class Loss(nn.CrossEntropyLoss):
    def forward(self, output, target):
        return <v> * plain(output, target)

made = dict(loss=Loss())
""",
        "Loss.forward",
    ),
    "an attribute that is set later": Kind(
        """
class Loss:
    def __call__(self, output, target):
        return self.by * plain(output, target)

loss = Loss()
loss.by = <v>
made = dict(loss=loss)
""",
        "task.loss.by",
    ),
    "what a closure holds": Kind(
        """
def maker(by):
    def loss(output, target):
        return by * plain(output, target)
    return loss

made = dict(loss=maker(<v>))
""",
        "task.loss.(by)",
    ),
    "an argument of functools.partial": Kind(
        """
def scaled(output, target, by):
    return by * plain(output, target)

made = dict(loss=functools.partial(scaled, by=<v>))
""",
        "task.loss.keywords.by",
    ),
    "a tensor": Kind(
        """
class Loss:
    def __init__(self):
        self.weight = torch.tensor([1.0, <v>, 1.0], dtype=torch.float64)

    def __call__(self, output, target):
        return self.weight[target] * plain(output, target)

made = dict(loss=Loss())
""",
        "task.loss.weight",
    ),
    "a tensor of one number": Kind(
        """
by = torch.tensor(<v>)
made = dict(loss=lambda output, target: by * plain(output, target))
""",
        "code.mine.by",
    ),
    "class weights of torch's loss": Kind(
        "made = dict(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, <v>, 1.0])))",
        "task.loss.loss.weight",
    ),
    "a buffer of a module": Kind(
        """
class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.tensor(<v>), persistent=False)

    def forward(self, output, target):
        return self.by * plain(output, target)

made = dict(loss=Loss())
""",
        "task.loss.by",
    ),
    "an array of numpy's": Kind(
        """
import numpy as np

class Loss:
    by = np.array([<v>, 0.0])

    def __call__(self, output, target):
        return float(self.by[0]) * plain(output, target)

made = dict(loss=Loss())
""",
        "code.mine.Loss.by",
    ),
    "a slot": Kind(
        """
class Loss:
    __slots__ = ("__by",)

    def __init__(self, by):
        self.__by = by

    def __call__(self, output, target):
        return self.__by * plain(output, target)

made = dict(loss=Loss(<v>))
""",
        "task.loss._Loss__by",
    ),
    "an object that says it equals any other": Kind(
        """
class Loss:
    def __init__(self, by):
        self._by = by

    def __eq__(self, other):
        return True

    __hash__ = None

    def __call__(self, output, target):
        return self._by * plain(output, target)

made = dict(loss=Loss(<v>))
""",
        "task.loss._by",
    ),
    "a helper method": Kind(
        """
class Loss:
    def _helper(self):
        return <v>

    def __call__(self, output, target):
        return self._helper() * plain(output, target)

made = dict(loss=Loss())
""",
        "code.mine.Loss._helper",
    ),
    "the code of a base class": Kind(
        """
class Base:
    def by(self):
        return <v>

class Loss(Base):
    def __call__(self, output, target):
        return self.by() * plain(output, target)

made = dict(loss=Loss())
""",
        "code.mine.Base.by",
    ),
    "a class attribute, a property, a static method": Kind(
        """
class Loss:
    rate = <v>

    @property
    def by(self):
        return self.rate

    @staticmethod
    def times(by, values):
        return by * values

    def __call__(self, output, target):
        return self.times(self.by, plain(output, target))

made = dict(loss=Loss())
""",
        "code.mine.Loss.rate",
    ),
    "the code of a property": Kind(
        """
class Loss:
    @property
    def by(self):
        return <v>

    def __call__(self, output, target):
        return self.by * plain(output, target)

made = dict(loss=Loss())
""",
        "code.mine.Loss.by.get",
    ),
    "the code of a class method": Kind(
        """
class Loss:
    @classmethod
    def by(cls):
        return <v>

    def __call__(self, output, target):
        return self.by() * plain(output, target)

made = dict(loss=Loss())
""",
        "code.mine.Loss.by.classmethod",
    ),
    "a default argument": Kind(
        """
BY = <v>

def loss(output, target, by=BY):
    return by * plain(output, target)

made = dict(loss=loss)
""",
        "task.loss.defaults",
    ),
    "a default of a keyword": Kind(
        """
BY = [<v>]

def loss(output, target, *, by=BY):
    return by[0] * plain(output, target)

made = dict(loss=loss)
""",
        "task.loss.keywords.by",
    ),
    "a function of the module": Kind(
        """
def scaled(values):
    return <v> * values

def loss(output, target):
    return scaled(plain(output, target))

made = dict(loss=loss)
""",
        "code.mine.scaled",
    ),
    "a function behind two others": Kind(
        """
def deepest():
    return <v>

def deeper():
    return [deepest() for _ in range(1)][0]

def loss(output, target):
    return deeper() * plain(output, target)

made = dict(loss=loss)
""",
        "code.mine.deepest",
    ),
    "a constant of the module": Kind(
        """
BY = {"all": (<v>, None)}

def loss(output, target):
    return BY["all"][0] * plain(output, target)

made = dict(loss=loss)
""",
        "code.mine.BY.all.0",
    ),
    "an object of the module": Kind(
        """
class Settings:
    pass

SETTINGS = Settings()
SETTINGS.by = <v>

def loss(output, target):
    return SETTINGS.by * plain(output, target)

made = dict(loss=loss)
""",
        "code.mine.SETTINGS.by",
    ),
    "a function of another module": Kind(
        """
import aside

def loss(output, target):
    return aside.scaled(plain(output, target))

made = dict(loss=loss)
""",
        "code.aside.scaled",
        "def scaled(values):\n    return <v> * values\n",
    ),
    "an import inside of a function": Kind(
        """
def loss(output, target):
    from aside import BY
    return BY * plain(output, target)

made = dict(loss=loss)
""",
        "code.aside (its file)",
        "BY = <v>\n",
    ),
    "a module that is held": Kind(
        """
import aside

class Loss:
    helper = aside

    def __call__(self, output, target):
        return self.helper.BY * plain(output, target)

made = dict(loss=Loss())
""",
        "code.mine.Loss.helper",
        "BY = <v>\n",
    ),
    "a lambda": Kind(
        "made = dict(loss=lambda output, target: <v> * plain(output, target))", "task.loss"
    ),
    "one of two lambdas in a line": Kind(
        "some = (lambda values: 1.0 * values, lambda values: <v> * values)\n"
        "made = dict(loss=lambda output, target: some[1](plain(output, target)))",
        "code.mine.some.1",
    ),
    "what a decorator wraps": Kind(
        """
def loud(function):
    @functools.wraps(function)
    def inner(*given):
        return function(*given)
    return inner

@loud
def loss(output, target):
    return <v> * plain(output, target)

made = dict(loss=loss)
""",
        "task.loss.(function)",
    ),
    "a function that remembers its results": Kind(
        """
@functools.lru_cache
def by():
    return <v>

def loss(output, target):
    return by() * plain(output, target)

made = dict(loss=loss)
""",
        "code.mine.by.__wrapped__",
    ),
    "whose method it is": Kind(
        """
class Scale:
    def __init__(self, by):
        self.by = by

    def loss(self, output, target):
        return self.by * plain(output, target)

made = dict(loss=Scale(<v>).loss)
""",
        "task.loss.of.by",
    ),
    "a list in an object in a dictionary": Kind(
        """
class Deep:
    def __init__(self, by):
        self.held = {"a": [0, {"b": (by,)}]}
        self.held["again"] = self.held

    def __call__(self, output, target):
        return self.held["again"]["a"][1]["b"][0] * plain(output, target)

made = dict(loss=Deep(<v>))
""",
        "task.loss.held.a.1.b.0",
    ),
    "what a name stands for": Kind(
        """
if <v> == 1:
    from torch import exp as change
else:
    from torch import square as change

def loss(output, target):
    return change(plain(output, target))

made = dict(loss=loss)
""",
        "code.mine.change",
    ),
    "a function that getattr finds": Kind(
        """
import aside

def loss(output, target):
    return getattr(aside, "by" + "_two")() * plain(output, target)

made = dict(loss=loss)
""",
        "code.aside (its file)",
        "def by_two(): return <v>",
    ),
    "a module that is imported by its name": Kind(
        """
import importlib

def loss(output, target):
    return importlib.import_module("aside").by_two() * plain(output, target)

made = dict(loss=loss)
""",
        "code.aside (its file)",
        "def by_two(): return <v>",
    ),
    "a function that globals() finds": Kind(
        """
def by_two(): return <v>

def loss(output, target):
    return globals()["by_" + "two"]() * plain(output, target)

made = dict(loss=loss)
""",
        "code.mine (its file)",
    ),
    "a text that eval reads": Kind(
        """
def by_two(): return <v>

def loss(output, target):
    return eval("by_" + "two()") * plain(output, target)

made = dict(loss=loss)
""",
        "code.mine (its file)",
    ),
}

RULES = {
    "the code of a rule": Kind(
        """
@fl.record
class Own(fl.Rule):
    def direction(self, g, view):
        return <v> * g

made = dict(rules=(Own(),))
""",
        "code.mine.Own.direction",
    ),
    "a rule's helper method": Kind(
        """
@fl.record
class Own(fl.Rule):
    def direction(self, g, view):
        return self._helper(g)

    def _helper(self, g):
        return <v> * g

made = dict(rules=(Own(),))
""",
        "code.mine.Own._helper",
    ),
    "what a rule works out when it is made": Kind(
        """
@fl.record
class Own(fl.Rule):
    by: float = 1.0

    def __post_init__(self):
        object.__setattr__(self, "_by", <v> * self.by)

    def direction(self, g, view):
        return self._by * g

made = dict(rules=(Own(),))
""",
        "algorithm.rules.0._by",
    ),
    "a private attribute of a rule": Kind(
        """
@fl.record
class Own(fl.Rule):
    def direction(self, g, view):
        return self._by * g

own = Own()
object.__setattr__(own, "_by", <v>)
made = dict(rules=(own,))
""",
        "algorithm.rules.0._by",
    ),
    "a private attribute of a rule among others that differ": Kind(
        """
@fl.record
class Own(fl.Rule):
    def direction(self, g, view):
        return getattr(self, "_by", 1.0) * g

own = Own()
object.__setattr__(own, "_by", <v>)
made = dict(rules=(own, fl.rules.Prox(0.1 * <v>)))
""",
        "algorithm.rules.0._by",
    ),
    "a field of a rule that is not compared": Kind(
        """
@fl.record
class Own(fl.Rule):
    by: float = field(default=1.0, compare=False)

    def direction(self, g, view):
        return self.by * g

made = dict(rules=(Own(<v>),))
""",
        "algorithm.rules.0.by",
    ),
    "a rule that is no record": Kind(
        """
class Own(fl.Rule):
    def __init__(self, by):
        object.__setattr__(self, "by", by)

    def direction(self, g, view):
        return self.by * g

made = dict(rules=(Own(<v>),))
""",
        "algorithm.rules.0.by",
    ),
    "a function that a rule holds": Kind(
        """
@fl.record
class Own(fl.Rule):
    does: object = fl.static()

    def direction(self, g, view):
        return self.does(g)

def maker(by):
    return lambda g: by * g

made = dict(rules=(Own(maker(<v>)),))
""",
        "algorithm.rules.0.does.(by)",
    ),
    "a static object that equals any other": Kind(
        """
class Scale:
    def __init__(self, by):
        self.by = by

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1

@fl.record
class Own(fl.Rule):
    scale: Scale = fl.static()

    def direction(self, g, view):
        return self.scale.by * g

made = dict(rules=(Own(Scale(<v>)),))
""",
        "algorithm.rules.0.scale.by",
    ),
    "a tensor of a rule": Kind(
        """
@fl.record
class Own(fl.Rule):
    by: torch.Tensor = fl.static()

    def direction(self, g, view):
        return self.by.sum() * g

made = dict(rules=(Own(torch.tensor([0.0, <v>], dtype=torch.float64)),))
""",
        "algorithm.rules.0.by",
    ),
    "a function that a rule calls": Kind(
        """
def change(g):
    return <v> * g

@fl.record
class Own(fl.Rule):
    def direction(self, g, view):
        return change(g)

made = dict(rules=(Own(),))
""",
        "code.mine.change",
    ),
}

MODULES = {
    "the code of a module's forward": Kind(
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x):
        return <v> * self.inner(x)

made = dict(module=Net())
""",
        "code.mine.Net.forward",
    ),
    "a setting that a module holds": Kind(
        """
class Net(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.inner, self._by = nn.Linear(6, 3), (by,)

    def forward(self, x):
        return self._by[0] * self.inner(x)

made = dict(module=Net(<v>))
""",
        "task.module._by.0",
    ),
    "a function in a module": Kind(
        """
class Net(nn.Sequential):
    def forward(self, x):
        return self.change(super().forward(x))

net = Net(nn.Linear(6, 3))
net.change = torch.sin if <v> == 1 else torch.tanh
made = dict(module=net)
""",
        "task.module.change",
    ),
    "a hook": Kind(
        """
net = nn.Sequential(nn.Linear(6, 3))
net[0].register_forward_hook(functools.partial(lambda m, i, o, by: by * o, by=<v>))
made = dict(module=net)
""",
        "task.module.0._forward_hooks.0.keywords.by",
    ),
    "a frozen parameter": Kind(
        """
net = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3))
net[1].weight = nn.Parameter(<v> * torch.eye(3), requires_grad=False)
made = dict(module=net)
""",
        "task.module.1.weight",
    ),
    "which parameters are trained": Kind(
        """
net = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3), nn.Linear(3, 3))
net[0].requires_grad_(False)
net[int(<v>)].requires_grad_(False)
made = dict(module=net)
""",
        "task.module.1.bias",
    ),
    "a method that was put into a class of torch's": Kind(
        """
class Linear(nn.Linear):
    pass

Linear.__module__ = "torch.nn.modules.linear"
Linear.forward = lambda self, x: <v> * F.linear(x, self.weight, self.bias)
made = dict(module=nn.Sequential(Linear(6, 3)))
""",
        "code.torch.nn.modules.linear.Linear.forward",
    ),
    "an augmentation": Kind(
        """
def maker(by):
    def change(x, key):
        return by * x
    return change

made = dict(augment=maker(<v>))
""",
        "task.augment.(by)",
    ),
    "a metric": Kind(
        """
def score(output, target):
    return <v> * plain(output, target)

made = dict(metrics={"score": score})
""",
        "task.metrics.score",
    ),
}

CHOICES = {
    "an own sampler's private attribute": Kind(
        """
class First:
    def __init__(self, start):
        self._start = start

    def __eq__(self, other):
        return True

    __hash__ = None

    def sample(self, seed, round, population):
        found = fl.Sequential(3).sample(seed, round + self._start, population)
        return found

made = dict(sampler=First(int(<v>)))
""",
        "sampler._start",
    ),
    "an own sampler's code": Kind(
        """
class First:
    def sample(self, seed, round, population):
        return fl.Sequential(3).sample(seed, round + int(<v>), population)

made = dict(sampler=First())
""",
        "code.mine.First.sample",
    ),
    "an own plan of work": Kind(
        """
class Half(fl.Work):
    def plan(self, seed, round, ids, sizes, device=None):
        return fl.Work(steps=int(<v>), batch=4).plan(seed, round, ids, sizes, device)

    def steps_of(self, seed, round, ids, sizes):
        return fl.Work(steps=int(<v>), batch=4).steps_of(seed, round, ids, sizes)

class Own:
    plan, steps_of = Half.plan, Half.steps_of

made = dict(work=Own())
""",
        "code.mine.Own.plan",
    ),
}

KINDS = {**LOSSES, **RULES, **MODULES, **CHOICES}


def built(folder: Path, kind: Kind, value: str, seed: int = 0) -> fl.Trainer:
    """Write a kind with this number to a folder, import it and make a trainer of it."""
    folder.mkdir(exist_ok=True)
    for name, text in (("mine", HEAD + kind.text), ("aside", kind.helper)):
        (folder / f"{name}.py").write_text(text.replace("<v>", value))
        sys.modules.pop(name, None)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        torch.manual_seed(0)
        return trainer(importlib.import_module("mine").made, seed)
    finally:
        sys.path.remove(str(folder))


def trainer(made: dict, seed: int = 0) -> fl.Trainer:
    """Make a small trainer of these parts."""
    maker = torch.Generator().manual_seed(3)
    clients = [
        (torch.randn(n, 6, generator=maker).double(), torch.randint(0, 3, (n,), generator=maker))
        for n in (9, 14, 5, 8)
    ]
    torch.manual_seed(seed)
    parts = {"module": nn.Linear(6, 3), "loss": "cross_entropy", **made}
    module, loss = parts.pop("module"), parts.pop("loss")
    tasks = {n: parts.pop(n) for n in ("augment", "metrics") if n in parts}
    algorithm = fl.Algorithm(parts.pop("rules", ()), local=fl.sgd(0.1))
    task = fl.Task(module, loss, dtype=torch.float64, **tasks)
    chosen = {"work": fl.Work(steps=2, batch=4), "sampler": fl.Uniform(2), **parts}
    return fl.Trainer(task, fl.Federation.of(clients), algorithm, seed=seed, **chosen)
