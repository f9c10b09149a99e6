"""Checks of what a user hands over: one clear error each, before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from undrift.core.algorithm import Algorithm
from undrift.core.losses import OF_CLASSES
from undrift.core.random import Seeds
from undrift.core.task import Task
from undrift.core.tree import named_leaves
from undrift.data.checks import check_whole
from undrift.data.federation import Federation
from undrift.errors import ConfigError, DataError, unknown_name

T = TypeVar("T")


def check_parts(task: Any, federation: Any, algorithm: Any) -> None:
    """Refuse what is no task, federation or algorithm, or an algorithm of many experiments."""
    kinds = {"task": (task, Task), "federation": (federation, Federation)}
    for name, (value, kind) in {**kinds, "algorithm": (algorithm, Algorithm)}.items():
        if not isinstance(value, kind):
            raise ConfigError(f"Trainer.{name} must be a {kind.__name__}, got {value!r}")
    for name, number in named_leaves(algorithm).items():
        if isinstance(number, Tensor) and number.numel() != 1:
            raise ConfigError(
                f"algorithm.{name} holds {number.numel()} numbers: a trainer runs one experiment; "
                "`unstack` gives them one by one"
            )


def known_device(device: Any) -> torch.device:
    """Turn a name into a device that is there."""
    try:
        made = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"no device {device!r}: use 'cpu', 'cuda' or 'cuda:1'") from error
    if made.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported: use 'cpu' or 'cuda'")
    if made.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: torch sees no CUDA device here; use 'cpu'")
    if made.type == "cuda" and (made.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigError(f"device {device!r}: the last one here is 'cuda:{last}'")
    return made


def check_options(engine: type, options: Mapping[str, Any]) -> None:
    """Refuse settings that an engine does not have."""
    known = inspect.signature(engine).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in known):
        return  # it has some of its own to look at
    names = [p.name for p in known if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in names:
            raise unknown_name("setting", name, names, f"Trainer, engine {engine.__name__}")


def known_seeds(seed: Any) -> Seeds:
    """Turn one whole number, or three, into seeds."""
    for number in seed if isinstance(seed, Seeds) else (seed,):
        check_whole("seed", number, low=-(2**63))
        if number >= 2**63:
            raise ConfigError(f"seed = {number} needs more than 63 bits")
    return seed if isinstance(seed, Seeds) else Seeds.of(seed)


def able(name: str, value: T, method: str) -> T:
    """Refuse an object without the method that makes it what it should be."""
    if isinstance(value, type) or not callable(getattr(value, method, None)):
        raise ConfigError(f"Trainer.{name} must be an object with `{method}`, got {value!r}")
    return value


def check_labels(task: Task, federation: Federation) -> None:
    """Refuse class numbers that the module has no output for, and say whose they are."""
    if task.loss_name not in OF_CLASSES or federation.y.is_floating_point():
        return
    try:
        classes = task.outputs(federation.x[federation.members[:1]])
    except Exception:
        return  # Task.check says what is wrong with the module
    labels = federation.y[federation.members]
    bad = ((labels < 0) | (labels >= classes)).reshape(len(labels), -1).any(1).nonzero()
    if len(bad):
        entry = int(bad[0])
        client = int(torch.searchsorted(federation.offsets, entry, right=True)) - 1
        raise DataError(
            f"client {client} has the label {labels[entry].flatten()[0].item()}, but the module "
            f"has {classes} outputs: labels run from 0 to {classes - 1}"
        )
