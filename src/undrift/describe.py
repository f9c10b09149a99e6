"""Describe a trainer's parts as plain JSON: what a checkpoint compares before it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch

from undrift import own
from undrift.core.losses import LOSSES
from undrift.core.task import Task
from undrift.data.federation import Federation
from undrift.data.spool import Streamed
from undrift.identity import Portrait, digest, portrait

FINGERPRINT = 2  # how experiments are described; another number, another way

# What lies in a file does not change, and to read all of it takes long.
_digests: WeakKeyDictionary[Federation, str] = WeakKeyDictionary()
_unchanging: WeakSet[Federation] = WeakSet()


def unchanging(federation: Federation) -> Federation:
    """Promise that nobody changes its examples: they are digested once."""
    _unchanging.add(federation)
    return federation


def describe(value: Any) -> Any:
    """Describe an object by all that it holds and all the code that it runs.

    >>> from undrift.rules import Prox
    >>> describe(Prox(mu=0.5))
    {'use': 'Prox', 'mu': 0.5}
    """
    if isinstance(value, Federation):
        return _federation(value)
    if isinstance(value, Task):
        album = Album()
        parts = task_parts(value).items()
        return describe_task(value, {n: album.find(n, p, value.original) for n, p in parts})
    return portrait(value).told()


class _Seen(NamedTuple):
    value: Any
    portrait: Portrait


class Album:
    """Portraits of the parts of a trainer, as they were when they were first seen.

    A part that changes while it trains, such as a counter in a loss, is what it was before.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def find(self, part: str, value: Any, within: Any) -> Portrait:
        """Give the portrait of a part; `within` is the module whose parameters are trained."""
        seen = self._seen.get(part)
        if seen is None or seen.value is not value:
            seen = self._seen[part] = _Seen(value, portrait(value, within))
        return seen.portrait


def task_parts(task: Task) -> dict[str, Any]:
    """List the parts of a task that are objects of the user's."""
    return {"module": task.original, "loss": task.loss, "metrics": task.metrics,
            "augmentation": task.augment}  # fmt: skip


def describe_task(task: Task, portraits: dict[str, Portrait]) -> dict[str, Any]:
    """Describe a task, of whose parts there are portraits."""
    shapes = {n: list(s) for n, s in zip(task.names, task.shapes, strict=True)}
    named = task.loss_name in LOSSES
    return {
        "parameters": shapes,
        "module": portraits["module"].told(),
        "loss": task.loss_name if named else portraits["loss"].told(),
        "metrics": portraits["metrics"].told(),
        "feature": task.feature,
        "dtype": str(task.dtype),
        "augment": portraits["augmentation"].told(),
    }


def _federation(federation: Federation) -> dict[str, Any]:
    """Describe who holds which examples, and when they arrive."""
    return {
        "clients": federation.num_clients,
        "examples": len(federation.members),
        "arrival": describe(federation.arrival),
        "digest": _content(federation),
    }


def _content(federation: Federation) -> str:
    if federation in _digests:
        return _digests[federation]
    made = digest(federation.x, federation.y, federation.members, federation.sizes)
    if isinstance(federation.x, Streamed) or federation in _unchanging:
        _digests[federation] = made
    return made


def describe_own(table: Mapping[str, Any], home: Path | None) -> dict[str, Any]:
    """Describe the code that an experiment names: its own, and all that this reads."""
    found: dict[str, Any] = {}
    with own.scope(home):
        for name in own.foreign_names(table):
            if " = " not in name:  # the address of a cluster
                try:
                    found[name] = describe(own.imported(name))
                except (ImportError, AttributeError):
                    found[name] = "(not found)"
    return found


def describe_test(test: Any) -> Any:
    """Describe examples to judge by."""
    return None if test is None else describe([torch.as_tensor(v) for v in test])
