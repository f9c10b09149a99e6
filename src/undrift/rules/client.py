"""Client mechanisms: what changes a local step.  Symbols as in the papers, signs as in rule.py.

R1, R2, ... are readings in docs/conventions.md.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from undrift.core.rule import ClientView, Rule, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.together import around
from undrift.core.tree import EMPTY, Tree, number, record, static
from undrift.errors import ConfigError
from undrift.rules.claims import MOMENTUM, VARIATES


@record
class Prox(Rule):
    """FedProx (Li et al. 2020, eq. 2): pull the local model towards the one received.

    mu = 0: FedAvg.
    """

    mu: float = number(default=0.01, low=0)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g + self.mu * (view.w - view.w0)


@record
class Scaffold(Rule):
    """SCAFFOLD (Karimireddy et al. 2020, alg. 1), option II.

    ||a_i||_1 stands for the paper's K, so that c_i is a mean gradient under momentum too.
    First round: FedAvg.
    """

    needs_path: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = (VARIATES,)

    c_by_size: bool = static(default=False)  # c moves by sum q_i dc_i instead of sum dc_i / N

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # c_i

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # c; unless c_by_size, the mean of c_i over the population

    def resize(self, state: Tree, before: int, after: int, joined: Tree, left: Tree) -> Tree:
        return state if self.c_by_size else mean_after(state, before, after, joined, left)

    def broadcast(self, state: Tree) -> Tree:
        return state

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g + (view.broadcast - view.mine)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        c_i = view.mine - view.broadcast + view.lost / (view.path * view.lr)
        return delta, c_i, weighed(c_i - view.mine, view, self.c_by_size)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update, state + mean_change(view, self.c_by_size)


@record
class ScaffoldGradient(Rule):
    """SCAFFOLD (Karimireddy et al. 2020, alg. 1), option I: c_i is the full gradient at x."""

    claims: ClassVar[tuple[str, ...]] = (VARIATES,)

    c_by_size: bool = static(default=False)

    def check_beside(self, algorithm: Any) -> None:
        need_gradients(self, algorithm)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # c_i

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # c

    def resize(self, state: Tree, before: int, after: int, joined: Tree, left: Tree) -> Tree:
        return state if self.c_by_size else mean_after(state, before, after, joined, left)

    def broadcast(self, state: Tree) -> Tree:
        return state

    def probe(self, view: ClientView) -> Tree:
        return view.grad_at(view.w0)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g + (view.broadcast - view.mine)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, view.probe, weighed(view.probe - view.mine, view, self.c_by_size)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update, state + mean_change(view, self.c_by_size)


def mean_after(mean: Vec, before: int, after: int, joined: Vec, left: Vec) -> Vec:
    """Keep c the mean of c_i when clients join (a newcomer's c_i is zero) or leave."""
    return (before * mean + joined.sum(0) - left.sum(0)) / after


def weighed(change: Vec, view: ClientView, by_size: bool) -> Tree:
    """Upload dc_i, by size together with its weight."""
    return (view.size * change, view.size) if by_size else change


def mean_change(view: ServerView, by_size: bool) -> Vec:
    """Give sum q_i dc_i or sum dc_i / N: N is the population, not the cohort."""
    change: Vec = view.upload[0] / view.upload[1] if by_size else view.upload / view.population
    return change


@record
class ScaffoldFresh(Rule):
    """ComFed's SCAFFOLD without client state (R4): c_i = grad f_i(x), used at once.

    The server's c is the cohort's mean of c_i, used in the next round.
    """

    claims: ClassVar[tuple[str, ...]] = (VARIATES,)

    c_by_size: bool = static(default=True)

    def check_beside(self, algorithm: Any) -> None:
        need_gradients(self, algorithm)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # c

    def broadcast(self, state: Tree) -> Tree:
        return state

    def probe(self, view: ClientView) -> Tree:
        return view.grad_at(view.w0)  # c_i

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g + (view.broadcast - view.probe)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, EMPTY, weighed(view.probe, view, self.c_by_size)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        of_cohort = view._replace(population=view.count)
        return update, mean_change(of_cohort, self.c_by_size)


def need_gradients(rule: Rule, algorithm: Any) -> None:
    """Refuse a mixture before a rule that takes a whole gradient out of what it gets."""
    mixed = [r for r in around(rule, algorithm)[0] if MOMENTUM in r.claims]
    if mixed:
        name, other = type(rule).__name__, type(mixed[0]).__name__
        raise ConfigError(
            f"{name} corrects gradients, not what {other} makes of them: put it first"
        )


@record
class ScaffoldLiteral(Rule):
    """ComFed algorithm 2 to the letter: c_i <- c first, so the correction is zero (R4).

    By size, c moves by sum q_i dc_i as line 20 prints; otherwise by sum dc_i / N.
    """

    c_by_size: bool = static(default=True)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # c

    def broadcast(self, state: Tree) -> Tree:
        return state

    def probe(self, view: ClientView) -> Tree:
        return view.grad_at(view.w0)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        c_i = view.broadcast
        return g + (view.broadcast - c_i)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, EMPTY, weighed(view.probe - view.broadcast, view, self.c_by_size)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update, state + mean_change(view, self.c_by_size)


@record
class ScaffoldLiteralPath(ScaffoldLiteral):
    """`ScaffoldLiteral` with option II: c_i becomes the mean gradient of the local steps."""

    needs_path: ClassVar[bool] = True

    def probe(self, view: ClientView) -> Tree:
        return EMPTY

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        change = view.lost / (view.path * view.lr) - view.broadcast
        return delta, EMPTY, weighed(change, view, self.c_by_size)


@record
class ScaffoldM(Rule):
    """SCAFFOLD/m (Varno et al. 2022, read as R9): only models are uploaded.

    Equal K, server step 1, uniform weights: SCAFFOLD option II.
    """

    needs_path: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = (VARIATES,)
    reads: ClassVar[str] = "steps"

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # h_i

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # h

    def resize(self, state: Tree, before: int, after: int, joined: Tree, left: Tree) -> Tree:
        return mean_after(state, before, after, joined, left)

    def broadcast(self, state: Tree) -> Tree:
        return state

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g + (view.broadcast - view.mine)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, view.mine - view.broadcast + view.lost / (view.path * view.lr), EMPTY

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        fraction = view.count / view.population
        return update, (1 - fraction) * state + fraction * update / (view.path * view.lr)
