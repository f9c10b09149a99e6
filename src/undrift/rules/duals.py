"""Duals: every client remembers how its problem pulls away from the common one.

Signs as in core/rule.py: delta = x - y_i; whatever moves a model is subtracted.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev

from undrift.core.local import Schedule, Sgd
from undrift.core.rule import ClientView, Lineup, Rule, ServerView, Sizes, overrides
from undrift.core.task import Vec
from undrift.core.together import moves
from undrift.core.tree import EMPTY, Tree, number, record, refuse_unused, static
from undrift.errors import ConfigError
from undrift.rules.claims import DUALS, VARIATES
from undrift.rules.client import mean_after
from undrift.rules.server import Step


@record
class FedDyn(Rule):
    """FedDyn (Acar et al. 2021, alg. 1) by local SGD; h without alpha, h_i with it.

    `by_size` pulls by alpha_i = alpha mean(n) / n_i.  alpha = 0: only the server's h is left.
    Everybody takes part, uniform weights: FedADMM and FedPD with rho = alpha.
    """

    claims: ClassVar[tuple[str, ...]] = (DUALS,)
    reads: ClassVar[str] = "deltas"
    changes: ClassVar[str] = "update"

    alpha: float = number(default=0.01, low=0)
    by_size: bool = static(default=False)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # h_i = alpha * sum of (x - y_i)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # h, the population's mean of h_i / alpha

    def resize(self, state: Tree, before: int, after: int, joined: Tree, left: Tree) -> Tree:
        per_alpha = 1 / (self.alpha + (self.alpha == 0))
        return mean_after(state, before, after, joined * per_alpha, left * per_alpha)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        pull = self.alpha * (view.w - view.w0) - view.mine
        return g + (pull * view.client.mean_size / view.size if self.by_size else pull)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, view.mine + self.alpha * delta, EMPTY

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        h = state + (view.count / view.population) * update
        return update + h, h


@record
class FedDynExact(FedDyn):
    """FedDyn whose local problem is solved at once, for quadratic losses and few parameters.

    One Newton step from x: y = x - (A + alpha I)^-1 (grad f_i(x) - h_i), A the curvature at x of
    all own data; exact where A is constant.  Of the local optimizer only weight decay is left.
    """

    alpha: float = number(default=0.01, low=0, ends="()")

    def check_beside(self, algorithm: Any) -> None:
        need_own_steps(self, algorithm, "solves its problem at once")
        need_no_steps(self, algorithm.local)

    def probe(self, view: ClientView) -> Tree:
        return view.grad_at(view.w0), jacrev(view.grad_at)(view.w0)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g

    def after_step(self, w: Vec, view: ClientView) -> Vec:
        (g, curvature), one = view.probe, torch.eye(len(w), dtype=w.dtype, device=w.device)
        share = view.client.mean_size / view.size if self.by_size else 1.0
        solved = torch.linalg.solve(curvature + share * self.alpha * one, g - share * view.mine)
        return view.w0 - solved


def need_own_steps(rule: Any, algorithm: Any, why: str) -> None:
    """Refuse parts that act on local steps or count them, where these are not theirs."""
    hooks = ("start", "look_at", "penalty", "direction", "after_step")
    others = [r for r in algorithm.rules if r is not rule and any(overrides(r, h) for h in hooks)]
    others += [part for part in algorithm.everything if part.needs_path]
    if others:
        raise ConfigError(
            f"a client of {type(rule).__name__} {why}, so that {type(others[0]).__name__} would "
            "be wrong about its local steps: leave one of them out"
        )


def need_no_steps(rule: Any, local: Sgd) -> None:
    """Refuse settings of local steps, of which weight decay alone is part of the local problem."""
    why = f"{type(rule).__name__} (solver = 'exact') solves the local problem at once"
    if type(local) is not Sgd or type(local.schedule) is not Schedule:
        raise ConfigError(f"local = {local!r}: {why}, so only its weight decay can matter")
    refuse_unused(Sgd, why, lr=local.lr, clip=local.clip)


class AdmmState(NamedTuple):
    """What a client of FedADMM keeps."""

    y: Vec  # its last model
    a: Vec  # its dual


@record
class FedAdmm(Rule):
    """FedADMM (Gong, Li & Freris 2022, alg. 1): only sampled clients update their duals."""

    claims: ClassVar[tuple[str, ...]] = (DUALS,)
    reads: ClassVar[str] = "deltas"
    changes: ClassVar[str] = "delta"

    rho: float = number(default=0.01, low=0)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return AdmmState(w.clone(), torch.zeros_like(w))

    def check_beside(self, algorithm: Any) -> None:
        need_plain_server(self, algorithm, "messages are changes, which must all be added up")

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g + view.mine.a + self.rho * (view.w - view.w0)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        # U_i = (y_i - y_prev) + (a_i+ - a_i) / rho, and the second term is y_i - x
        message = (view.mine.y - view.w) + delta
        return message, AdmmState(view.w, view.mine.a - self.rho * delta), EMPTY


@record
class FedPd(Rule):
    """FedPD (Zhang et al. 2021, alg. 1) that communicates in every round; everybody takes part."""

    claims: ClassVar[tuple[str, ...]] = (DUALS,)
    reads: ClassVar[str] = "deltas"
    changes: ClassVar[str] = "delta"

    rho: float = number(default=0.01, low=0, ends="()")

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # lambda_i

    def check(self, lineup: Lineup) -> None:
        need_everybody(self, lineup)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g + view.mine + self.rho * (view.w - view.w0)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        dual = view.mine - self.rho * delta
        return delta - dual / self.rho, dual, EMPTY  # x0_i+ = y_i + lambda_i / rho


def need_everybody(rule: Any, lineup: Lineup) -> None:
    """Refuse a cohort that is not the whole population."""
    if not lineup.is_everybody:
        raise ConfigError(
            f"{type(rule).__name__} is defined only where everybody takes part in every round, but "
            f"this one has a cohort of {len(lineup.steps)} by choice or by chance: use "
            "sampler=Everyone(), or FedDyn or SCAFFOLD for a sampled cohort"
        )


def need_plain_server(rule: Any, algorithm: Any, why: str, lr: float | None = None) -> None:
    """Refuse what changes the update on its way; `lr` is the only step that will do."""
    others = [r for r in algorithm.chain if r is not rule and (moves(r) or r.changes == "delta")]
    moving = [r for r in others if not (type(r) is Step and _is_step(r, lr))]
    if moving:
        step = "a server step" if lr is None else f"a server step of {lr:g}"
        raise ConfigError(
            f"{type(rule).__name__}'s {why}, but {type(moving[0]).__name__} changes the update: "
            f"use {step}"
        )


def _is_step(step: Step, lr: float | None) -> bool:
    return lr is None or (step.lr == lr and type(step.schedule) is Schedule)


class DriftState(NamedTuple):
    """What a client of FedDC keeps."""

    h: Vec  # sum of (y_i - x)
    c: Vec  # control variate


@record
class FedDc(Rule):
    """FedDC (Gao et al. 2022, alg. 1): FedDyn's drift and SCAFFOLD's variates, r_i = n_i / mean(n).

    Without the variates: FedDyn(alpha, by_size).  alpha = 0 and h frozen: SCAFFOLD option II.
    """

    needs_path: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = (DUALS, VARIATES)
    reads: ClassVar[str] = "deltas"
    changes: ClassVar[str] = "update"

    alpha: float = number(default=0.01, low=0)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return DriftState(torch.zeros_like(w), torch.zeros_like(w))

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return DriftState(torch.zeros_like(w), torch.zeros_like(w))  # means over the population

    def resize(self, state: Tree, before: int, after: int, joined: Tree, left: Tree) -> Tree:
        parts = zip(state, joined, left, strict=True)
        return DriftState(*(mean_after(m, before, after, new, old) for m, new, old in parts))

    def broadcast(self, state: Tree) -> Tree:
        return state.c

    def direction(self, g: Vec, view: ClientView) -> Vec:
        r = view.size / view.client.mean_size
        pull = self.alpha * (view.w - view.w0 + view.mine.h)
        return g + (pull + view.broadcast) / r - view.mine.c

    def counted(self, g: Vec, view: ClientView) -> Vec:
        return g  # c_i divides by the paper's K, which the pull does not shorten

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        r = view.size / view.client.mean_size
        change = delta / (view.path * view.lr) - view.broadcast / r
        return delta, DriftState(view.mine.h - delta, view.mine.c + change), r * change

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        h = state.h - (view.count / view.population) * update
        return update - h, DriftState(h, state.c + view.upload / view.population)


class VrlState(NamedTuple):
    """What a client of VRL-SGD keeps until it hears the mean model."""

    d: Vec  # its deviation at the start of its last round
    y: Vec  # its last model
    per: Tensor  # 1 / (K lr) of its last round; 0 before the first
    last: Tensor  # its last round


@record
class VrlSgd(Rule):
    """VRL-SGD (Liang et al. 2019, alg. 1): d_i <- d_i + (mean y - y_i) / (K lr); all take part.

    The mean arrives as the next model, so d_i is completed then.  Equal K: SCAFFOLD option II.
    """

    needs_path: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = (VARIATES,)
    reads: ClassVar[str] = "deltas"

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        zero, none = torch.zeros_like(w), w.new_zeros(())
        return VrlState(zero, zero, none, none)

    def check(self, lineup: Lineup) -> None:
        need_everybody(self, lineup)

    def check_beside(self, algorithm: Any) -> None:
        need_plain_server(self, algorithm, "next model must be the mean of its clients'", lr=1.0)

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g - deviation(view.mine, view.w0, view.round)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        per, d = 1 / (view.path * view.lr), deviation(view.mine, view.w0, view.round)
        return delta, VrlState(d, view.w, per, view.round), EMPTY


def deviation(mine: VrlState, mean: Vec, round: Tensor) -> Vec:
    """Complete d_i, now that the mean of the last round's models is known.

    Who was away in between has missed it, and keeps d_i as it was.
    """
    heard = (round == mine.last + 1).to(mean.dtype)
    return mine.d + (mean - mine.y) * (heard * mine.per)
