"""What each setting may be, so that a test can change all of them; a new one needs an entry."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import undrift as fl
from undrift.core.algorithm import Algorithm
from undrift.core.rule import Aggregate, Mean, Rule
from undrift.experiment.names import parameters
from undrift.rules import Ema, EmaAdam, Trace, compat, observe
from undrift.rules.named import catalogue

PLAIN = fl.Sgd(0.1, weight_decay=0.01, clip=0.5, schedule=fl.Exponential(0.8))
MOVED = fl.HeavyBall(0.1, momentum=0.6, weight_decay=0.01, schedule=fl.Exponential(0.8))
RISING = fl.Sgd(0.05, schedule=fl.Listed((0.5, 1.0, 2.0, 4.0)))
PSEUDO = fl.PseudoLabels(classes=3, every=3)
DIGITS = fl.rules.Policy("digits")
EACH = (0.1, 0.3, 0.2, 0.5, 0.4, 0.25)

# What else a setting may be, by `owner.setting` or by `setting`; choices by name need no entry.
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("mu", "rho", "gamma", "strength", "q", "b", "alpha"), (0.7,)),
    **dict.fromkeys(("beta", "beta1", "beta2", "beta_local", "beta_global", "momentum"), (0.4,)),
    **dict.fromkeys(("server_lr", "v0", "tau", "eps"), (0.2,)),
    **dict.fromkeys(("lr", "weight_decay"), (0.05,)),
    **dict.fromkeys(("alpha1", "alpha2", "gmf", "temperature", "decay", "weight", "rate"), (0.3,)),
    "local": (MOVED, PLAIN),
    "KeepOptimizer.local": (fl.HeavyBall(5.0),),
    "AverageOptimizer.local": (fl.HeavyBall(5.0),),
    "c_weights": ("uniform", "size"),
    "clip": (0.2,),
    "clip_eps": (0.1,),
    "stored": (2, 3),
    "patience": (1.0,),
    "PlateauSteps.patience": (1.0, 2.0),
    "lipschitz": (3.0,),
    "fedvra.gamma": (0.5, EACH),
    "fedvra_u.gamma": (0.5, EACH),
    "FedVraEach.gamma": (fl.PerClient(EACH), fl.PerClient(EACH[::-1])),
    "a": (0.3,),
    "d": (1.3,),
    "fedvra.d": (1.3, "cohort"),
    "fedvra_u.d": (1.3, "cohort"),
    "objective": (PSEUDO, fl.Clusters(groups=3)),
    "fedvra_u.steps": (1,),
    "TwoBlocks.steps": (1,),
    "steps": (3.0,),
    "radius": (0.5,),
    "noise": (fl.FeatureNoise(2.0, clip=0.5),),
    "single_batch": (2,),
    "batch": (2,),
    "FeatureNoise.batch": (4.0,),
    "FeatureNoise.clip": (0.2,),
    "sigma": (2.0,),
    "skip": (0.9,),
    "exchanges": ((1, 3),),
    "server_schedule": (fl.Milestones((1,), (0.5,)),),
    "schedule": (fl.Exponential(0.8), fl.Milestones((1,), (0.5,))),
    "policy": ("mnist",),
    "Steered.policy": (DIGITS, fl.rules.Policy("mnist")),
    "steering": (DIGITS.agent.steering,),
    "nbar": (5.0,),
    "epochs": (2.0,),
    "order": (((5, 4, 3, 2, 1, 0),) * 4,),
    "weights": (fl.PerClient(EACH),),
    "norm": (0.03,),
    "Private.noise": (0.5,),
    "cohort": (8.0,),
    "Mime.base": (Trace(0.9), EmaAdam()),
    "MimeLite.base": (Trace(0.9), EmaAdam()),
    "classes": (3, 4),
    "groups": (3, 4),
    "every": (3, 2),
    "Exponential.gamma": (0.5,),
    "starts": ((1,), (2,)),
    "factors": ((0.5,), (0.1,)),
    "rounds": ((1.0, 0.1),),
    "Listed.steps": ((1.0, 0.5),),
    "InverseTime.steps": (4.0,),
    "knobs": (("alpha1",),),
    "reach": (0.05,),
    "sees": (DIGITS.agent.steering.sees,),
    "source": ("digits", "mnist"),
    "digest": ("0" * 64,),
}

# Where a setting does not matter at its default: what the others must be for it.
BASES: dict[str, dict[str, Any]] = {
    "FedVraEach": {"gamma": fl.PerClient(EACH)},
    "KeepOptimizer": {"local": MOVED},
    "AverageOptimizer": {"local": MOVED},
    "PlateauSteps": {"patience": 1.0},
    "PseudoLabels": {"classes": 3, "every": 3},
    "Milestones": {"starts": (1,), "factors": (0.5,)},
    "fedvra_u": {"objective": PSEUDO},
    "TwoBlocks": {"objective": PSEUDO},
    "Steered": {"policy": DIGITS, "steering": DIGITS.agent.steering},
    "Steering": {"sees": DIGITS.agent.steering.sees},
}


class Setting(NamedTuple):
    """What a setting is when it is left out, and what else it may be."""

    default: Any  # NONE: it cannot be left out
    others: tuple[Any, ...]

    @property
    def values(self) -> tuple[Any, ...]:
        """All of them, the default first."""
        return self.others if self.default is NONE else (self.default, *self.others)

    @property
    def is_switch(self) -> bool:
        """Whether it chooses between ways, rather than being a number."""
        return not all(type(v) in (int, float) for v in self.values)


class Subject(NamedTuple):
    """Something with settings, and how it stands in an algorithm."""

    name: str
    make: Callable[..., Any]
    settings: dict[str, Setting]
    within: Callable[[Any], Algorithm]
    needs: str = ""  # of the world


NONE = object()
OUTSIDE = "Steered.policy"  # without one somebody acts between rounds, whom no test has here


def setting_of(owner: str, name: str, default: Any, hint: Any, choices: Any) -> Setting:
    """Look up what a setting may be; one that has no entry is an error."""
    named = choices or (typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ())
    if isinstance(default, bool):
        named = (False, True)
    others = VALUES.get(f"{owner}.{name}", VALUES.get(name, named))
    if not others:
        raise LookupError(f"{owner}.{name}: say in tests/rules/settings.py what else it may be")
    missing = default is inspect.Parameter.empty or f"{owner}.{name}" == OUTSIDE
    default = NONE if missing else default
    return Setting(default, tuple(v for v in others if v is not default and v != default))


def settings_of(owner: str, made: Callable[..., Any]) -> dict[str, Setting]:
    """Enumerate the settings of a named algorithm or of a record."""
    hints = typing.get_type_hints(getattr(made, "func", made))
    taken = getattr(made, "args", ())  # comfed's client and server
    fields = dataclasses.fields(made) if isinstance(made, type) else dataclasses.fields(fl.Adaptive)
    choices = {f.name: f.metadata.get("choices") for f in fields}
    return {
        name: setting_of(owner, name, _default(p), hints.get(name), choices.get(name))
        for name, p in list(parameters(made).items())
        if not (taken and name in ("client", "server"))
    }


def _default(parameter: inspect.Parameter) -> Any:
    """Give the value of a setting that is left out; a record's parts are made anew."""
    made = parameter.default
    return made.default_factory() if hasattr(made, "default_factory") else made


