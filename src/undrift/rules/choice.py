"""Settings that are one of a few names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from undrift.errors import unknown_name

T = TypeVar("T")


def choice(kind: str, name: Any, known: Mapping[str, T], place: str) -> T:
    """Give what a name stands for, or refuse it with the nearest one that is known.

    >>> choice("d", "cohort", {"cohort": 1}, "fedvra")
    1
    """
    if name not in tuple(known):  # a list or a table cannot be looked up, it is no name either
        raise unknown_name(kind, name, list(known), place)
    return known[name]
