"""FedVRA: one rule between FedAvg, FedProx, FedNova, FedDyn and SCAFFOLD's local direction.

omega_i is a client's weight among everybody: its share of all examples, or 1 / N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from undrift.core.rule import (
    Aggregate,
    ClientInfo,
    ClientView,
    Lineup,
    Mean,
    Rule,
    ServerView,
    Sizes,
)
from undrift.core.task import Vec
from undrift.core.transfer import table
from undrift.core.tree import Tree, record, static
from undrift.errors import ConfigError
from undrift.rules.claims import DUALS
from undrift.rules.client import mean_after


@record
class PerClient:
    """One number for every client: a sequence by id, or a function of what the record says of it.

    >>> PerClient((0.1, 0.2)).at(ClientInfo(torch.tensor(1), *torch.ones(4)))
    tensor(0.2000)
    """

    values: Sequence[float] | Callable[[ClientInfo], Tensor] = static()

    def __post_init__(self) -> None:
        if callable(self.values):
            return
        values = tuple(float(v) for v in self.values)
        if not values or not all(math.isfinite(v) and v >= 0 for v in values):
            raise ConfigError(f"PerClient.values must be numbers of at least 0, got {values}")
        object.__setattr__(self, "values", values)

    def at(self, client: ClientInfo) -> Tensor:
        """Give the number of one client, or of several."""
        if callable(self.values):
            return self.values(client)
        size = client.size
        return table(self.values, size.dtype, size.device)[client.id]


@record
class PerRound:
    """One number for every round and client: a row by client id for each round, 0 first.

    >>> client = ClientInfo(torch.tensor(1), *torch.ones(4))
    >>> PerRound(((0.1, 0.2), (0.3, 0.4))).at(client, torch.tensor(1.0))
    tensor(0.4000)
    """

    values: Sequence[Sequence[float]] = static()

    def __post_init__(self) -> None:
        rows = tuple(PerClient(tuple(row)).values for row in self.values)
        if not rows or len({len(row) for row in rows}) > 1:  # type: ignore[arg-type]
            raise ConfigError("PerRound.values needs one row for each round, all of one length")
        object.__setattr__(self, "values", rows)

    def at(self, client: ClientInfo, round: Tensor) -> Tensor:
        """Give the number of one client, or of several, in a round."""
        size = client.size
        return table(self.values, size.dtype, size.device)[round.long(), client.id]


def per_client(value: Any) -> Any:
    """Accept a number, a sequence by client id, rows of them or a function of a ClientInfo."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
        return PerRound(value)
    several = callable(value) or isinstance(value, (list, tuple))
    return PerClient(value) if several else value


def at(value: Any, client: ClientInfo, round: Tensor | None = None) -> Any:
    """Give a client's own number where there is one for each, or one for each in every round."""
    if isinstance(value, PerRound):
        if round is None:
            raise ConfigError("numbers for every round stand for a and d, both of them, alone")
        return value.at(client, round)
    return value.at(client) if isinstance(value, PerClient) else value


def check_lists(owner: Any, lineup: Lineup, *names: str) -> None:
    """Refuse lists that have no number for some client, or no row for this round."""
    for name in names:
        value, place = getattr(owner, name), f"{type(owner).__name__}.{name}"
        if isinstance(value, PerRound) and lineup.round >= len(value.values):
            raise ConfigError(
                f"{place} has rows for {len(value.values)} rounds, but round {lineup.round + 1} "
                "begins: give one row for every round, or numbers that hold in all of them"
            )
        row = value.values[0] if isinstance(value, PerRound) else getattr(value, "values", None)
        if isinstance(row, tuple) and len(row) < lineup.clients:
            raise ConfigError(
                f"{place} has numbers for {len(row)} clients, but there are {lineup.clients}: "
                "give one for every client id, also of those who never take part"
            )


def omega(client: ClientInfo, by_size: bool) -> Tensor:
    """Weigh a client among everybody."""
    return client.share if by_size else client.share * client.mean_size / client.size


@record
class ShareSum(Aggregate):
    """The sum of omega_i delta_i: weights of everybody, not taken over the cohort again."""

    by_size: bool = static(default=True)

    def weight(self, view: ClientView) -> Tensor:
        return omega(view.client, self.by_size)

    def lift(self, delta: Vec, view: ClientView) -> Tree:
        return self.weight(view) * delta

    def finish(self, total: Tree) -> Vec:
        update: Vec = total
        return update


def check_duals(rule: FedVra, lineup: Lineup) -> None:
    """Refuse a cohort for which remark 1, (a + d) eta gamma Q~ <= 1, leaves no positive a_i."""
    check_lists(rule, lineup, "gamma", "a", "d")
    if rule.a is not None:
        return
    gamma, a, d = coefficients(rule, lineup.info, lineup.steps, lineup.lr)
    gamma, eta = (v + 0 * d for v in (gamma, lineup.lr))
    bad = (~(a > 0) | (gamma * eta > 1)).nonzero().flatten()
    if len(bad):
        c = int(bad[0])
        raise ConfigError(
            f"FedVra: gamma = {float(gamma[c]):g} and eta = {float(eta[c]):g} with "
            f"{int(lineup.steps[c])} steps and d = {float(d[c]):g} leave client "
            f"{int(lineup.info.id[c])} a = {float(a[c]):.3g}, which must be positive: lower gamma, "
            "eta or the local work, or give a and d"
        )
    check_cohort(rule, lineup, a, d)


