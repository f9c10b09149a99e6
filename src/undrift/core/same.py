"""Whether two objects do the same: modules, functions and what they remember."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

from undrift.core.ops import STATISTICS

Asked = dict[tuple[int, int], tuple[Any, Any]]  # pairs by their ids; held, so that ids stay theirs


def same(one: Any, other: Any) -> bool:
    """Tell whether two objects compute the same, whatever trainable parameters they start with.

    In doubt they do not: two objects that hold something unknown must be one.

    >>> same(nn.Linear(3, 2), nn.Linear(3, 2)), same(nn.Dropout(0.1), nn.Dropout(0.2))
    (True, False)
    """
    return _same(one, other, {})


def _same(one: Any, other: Any, asked: Asked) -> bool:
    if one is other or (id(one), id(other)) in asked:
        return True  # or it is being compared, further out
    if type(one) is not type(other):
        return False
    asked[id(one), id(other)] = (one, other)
    if isinstance(one, Tensor | np.ndarray):
        return _equal(one, other)
    if isinstance(one, nn.Module):
        return _alike(_module(one), _module(other), asked)
    if isinstance(one, Mapping):
        keys = list(one) == list(other)
        return keys and _alike(one.values(), other.values(), asked)
    if isinstance(one, tuple | list):
        return _alike(one, other, asked)
    if isinstance(one, weakref.ref):  # as nn.LSTM has of its weights
        return _same(one(), other(), asked)
    parts = _parts(one)
    if parts is not None:
        return _alike(parts, _parts(other) or (), asked)
    return bool(one == other)


def _equal(one: Any, other: Any) -> bool:
    alike = bool(one.shape == other.shape and one.dtype == other.dtype)
    trained = isinstance(one, nn.Parameter) and one.requires_grad and other.requires_grad
    return alike and (trained or bool((one == other).all()))


def _alike(some: Iterable[Any], others: Iterable[Any], asked: Asked) -> bool:
    a, b = list(some), list(others)
    return len(a) == len(b) and all(_same(x, y, asked) for x, y in zip(a, b, strict=True))


def _parts(value: Any) -> list[Any] | None:
    """List what decides what an object does; None if it says so itself, by ==."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        # names that it looks up are found in its module: two of one module find the same
        return [value.__code__, value.__defaults__, value.__kwdefaults__, cells,
                id(value.__globals__)]  # fmt: skip
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    own_equality = "__eq__" in {n for kind in type(value).__mro__[:-1] for n in vars(kind)}
    held = getattr(value, "__dict__", None)
    return None if own_equality or held is None or isinstance(value, type) else [held]


def _module(module: nn.Module) -> list[Any]:
    """List what decides a module: its settings, parts, and the tensors that are not trained."""
    trained = {n: (tuple(p.shape), p.dtype) for n, p in _own(module) if p.requires_grad}
    frozen = {n: p.detach() for n, p in _own(module) if not p.requires_grad}
    # those of a BatchNorm that trains belong to a run
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    kept = {n: None if norm and n in STATISTICS else b for n, b in module._buffers.items()}
    rest = {n: _listed(n, v) for n, v in vars(module).items() if n not in _TENSORS}
    return [trained, frozen, kept, rest]


_TENSORS = ("_parameters", "_buffers", "_non_persistent_buffers_set")


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in module._parameters.items() if p is not None]


def _listed(name: str, value: Any) -> Any:
    """Hooks stand under numbers that count through a whole program."""
    return list(value.values()) if "hooks" in name and isinstance(value, dict) else value
