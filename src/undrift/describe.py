"""Describe an object as plain JSON: what a checkpoint compares before it resumes."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import fields, is_dataclass
from itertools import chain
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from undrift.core.losses import LOSSES
from undrift.core.task import Task
from undrift.data.federation import Federation
from undrift.data.spool import Rows, Streamed, pieces
from undrift.own import plain_module

# What lies in a file does not change, and to read all of it takes long.
_digests: WeakKeyDictionary[Federation, str] = WeakKeyDictionary()
_unchanging: WeakSet[Federation] = WeakSet()


def unchanging(federation: Federation) -> Federation:
    """Promise that nobody changes its examples: they are digested once."""
    _unchanging.add(federation)
    return federation


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
    """Name a function by what it does, an object of somebody else's class by what it holds."""
    if isinstance(value, nn.Module):
        return {"use": repr(value), "parts": _parts(value), "digest": _tensors(value)}
    if isinstance(value, functools.partial):
        given = describe([value.args, value.keywords])
        return {"use": describe(value.func), "given": given}
    if isinstance(value, FunctionType):
        return _function(value)
    if hasattr(value, "__qualname__"):
        return f"{plain_module(value.__module__)}.{value.__qualname__}"
    name = f"{plain_module(type(value).__module__)}.{type(value).__qualname__}"
    return {"use": name, "settings": _plain(getattr(value, "__dict__", {}))}


def _function(value: FunctionType) -> dict[str, Any]:
    """Describe code, defaults and what the function remembers from where it was made."""
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    kept = [v for v in (cells, value.__defaults__, value.__kwdefaults__) if v]
    plain = _plain({str(i): v for i, v in enumerate(kept)})
    return {"use": value.__qualname__, "code": _code(value.__code__), "settings": plain}


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Keep the settings that are plain values."""
    kinds = (bool, int, float, str, tuple, list, dict)
    public = {n: v for n, v in settings.items() if not n.startswith("_")}
    return {n: describe(v) for n, v in public.items() if isinstance(v, kinds)}


def _code(code: CodeType) -> str:
    """Digest what a function does, not where it stands."""
    made = hashlib.blake2b(code.co_code, digest_size=8)
    for constant in (*code.co_consts, code.co_names):
        made.update(_constant(constant).encode())
    return made.hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, frozenset):  # its order changes from process to process
        return repr(sorted(map(_constant, value)))
    return repr(value)


def _parts(module: nn.Module) -> str:
    """Digest the classes, settings and forward code of a module's parts."""
    made = hashlib.blake2b(digest_size=16)
    for name, part in module.named_modules():
        forward = getattr(type(part), "forward", None)
        code = _code(forward.__code__) if isinstance(forward, FunctionType) else ""
        made.update(repr((name, type(part).__qualname__, code, _plain(vars(part)))).encode())
    return made.hexdigest()


def _tensors(module: nn.Module) -> str:
    return digest(*module.parameters(), *module.buffers())


def _array(value: Tensor) -> Any:
    if value.numel() == 1:
        return value.item()
    return {"shape": list(value.shape), "dtype": str(value.dtype), "digest": digest(value)}


def digest(*values: Rows) -> str:
    """Digest the bytes of tensors; of what lies in a file, piece by piece."""
    made = hashlib.blake2b(digest_size=16)
    for piece in chain.from_iterable(map(pieces, values)):
        flat = piece.detach().cpu().contiguous().reshape(-1)
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
        "parts": _parts(task.original),
        "frozen": digest(*frozen, *fixed),
        "loss": task.loss_name if task.loss_name in LOSSES else describe(task.loss),
        "metrics": {n: describe(m) for n, m in sorted(task.metrics.items())},
        "feature": task.feature,
        "dtype": str(task.dtype),
        "augment": describe(task.augment),
    }


def _federation(federation: Federation) -> dict[str, Any]:
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
