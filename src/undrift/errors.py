"""Every error that undrift raises on purpose.

UndriftError
├── ConfigError           a value, a name or a combination that cannot work
│   └── PolicyError           a policy file that is damaged, or for something else
├── DataError             examples, clients or shapes that do not fit
├── TaskError             a module that cannot be trained as asked
├── ClientError           one client failed: which one, in which stage, rule and step
├── ServerError           the server half of a rule failed
├── EmptyRoundError       no client of the cohort could take part
├── FederationError       machines that work together cannot start or go on
│   └── ReportRefused         what one client sent was not taken: which client, and why
├── CheckpointError       a checkpoint could not be written or read
│   ├── CorruptCheckpoint     its bytes are not the ones that were written
│   └── ChangedExperiment     it belongs to another experiment; the message shows the difference
└── MissingExtra          an optional dependency is not installed

Each message names the value, the place and the next move.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

__all__ = [
    "ChangedExperiment",
    "CheckpointError",
    "ClientError",
    "ConfigError",
    "CorruptCheckpoint",
    "DataError",
    "EmptyRoundError",
    "FederationError",
    "MissingExtra",
    "PolicyError",
    "ServerError",
    "TaskError",
    "UndriftError",
    "unknown_name",
]


MOST_NAMES = 40  # in one message


class UndriftError(Exception):
    """The root: catch this to catch everything that undrift raises on purpose."""


class ConfigError(UndriftError, ValueError):
    """A value, a name or a combination that cannot work."""


class PolicyError(ConfigError):
    """A policy file is damaged, or was trained for something else."""


class DataError(UndriftError, ValueError):
    """Examples, clients or shapes that do not fit."""


class TaskError(UndriftError, TypeError):
    """A module that cannot be trained as asked."""


class ClientError(UndriftError, RuntimeError):
    """One client failed."""

    def __init__(
        self, client: int, stage: str, rule: str | None, step: int | None, cause: BaseException
    ) -> None:
        self.client, self.stage, self.rule, self.step = client, stage, rule, step
        place = f"client {client}, stage {stage!r}"
        place += f", rule {rule!r}" if rule else ""
        place += f", step {step}" if step is not None else ""
        super().__init__(f"{place}: {type(cause).__name__}: {cause}")


class ServerError(UndriftError, RuntimeError):
    """The server half of a rule failed."""


class EmptyRoundError(UndriftError, RuntimeError):
    """No client of the cohort could take part."""


class FederationError(UndriftError, RuntimeError):
    """Machines that work together cannot start or go on."""


class ReportRefused(FederationError):
    """What one client sent was not taken; the round goes on without it."""

    def __init__(self, client: int | None, round: int, phase: str, cause: str) -> None:
        # parts of it are a stranger's words: they must not look like lines of ours
        cause = "".join(c if c.isprintable() else "?" for c in cause[:500])
        self.client, self.round, self.phase, self.cause = client, round, phase, cause
        who = "a node that is no client" if client is None else f"client {client}"
        super().__init__(self.told(who))

    def told(self, who: str) -> str:
        """Say what was refused, of somebody of that name."""
        return f"{who}, round {self.round}, {self.phase}: refused, {self.cause}"


class CheckpointError(UndriftError, OSError):
    """A checkpoint could not be written or read."""


class CorruptCheckpoint(CheckpointError):
    """The bytes of a checkpoint are not the ones that were written."""


class ChangedExperiment(CheckpointError):
    """The checkpoint belongs to another experiment."""


class MissingExtra(UndriftError, ImportError):
    """An optional dependency is not installed."""


def unknown_name(kind: str, name: Any, known: list[str], where: str = "") -> ConfigError:
    """Build the error for a name that is not known, with the nearest one that is.

    >>> print(unknown_name("server optimizer", "yogy", ["adam", "yogi"]))
    no server optimizer named 'yogy'. Did you mean 'yogi'? Known: adam, yogi
    """
    near = get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    prefix = f"{where}: " if where else ""
    some = known if len(known) <= MOST_NAMES else get_close_matches(str(name), known, MOST_NAMES, 0)
    others = f"Known: {', '.join(some)}" if some is known else f"Some of all {len(known)}: "
    others += "" if some is known else ", ".join(some[:8])
    others = others if known else "There is none"
    return ConfigError(f"{prefix}no {kind} named {name!r}.{hint} {others}")
