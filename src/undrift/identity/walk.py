"""A walk through everything that an object holds, and through the code that it runs."""

from __future__ import annotations

import copyreg
import functools
import logging
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from undrift.core.ops import STATISTICS
from undrift.identity.content import PLAIN, of_array, of_tensor, of_values
from undrift.identity.kinds import Kinds

CODE = "code"
MOST = 100_000  # objects that are looked at, and how deep
DEEPEST = 150
MADE = 1 << 9  # flag of a class that was made while a program runs
WORD = 8  # bytes: what an attribute takes of an object
HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)
# What they give depends on how often they were asked.
DRAWN = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_TENSORS = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


class Walk:
    """Looks at one object and what hangs on it."""

    def __init__(self, trained: Mapping[int, int]) -> None:
        self.trained = trained
        self.code: dict[str, Any] = {}
        self.unknown: dict[str, Any] = {}
        self.kinds = Kinds(self)
        self._path: list[str] = []
        self._open: dict[int, int] = {}  # objects that are being looked at, by how deep they lie
        self._seen = 0

    def look(self, value: Any, name: str = "") -> Any:
        """Describe what stands under this name."""
        if type(value) in PLAIN and not isinstance(value, str):
            return value
        self._path += [name] if name else []
        try:
            return self._looked(value)
        finally:
            if name:
                self._path.pop()

    def named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Describe what stands under some names, whose order means nothing."""
        return {str(n): self.look(values[n], str(n)) for n in sorted(values, key=str)}

    def within(self, path: list[str], value: Any) -> Any:
        """Describe something that has a path of its own."""
        before, self._path = self._path, path
        try:
            return self.look(value)
        finally:
            self._path = before

    def _looked(self, value: Any) -> Any:
        self._seen += 1
        found = of_values(value)
        if found is not None:
            return found
        if type(value) is str:
            return value
        if id(value) in self._open:
            return {"circle": len(self._open) - self._open[id(value)]}
        if self._seen > MOST or len(self._open) > DEEPEST:
            return self._unknown(value)
        self._open[id(value)] = len(self._open)
        try:
            return self._opened(value)
        finally:
            del self._open[id(value)]

    def _opened(self, value: Any) -> Any:
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return self._numbers(value)
        if issubclass(type(value), type):  # list[int] only says that it is one
            return self.kinds.name(value)
        if isinstance(value, FunctionType):
            return self.kinds.function(value)
        if isinstance(value, ModuleType):
            return self.kinds.module(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, dict | MappingProxyType | list | tuple | set | frozenset):
            return self._contents(value)
        form = next((form for kind, form in _FORMS if isinstance(value, kind)), Walk._object)
        return form(self, value)

    # -- values ------------------------------------------------------------------------------
    def _numbers(self, value: Any) -> Any:
        """Describe a tensor, an array or a number of numpy's, and what hangs on it."""
        if isinstance(value, np.float64):
            return float(value)  # it is a float
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            if array.dtype.hasobject:
                return {"use": "numpy", "shape": list(array.shape), "of": self.look(array.tolist())}
            found = of_array(array)
        elif id(value) in self.trained:
            found = f"trained {self.trained[id(value)]} {value.dtype}{list(value.shape)}"
        else:
            try:
                found = of_tensor(value)
            except (RuntimeError, TypeError, NotImplementedError):  # it lies nowhere, or sparsely
                return self._unknown(value)
            if isinstance(value, nn.Parameter) and value.requires_grad:
                found = f"trainable {found}"
        more = {n: v for n, v in getattr(value, "__dict__", {}).items() if n != "_cdata"}
        usual = (Tensor, nn.Parameter, np.ndarray)
        if not more and (type(value) in usual or isinstance(value, np.generic)):
            return found
        return {"use": self.kinds.name(type(value)), "is": found, **self.named(more)}

    def _contents(self, value: Any) -> Any:
        """Describe a container, and what its kind adds to it."""
        kind = type(value)
        if isinstance(value, Mapping):
            inside: Any = self._mapping(value)
        elif isinstance(value, set | frozenset):
            inside = sorted((self.look(v) for v in value), key=repr)
        else:
            inside = [self.look(v, str(i)) for i, v in enumerate(value)]
        if kind in (dict, list, tuple):
            return inside
        if hasattr(kind, "_fields") and len(kind._fields) == len(value):
            inside = dict(zip(kind._fields, inside, strict=True))
            return {"use": self.kinds.name(kind), **inside}
        more = dict(_attributes(value))
        if hasattr(value, "default_factory"):
            more["default_factory"] = value.default_factory
        return {"use": self.kinds.name(kind), "of": inside, **self.named(more)}

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        """Describe keys and values; a program may walk through them in their order."""
        keys = [k if type(k) is str else self._key(k) for k in value]
        if len(set(keys)) < len(keys):
            return [[self.look(k), self.look(v)] for k, v in value.items()]
        found = {k: self.look(v, k) for k, v in zip(keys, value.values(), strict=True)}
        ordered = keys == sorted(keys)
        return found if ordered else {**found, "(order)": of_values(tuple(keys)) or list(keys)}

    def _key(self, key: Any) -> str:
        return f"({type(key).__name__} {key!r})" if type(key) in PLAIN else repr(self.look(key))

    # -- objects -----------------------------------------------------------------------------
    def _object(self, value: Any) -> Any:
        """Describe an object by its attributes, and by what it would be pickled as."""
        kind = type(value)
        told: dict[str, Any] = {"use": self.kinds.name(kind)}
        if isinstance(value, (*DRAWN, Iterator)):
            return self._unknown(value)
        if _has_more(value):
            try:
                reduced = _reduced(value)
            except Exception:  # whatever a class that nobody may pickle says
                return self._unknown(value)
            whole = [reduced] if isinstance(reduced, str) else reduced
            parts = [list(part) if isinstance(part, Iterator) else part for part in whole]
            told["made"] = [self.look(part, str(i)) for i, part in enumerate(parts)]
        return {**told, **{_free(n): self.look(v, n) for n, v in _attributes(value)}}

    def _unknown(self, value: Any) -> Any:
        self.unknown[".".join(self._path)] = value
        return {"use": self.kinds.name(type(value)), "unknown": True}

    def _module(self, module: nn.Module) -> Any:
        """Describe a module: its settings, parts, parameters and other tensors."""
        # those of a BatchNorm that trains belong to a run
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        kept = {n: "of a run" if norm and n in STATISTICS else b
                for n, b in module._buffers.items()}  # fmt: skip
        told: dict[str, Any] = {"use": self.kinds.name(type(module))}
        for name, value in _attributes(module):
            if name in _TENSORS or (name in HOOKS and not value):
                continue
            if name in HOOKS:  # they stand under numbers that count through a whole program
                value = list(value.values()) if isinstance(value, dict) else value
            elif name in _USUAL and value is _USUAL[name]:
                continue
            told[_free(name)] = self.look(value, name)
        for held in (module._parameters, kept, module._modules):
            told |= {_free(n): self.look(v, n) for n, v in held.items()}
        order = list(module._modules)
        return {**told, "(order)": order} if order != sorted(order, key=_natural) else told