def named() -> dict[str, Subject]:
    """Every algorithm that `undrift list` names."""
    return {
        name: Subject(
            name, entry.build, settings_of(name, entry.build), lambda made: made, entry.needs
        )
        for name, entry in catalogue().items()
    }


def kinds(parent: type, *modules: Any) -> list[type]:
    """Every public class of some modules that is a `parent`."""
    found = {v for m in modules for v in vars(m).values() if isinstance(v, type)}
    return sorted((k for k in found if issubclass(k, parent)), key=lambda k: k.__name__)


EVERYBODY = (fl.FedPd, fl.VrlSgd)


def parts() -> dict[str, Subject]:
    """Every rule, aggregate, local optimizer and schedule, and what they are made of."""
    found = [_rule(k) for k in kinds(Rule, fl.rules, compat, observe)]
    found += [_subject(k, _aggregated) for k in kinds(Aggregate, fl.rules, compat)]
    found += [_subject(k, _trained) for k in kinds(fl.Sgd, fl.rules)]
    found += [
        _subject(k, lambda made: _trained(fl.Sgd(0.1, schedule=made)))
        for k in kinds(fl.rules.Schedule, fl.rules)
    ]
    for kind in kinds(fl.rules.Schedule, fl.rules):
        served = _subject(kind, lambda made: fl.Algorithm(server=fl.Step(schedule=made)))
        found.append(served._replace(name=f"{kind.__name__} of the server"))
    for kind in (Ema, Trace, EmaAdam):
        found.append(_subject(kind, lambda made: _ruled(fl.Mime(made))))
    for kind in (fl.PseudoLabels, fl.Clusters):
        found.append(_subject(kind, lambda made: _ruled(fl.TwoBlocks(made))))
    found.append(_subject(fl.FeatureNoise, lambda made: _ruled(fl.RFedAvgPlus(1.0, made))))
    found.append(_subject(fl.rules.Steering, lambda made: fl.Algorithm((_steered(steering=made),))))
    found.append(_subject(fl.rules.Policy, lambda made: fl.Algorithm((_steered(policy=made),))))
    return {subject.name: subject for subject in found}


def _subject(kind: type, within: Callable[[Any], Algorithm], needs: str = "") -> Subject:
    return Subject(kind.__name__, kind, settings_of(kind.__name__, kind), within, needs)


def _rule(kind: type) -> Subject:
    return _subject(kind, _ruled, "everybody" if issubclass(kind, EVERYBODY) else "")


def _ruled(rule: Rule) -> Algorithm:
    aggregate: Aggregate = Mean(by_size=isinstance(rule, fl.MomentumAdd))
    if isinstance(rule, fl.FedVra):
        aggregate = fl.ShareSum(rule.by_size)
    if isinstance(rule, fl.PlateauSteps):
        return fl.Algorithm((rule,), RISING)
    if isinstance(rule, fl.FedDynExact):
        return fl.Algorithm((rule,))
    plain = isinstance(rule, fl.FedAdc | compat.FedDynUnclipped)
    return fl.Algorithm((rule,), PLAIN if plain else MOVED, aggregate)


def _aggregated(aggregate: Aggregate) -> Algorithm:
    return fl.Algorithm((), MOVED, aggregate)


def _trained(local: fl.Sgd) -> Algorithm:
    return fl.Algorithm((), local)


def _steered(**settings: Any) -> fl.rules.Steered:
    return fl.rules.Steered(**{"policy": DIGITS, "steering": DIGITS.agent.steering, **settings})
