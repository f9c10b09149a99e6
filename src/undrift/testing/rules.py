"""Checks for rules and aggregates; an error names the hook and what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch

from undrift.core.algorithm import Algorithm
from undrift.core.local import HeavyBall, Sgd
from undrift.core.rule import Aggregate, Rule
from undrift.core.task import Task
from undrift.data import Federation, Sampler
from undrift.errors import ClientError, ConfigError
from undrift.rules import Adaptive, Nova, Prox
from undrift.testing.errors import RuleError, told
from undrift.testing.purity import P, check_hooks
from undrift.testing.records import check_record
from undrift.testing.ways import check_engines, check_ways
from undrift.testing.world import World, in_dtype, world_of


def check_rule(
    rule: Rule,
    *,
    task: Task | None = None,
    federation: Federation | None = None,
    sampler: Sampler | None = None,
    rounds: int = 3,
) -> None:
    """Raise `RuleError` unless a rule keeps every promise that engines rely on.

    It is a frozen record that pickles, copies and stacks; it is pure; shapes and dtypes are stable;
    it runs for many clients at once, in chunks of any size and in any order, and in a `Fleet`; it
    resumes bit by bit; it stays finite, in float32 too, and where clients are left out because
    theirs is not; it gets on with other parts.  `task`, `federation` (at least two clients)
    and `sampler` replace the tiny world's; a task alone must take [B, 4] inputs and 3 classes.

    >>> from undrift import Prox
    >>> check_rule(Prox(0.1))
    """
    if not isinstance(rule, Rule):
        raise RuleError(f"{rule!r} is not a Rule: derive its class from undrift.Rule")
    world = world_of(task, federation)
    world = world if sampler is None else world._replace(sampler=sampler)
    _check_all(rule, lambda r: Algorithm((r,), Sgd(lr=0.1)), world, rounds)
    _check_together(rule, world, rounds)
    _check_beside_nova(rule, world, rounds)


def check_aggregate(
    aggregate: Aggregate,
    *,
    task: Task | None = None,
    federation: Federation | None = None,
    rounds: int = 3,
) -> None:
    """Raise `RuleError` unless an aggregate keeps every promise; as `check_rule`.

    >>> from undrift import Mean
    >>> check_aggregate(Mean())
    """
    if not isinstance(aggregate, Aggregate):
        raise RuleError(f"{aggregate!r} is not an Aggregate: derive it from undrift.Aggregate")
    world = world_of(task, federation)
    _check_all(aggregate, lambda a: Algorithm((), Sgd(lr=0.1), a), world, rounds)


def _check_all(part: P, build: Callable[[P], Algorithm], world: World, rounds: int) -> None:
    check_record(part)
    for dtype in (torch.float32, torch.float64):
        check_hooks(part, build, world._replace(task=in_dtype(world.task, dtype)), rounds)
    check_ways(part, build, world, rounds)


def _check_together(rule: Rule, world: World, rounds: int) -> None:
    """A rule must get on with neighbours, momentum and a server optimizer."""
    try:
        chain = Algorithm((Prox(0.1), rule), HeavyBall(lr=0.02), server=Adaptive("yogi"))
    except ConfigError:
        return  # it says itself what it cannot stand beside
    with told(rule, "does not work beside Prox, HeavyBall and Adaptive"):
        check_engines(rule, chain, world, rounds)


def _check_beside_nova(rule: Rule, world: World, rounds: int) -> None:
    """Nova shows `direction` a model of one parameter."""
    with told(rule, "does not work beside Nova"):
        try:
            algo = Algorithm((rule,), HeavyBall(lr=0.02), Nova())
            skipped = world.trainer(algo, engine="reference").round().skipped
        except (ConfigError, ClientError) as error:
            if _is_by_parameter(error):
                return
            raise
        if skipped:
            raise RuleError(
                f"{type(rule).__name__}.direction gives NaN where every state is zero, as Nova "
                "shows it: clamp what it divides by"
            )
        check_engines(rule, algo, world, rounds)


def _is_by_parameter(error: ConfigError | ClientError) -> bool:
    """Whether a direction treats parameters differently, for which ||a||_1 does not exist."""
    # It went well on the whole model: if it fails now, it cannot be shown a single parameter.
    return isinstance(error, ConfigError) or error.stage == "direction"
