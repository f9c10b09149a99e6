"""Describe an object as plain JSON: what a checkpoint compares before it resumes."""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from undrift.core.task import LOSSES, Task
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


def _named(value: Any) -> Any:
    """Name a function by its code, an object of somebody else's class by what it holds."""
    if isinstance(value, nn.Module):
        return {"use": repr(value), "settings": _plain(vars(value)), "digest": _tensors(value)}
    if hasattr(value, "__code__"):
        return {"use": f"{value.__module__}.{value.__qualname__}", "code": _code(value.__code__)}
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return {"use": name, "settings": _plain(getattr(value, "__dict__", {}))}


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Keep the settings that are plain values."""
    kinds = (bool, int, float, str, tuple, list)
    return {n: describe(v) for n, v in settings.items() if isinstance(v, kinds)}


def _code(code: CodeType) -> str:
    """Digest what a function does, not where it stands."""
    made = hashlib.blake2b(code.co_code, digest_size=8)
    for constant in code.co_consts:
        known = _code(constant) if isinstance(constant, CodeType) else repr(constant)
        made.update(known.encode())
    made.update(repr(code.co_names).encode())
    return made.hexdigest()


def _tensors(module: nn.Module) -> str:
    return digest(*module.parameters(), *module.buffers())


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
    moving = {*task.float_buffers, *task.counter_names}
    fixed = [b for n, b in task.module.named_buffers() if n not in moving]
    return {
        "parameters": shapes,
        "module": str(task.original),
        "frozen": digest(*frozen, *fixed),
        "loss": task.loss_name if task.loss_name in LOSSES else describe(task.loss),
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
