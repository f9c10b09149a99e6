"""Which parts make an algorithm together: asked when it is built, answered with a reason."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from undrift.core.rule import Rule, overrides, serves_only
from undrift.errors import ConfigError

if TYPE_CHECKING:
    from undrift.core.algorithm import Algorithm

OVERRULED = {  # where the last rule would have its way, and the others would not know
    "loss": "put another objective in the place of the task's loss",
    "start": "choose the first state of the local optimizer",
}


def check_together(algo: Algorithm) -> None:
    """Refuse parts that make no sense together."""
    _check_server(algo)
    _check_claims(algo)
    _check_means(algo)
    _check_path(algo)
    for rule in algo.chain:
        rule.check_beside(algo)


def _check_server(algo: Algorithm) -> None:
    if not serves_only(algo.server):
        name = type(algo.server).__name__
        raise ConfigError(
            f"Algorithm.server = {name}(...) has a client half, which would never run: put it "
            "among the rules"
        )


def _check_claims(algo: Algorithm) -> None:
    """Refuse two rules that do what only one can do."""
    for one, other in combinations(algo.rules, 2):
        both = [claim for claim in one.claims if claim in other.claims]
        both += [why for hook, why in OVERRULED.items() if _both(hook, one, other)]
        if both:
            raise ConfigError(
                f"{_name(one)} and {_name(other)} both {both[0]}: leave one of them out"
            )


def _both(hook: str, *rules: Rule) -> bool:
    return all(overrides(rule, hook) for rule in rules)


def _check_means(algo: Algorithm) -> None:
    """Refuse what comes between the mean over clients and a rule that takes the update for it."""
    for rule in algo.rules:
        if not rule.reads:
            continue
        needs = f"{_name(rule)} needs the update to be a mean of its clients' {rule.reads}"
        if rule.reads not in algo.aggregate.means:
            kind = type(algo.aggregate).__name__
            raise ConfigError(f"{needs}, which {kind} does not give: use Mean()")
        sent = [r for r in algo.rules if r is not rule and r.changes == "delta"]
        if sent:
            raise ConfigError(
                f"{needs}, but {_name(sent[0])} sends something else than what its model lost: "
                "leave one of them out"
            )
        before = [r for r in around(rule, algo)[0] if moves(r)]
        if before:
            circle = moves(rule) and before[0].reads
            advice = "leave one of them out" if circle else f"put {_name(rule)} first"
            raise ConfigError(f"{needs}, but {_name(before[0])} changes it before: {advice}")


def around(rule: Rule, algo: Algorithm) -> tuple[list[Rule], list[Rule]]:
    """List the rules that act before and after one of them."""
    at = next(i for i, other in enumerate(algo.chain) if other is rule)
    return list(algo.chain[:at]), list(algo.chain[at + 1 :])


def moves(rule: Rule) -> bool:
    """Tell whether a rule's server half changes the update."""
    only = serves_only(rule) and overrides(rule, "server") and not rule.observes
    return only or rule.changes == "update"


def _check_path(algo: Algorithm) -> None:
    """Refuse what has no ||a||_1 where some part divides by it."""
    needing = [p for p in algo.everything if p.needs_path]
    if not needing:
        return
    who = type(needing[0]).__name__
    if not algo.local.linear:
        raise ConfigError(
            f"{who} divides by ||a||_1, which {type(algo.local).__name__} does not have: use "
            "Sgd, HeavyBall or Nesterov, or SCAFFOLD with option 'I'"
        )
    bent = [_name(rule) for rule in algo.rules if not rule.linear]
    if bent:
        raise ConfigError(
            f"{who} divides by ||a||_1, which does not exist where {bent[0]} bends the gradient: "
            "leave one of them out"
        )
    exact = [type(p).__name__ for p in needing if p.exact_path]
    if exact and algo.local.clip is not None:
        raise ConfigError(
            f"{exact[0]} needs ||a||_1 exactly, which clipping at {algo.local.clip} destroys: "
            "leave clip out, or leave out what divides by it"
        )


def _name(rule: Rule) -> str:
    return type(rule).__name__
