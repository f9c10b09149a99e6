"""What a failed check says: one sentence that names the part, the hook and what is wrong."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from undrift.core.rule import Aggregate, Rule
from undrift.errors import UndriftError


class RuleError(UndriftError, AssertionError):
    """A rule or an aggregate that breaks a promise; the message names the hook."""


class EngineError(UndriftError, AssertionError):
    """An engine that does not compute what the reference engine computes."""


@contextmanager
def told(part: Rule | Aggregate, what: str) -> Iterator[None]:
    """Turn any failure into one sentence that names the hook."""
    try:
        yield
    except RuleError:
        raise
    except Exception as error:
        deepest = error
        while deepest.__cause__ is not None and isinstance(deepest.__cause__, Exception):
            deepest = deepest.__cause__
        hook = _hook_of(deepest, part) or _hook_of(error, part)
        name = type(part).__name__ + (f".{hook}" if hook else "")
        raise RuleError(f"{name} {what}: {type(deepest).__name__}: {deepest}") from error


def _hook_of(error: BaseException, part: Rule | Aggregate) -> str | None:
    """Find the innermost hook of a part on the traceback."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, type(part)) and frame.f_code.co_name != "watched":
            found = frame.f_code.co_name
    return found
