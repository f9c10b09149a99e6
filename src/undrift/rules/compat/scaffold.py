"""SCAFFOLD as other people write it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from undrift.core.rule import ClientView, Rule, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.tree import Tree, number, record, refuse_unused, static
from undrift.rules.claims import VARIATES
from undrift.rules.client import (
    Scaffold,
    ScaffoldFresh,
    ScaffoldM,
    mean_after,
    mean_change,
    weighed,
)


@record
class ScaffoldMPrinted(ScaffoldM):
    """SCAFFOLD/m with the decay (N-1)/N that the AdaBest paper prints; right only for m = 1."""

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        n, fraction = view.population, view.count / view.population
        return update, (n - 1) / n * state + fraction * update / (view.path * view.lr)


@record
class ScaffoldBaseLr(Scaffold):
    """SCAFFOLD option II that divides by the undecayed `lr` (FedDyn's and FedDC's code).

    Under a falling learning rate c_i is then too small by the factor that it fell; None is the
    round's.  `steps` stands for everybody's K (plato divides by its epochs E: lr = 1, steps = E).
    by_path = False takes the number of steps under momentum too, as printed, so that c_i is no
    mean gradient there.
    """

    lr: float | None = number(default=None, low=0, ends="()")
    steps: float | None = number(default=None, low=0, ends="()")
    by_path: bool = static(default=True)

    def __post_init__(self) -> None:
        check_length(self)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        change = view.lost / length_of(self, view) - view.broadcast
        return delta, view.mine + change, weighed(change, view, self.c_by_size)


def check_length(rule: Any) -> None:
    """Refuse a choice between ||a_i||_1 and K_i where neither is read."""
    if rule.steps is not None:
        refuse_unused(type(rule), "steps stands for everybody's K", by_path=rule.by_path)


def length_of(rule: Any, view: ClientView) -> Any:
    """Give K lr as a rule's `steps`, `lr` and `by_path` say; None is the client's, the round's."""
    own = view.path if rule.by_path else view.steps
    return (own if rule.steps is None else rule.steps) * (view.lr if rule.lr is None else rule.lr)


@record
class ScaffoldPostStep(Rule):
    """SCAFFOLD that corrects after the optimizer's step, outside momentum (NIID-Bench's code).

    It divides by K lr; self-consistent, and defined for RMSProp and Adam too.
    """

    claims: ClassVar[tuple[str, ...]] = (VARIATES,)

    c_by_size: bool = static(default=False)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # c_i

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # c

    def resize(self, state: Tree, before: int, after: int, joined: Tree, left: Tree) -> Tree:
        return state if self.c_by_size else mean_after(state, before, after, joined, left)

    def broadcast(self, state: Tree) -> Tree:
        return state

    def after_step(self, w: Vec, view: ClientView) -> Vec:
        return w - view.lr * (view.broadcast - view.mine)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        change = view.lost / (view.steps * view.lr) - view.broadcast
        return delta, view.mine + change, weighed(change, view, self.c_by_size)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update, state + mean_change(view, self.c_by_size)


@record
class ScaffoldPostStepGradient(ScaffoldPostStep):
    """`ScaffoldPostStep` with option I: c_i is the full gradient at x."""

    def probe(self, view: ClientView) -> Tree:
        return view.grad_at(view.w0)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, view.probe, weighed(view.probe - view.mine, view, self.c_by_size)


@record
class ScaffoldFreshPostStep(ScaffoldFresh):
    """`ScaffoldFresh` that corrects after the optimizer's step, outside momentum."""

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g

    def after_step(self, w: Vec, view: ClientView) -> Vec:
        return w - view.lr * (view.broadcast - view.probe)


@record
class ScaffoldUnbalanced(Scaffold):
    """SCAFFOLD for unequal sizes, r_i = n_i / mean(n), as in FedDyn's code.

    Steps use c / r_i, option II subtracts c itself: inconsistent, and kept as it is.  `lr`, `steps`
    and `by_path` as in `ScaffoldBaseLr`; the code has its undecayed lr.
    """

    lr: float | None = number(default=None, low=0, ends="()")
    steps: float | None = number(default=None, low=0, ends="()")
    by_path: bool = static(default=True)

    def __post_init__(self) -> None:
        check_length(self)
        why = "c moves by sum r_i dc_i / N, as in that code"
        refuse_unused(type(self), why, c_by_size=self.c_by_size)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g + (view.broadcast * view.client.mean_size / view.size - view.mine)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        change = view.lost / length_of(self, view) - view.broadcast
        return delta, view.mine + change, change * view.size / view.client.mean_size

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update, state + view.upload / view.population
