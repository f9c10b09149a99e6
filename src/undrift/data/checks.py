"""Checks that federations, samplers and local work share."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from undrift.errors import ConfigError


def check_whole(name: str, value: Any, low: int = 1) -> None:
    """Refuse what is not a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < low:
        raise ConfigError(f"{name} must be a whole number, {low} or more; got {value!r}")
