"""What one client can do to the model, bounded; and hidden, if noise is added.

The whole of what a client uploads is clipped, last; clients weigh the same and the sum is divided
by a fixed number.  The noise comes from a secret of the server (core/noise.py), never from the
experiment's seed: whoever knows the seed could subtract it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from undrift.core.rule import ClientView, Mean, Rule, ServerView, overrides
from undrift.core.task import Vec
from undrift.core.together import around
from undrift.core.tree import Tree, number, record
from undrift.errors import ConfigError


def clipped(delta: Vec, norm: Any) -> Vec:
    """Shorten a vector to a norm, if it is longer."""
    length = torch.linalg.vector_norm(delta)
    # never above it: rounding must not give back what the division took away
    return delta * (norm / length.clamp(min=1e-30) * (1 - 1e-6)).clamp(max=1.0)


@record
class Clipped(Rule):
    """Shorten what a client's model lost to a norm: no client can do more in one round.

    What other rules send beside the change is not shortened.
    """

    changes: ClassVar[str] = "delta"
    bounds: ClassVar[bool] = True  # a change that is longer than `norm` is no honest one

    norm: float = number(default=1.0, low=0, ends="()")

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return clipped(delta, self.norm), view.mine, ()


@record
class Private(Rule):
    """DP-FedAvg (McMahan et al. 2018): clip every client's change, add Gaussian noise to the sum.

    Hides whether a client took part at all; `spent_on_updates` says how well.  The sum is divided
    by `cohort`, the number of clients that is expected, whoever reports.  A round that nobody
    reports in leaves the model as it is, which tells just that.
    """

    changes: ClassVar[str] = "delta"
    bounds: ClassVar[bool] = True
    hides: ClassVar[bool] = True  # nothing else about a client may be sent

    norm: float = number(default=1.0, low=0, ends="()")
    noise: float = number(default=1.0, low=0)  # standard deviation of the sum's noise, over norm
    cohort: float = number(default=1.0, low=1)

    def check_beside(self, algorithm: Any) -> None:
        check_sees_all(self, algorithm)

    def server_noise(self, parameters: int) -> int:
        return parameters

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        if view.task.float_buffers:
            raise ConfigError("Private cannot hide BatchNorm's running statistics: use GroupNorm")
        return clipped(delta, self.norm), view.mine, ()

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        total = update.double() * view.count.double()
        drawn = view.noise * (self.noise * self.norm)
        return ((total + drawn) / self.cohort).to(update.dtype), state


def check_sees_all(rule: Private, algorithm: Any) -> None:
    """Refuse what would send more than the change that is bounded, or see it before its noise."""
    if not isinstance(algorithm.aggregate, Mean) or algorithm.aggregate.by_size:
        raise ConfigError("Private needs clients that weigh the same: Mean(by_size=False)")
    for other in algorithm.rules:
        sends = [h for h in ("finish", "row", "after_round") if overrides(other, h)]
        if other is not rule and (sends or other.shares_probe):
            what = type(other).__name__
            raise ConfigError(f"Private bounds the model's change alone, and {what} sends more")
    before = [r for r in around(rule, algorithm)[0] if overrides(r, "server")]
    if before:
        what = type(before[0]).__name__
        raise ConfigError(f"{what} would see the sum before its noise: put Private first")
