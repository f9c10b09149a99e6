"""Every setting of every algorithm and part changes numbers, or is refused by its name.

A setting that is taken and ignored is worse than an error: two runs seem to compare something.
Settings are enumerated from signatures and fields, so that a new one fails here until
`settings.py` says what it may be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import undrift as fl
from rules.needs import CELLS, KINDS
from rules.settings import BASES, Subject, named, parts
from undrift.core.tree import named_leaves
from undrift.errors import UndriftError
from undrift.testing.world import World, numbers, tiny_world

SUBJECTS = named() | parts()
ROUNDS = 4
PARTS = {  # what a setting stands for, where it is refused by that
    "local_momentum": {"MomentumAdd", "MomentumMix"},
    "objective": {"PseudoLabels"},
    "correction": {"post_step"},
    "tau_eff": {"Nova", "NovaBySteps"},
}


@cache
def world(needs: str) -> World:
    made = tiny_world()._replace(sampler=fl.Weighted(count=4))  # unequal chances
    if needs == "everybody":
        return made._replace(sampler=fl.Everyone())
    return made._replace(work=fl.Work(steps=1, batch=None)) if needs == "one step" else made


@cache
def trajectory(algorithm: fl.Algorithm, needs: str) -> dict[str, Tensor] | UndriftError:
    """Give the models of all rounds, and every number there is at the end."""
    found: dict[str, Tensor] = {}
    try:
        trainer = world(needs).trainer(algorithm)
        for round in range(ROUNDS):
            trainer.round()
            found[f"w{round}"] = trainer.server.w.clone()
            pairs = zip(algorithm.rules, trainer.server.states, strict=False)
            notes = named_leaves([rule.broadcast(state) for rule, state in pairs])
            found |= {f"note {round} {n}": torch.as_tensor(v) for n, v in notes.items()}
    except UndriftError as error:
        return error
    return found | numbers(trainer)


def differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether some number that both have is another one."""
    pairs = [(one[n].double(), other[n].double()) for n in one.keys() & other.keys()]
    return any(
        a.shape == b.shape and not torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)
        for a, b in pairs
    )


def outcome(subject: Subject, settings: Mapping[str, Any]) -> dict[str, Tensor] | UndriftError:
    try:
        # a default is left out: to name it would be the same
        given = {n: v for n, v in settings.items() if v is not subject.settings[n].default}
        made = subject.within(subject.make(**given))
    except UndriftError as error:
        return error
    return trajectory(made, subject.needs)


def bases(subject: Subject, depth: int) -> Iterator[dict[str, Any]]:
    """Settings at their first values, and with up to `depth` switches turned."""
    first = {n: s.values[0] for n, s in subject.settings.items()} | BASES.get(subject.name, {})
    turns = [(n, v) for n, s in subject.settings.items() if s.is_switch for v in s.values]
    turns = [(n, v) for n, v in turns if v is not first[n]]
    for count in range(depth + 1):
        for some in combinations(turns, count):
            if len({n for n, _ in some}) == count:
                yield first | dict(some)


def ignored(subject: Subject, depth: int) -> Iterator[str]:
    """List the settings that are taken and change nothing, or refused without a name."""
    for base in bases(subject, depth):
        start = outcome(subject, base)
        if not isinstance(start, UndriftError):
            for name, value in others(subject, base):
                other = outcome(subject, base | {name: value})
                if told := complaint(start, other, name, value, base[name]):
                    yield f"{name} = {value!r} beside {base} {told}"


def others(subject: Subject, base: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give every other value of every setting."""
    for name, setting in subject.settings.items():
        usual = "uniform" if base.get("mode", "persistent") == "persistent" else "size"
        for value in setting.values:
            if name == "c_weights" and (value or usual) == (base[name] or usual):
                continue  # None is one of both, as the mode has it
            if value is not base[name] and value != base[name]:
                yield name, value


def complaint(start: Mapping[str, Tensor], other: Any, name: str, value: Any, before: Any) -> str:
    """Tell what is wrong with another value's outcome; nothing if it differs or is refused."""
    if isinstance(other, UndriftError):
        return "" if names(other, name, value, before) else f"is not named: {other}"
    return "" if differ(start, other) else "changes nothing"


def names(error: UndriftError, setting: str, *values: Any) -> bool:
    """Whether an error names a setting, or the part that was given for it."""
    known = {setting, *(type(v).__name__ for v in values if is_dataclass(v))}
    known |= {f.name for v in values if is_dataclass(v) for f in fields(v)}
    known |= PARTS.get(setting, set())
    return bool(known & set(re.findall(r"\w+", str(error))))


def below(kind: type) -> Iterator[type]:
    """Every class that the package derives from one, exported or not."""
    for found in kind.__subclasses__():
        if found.__module__.startswith(("undrift.rules.", "undrift.core.")):
            yield found
        yield from below(found)


@pytest.mark.parametrize("kind", [fl.Rule, fl.Aggregate, fl.Sgd, fl.rules.Schedule])
def test_every_part_of_the_package_is_tried(kind: type) -> None:
    assert {found.__name__ for found in below(kind)} <= SUBJECTS.keys()


USUAL = {*KINDS, *CELLS, *parts()}
EVERY = [pytest.param(n, marks=() if n in USUAL else pytest.mark.slow) for n in SUBJECTS]


@pytest.mark.parametrize("name", EVERY)
def test_no_setting_is_ignored(name: str) -> None:
    """Each alone, and beside each other switch."""
    subject = SUBJECTS[name]
    start = outcome(subject, next(bases(subject, 0)))
    assert not isinstance(start, UndriftError), start
    problems = list(ignored(subject, 1))
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SUBJECTS if not n.startswith("comfed")])
def test_no_setting_is_ignored_beside_two_switches(name: str) -> None:
    problems = list(ignored(SUBJECTS[name], 2))
    assert not problems, "\n".join(problems)
