"""Settings by name: checked against the function that takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from undrift.errors import ConfigError, unknown_name


def check_settings(function: Callable[..., Any], settings: Mapping[str, Any], place: str) -> None:
    """Refuse a setting that `function` does not know, and name one that is missing.

    >>> check_settings(lambda width: None, {"widht": 3}, "models.mlp")
    Traceback (most recent call last):
    undrift.errors.ConfigError: models.mlp: no setting named 'widht'. Did you mean 'width'? ...
    """
    known = inspect.signature(function).parameters
    for name in settings:
        if name not in known:
            raise unknown_name("setting", name, list(known), place)
    missing = [n for n, p in known.items() if p.default is p.empty and n not in settings]
    if missing:
        raise ConfigError(f"{place}: needs the setting {missing[0]!r}, which was not given")


def whole(name: str, value: Any, low: int = 1) -> int:
    """Return a whole number that is at least `low`, or say what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")
    return value


def flag(name: str, value: Any) -> bool:
    """Return true or false, or say what is wrong with it."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is true or false, got {value!r}")
    return value


def number(name: str, value: Any, low: float, high: float) -> float:
    """Return a number in [low, high), or say what is wrong with it."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not low <= value < high:  # written so that NaN fails too
        raise ConfigError(f"{name} must be a number in [{low:g}, {high:g}), got {value!r}")
    return float(value)
