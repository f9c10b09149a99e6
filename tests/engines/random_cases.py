"""A random module under random rules on random clients, each a function of a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from random_modules import CLASSES, Made, build
from torch import Tensor, nn
from torch.nn import functional as F

import undrift as fl
from undrift.errors import UndriftError
from undrift.testing.compare import difference
from undrift.testing.world import numbers

NEAR = 1e-9  # in float64
# a norm behind a norm has gradients that are rounding alone, which a small eps makes steps of
EPS = 1e-3


class Case(NamedTuple):
    """Everything that a trainer is made of, but the engine."""

    made: Made
    algorithm: Any
    rules: str
    clients: list[tuple[Tensor, Tensor]]
    settings: dict[str, Any]
    loss: str
    options: dict[str, Any]  # of the engine that is compared


LOSSES: dict[str, Any] = {
    "cross_entropy": "cross_entropy",
    "mse": "mse",
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "weighed": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)),
    "ignoring": nn.CrossEntropyLoss(ignore_index=0),
    "huber": nn.HuberLoss(delta=0.5),
    "own": lambda value, target: (value - F.one_hot(target, CLASSES)).abs().sum(-1).sqrt(),
}
NUMBERS = ("mse", "huber")  # losses of numbers, not of classes
LOCALS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: fl.sgd(0.05),
    "momentum": lambda: fl.sgd(0.03, momentum=0.9),
    "nesterov": lambda: fl.sgd(0.03, momentum=0.8, nesterov=True),
    "decayed": lambda: fl.sgd(0.05, lr_decay=0.9, weight_decay=0.01),
    "clipped": lambda: fl.sgd(0.05, clip=0.5),
    "adam": lambda: fl.Adam(0.01, eps=EPS),
    "adamw": lambda: fl.AdamW(0.01, eps=EPS),
    "rmsprop": lambda: fl.RmsProp(0.01, eps=EPS),
}
RULES: dict[str, Callable[[Any], Any]] = {
    "fedavg": lambda local: fl.fedavg(local=local),
    "fedavgm": lambda local: fl.fedavgm(local=local),
    "fedadam": lambda local: fl.fedadam(local=local, tau=0.1),
    "fedyogi": lambda local: fl.fedyogi(local=local, tau=0.1),
    "fedadagrad": lambda local: fl.fedadagrad(local=local, tau=0.1),
    "fedprox": lambda local: fl.fedprox(local=local, mu=0.1),
    "scaffold I": lambda local: fl.scaffold(local=local, option="I"),
    "scaffold II": lambda local: fl.scaffold(local=local),
    "feddyn": lambda local: fl.feddyn(local=local, alpha=0.1),
    "mime": lambda local: fl.mime(local=local),
    "mimelite": lambda local: fl.mimelite(local=local),
    "qfedavg": lambda local: fl.qfedavg(local=local),
    "rfedavg": lambda local: fl.rfedavg(local=local, strength=0.01),
    "rfedavg+": lambda local: fl.rfedavg_plus(local=local, strength=0.01),
    "adabest": lambda local: fl.adabest(local=local),
    "fednova": lambda local: fl.fednova(local=local),
    "fedvra": lambda local: fl.fedvra(local=local),
    "moon": lambda local: fl.moon(local=local),
    "slowmo": lambda local: fl.slowmo(local=local),
    "fedadc": lambda local: fl.fedadc(local=local),
    "vrlsgd": lambda local: fl.vrlsgd(local=local),
    "feddc": lambda local: fl.feddc(local=local),
    "fedpd": lambda local: fl.fedpd(local=local),
    "fedadmm": lambda local: fl.fedadmm(local=local),
    "comfed": lambda local: fl.comfed("scaf", "adam", local=local, server_lr=0.05, tau=0.1),
    "clipping": lambda local: fl.Algorithm((fl.Clipped(0.5),), local),
}
EVERYBODY = ("fedpd", "vrlsgd")  # they need all clients in every round


def case(seed: int) -> Case:
    """Make the case of a seed."""
    draw = random.Random(f"case {seed}")
    made = build(seed)
    maker = torch.Generator().manual_seed(seed)
    sizes = draw.choice([(5, 9, 3), (4, 1, 7, 2), (6, 6), (2, 11, 5, 3)])
    loss = draw.choice(sorted(LOSSES))

    def targets(n: int) -> Tensor:
        if loss in NUMBERS:
            return torch.randn(n, CLASSES, generator=maker, dtype=torch.float64)
        return torch.randint(0, CLASSES, (n,), generator=maker)

    clients = [(made.inputs(n, maker), targets(n)) for n in sizes]
    work = draw.choice([
        fl.Work(epochs=1, batch=4), fl.Work(epochs=(1, 2), batch=3), fl.Work(steps=3, batch=4),
        fl.Work(epochs=1, batch=4, last="drop"), fl.Work(epochs=1, batch=None),
    ])  # fmt: skip
    sampler = draw.choice([None, None, fl.Uniform(count=len(sizes) - 1)])
    algorithm, rules = _algorithm(draw)
    sampler = None if rules.startswith(EVERYBODY) else sampler
    settings = {"work": work, "sampler": sampler, "seed": seed}
    options = draw.choice([{}, {}, {}, {"graph": True}, {"chunk": 2}, {"workers": 2}])
    return Case(made, algorithm, rules, clients, settings, loss, options)


def _algorithm(draw: random.Random) -> tuple[Any, str]:
    """Draw rules and a local optimizer that go together."""
    while True:
        rule, local = draw.choice(sorted(RULES)), draw.choice(sorted(LOCALS))
        try:
            return RULES[rule](LOCALS[local]()), f"{rule} with {local}"
        except UndriftError:  # not every rule takes every optimizer
            continue


def trainer(case: Case, **options: Any) -> fl.Trainer:
    """Make a trainer."""
    task = fl.Task(case.made.module, LOSSES[case.loss], feature="head:input", dtype=torch.float64)
    return fl.Trainer(
        task, fl.Federation.of(case.clients), case.algorithm, **case.settings, **options
    )


class Told(NamedTuple):
    """How a case ended."""

    refused: str  # by whom and why, before training; "" if it was trained
    apart: str  # what differs between engines; "" if nothing does


def compare(case: Case, rounds: int = 2) -> Told:
    """Train by the default engine and by the reference; say what differs."""
    try:
        ours = trainer(case, **case.options)
    except UndriftError as error:
        return Told(str(error), "")
    theirs = trainer(case, engine="reference")
    ours.run(rounds)
    theirs.run(rounds)
    x, y = map(torch.cat, zip(*case.clients, strict=True))
    found = [numbers(t) | {f"test {n}": torch.tensor(v) for n, v in t.evaluate(x, y).items()}
             for t in (ours, theirs)]  # fmt: skip
    if any(not v.isfinite().all() for v in found[1].values() if v.is_floating_point()):
        return Told("", "the reference is not finite: the case says nothing")
    return Told("", difference(found[0], found[1], NEAR))


def text(seed: int, case: Case) -> str:
    """Describe a case in a line."""
    made = ", ".join(case.made.parts)
    return f"seed {seed}: {made}; {case.rules}; {case.loss}; {case.settings} {case.options}"
