"""Random sentences of the algebra: every rule, local optimizer, aggregate and server there is.

Parts are found by looking at the package, and their settings at their declared ranges; what cannot
be guessed has an entry in `DRAWN`.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

import undrift as fl
from undrift import rules
from undrift.core import local, rule
from undrift.core.local import Schedule
from undrift.core.noise import Secret, draws_noise
from undrift.core.rule import Aggregate, Mean, Rule, serves_only
from undrift.errors import ConfigError
from undrift.testing import tiny_task, tiny_world


def parts(base: type) -> list[type]:
    """List the classes below `base` that the package defines."""
    walked = pkgutil.walk_packages(rules.__path__, f"{rules.__name__}.")
    modules = [local, rule, *(importlib.import_module(found.name) for found in walked)]
    found = {
        thing.__qualname__: thing
        for module in modules
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, base) and thing is not base
    }
    return [found[name] for name in sorted(found)]


def serves(kind: type) -> bool:
    blank: Any = object.__new__(kind)
    return serves_only(blank)


RULES = [kind for kind in parts(Rule) if not serves(kind)]
SERVERS = [Rule, *(kind for kind in parts(Rule) if serves(kind))]
LOCALS = [local.Sgd, *parts(local.Sgd)]
LINEAR = [kind for kind in LOCALS if kind.linear]
AGGREGATES = parts(Aggregate)
SCHEDULES = parts(Schedule)


# ---- settings ------------------------------------------------------------------------------------
def some(draw: Random, low: float, high: float) -> float:
    """Draw a number between two positive ones, small ones as often as large ones."""
    return round(math.exp(draw.uniform(math.log(low), math.log(high))), 6)


def maybe(draw: Random, low: float, high: float) -> float | None:
    return None if draw.random() < 0.5 else some(draw, low, high)


def schedule(draw: Random, chosen: Any) -> Schedule:
    if draw.random() < 0.5:
        return Schedule()
    lists = {rules.Milestones: ((1, 2), (0.5, 0.1)), rules.Listed: ((1.0, 0.5), (1.0, 0.8))}
    kind = draw.choice(SCHEDULES)
    return kind(*lists[kind]) if kind in lists else drawn(kind, draw)


def coefficient(draw: Random, chosen: Any) -> Any:
    return draw.choice([None, some(draw, 0.2, 1), rules.PerClient((0.3, 0.5, 0.4, 0.2))])


def own_lr(draw: Random, chosen: Any) -> float | None:
    return draw.choice([None, chosen.lr])


def by_client(draw: Random, chosen: Any) -> Any:
    return rules.PerClient((2.0, 3.0, 4.0, 3.0))


def some_objective(draw: Random, chosen: Any) -> Any:
    return draw.choice([rules.PseudoLabels(classes=3, every=2), rules.Clusters(groups=3)])


# By class and field, or by field: (the generator, the algorithm's local optimizer) -> a value.
DRAWN: dict[str, Callable[[Random, Any], Any]] = {
    "schedule": schedule,
    "lr": lambda draw, _: some(draw, 0.3, 1),
    **{f"{kind.__name__}.lr": lambda draw, _: some(draw, 0.01, 0.1) for kind in LOCALS},
    **{f"{name}.lr": own_lr for name in ("ScaffoldBaseLr", "ScaffoldUnbalanced", "FedDcConstant")},
    "Adaptive.lr": lambda draw, _: some(draw, 0.005, 0.05),
    "tau": lambda draw, _: some(draw, 0.03, 0.3),  # a smaller one blows up rounding errors
    "eps": lambda draw, _: some(draw, 0.03, 0.3),
    "weight_decay": lambda draw, _: draw.choice([0.0, some(draw, 1e-3, 1e-1)]),
    "clip": lambda draw, _: maybe(draw, 0.2, 2),
    "v0": lambda draw, _: draw.choice([0.0, some(draw, 1e-4, 1e-2)]),
    "steps": lambda draw, _: draw.choice([None, 2]),
    "InverseTime.steps": lambda draw, _: 2.0,
    "TwoBlocks.steps": lambda draw, _: draw.choice([1, 2]),
    "patience": lambda draw, _: draw.choice([None, 1, 2]),
    "PlateauSteps.patience": lambda draw, _: draw.choice([1, 2]),
    "lipschitz": lambda draw, _: some(draw, 5, 50),
    "QFair.lipschitz": lambda draw, _: maybe(draw, 5, 50),
    "stored": lambda draw, _: draw.choice([1, 2]),
    "batch": lambda draw, _: draw.choice([None, 2]),
    "exchanges": lambda draw, _: draw.choice([None, (1,)]),
    "nbar": by_client,
    "weights": by_client,
    "FeatureNoise.clip": lambda draw, _: some(draw, 0.2, 2),
    "FeatureNoise.batch": lambda draw, _: some(draw, 2, 32),
    "noise": lambda draw, _: draw.choice([None, drawn(rules.FeatureNoise, draw)]),
    "Private.noise": lambda draw, _: 0.0,  # nobody draws the same noise twice
    "base": lambda draw, _: drawn(draw.choice([rules.Ema, rules.EmaAdam, rules.Trace]), draw),
    "objective": some_objective,
    "FedDynExact.alpha": lambda draw, _: some(draw, 3, 10),  # a network is not convex
    "gamma": lambda draw, _: some(draw, 0.05, 1),
    "InverseTime.decay": lambda draw, _: some(draw, 0.01, 0.2),
    "Exponential.gamma": lambda draw, _: draw.uniform(0.5, 1),
    "FedVraEach.gamma": lambda draw, _: rules.PerClient((0.1, 0.4, 0.2, 0.3)),
    "a": coefficient,
    "d": coefficient,
    "local": lambda draw, chosen: chosen if draw.random() < 0.9 else rules.AdamW(),
}


def drawn(kind: type, draw: Random, chosen: Any = None) -> Any:
    """Make a part with random settings; `chosen` is the algorithm's local optimizer."""
    settings = {}
    for field in fields(kind):
        entry = DRAWN.get(f"{kind.__name__}.{field.name}", DRAWN.get(field.name))
        limits, choices = field.metadata.get("range"), field.metadata.get("choices")
        if entry is not None:
            settings[field.name] = entry(draw, chosen)
        elif choices:
            settings[field.name] = draw.choice(choices)
        elif isinstance(field.default, bool):
            settings[field.name] = draw.random() < 0.25
        elif limits is not None and field.default not in (None, MISSING):
            settings[field.name] = within(field.default, *limits, draw)
        else:
            given = field.default is not MISSING or field.default_factory is not MISSING
            assert given, f"{kind.__name__}.{field.name} needs an entry in DRAWN"
    return without_unread(kind, settings)


