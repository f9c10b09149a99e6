"""FedRL: a learned policy turns the knobs of an adaptive server, inside the server's own step.

Letters: P parameters, C clients of the round, K knobs.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.core.rule import ClientView, Rule, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.tree import EMPTY, Tree, number, part, record, static, where
from undrift.errors import PolicyError
from undrift.rules.policy import Policy, Steering
from undrift.rules.server import adam

ROUNDS_TO_FIT = 10  # of `pca = "rounds"`
FARTHEST = 10.0  # where the state is cut off
SQUARINGS = 40  # 2^40 power iterations: exact unless two eigenvalues agree in 11 digits
ALONE = (  # of cohorts that never have two clients
    "sampler: every cohort is one client, and one row has no direction: with pca = 'clients' "
    "{who} will never act; ask for cohorts of at least two, or set algorithm.pca = 'rounds'"
)


class Axis(NamedTuple):
    """The direction that the state is measured along, fitted once; float64 but for the first."""

    direction: Vec  # [P], length 1; zero before it is fitted
    centre: Tensor  # what was fitted on has its mean here
    spread: Tensor  # and this deviation
    rows: Tree = EMPTY  # [10, P] what will be fitted on; EMPTY where clients' rows are


class Seen(NamedTuple):
    """The state of this round, and mean and squared deviations of all so far; float64."""

    value: Tensor
    rounds: Tensor
    mean: Tensor
    square: Tensor


class Helm(NamedTuple):
    """What the server keeps."""

    m: Vec
    v: Vec
    knobs: Tensor  # [K] float64: as exact as the Python numbers of a server that nobody steers
    axis: Axis
    seen: Seen
    action: Tensor  # [K] of this round, in [-1, 1]
    actor: Tree  # the policy's layers, float64
    waiting: Tree  # of a server that is steered from outside: this round's D, and whether it waits


@record
class Steered(Rule):
    """FedRL (1.20): FedAdam whose alpha1 and alpha2 a policy moves, by what it sees of this round.

    The state is D * D along its first principal direction.  `pca` "clients" fits that on the first
    cohort's D_i * D_i (of two clients at least), "rounds" on D * D of the first ten rounds.  There
    are no actions until then.
    Zero actions: FedAdam(alpha1, alpha2), uniform weights.  Without a policy somebody else acts,
    between rounds (`acted`).
    """

    changes: ClassVar[str] = "update"
    rows_known: ClassVar[bool] = True  # the server has the deltas

    policy: Policy | None = static(default=None)
    lr: float = number(default=0.01, low=0)
    alpha1: float = number(default=0.9, low=0, high=0.999)
    alpha2: float = number(default=0.99, low=0, high=0.9999)
    tau: float = number(default=1e-3, low=0, ends="()")
    pca: str = static(default="clients", choices=("clients", "rounds"))
    steering: Steering = part(default_factory=Steering)

    def __post_init__(self) -> None:
        check_policy(self)

    def row(self, delta: Vec, view: ClientView) -> Tree:
        return delta * delta if self.pca == "clients" else EMPTY

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return first_helm(self, w)

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        state = looked(self, update * update, state, view)
        if self.policy is None:
            return torch.zeros_like(update), state._replace(waiting=(update, update.new_ones(())))
        return moved(self, update, state, chosen(state.actor, sight(self, state)))


def check_policy(rule: Steered) -> None:
    """Refuse a policy that was trained to turn or to see something else."""
    if rule.policy is not None and rule.policy.agent.steering != rule.steering:
        raise PolicyError(
            f"Steered: policy {rule.policy.source!r} was trained with "
            f"{rule.policy.agent.steering}, not with {rule.steering}: leave `steering` to it"
        )


def first_helm(rule: Steered, w: Vec) -> Helm:
    """Start with the knobs where nobody has touched them."""
    zero = torch.zeros((), dtype=torch.float64, device=w.device)
    knobs = torch.stack([zero + start for start in starts(rule)])
    rows = w.new_zeros(ROUNDS_TO_FIT, len(w)) if rule.pca == "rounds" else EMPTY
    axis = Axis(torch.zeros_like(w), zero, zero, rows)
    layers = () if rule.policy is None else rule.policy.agent.layers
    actor = tuple((a.to(zero), b.to(zero)) for a, b in layers)
    waiting = EMPTY if rule.policy is not None else (torch.zeros_like(w), w.new_zeros(()))
    flat = torch.zeros_like(w)
    seen = Seen(zero, zero, zero, zero)
    return Helm(flat, flat.clone(), knobs, axis, seen, torch.zeros_like(knobs), actor, waiting)


def starts(rule: Steered) -> list[Any]:
    """Tell where each knob stands before anybody acts."""
    own = {"alpha1": rule.alpha1, "alpha2": rule.alpha2, "server_lr": 0.0}
    return [own[name] for name in rule.steering.knobs]


# ----------------------------------------------------------------------------------- the state
def looked(rule: Steered, square: Vec, state: Helm, view: ServerView) -> Helm:
    """Fit the direction where it is time, and measure this round's D * D along it."""
    axis = fitted_to_rounds(state.axis, square, view.round)
    if rule.pca == "clients":
        new = principal(view.rows, view.accepted)
        # one row has no direction: then the next cohort's give it
        axis = where(is_fitted(state.axis) | (view.accepted.sum() < 2), state.axis, new)
    value = square.double() @ axis.direction.double() - axis.centre
    return state._replace(axis=axis, seen=standardised(rule, state.seen, value, axis))


