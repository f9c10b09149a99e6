"""Algorithms with duals or deviations that clients keep, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from undrift.core.algorithm import Algorithm
from undrift.core.local import Schedule, Sgd
from undrift.core.rule import Mean, Rule
from undrift.errors import ConfigError, unknown_name
from undrift.rules.choice import choice
from undrift.rules.compat import (
    AverageOptimizer,
    FedAdmmRestart,
    FedDcConstant,
    FedDynHalf,
    FedDynUnclipped,
    FedPdAlone,
    VrlPostStep,
)
from undrift.rules.compat.optimizers import need_state
from undrift.rules.duals import FedAdmm, FedDc, FedDyn, FedDynExact, FedPd, VrlSgd
from undrift.rules.local import local_of, need_falling_rate, need_more_than_sgd
from undrift.rules.server import Step

UNIFORM = Mean(by_size=False)


def feddyn(
    lr: float | None = None,
    *,
    alpha: float = 0.01,
    by_size: bool = False,
    clip_prox: bool = True,
    half_pull: bool = False,
    solver: Literal["sgd", "exact"] = "sgd",
    local: Sgd | None = None,
) -> Algorithm:
    """FedDyn (Acar et al. 2021) by local SGD: uniform weights.

    `by_size` pulls clients by alpha mean(n) / n_i; clip_prox=False adds alpha y after clipping, as
    the authors' code does; `half_pull` is fedsim's.  `solver` "exact" is the paper's, for quadratic
    losses.
    """
    if solver not in ("sgd", "exact"):
        raise unknown_name("solver", solver, ["sgd", "exact"], "feddyn")
    if solver == "exact" and (half_pull or not clip_prox):
        raise ConfigError("feddyn: an exact solver has no clip_prox and no half_pull; use 'sgd'")
    rule: Rule = (FedDynHalf if half_pull else FedDyn)(alpha, by_size)
    chosen = local_of(lr, local)
    if not clip_prox:
        if chosen.clip is None:
            raise ConfigError(
                "feddyn: clip_prox = False changes nothing without a clip: leave it out, or give "
                "one, e.g. local=sgd(0.1, clip=10.0)"
            )
        rule = FedDynUnclipped(alpha, by_size, half_pull)
    if solver == "exact":
        rule = FedDynExact(alpha, by_size)
    return Algorithm((rule,), chosen, UNIFORM)


def feddc(
    lr: float | None = None,
    *,
    alpha: float = 0.01,
    steps: float | None = None,
    scaffold_base_lr: bool = False,
    local: Sgd | None = None,
) -> Algorithm:
    """FedDC (Gao et al. 2022): uniform weights.

    `steps` stands for everybody's K and `scaffold_base_lr` for the undecayed lr in c_i, both as in
    the authors' code.
    """
    chosen = local_of(lr, local)
    rule: Rule = FedDc(alpha)
    if scaffold_base_lr:
        need_falling_rate("feddc: scaffold_base_lr = True", chosen)
    if steps is not None or scaffold_base_lr:
        rule = FedDcConstant(alpha, chosen.lr if scaffold_base_lr else None, steps)
    return Algorithm((rule,), chosen, UNIFORM)


def fedpd(
    lr: float | None = None,
    *,
    rho: float = 0.01,
    skip: float = 0.0,
    exchanges: Sequence[int] | None = None,
    start: Literal["received", "own"] = "received",
    local: Sgd | None = None,
) -> Algorithm:
    """FedPD (Zhang et al. 2021), communicating in every round; everybody must take part.

    `skip` is the chance that a round exchanges nothing, `exchanges` lists those (0 first) that do;
    `start` "own" goes on from a client's last model, as the authors' code does.
    """
    if start not in ("received", "own"):
        raise unknown_name("start", start, ["received", "own"], "fedpd")
    rule: Rule = FedPd(rho)
    if start == "own" or skip or exchanges is not None:
        listed = None if exchanges is None else tuple(int(r) for r in exchanges)
        rule = FedPdAlone(rho, skip, listed, start == "own")
    return Algorithm((rule,), local_of(lr, local), UNIFORM)


def fedadmm(
    lr: float | None = None,
    *,
    rho: float = 0.01,
    server_lr: float = 1.0,
    server_schedule: Schedule | None = None,
    restart: bool = False,
    local: Sgd | None = None,
) -> Algorithm:
    """FedADMM (Gong, Li & Freris 2022): uniform weights.

    `server_schedule` is a factor on server_lr, Milestones((60,), (0.5,)) in the authors' code;
    `restart` sets y_prev to x, as that code does.
    """
    rule = (FedAdmmRestart if restart else FedAdmm)(rho)
    step = Step(server_lr, Schedule() if server_schedule is None else server_schedule)
    return Algorithm((rule,), local_of(lr, local), UNIFORM, step)


def vrlsgd(
    lr: float | None = None,
    *,
    correction: Literal["gradient", "post_step"] = "gradient",
    buffers: Literal["reset", "average"] = "reset",
    local: Sgd | None = None,
) -> Algorithm:
    """VRL-SGD (Liang et al. 2019): everybody must take part.

    The authors' code corrects after momentum (`correction` "post_step") and averages the momentum
    buffers.  VRL-SGD-W is a first round of one local step.
    """
    kinds: dict[str, Callable[[], Rule]] = {"gradient": VrlSgd, "post_step": VrlPostStep}
    rule = choice("correction", correction, kinds, "vrlsgd")()
    chosen = local_of(lr, local)
    if correction == "post_step":
        need_more_than_sgd("vrlsgd: correction = 'post_step'", chosen)
    if buffers == "average":
        need_state("vrlsgd: buffers = 'average'", chosen)
    kept: dict[str, tuple[Rule, ...]] = {"reset": (), "average": (AverageOptimizer(chosen),)}
    return Algorithm((rule, *choice("buffers", buffers, kept, "vrlsgd")), chosen, UNIFORM)