def without_unread(kind: type, settings: dict[str, Any]) -> Any:
    """Make a part, without those settings that nothing reads beside the others."""
    while True:
        try:
            return kind(**settings)
        except ConfigError as error:
            found = re.search(r"(\w+) = \S+ changes nothing", str(error))
            if found is None or settings.pop(found[1], None) is None:
                raise


def within(default: float, low: float, high: float, ends: str, draw: Random) -> float:
    """Draw a number of a declared range: sometimes its ends; a decade around the default else."""
    closed = [v for v, end in ((low, ends[0] == "["), (high, ends[1] == "]")) if end and v < 1e9]
    if closed and draw.random() < 0.15:
        return draw.choice(closed)
    if math.isfinite(high):
        return round(draw.uniform(low + 1e-3, high - 1e-3), 3)
    return some(draw, max(low, default / 10, 1e-4), max(default * 10, 1e-3))


# ---- sentences -----------------------------------------------------------------------------------
SIZES = {"unequal": (3, 4, 2, 1), "equal": (3, 3, 3, 3)}
WORLDS = {name: tiny_world(sizes=sizes) for name, sizes in SIZES.items()}
ROUNDS = 3
LASTS = ["keep", "keep", "drop", "bootstrap", "full"]


def bare_task() -> fl.Task:
    """Make a task without a feature layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return fl.Task(nn.Linear(4, 3), dtype=torch.float64)


TASKS = {True: tiny_task(), False: bare_task()}


class Composition(NamedTuple):
    """A sentence and its world, before anybody has looked whether they make sense."""

    number: int
    rules: tuple[Rule, ...]
    local: local.Sgd
    aggregate: Aggregate
    server: Rule
    sizes: str
    features: bool
    chunk: int | None
    world: dict[str, Any]  # work, sampler, seed

    def __str__(self) -> str:
        names = [type(p).__name__ for p in (*self.rules, self.local, self.aggregate, self.server)]
        return f"composition {self.number}: {' · '.join(names)}"

    def trainer(self, engine: str) -> fl.Trainer:
        """Build it; this is where it may be refused."""
        algorithm = fl.Algorithm(self.rules, self.local, self.aggregate, self.server)
        task, federation = TASKS[self.features], WORLDS[self.sizes].federation
        options: dict[str, Any] = {"chunk": self.chunk} if engine == "vectorised" else {}
        if draws_noise(algorithm):  # the same in every engine
            options["private_key"] = Secret(bytes(range(32)))
        return fl.Trainer(task, federation, algorithm, engine=engine, **self.world, **options)


def composition(number: int) -> Composition:
    """Give the sentence of this number; the first ones show every rule alone, three times."""
    if number >= len(ALONE):
        return sentence(number, Random(number))
    for attempt in range(100):
        try:
            made = sentence(number, Random(f"{number} {attempt}"), ALONE[number])
            made.trainer("reference")
            return made
        except ConfigError:
            continue
    raise AssertionError(f"{ALONE[number].__name__} is refused whatever is beside it")


ALONE = [kind for kind in RULES for _ in range(3)]


def sentence(number: int, draw: Random, only: type | None = None) -> Composition:
    """Draw any sentence, or one of a single rule."""
    count = draw.choices(range(5), (0.06, 0.48, 0.3, 0.11, 0.05))[0]
    kinds = [only] if only else [draw.choice(RULES + SERVERS) for _ in range(count)]
    plain = 0.7 if only else 0.5
    chosen = drawn(draw.choice(LINEAR if draw.random() < plain else LOCALS), draw)
    if any(kind.__name__ == "FedDynExact" for kind in kinds):
        chosen = local.Sgd()  # it solves the local problem at once, and refuses other settings
    aggregate = Mean if draw.random() < plain else draw.choice(AGGREGATES)
    server = Rule if draw.random() < plain else draw.choice(SERVERS)
    return Composition(
        number,
        tuple(drawn(kind, draw, chosen) for kind in kinds),
        chosen,
        drawn(aggregate, draw, chosen),
        drawn(server, draw, chosen),
        draw.choice(list(SIZES)),
        draw.random() < 0.97,
        draw.choice([None, None, 2]),
        {"work": work(draw), "sampler": sampler(draw), "seed": number},
    )


def work(draw: Random) -> fl.Work:
    """Draw local work: steps or epochs, for all alike or by chance, some batches or all data."""
    kind = draw.choice(["steps", "steps", "epochs"])
    amount = {kind: draw.choice([1, 2, (1, 3)])}
    return fl.Work(**amount, batch=draw.choice([2, 3, None]), last=draw.choice(LASTS))


def sampler(draw: Random) -> Any:
    """Draw who takes part."""
    lists = [draw.sample(range(4), 2) for _ in range(ROUNDS)]
    some = [fl.Uniform(count=2), fl.Uniform(fraction=0.5), fl.Bernoulli(0.6), fl.Sequential(2)]
    some += [fl.Weighted(2), fl.Explicit(lists), fl.Explicit(lists, [0.5] * 4)]
    return fl.Everyone() if draw.random() < 0.5 else draw.choice(some)
