"""Whether two objects do the same: modules, functions and what they remember."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from undrift.core.ops import STATISTICS

PLAIN = (dict, list, tuple)
MADE = 1 << 9  # flag of a class that was made while a program runs
WORD = 8  # bytes: what an attribute takes of an object
HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)


class Asked(NamedTuple):
    """What a comparison knows: pairs by their ids, and the places of trained parameters by theirs.

    Objects are held, so that ids stay theirs.
    """

    pairs: dict[tuple[int, int], tuple[Any, Any]]
    places: tuple[dict[int, int], dict[int, int]]


def same(one: Any, other: Any, within: tuple[Any, Any] | None = None) -> bool:
    """Tell whether two objects compute the same, whatever trained parameters they start with.

    Trained are the parameters of the two, or of the modules `within` which they do their work.
    In doubt they do not: two objects that hold something unknown must be one.

    >>> same(nn.Linear(3, 2), nn.Linear(3, 2)), same(nn.Dropout(0.1), nn.Dropout(0.2))
    (True, False)
    """
    first, second = within or (one, other)
    return _same(one, other, Asked({}, (_places(first), _places(second))))


def _places(module: Any) -> dict[int, int]:
    """Number the parameters that are trained; tied ones have one number."""
    found = module.parameters() if isinstance(module, nn.Module) else ()
    return {id(p): i for i, p in enumerate(found) if p.requires_grad}


def _same(one: Any, other: Any, asked: Asked) -> bool:
    if isinstance(one, nn.Parameter) and isinstance(other, nn.Parameter):
        return _parameters(one, other, asked)
    if one is other or (id(one), id(other)) in asked.pairs:
        return True  # or it is being compared, further out
    if type(one) is not type(other):
        return False
    asked.pairs[id(one), id(other)] = (one, other)
    if isinstance(one, Tensor | np.ndarray):
        return _equal(one, other)
    if isinstance(one, nn.Module):
        return _alike(_module(one), _module(other), asked)
    if isinstance(one, Mapping | list | tuple):
        return _contents(one, other, asked)
    parts = _parts(one)
    if parts is not None:
        return _alike(parts, _parts(other) or (), asked)
    return _by_itself(one, other)


def _parameters(one: nn.Parameter, other: nn.Parameter, asked: Asked) -> bool:
    """Compare two parameters: trained ones by where they stand, others by what they hold."""
    places = [known.get(id(p)) for known, p in zip(asked.places, (one, other), strict=True)]
    if places == [None, None]:
        return one.requires_grad == other.requires_grad and _equal(one, other)
    return places[0] == places[1] and (one.shape, one.dtype) == (other.shape, other.dtype)


def _equal(one: Any, other: Any) -> bool:
    alike = bool(one.shape == other.shape and one.dtype == other.dtype)
    return alike and bool((one == other).all())


def _contents(one: Any, other: Any, asked: Asked) -> bool:
    """Compare containers, and what their kind adds to them."""
    if isinstance(one, Mapping):
        inside = list(one) == list(other) and _alike(one.values(), other.values(), asked)
    else:
        inside = _alike(one, other, asked)
    if not inside or type(one) in PLAIN:
        return inside
    return all(
        _same(getattr(one, n, None), getattr(other, n, None), asked)
        for n in ("__dict__", "default_factory")
    )


def _by_itself(one: Any, other: Any) -> bool:
    """Ask the objects; an answer that is neither yes nor no is a no."""
    try:
        equal = bool(one == other)
    except Exception:
        return False
    signs = not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other)
    return equal and signs


def _alike(some: Iterable[Any], others: Iterable[Any], asked: Asked) -> bool:
    a, b = list(some), list(others)
    return len(a) == len(b) and all(_same(x, y, asked) for x, y in zip(a, b, strict=True))


def _parts(value: Any) -> list[Any] | None:
    """List what decides what an object does; None if it says so itself, by ==."""
    if isinstance(value, FunctionType):
        cells = [_in_cell(cell) for cell in value.__closure__ or ()]
        # names that it looks up are found in its module: two of one module find the same
        return [value.__code__, value.__defaults__, value.__kwdefaults__, cells,
                value.__dict__, id(value.__globals__)]  # fmt: skip
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords, vars(value)]
    if isinstance(value, weakref.ref):  # as nn.LSTM has of its weights
        return [value()]
    if isinstance(value, type):
        return None
    return _attributes(value)


def _attributes(value: Any) -> list[Any] | None:
    """List what an object of a plain Python class holds."""
    kinds = type(value).__mro__[:-1]
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    if any("__eq__" in vars(kind) for kind in kinds):
        return None
    slots = [n for kind in kinds for n in _names(vars(kind).get("__slots__", ()))]
    seen = object.__basicsize__ + WORD * (len(slots) + 2)  # and a dictionary, and weak references
    if type(value).__basicsize__ > seen or not all(kind.__flags__ & MADE for kind in kinds):
        return None  # written in C: who knows what it holds; == is identity
    return [getattr(value, "__dict__", None), *(getattr(value, n, None) for n in slots)]


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _in_cell(cell: CellType) -> Any:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()  # nothing was ever put there


def _module(module: nn.Module) -> list[Any]:
    """List what decides a module: its settings, parts, parameters and other tensors."""
    # those of a BatchNorm that trains belong to a run
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    kept = {n: None if norm and n in STATISTICS else b for n, b in module._buffers.items()}
    rest = {n: _listed(n, v) for n, v in vars(module).items() if n not in _TENSORS}
    return [dict(module._parameters), kept, rest]


_TENSORS = ("_parameters", "_buffers", "_non_persistent_buffers_set")


def _listed(name: str, value: Any) -> Any:
    """Hooks stand under numbers that count through a whole program."""
    return list(value.values()) if name in HOOKS and isinstance(value, dict) else value