def fitted_to_rounds(axis: Axis, square: Vec, round: Tensor) -> Axis:
    """Keep the first rounds' D * D; with the last of them the direction is fitted."""
    if not isinstance(axis.rows, Tensor):
        return axis
    here = torch.arange(ROUNDS_TO_FIT, device=square.device) == round
    rows = torch.where(here[:, None], square, axis.rows)
    new = principal(rows, torch.ones_like(here))
    return where(round == ROUNDS_TO_FIT - 1, new._replace(rows=rows), axis._replace(rows=rows))


def principal(rows: Tensor, kept: Tensor) -> Axis:
    """First principal direction of some rows [C, P], its largest component positive.

    Found in the C x C products of the rows, which are squared until one eigenvector is left: the
    same as a singular value decomposition, of operations that a device does without being asked.
    """
    x = torch.where(kept[:, None], rows.double(), 0.0)
    count = kept.sum().clamp(min=1)
    mean = x.sum(0) / count
    x = torch.where(kept[:, None], x - mean, 0.0)
    products = x @ x.T
    power = products / positive(products.diagonal().sum())
    for _ in range(SQUARINGS):
        power = power @ power
        power = power / positive(power.diagonal().sum())
    largest = power.diagonal().argmax().reshape(1)
    found = power.index_select(1, largest)[:, 0] @ x
    found = found / positive(torch.linalg.vector_norm(found))
    found = torch.where(found.amax() >= -found.amin(), found, -found)
    along = x @ found
    spread = ((along * along).sum() / (count - 1).clamp(min=1)).sqrt()
    return Axis(found.to(rows.dtype), mean @ found, spread)


def positive(value: Tensor) -> Tensor:
    """Divide by this: 1 where there is nothing."""
    return torch.where(value > 0, value, torch.ones_like(value))


def standardised(rule: Steered, seen: Seen, value: Tensor, axis: Axis) -> Seen:
    """Make the state a plain number; zero before there is a direction.

    A round whose D * D overflows is not looked at: one NaN would stay in all that follows.
    """
    ready = is_fitted(axis) & torch.isfinite(value)
    rounds = seen.rounds + 1
    off = value - seen.mean
    mean = seen.mean + off / rounds
    square = seen.square + off * (value - mean)
    deviation = axis.spread if rule.steering.scale == "fit" else (square / rounds).sqrt()
    shown = value if rule.steering.scale == "fit" else value - mean
    shown = (shown / positive(deviation)).clamp(-FARTHEST, FARTHEST)
    return where(ready, Seen(shown, rounds, mean, square), seen)


def is_fitted(axis: Axis) -> Tensor:
    """Whether there is a direction, and so actions."""
    return (axis.direction != 0).any()


# ---------------------------------------------------------------------------------- the action
def sight(rule: Steered, state: Helm) -> Tensor:
    """Give what an agent sees now; of several states side by side, one row for each."""
    parts = {"pca": lambda: state.seen.value[..., None], "knobs": lambda: state.knobs}
    return torch.cat([parts[name]() for name in rule.steering.sees], -1)


def chosen(actor: Tree, seen: Tensor) -> Tensor:
    """Give the policy's mean action, cut off at -1 and 1."""
    *hidden, last = actor
    for weight, bias in hidden:
        seen = torch.tanh(weight @ seen + bias)
    return (last[0] @ seen + last[1]).clamp(-1, 1)


def moved(rule: Steered, update: Vec, state: Helm, action: Tensor) -> tuple[Vec, Helm]:
    """Turn the knobs, then take FedAdam's step with them."""
    acts = state.seen.rounds > 0
    action = torch.where(acts, action, torch.zeros_like(action))
    turned = [
        torch.where(acts, knob, state.knobs[k])
        for k, knob in enumerate(turned_by(rule, state.knobs, action))
    ]
    at: dict[str, Any] = {"alpha1": rule.alpha1, "alpha2": rule.alpha2}
    at |= dict(zip(rule.steering.knobs, turned, strict=True))
    lr = rule.lr * 10 ** at["server_lr"] if "server_lr" in at else rule.lr
    m = at["alpha1"] * state.m + (1 - at["alpha1"]) * update
    v = adam(state.v, update * update, at["alpha2"])
    step = lr * m / (v.sqrt() + rule.tau)
    return step, state._replace(m=m, v=v, knobs=torch.stack(turned), action=action)


def turned_by(rule: Steered, knobs: Tensor, action: Tensor) -> list[Tensor]:
    """Tell where an action turns every knob, within its range."""
    kind, turned = rule.steering.action, []
    for k, (limit, start) in enumerate(zip(rule.steering.limits, starts(rule), strict=True)):
        middle, half = (limit.high + limit.low) / 2, (limit.high - limit.low) / 2
        base = {"change": knobs[k], "offset": start, "value": middle}[kind]
        far = half if kind == "value" else limit.reach
        turned.append((base + far * action[k]).clamp(limit.low, limit.high))
    return turned


def acted(rule: Steered, w: Vec, state: Helm, action: Tensor) -> tuple[Vec, Helm]:
    """Act from outside on the D that waits: gives the model and the state after it.

    The same numbers as a policy inside would give; nothing happens where nothing waits.
    """
    update, waits = state.waiting
    step, after = moved(rule, update, state, action.clamp(-1, 1))
    # of the state only what an action changes: the rest is as large as several models
    new = (w - step, after.m, after.v, after.knobs, after.action, torch.zeros_like(waits))
    old = (w, state.m, state.v, state.knobs, state.action, waits)
    w, m, v, knobs, turned, waits = where(waits > 0, new, old)
    return w, state._replace(m=m, v=v, knobs=knobs, action=turned, waiting=(update, waits))