def check_cohort(rule: FedVra, lineup: Lineup, a: Tensor, d: Tensor) -> None:
    """Refuse an a_i that remark 1 does not allow where a mean divides by the cohort's weights.

    What is sent is d D_i, but d / sum omega is what acts.
    """
    aggregate = getattr(lineup.algorithm, "aggregate", None)
    if not isinstance(aggregate, Mean):
        return
    acting = d / omega(lineup.info, aggregate.by_size).sum()
    reach = 1 - (1 - at(rule.gamma, lineup.info) * lineup.lr) ** lineup.steps
    bad = ((a + acting) * reach > 1 + 1e-6).nonzero().flatten()
    if len(bad):
        c = int(bad[0])
        raise ConfigError(
            f"FedVra before {type(aggregate).__name__} (d = 'cohort'): this cohort's d is "
            f"1 / sum omega = {float(acting[c]):.4g}, and a = {float(a[c]):.3g} of client "
            f"{int(lineup.info.id[c])} makes (a + d) eta gamma Q~ "
            f"{float((a + acting)[c] * reach[c]):.3g}, which remark 1 bounds by 1: give a, or "
            "lower gamma, eta or the local work"
        )


def check_weights(rule: FedVra, algorithm: Any) -> None:
    """Refuse d = 1 / Prob before weights that are taken over the cohort once more."""
    aggregate = algorithm.aggregate
    if not isinstance(aggregate, ShareSum):
        if rule.d is None:
            raise ConfigError(
                f"FedVra with d = 1 / Prob(i in cohort) before {type(aggregate).__name__} makes "
                "up for absent clients twice: use ShareSum, or give d = 1"
            )
    elif aggregate.by_size != rule.by_size:
        raise ConfigError(
            f"FedVra.by_size = {rule.by_size} and ShareSum.by_size = {aggregate.by_size}: "
            "give both the same weights"
        )


@record
class FedVra(Rule):
    """FedVRA (Wang et al. 2023, alg. 1), before `ShareSum` of the same weights.

    a None is the largest that remark 1 allows, d at most; d None is 1 / Prob(i in cohort).
    a = gamma = 0 before a mean (d = 1): FedAvg; a = 0: FedProx(gamma); before Nova: FedNova.
    a = 1, d = N / m, equal weights: FedDyn(gamma).
    """

    claims: ClassVar[tuple[str, ...]] = (DUALS,)
    changes: ClassVar[str] = "delta"

    gamma: Any = 0.1
    a: Any = None
    d: Any = None
    by_size: bool = static(default=True)
    check, check_beside = check_duals, check_weights

    def __post_init__(self) -> None:
        check_numbers(self)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # lambda_i

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return torch.zeros_like(w)  # lambda = sum over everybody of omega_i lambda_i

    def resize(self, state: Tree, before: int, after: int, joined: Tree, left: Tree) -> Tree:
        return mean_after(state, before, after, joined, left)  # exact for equal weights

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return g - view.mine + at(self.gamma, view.client) * (view.w - view.w0)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        gamma, a, d = coefficients(self, view.client, view.steps, view.lr, view.round)
        weight = omega(view.client, self.by_size)
        return d * delta, view.mine + a * gamma * delta, weight * a * gamma * delta

    def sent(self, upload: Tree) -> Tree:
        return upload[:1]  # a_i: the rest follows from delta

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return with_dual(update, state + view.upload, self.gamma)


@record
class FedVraEach(FedVra):
    """FedVRA with a gamma for every client: beta is 1 over the population's mean gamma."""

    reads_everyone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_numbers(self)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        moved, state, upload = FedVra.finish(self, delta, view)
        return at(self.gamma, view.client) * moved, state, upload

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        dual, weights = state + view.upload, omega(view.everyone, self.by_size)
        mean = (weights * at(self.gamma, view.everyone)).sum() / weights.sum()
        return (update + dual) / mean, dual


def coefficients(
    rule: FedVra, client: ClientInfo, steps: Tensor, lr: Any, round: Tensor | None = None
) -> tuple[Any, Any, Any]:
    """Give gamma_i, a_i and d_i of one client, or of several."""
    gamma = at(rule.gamma, client)
    d = 1 / client.probability if rule.d is None else at(rule.d, client, round) + 0 * steps
    # gamma lr Q~ = 1 - (1 - gamma lr)^Q, how far Q steps go towards the end
    reach = 1 - (1 - gamma * lr) ** steps
    a = torch.minimum(d, 1 / reach - d) if rule.a is None else at(rule.a, client, round)
    return gamma, a, d


def with_dual(update: Vec, dual: Vec, gamma: Any) -> tuple[Vec, Vec]:
    """Add beta lambda; beta gamma_i = 1, so the update is scaled already.  gamma = 0: no duals."""
    return update + dual / (gamma + (gamma == 0)), dual


def check_numbers(rule: FedVra) -> None:
    """Refuse what is no number and no `PerClient`, and duals where gamma = 0 leaves none."""
    for name in ("gamma", "a", "d"):
        value = getattr(rule, name)
        listed = isinstance(value, PerClient | Tensor | (PerRound if name != "gamma" else Tensor))
        if not (listed or (value is None and name != "gamma")):
            _check_number(name, value)
    each = isinstance(rule.gamma, PerClient)
    if each != isinstance(rule, FedVraEach):
        raise ConfigError(f"{type(rule).__name__}.gamma: FedVraEach takes PerClient, FedVra one")
    if each and not callable(rule.gamma.values) and not any(rule.gamma.values):
        raise ConfigError("FedVraEach.gamma is 0 for every client: use FedVra with gamma = 0")
    plain = not each and not isinstance(rule.gamma, Tensor)
    if plain and rule.gamma == 0 and rule.a not in (None, 0):
        raise ConfigError(f"FedVra.a = {rule.a!r} without gamma has nothing to act on: give a = 0")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"FedVra.{name} must be a number or PerClient(...), got {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"FedVra.{name} = {value!r} is outside [0, inf)")
