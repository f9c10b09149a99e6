"""Classes and functions: by name where they are well known, by their code where they are not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from importlib.util import find_spec, resolve_name
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any

from undrift.identity.code import Reads, body, file_text, reads
from undrift.identity.origin import dotted, edition, file_of, origin

if TYPE_CHECKING:
    from undrift.identity.walk import Walk

# What Python keeps in a class that decides nothing, or that its bases and fields tell.
_KEPT = frozenset((
    "__module__", "__qualname__", "__name__", "__doc__", "__dict__", "__weakref__", "__slots__",
    "__slotnames__",
    "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__",
    "__static_attributes__", "__firstlineno__", "__match_args__", "__abstractmethods__",
    "_abc_impl", "__parameters__", "__orig_bases__", "__type_params__", "__dataclass_fields__",
    "__dataclass_params__", "__protocol_attrs__", "__non_callable_proto_members__",
    "_is_protocol", "_is_runtime_protocol", "_fields", "_field_defaults", "__classcell__",
    "__classdictcell__", "__replace__", "__repr__",
))  # fmt: skip
# what finds other code by a text
LOOKED_UP = frozenset((
    "getattr", "globals", "locals", "vars", "eval", "exec", "attrgetter", "methodcaller",
    "__import__", "import_module", "__dict__", "__getattribute__",
))  # fmt: skip
_WRITTEN = "<string>"  # the file of methods that dataclasses and named tuples write themselves


class Kinds:
    """Names classes and functions for a walk, and writes down the code behind the names."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self._named: dict[str, Any] = {}  # whose code stands under a name
        self._names: dict[int, str] = {}  # of classes, by id
        self._parted: set[tuple[int, frozenset[str]]] = set()  # modules, and what was used of them

    # -- classes -----------------------------------------------------------------------------
    def name(self, kind: type) -> str:
        """Name a class; what is not well known is written down with its methods."""
        known = self._names.get(id(kind))
        if known is not None:
            return known
        module = getattr(kind, "__module__", "")
        whose = origin(module)
        short = kind.__name__ if module.startswith("undrift.") and whose == "known" else ""
        name = short or dotted(module, kind.__qualname__)
        if whose == "installed":
            name = f"{name} ({edition(module)})"
        name = name if whose != "own" else self._free(name, kind)
        self._names[id(kind)] = name
        for base in kind.__mro__[1:-1]:
            self.name(base)
        if whose == "own":
            self._named[name] = kind
            bases = [self.name(base) for base in kind.__bases__ if base is not object]
            told: dict[str, Any] = {"bases": bases} if bases else {}
            if type(kind) is not type:
                told["class"] = self.name(type(kind))
            self.walk.code[name] = told  # before the methods, which may read it
            told |= self._members(name, dict(_defined(kind)))
        elif foreign := dict(_foreign(kind)):
            self.walk.code[name] = self._members(name, foreign)
        return name

    def _members(self, name: str, members: dict[str, Any]) -> dict[str, Any]:
        path = [f"code.{name}"]
        return {n: self.walk.within([*path, n], members[n]) for n in sorted(members)}

    def _free(self, name: str, thing: Any) -> str:
        """Find a name under which no other object stands."""
        number, free = 1, name
        while self._named.get(free, thing) is not thing:
            number += 1
            free = f"{name} ({number})"
        return free

    # -- functions ---------------------------------------------------------------------------
    def function(self, function: FunctionType) -> Any:
        """Describe a function by its name, its code and what it remembers."""
        names = function.__globals__
        module = names.get("__name__") or ""
        whose = origin(module)
        name = dotted(module, function.__code__.co_qualname)
        told: dict[str, Any] = {"use": name if whose != "installed" else
                                f"{name} ({edition(module)})"}  # fmt: skip
        if whose == "own":
            told["body"] = body(function.__code__, names)
            if function.__defaults__:
                told["defaults"] = self.walk.look(function.__defaults__, "defaults")
            if function.__kwdefaults__:
                told["keywords"] = self.walk.named(function.__kwdefaults__)
            self._read(function)
        kept = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        told |= {f"({n})": self.walk.look(cell, n) for n, cell in kept}
        more = {n: v for n, v in vars(function).items() if n != "__wrapped__"}
        told |= self.walk.named(more)
        return told if len(told) > 1 else told["use"]

    def _read(self, function: FunctionType) -> None:
        """Write down what a function reads by name: globals, parts of modules, imports."""
        names = function.__globals__
        found = reads(function.__code__)
        module = names.get("__name__") or ""
        for name in found.globals:
            if name in names:
                self._put(dotted(module, name), names[name], found.attributes)
        for name, level in found.imports:
            self._import(name, level, names.get("__package__") or "")
        if LOOKED_UP & found.attributes:
            self._put_files(module, names, found)

    def _put_files(self, module: str, names: dict[str, Any], found: Reads) -> None:
        """Write down whole files where code looks up by a text what it runs.

        Which function that is nobody can tell beforehand.
        """
        read = [names[n].__name__ for n in found.globals if isinstance(names.get(n), ModuleType)]
        for name in (module, *read):
            file = file_of(name)
            if file is not None and origin(name) == "own":
                self.walk.code[f"{dotted(name)} (its file)"] = {"body": file_text(file)}
        if found.attributes & {"import_module", "__import__"}:
            for text in sorted(found.texts):
                self._import(text, 0, names.get("__package__") or "")

    def _put(self, name: str, value: Any, attributes: frozenset[str]) -> None:
        """Write down what stands under a name; of a module the parts that are used."""
        if isinstance(value, ModuleType) and origin(value.__name__) == "own":
            self._put_parts(value, attributes)
        if self._named.get(name, self) is value:
            return
        free = self._free(name, value)
        if isinstance(value, type) and self.name(value) == free:
            return
        self._named[free] = value
        if isinstance(value, ModuleType):
            self.walk.code[free] = f"module {dotted(value.__name__)}"
        else:
            self.walk.code[free] = None  # it may read itself
            self.walk.code[free] = self.walk.within([f"code.{free}"], value)

    def _put_parts(self, module: ModuleType, attributes: frozenset[str]) -> None:
        if (id(module), attributes) not in self._parted:
            self._parted.add((id(module), attributes))
            for part in sorted(attributes & vars(module).keys()):
                self._put(dotted(module.__name__, part), vars(module)[part], attributes)

    def _import(self, name: str, level: int, package: str) -> None:
        """Write down a module that a function imports when it runs; nothing is imported for it."""
        spec = None
        for whole in ("." * level + name, f".{name}"):  # own parts see their neighbours
            with suppress(ImportError, ValueError, AttributeError):
                found = resolve_name(whole, package)
                # to find a module in a package imports the package
                there = found.rpartition(".")[0] in ("", *sys.modules)
                spec = spec or find_spec(found if there else found.partition(".")[0])
        if spec is not None and spec.origin and origin(spec.name, spec.origin) == "own":
            self.walk.code[f"{dotted(spec.name)} (its file)"] = {"body": file_text(spec.origin)}

    @staticmethod
    def module(module: ModuleType) -> Any:
        """Name a module, with all of its file if it is the user's."""
        name, file = f"module {dotted(module.__name__)}", file_of(module.__name__)
        if file is None or origin(module.__name__) != "own":
            return name
        return {"use": name, "body": file_text(file)}


def _defined(kind: type) -> Iterator[tuple[str, Any]]:
    """List what a class of the user's defines."""
    for name, value in vars(kind).items():
        if isinstance(value, MemberDescriptorType | GetSetDescriptorType) or name in _KEPT:
            continue
        if not (isinstance(value, FunctionType) and value.__code__.co_filename == _WRITTEN):
            yield name, value
    if is_dataclass(kind):
        for field in fields(kind):
            if field.default_factory is not MISSING:
                yield f"{field.name} (made)", field.default_factory


def _foreign(kind: type) -> Iterator[tuple[str, Any]]:
    """List what the user has put into a class of somebody else's."""
    for name, value in vars(kind).items():
        if not isinstance(value, FunctionType) or value.__code__.co_filename == _WRITTEN:
            continue
        if origin(value.__globals__.get("__name__") or "") == "own":
            yield name, value
