"""Local optimizers and learning-rate schedules.

Every local step is, in this order (docs/conventions.md, C4):
    u = clip(gradient + corrections) + weight_decay * w,   w <- w - move(u)
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from undrift.core.task import Vec
from undrift.core.transfer import table
from undrift.core.tree import EMPTY, Tree, number, part, record, refuse_unused, static
from undrift.errors import ConfigError

CLIP_EPS = 1e-6  # torch's clip_grad_norm_


@record
class Schedule:
    """A factor on the learning rate by round (0 first) and local step; this one is constant."""

    def factor(self, round: Tensor, step: Tensor) -> Any:
        """Give the factor for one local step."""
        return 1.0


@record
class Exponential(Schedule):
    """lr * gamma^round (FedDyn, AdaBest: 0.998)."""

    gamma: float = number(default=0.998, low=0, high=1, ends="(]")

    def factor(self, round: Tensor, step: Tensor) -> Any:
        return self.gamma**round


@record
class Milestones(Schedule):
    """lr * factors[k] from round starts[k] on (FedNova: /10 at 50 %, /100 at 75 %)."""

    starts: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        plain = len(self.starts) == len(self.factors) and list(self.starts) == sorted(self.starts)
        if not plain or any(f < 0 for f in self.factors):
            raise ConfigError(
                f"Milestones(starts={self.starts!r}, factors={self.factors!r}): give one factor, "
                "0 or more, for each start, and the starts in ascending order"
            )

    def factor(self, round: Tensor, step: Tensor) -> Any:
        value = torch.ones_like(round)
        for start, factor in zip(self.starts, self.factors, strict=True):
            value = torch.where(round >= start, torch.ones_like(round) * factor, value)
        return value


@record
class Listed(Schedule):
    """lr * rounds[r] * steps[k]; after its end the last number of a list holds on."""

    rounds: tuple[float, ...] = static(default=(1.0,))
    steps: tuple[float, ...] = static(default=(1.0,))

    def __post_init__(self) -> None:
        for name in ("rounds", "steps"):
            values = tuple(float(v) for v in getattr(self, name))
            if not values or not all(math.isfinite(v) and v >= 0 for v in values):
                raise ConfigError(f"Listed.{name} = {values!r}: give numbers of at least 0")
            object.__setattr__(self, name, values)

    def factor(self, round: Tensor, step: Tensor) -> Any:
        return _at(self.rounds, round) * _at(self.steps, step)


def _at(values: tuple[float, ...], place: Tensor) -> Tensor:
    at = place.long().clamp(max=len(values) - 1)
    # not by brackets: torch reads an index without axes on the host, which no tracer allows
    found = table(values, place.dtype, place.device).index_select(0, at.reshape(-1))
    return found.reshape(place.shape)


@record
class InverseTime(Schedule):
    """lr / (1 + decay * t), t counted in local steps over rounds of `steps` (rFedAvg's theory)."""

    decay: float = number(default=0.01, low=0)
    steps: float = number(default=1.0, low=0, ends="()")

    def factor(self, round: Tensor, step: Tensor) -> Any:
        return 1.0 / (1.0 + self.decay * (round * self.steps + step))


@record
class Sgd:
    """Plain SGD; also the base of the other local optimizers.

    Clipping multiplies by min(1, clip / (norm + clip_eps)): torch's clip_grad_norm_.
    """

    linear: ClassVar[bool] = True  # delta is linear in the gradients: ||a||_1 is defined
    decoupled: ClassVar[bool] = False  # weight decay outside the gradient (AdamW)

    lr: float = number(default=0.1, low=0)
    weight_decay: float = number(default=0.0, low=0)
    clip: float | None = number(default=None, low=0, ends="()")
    clip_eps: float = number(default=CLIP_EPS, low=0)  # 0: a norm of exactly `clip`
    schedule: Schedule = part(default_factory=Schedule)

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise ConfigError(
                f"{type(self).__name__}.schedule must be a schedule such as Exponential(0.998), "
                f"got {self.schedule!r}"
            )
        if self.clip is None:
            refuse_unused(type(self), "there is no clip, so give one", clip_eps=self.clip_eps)

    def init(self, w: Vec) -> Tree:
        """State for one round (C3)."""
        return EMPTY

    def move(self, u: Vec, state: Tree, lr: Any) -> tuple[Vec, Tree]:
        """Give (what to subtract from w, next state)."""
        return lr * u, state

    def lr_at(self, round: Tensor, step: Any) -> Any:
        """Learning rate of one local step."""
        return self.lr * self.schedule.factor(round, step)

    def decay(self, w: Vec) -> Vec:
        """Gradient of the weight decay that belongs to the local objective (C2)."""
        return torch.zeros_like(w) if self.decoupled else self.weight_decay * w


@record
class HeavyBall(Sgd):
    """buf <- momentum * buf + u;  w <- w - lr * buf  (torch.optim.SGD)."""

    momentum: float = number(default=0.9, low=0, high=1, ends="[)")

    def init(self, w: Vec) -> Tree:
        return torch.zeros_like(w)

    def move(self, u: Vec, state: Tree, lr: Any) -> tuple[Vec, Tree]:
        buf = self.momentum * state + u
        return lr * buf, buf


@record
class Nesterov(Sgd):
    """buf <- momentum * buf + u;  w <- w - lr * (u + momentum * buf)  (torch.optim.SGD)."""

    momentum: float = number(default=0.9, low=0, high=1, ends="[)")

    def init(self, w: Vec) -> Tree:
        return torch.zeros_like(w)

    def move(self, u: Vec, state: Tree, lr: Any) -> tuple[Vec, Tree]:
        buf = self.momentum * state + u
        return lr * (u + self.momentum * buf), buf


@record
class RmsProp(Sgd):
    """sq <- alpha * sq + (1 - alpha) * u^2;  w <- w - lr * u / (sqrt(sq) + eps)."""

    linear: ClassVar[bool] = False

    alpha: float = number(default=0.99, low=0, high=1, ends="[)")
    eps: float = number(default=1e-8, low=0, ends="()")  # 0 / 0 where nothing moves

    def init(self, w: Vec) -> Tree:
        return torch.zeros_like(w)

    def move(self, u: Vec, state: Tree, lr: Any) -> tuple[Vec, Tree]:
        square = self.alpha * state + (1 - self.alpha) * u * u
        return lr * u / (square.sqrt() + self.eps), square


@record
class AdamW(Sgd):
    """AdamW as in torch: decoupled weight decay, bias-corrected moments."""

    linear: ClassVar[bool] = False
    decoupled: ClassVar[bool] = True

    beta1: float = number(default=0.9, low=0, high=1, ends="[)")
    beta2: float = number(default=0.999, low=0, high=1, ends="[)")
    eps: float = number(default=1e-8, low=0, ends="()")  # 0 / 0 where nothing moves

    def init(self, w: Vec) -> Tree:
        return torch.zeros_like(w), torch.zeros_like(w), w.new_zeros(())

    def move(self, u: Vec, state: Tree, lr: Any) -> tuple[Vec, Tree]:
        m, v, t = state
        m = self.beta1 * m + (1 - self.beta1) * u
        v = self.beta2 * v + (1 - self.beta2) * u * u
        t = t + 1
        root = (v / (1 - self.beta2**t)).sqrt() + self.eps
        return lr * m / (1 - self.beta1**t) / root, (m, v, t)


@record
class Adam(AdamW):
    """Adam as in torch: weight decay belongs to the gradient (C4)."""

    decoupled: ClassVar[bool] = False


def local_step(
    local: Sgd, w: Vec, g: Vec, state: Tree, lr: Any, at: Vec | None = None
) -> tuple[Vec, Tree]:
    """Take one local step with an already corrected gradient, taken `at` w or elsewhere."""
    if local.clip is not None:
        norm = torch.linalg.vector_norm(g)
        # the smallest float keeps 0 / 0 away where clip_eps is 0 and the gradient too
        room = (norm + local.clip_eps).clamp(min=torch.finfo(g.dtype).tiny)
        g = g * (local.clip / room).clamp(max=1.0)
    if not local.decoupled and not _is_zero(local.weight_decay):
        g = g + local.weight_decay * (w if at is None else at)
    move, state = local.move(g, state, lr)
    if local.decoupled:
        move = move + lr * local.weight_decay * w
    return w - move, state


def _is_zero(value: Any) -> bool:
    """A plain 0 saves a pass over [P]; a stacked number is never plain."""
    return isinstance(value, (int, float)) and value == 0
