"""Local optimizers by their usual names."""

from __future__ import annotations

from typing import Any

from undrift.core.local import HeavyBall, Nesterov, Sgd
from undrift.errors import ConfigError


def sgd(lr: float = 0.1, momentum: float = 0.0, *, nesterov: bool = False, **more: Any) -> Sgd:
    """Local SGD as in torch: plain, heavy ball or Nesterov.

    >>> type(sgd(0.1, momentum=0.9)).__name__
    'HeavyBall'
    """
    if momentum == 0 and nesterov:
        raise ConfigError("sgd(nesterov=True) needs a momentum above 0")
    if momentum == 0:
        return Sgd(lr=lr, **more)
    return (Nesterov if nesterov else HeavyBall)(lr=lr, momentum=momentum, **more)


def local_of(lr: float | None, local: Sgd | None) -> Sgd:
    """Plain SGD with this learning rate, or the given local optimizer, which has its own."""
    if local is None:
        return Sgd(lr=0.1 if lr is None else lr)
    if lr is not None:
        raise ConfigError(f"lr = {lr!r} and local = {local!r}: give the learning rate once")
    return local
