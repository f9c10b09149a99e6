"""Local optimizers' states that live on (C3 lets them start afresh)."""

from __future__ import annotations

from typing import Any

import torch

from undrift.core.algorithm import Algorithm
from undrift.core.local import HeavyBall
from undrift.core.rule import ClientView, Rule, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.tree import EMPTY, Tree, leaves, part, record, replace, tree_map
from undrift.errors import ConfigError


@record
class KeepOptimizer(Rule):
    """A client's momentum and moments live on from round to round (rFedAvg's code; C3)."""

    local: Any = part(default_factory=HeavyBall)

    def check_beside(self, algorithm: Any) -> None:
        need_same(self, algorithm.local)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return self.local.init(w)

    def start(self, optimizer: Tree, view: ClientView) -> Tree:
        return view.mine

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, view.optimizer, EMPTY


@record
class AverageOptimizer(Rule):
    """The cohort's momentum and moments are averaged and start the next round (SlowMo)."""

    local: Any = part(default_factory=HeavyBall)

    def check_beside(self, algorithm: Any) -> None:
        need_same(self, algorithm.local)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return self.local.init(w)

    def broadcast(self, state: Tree) -> Tree:
        return state

    def start(self, optimizer: Tree, view: ClientView) -> Tree:
        return view.broadcast

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, EMPTY, view.optimizer

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update, tree_map(lambda v: v / view.count, view.upload)


def need_same(rule: Any, local: Any) -> None:
    """Refuse to keep the state of another local optimizer, or of one that has none."""
    name = type(rule).__name__
    if rule.local != local:
        raise ConfigError(f"{name}.local = {rule.local!r} must be the algorithm's local optimizer")
    need_state(f"{name}.local = {local!r}", local)


def need_state(place: str, local: Any) -> None:
    """Refuse a local optimizer that keeps nothing from one local step to the next."""
    if not leaves(local.init(torch.zeros(1))):
        raise ConfigError(
            f"{place}: {type(local).__name__} keeps nothing between local steps, so that nothing "
            "lives on: give a local optimizer with momentum or moments, such as HeavyBall"
        )


def keep_client_opt(algorithm: Algorithm) -> Algorithm:
    """Let the clients' optimizer states live on from round to round."""
    return replace(algorithm, rules=(*algorithm.rules, KeepOptimizer(algorithm.local)))