def _partial(walk: Walk, value: functools.partial[Any]) -> Any:
    return {
        "use": "functools.partial",
        "does": walk.look(value.func, "does"),
        "args": walk.look(value.args, "args"),
        "keywords": walk.named(value.keywords),
        **walk.named(vars(value)),
    }


def _builtin(walk: Walk, value: BuiltinFunctionType) -> Any:
    name = f"{value.__module__ or 'builtins'}.{value.__qualname__}"
    owner = value.__self__
    if owner is None or isinstance(owner, ModuleType | type):
        return name
    return {"use": name, "of": walk.look(owner, "of")}


def _property(walk: Walk, value: property) -> Any:
    accessors = {"get": value.fget, "set": value.fset, "delete": value.fdel}
    return {n: walk.look(f) for n, f in accessors.items() if f is not None}


def _cell(walk: Walk, value: CellType) -> Any:
    try:
        held = value.cell_contents
    except ValueError:
        return "(nothing yet)"
    return walk.look(held)


# what Python itself makes of functions
_FORMS: list[tuple[Any, Callable[[Walk, Any], Any]]] = [
    (
        MethodType,
        lambda w, v: {"of": w.look(v.__self__, "of"), "method": w.look(v.__func__, "method")},
    ),
    (functools.partial, _partial),
    (BuiltinFunctionType, _builtin),
    (weakref.ref, lambda w, v: {"weak": w.look(v())}),  # as nn.LSTM has of its weights
    (staticmethod | classmethod, lambda w, v: {type(v).__name__: w.look(v.__func__)}),
    (property, _property),
    (functools.cached_property, lambda w, v: {"cached_property": w.look(v.func)}),
    (CellType, _cell),
    (logging.Logger, lambda w, v: f"logger {v.name}"),
]

_USUAL = {n: v for n, v in vars(nn.Module()).items() if v is None or isinstance(v, bool)}


def _natural(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (-1, name)


def _free(name: str) -> str:
    """Name an attribute so that it is not taken for what a description says of its own."""
    return f".{name}" if name in ("use", "made", CODE) else name


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """List what an object has: fields first, then the rest; not what it may work out again."""
    kind = type(value)
    found: dict[str, Any] = {}
    for base in kind.__mro__[:-1]:
        for name in _slots(base):
            if hasattr(value, name):
                found[name] = getattr(value, name)
    found.update(value.__dict__ if kind.__dictoffset__ else {})  # list[int] shows another's
    first = [f.name for f in fields(value)] if is_dataclass(value) else []
    for name in dict.fromkeys([*(n for n in first if n in found), *sorted(found, key=str)]):
        cached = getattr(kind, name, None)
        if not isinstance(cached, functools.cached_property):
            yield str(name), found[name]


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    for name in names:
        hidden = name.startswith("__") and not name.endswith("__")
        yield f"_{kind.__name__.lstrip('_')}{name}" if hidden else name


def _has_more(value: Any) -> bool:
    """Whether an object holds something beside the attributes that Python shows."""
    kind = type(value)
    kinds = kind.__mro__[:-1]
    slots = [name for base in kinds for name in _slots(base)]
    seen = object.__basicsize__ + WORD * (len(slots) + 2)  # and a dictionary, and weak references
    return kind.__basicsize__ > seen or not all(base.__flags__ & MADE for base in kinds)


def _reduced(value: Any) -> Any:
    """Ask what an object would be pickled as: a name, or how it is made."""
    maker = copyreg.dispatch_table.get(type(value))
    return maker(value) if maker is not None else value.__reduce_ex__(4)


__all__ = ["CODE", "Walk"]
