"""What runs on the same data share: examples on a device, and how they are dealt.

Nobody changes the examples of an experiment, so that dozens of runs need one copy, one check and
one digest of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from undrift.data.partitions import PARTITIONS
from undrift.experiment.spec import Experiment
from undrift.sources import Examples

MOST = 32  # that is kept of the ways to deal the same examples
Made = TypeVar("Made")

_moved: WeakKeyDictionary[Examples, dict[Any, Examples]] = WeakKeyDictionary()
_dealt: WeakKeyDictionary[Examples, dict[str, Any]] = WeakKeyDictionary()


def resident(examples: Examples, device: str, dtype: torch.dtype) -> Examples:
    """Give the examples as they lie on a device; where they cannot, as they are."""
    if device == "cpu":
        return examples
    known = _moved.setdefault(examples, {})
    if (device, dtype) not in known:
        with suppress(RuntimeError, AssertionError):  # the trainer says what is wrong with it
            known[device, dtype] = _to(examples, device, dtype)
    return known.get((device, dtype), examples)


def _to(examples: Examples, device: str, dtype: torch.dtype) -> Examples:
    names = ("train_x", "train_y", "test_x", "test_y")
    values = {name: getattr(examples, name) for name in names}
    moved = {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        for name, value in values.items()
    }
    return replace(examples, **moved)


def dealt_once(
    what: str, experiment: Experiment, examples: Examples, make: Callable[[], Made]
) -> Made:
    """Make what depends on how examples are dealt, or find it if they were dealt so before.

    It must not refer to `examples` itself, which would then never be forgotten.
    """
    kind = type(experiment.partition)
    if experiment.partition is not None and kind not in PARTITIONS.values():
        return make()  # somebody else's may depend on more than its settings
    known, key = _dealt.setdefault(examples, {}), _key(what, experiment)
    if key not in known:
        if len(known) >= MOST:
            del known[next(iter(known))]
        known[key] = make()
    made: Made = known[key]
    return made


def _key(what: str, experiment: Experiment) -> str:
    table = experiment.to_table()
    parts = [table.get(name) for name in ("partition", "arrival", "hold", "task")]
    more = [what, experiment.seeds.partition, experiment.evaluate.clients]
    return json.dumps([parts, more], sort_keys=True)
