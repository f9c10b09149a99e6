"""Local optimizers by their usual names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from undrift.core.local import Exponential, HeavyBall, Listed, Nesterov, Schedule, Sgd
from undrift.errors import ConfigError


def sgd(
    lr: float | Sequence[float] = 0.1,
    momentum: float = 0.0,
    *,
    nesterov: bool = False,
    lr_decay: float | None = None,
    **more: Any,
) -> Sgd:
    """Local SGD as in torch: plain, heavy ball or Nesterov.

    `lr_decay` multiplies lr after every round; a list of lrs gives the one of each round.

    >>> type(sgd(0.1, momentum=0.9)).__name__
    'HeavyBall'
    >>> sgd([0.1, 0.05]).schedule
    Listed(rounds=(1.0, 0.5), steps=(1.0,))
    """
    lr, schedule = _scheduled(lr, lr_decay)
    if schedule:
        if "schedule" in more:
            raise ConfigError("sgd: lr_decay and a list of lrs are schedules; give one schedule")
        more = {**more, **schedule}
    if momentum == 0 and nesterov:
        raise ConfigError("sgd(nesterov=True) needs a momentum above 0")
    if momentum == 0:
        return Sgd(lr=lr, **more)
    return (Nesterov if nesterov else HeavyBall)(lr=lr, momentum=momentum, **more)


def _scheduled(lr: Any, decay: float | None) -> tuple[float, dict[str, Any]]:
    if not isinstance(lr, (list, tuple)):
        return lr, {} if decay is None else {"schedule": Exponential(decay)}
    if decay is not None or not lr or not lr[0]:
        raise ConfigError(f"sgd(lr={lr!r}): a list starts above 0 and has no lr_decay beside it")
    return float(lr[0]), {"schedule": Listed(tuple(rate / lr[0] for rate in lr))}


def need_more_than_sgd(place: str, local: Sgd) -> None:
    """Refuse a form that plain SGD without a clip cannot tell from the paper's."""
    if type(local) is Sgd and local.clip is None:
        raise ConfigError(
            f"{place} changes nothing for plain SGD without clip: leave it out, or give a local "
            "optimizer with momentum, moments or a clip"
        )


def need_falling_rate(place: str, local: Sgd) -> None:
    """Refuse a choice between the round's learning rate and the first one where they agree."""
    if type(local.schedule) is Schedule:
        raise ConfigError(
            f"{place} changes nothing while the learning rate stays: leave it out, or give a "
            "schedule, e.g. local=sgd(0.1, lr_decay=0.998)"
        )


def local_of(lr: float | None, local: Sgd | None) -> Sgd:
    """Plain SGD with this learning rate, or the given local optimizer, which has its own."""
    if local is None:
        return Sgd(lr=0.1 if lr is None else lr)
    if lr is not None:
        raise ConfigError(f"lr = {lr!r} and local = {local!r}: give the learning rate once")
    return local
