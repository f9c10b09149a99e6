"""Hooks are pure, and stable in shapes and dtypes: every call of a part is watched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from undrift.core.algorithm import Algorithm
from undrift.core.rule import Aggregate, ClientInfo, Rule, overrides
from undrift.core.tree import Tree, leaves, named_leaves, structure, tree_map
from undrift.testing.compare import TOLERANCE, Spec, differs, distance, spec, text
from undrift.testing.errors import RuleError, told
from undrift.testing.world import World

SAME_EACH_TIME = ("probe", "review", "row", "after_round", "broadcast", "lift")
P = TypeVar("P", Rule, Aggregate)


def check_hooks(part: P, build: Callable[[P], Algorithm], world: World, rounds: int) -> None:
    """Run with every hook watched; clients leave and come back in between."""
    with told(part, f"fails in {str(world.task.dtype)[6:]}"):
        trainer = world.trainer(build(_watched(part)), engine="reference")
        for r in range(rounds):
            skipped = trainer.round().skipped
            if skipped:
                raise RuleError(f"{type(part).__name__}: the update of clients {skipped} is NaN")
            last = [world.federation.num_clients - 1]
            (trainer.enroll if r % 2 else trainer.leave)(last)
        if isinstance(part, Rule):
            _check_personal(part, trainer.server.states[0], world.federation.num_clients)


def _watched(part: P) -> P:
    """Derive a twin whose hooks are called twice, on arguments that must not change."""
    kind, base = type(part), Rule if isinstance(part, Rule) else Aggregate
    own = [n for n, hook in vars(base).items() if callable(hook) and overrides(part, n)]
    names = [n for n in own if n != "personal" and not n.startswith("_")]
    seen: dict[str, Spec] = {}
    hooks = {n: _watch(n, getattr(kind, n), seen) for n in names}
    made: Any = type(kind.__name__, (kind,), hooks)
    twin: P = object.__new__(made)
    for f in fields(part):  # type: ignore[arg-type]
        object.__setattr__(twin, f.name, getattr(part, f.name))
    return twin


def _watch(hook: str, original: Callable[..., Any], seen: dict[str, Spec]) -> Callable[..., Any]:
    def watched(self: Any, *args: Any) -> Any:
        name = f"{type(self).__name__}.{hook}"
        before, own = _copied(args), copy.deepcopy(vars(self))
        first = original(self, *args)
        if structure(own) != structure(vars(self)) or differs(own, vars(self)):
            raise RuleError(f"{name} writes on itself: return a new state instead")
        _check_untouched(name, args, before)
        if differs(original(self, *args), first):
            raise RuleError(f"{name} is not pure: the same call gave two results")
        _check_result(name, hook, args, first, seen)
        return first

    watched.__name__ = hook
    return watched


def _copied(args: Any) -> Any:
    return tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, args)


def _check_untouched(name: str, args: Any, before: Any) -> None:
    now, then = named_leaves(args), named_leaves(before)
    for place, value in then.items():
        if differs(now[place], value):
            raise RuleError(
                f"{name} changes its argument {_place(place)} in place: write g = g * 2 "
                "instead of g.mul_(2)"
            )


def _place(path: str) -> str:
    number, _, rest = path.partition(".")
    return f"{int(number) + 1}" + (f" ({rest})" if rest else "")


def _check_result(name: str, hook: str, args: Any, result: Any, seen: dict[str, Spec]) -> None:
    """Compare the shapes of what a hook returns with what it must be like."""
    for what, value, like in _expected(name, hook, args, result):
        if spec(value) != spec(like):
            raise RuleError(
                f"{name} returns {what} as {text(value)}, expected {text(like)}: structure, "
                "shapes and dtypes must stay"
            )
    if hook == "penalty" and isinstance(result, Tensor) and result.dim():
        raise RuleError(f"{name} returns shape {list(result.shape)}: a penalty is one number")
    varying = result[2] if hook == "finish" and len(args) == 2 else result
    if hook in SAME_EACH_TIME or varying is not result:
        was, now = seen.setdefault(hook, spec(varying)), spec(varying)
        if was != now:
            raise RuleError(f"{name} returned {was[1]} first and {now[1]} later: shapes must stay")
    if hook not in ("server", "server_after", "init_server", "resize", "broadcast"):
        _check_finite(name, result)


def _expected(name: str, hook: str, args: Any, result: Any) -> list[tuple[str, Any, Any]]:
    """List (what, value, what it must be like) of the results that have a pattern."""
    if hook in ("begin", "direction", "server_after", "resize"):
        like = args[0].mine if hook == "begin" else args[0]
        return [("its result", result, like)]
    if hook == "server" or (hook == "finish" and len(args) == 2):
        wanted = 2 if hook == "server" else 3
        if not isinstance(result, tuple) or len(result) != wanted:
            raise RuleError(f"{name} must return {wanted} values, got {text(result)}")
        state = args[1] if hook == "server" else args[1].mine
        return [("the vector", result[0], args[0]), ("the state", result[1], state)]
    return []


def _check_finite(name: str, result: Any) -> None:
    for leaf in leaves(result):
        if isinstance(leaf, Tensor) and not bool(torch.isfinite(leaf).all()):
            raise RuleError(f"{name} returns NaN or infinity on an ordinary batch")


def _check_personal(rule: Rule, state: Tree, num_clients: int) -> None:
    """Both engines map `personal` over clients, so it is compared with plain calls here."""
    if not overrides(rule, "personal"):
        return
    ones = torch.ones(num_clients, dtype=torch.float64)
    info = ClientInfo(torch.arange(num_clients), ones, ones, ones, ones)
    mapped = vmap(lambda one: rule.personal(state, one))(info)
    for c in range(num_clients):
        alone = rule.personal(state, ClientInfo(*(v[c] for v in info)))
        if distance(leaves(tree_map(lambda v, c=c: v[c], mapped)), leaves(alone)) > TOLERANCE:
            raise RuleError(f"{type(rule).__name__}.personal differs when mapped over clients")
