"""Describe an object as plain JSON: what a checkpoint compares before it resumes."""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.core.task import Task
from undrift.data.federation import Federation


def describe(value: Any) -> Any:
    """Describe settings by their values, big arrays by a digest, functions by their name.

    >>> from undrift.rules import Prox
    >>> describe(Prox(mu=0.5))
    {'use': 'Prox', 'mu': 0.5}
    """
    if isinstance(value, Task):
        return _task(value)
    if isinstance(value, Federation):
        return _federation(value)
    if isinstance(value, Tensor | np.ndarray):
        return _array(torch.as_tensor(value))
    if is_dataclass(value) and not isinstance(value, type):
        named = {f.name: describe(getattr(value, f.name)) for f in fields(value)}
        return {"use": type(value).__name__, **named}
    if isinstance(value, dict):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [describe(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _named(value)


def _named(value: Any) -> str:
    """Name a function, a class or an object of somebody else's class."""
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _array(value: Tensor) -> Any:
    if value.numel() == 1:
        return value.item()
    return {"shape": list(value.shape), "dtype": str(value.dtype), "digest": digest(value)}


def digest(*values: Tensor) -> str:
    """Digest the bytes of tensors."""
    made = hashlib.blake2b(digest_size=16)
    for value in values:
        flat = value.detach().cpu().contiguous().reshape(-1)
        made.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return made.hexdigest()


def _task(task: Task) -> dict[str, Any]:
    shapes = {n: list(s) for n, s in zip(task.names, task.shapes, strict=True)}
    frozen = [p for p in task.module.parameters() if not p.requires_grad]
    return {
        "parameters": shapes,
        "module": str(task.original),
        "frozen": digest(*frozen),
        "loss": task.loss_name,
        "metrics": sorted(task.metrics),
        "feature": task.feature,
        "dtype": str(task.dtype),
    }


def _federation(federation: Federation) -> dict[str, Any]:
    parts = (federation.x, federation.y, federation.members, federation.sizes)
    return {
        "clients": federation.num_clients,
        "examples": len(federation.members),
        "arrival": describe(federation.arrival),
        "digest": digest(*parts),
    }
