"""Trees of tensors, and records that are trees.  The only user of torch's pytree module.

A tree is a tensor, or a tuple, NamedTuple, dict or record of trees; `EMPTY` is the tree without
leaves.  A `record` is a frozen dataclass whose plain fields are leaves (numbers that may be
stacked over experiments) and whose `static` fields belong to the structure.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from numbers import Real
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import torch
from torch import Tensor
from torch.utils import _pytree

from undrift.errors import ConfigError, unknown_name

T = TypeVar("T")
Tree = Any  # nested tuples, NamedTuples, dicts and records of tensors
EMPTY: Tree = ()

_LEAVES = {Tensor, torch.nn.Parameter, float, int, bool, str}  # what nearly all leaves are
_RECORDS: dict[type, tuple[list[str], list[str]]] = {}  # branches and static fields


def static(default: Any = MISSING, *, choices: tuple[Any, ...] = ()) -> Any:
    """Make a field that shapes the computation: never traced, never stacked."""
    return field(default=default, metadata={"static": True, "choices": choices})


def number(
    default: Any = MISSING, *, low: float = -math.inf, high: float = math.inf, ends: str = "[]"
) -> Any:
    """Make a numeric field with a declared range; `ends` is "[]", "(]", "[)" or "()"."""
    return field(default=default, metadata={"range": (low, high, ends)})


def part(*, default_factory: Any) -> Any:
    """Make a field that holds another record, made anew for every owner."""
    return field(default_factory=default_factory)


def check_fields(record: Any) -> None:
    """Refuse a value that is not among its field's choices or not within its range."""
    for f in fields(record):
        choices = f.metadata.get("choices")
        if choices and getattr(record, f.name) not in choices:
            owner, value = type(record).__name__, getattr(record, f.name)
            raise unknown_name(f.name, value, [str(c) for c in choices], owner)
        if isinstance(f.default, bool) and not isinstance(getattr(record, f.name), bool):
            owner, value = type(record).__name__, getattr(record, f.name)
            raise ConfigError(f"{owner}.{f.name} is True or False, got {value!r}")
        value, limits = getattr(record, f.name), f.metadata.get("range")
        if limits is not None and not (value is None and f.default is None):
            _check_number(f"{type(record).__name__}.{f.name}", value, *limits)


def refuse_unused(owner: Callable[..., Any], why: str, **given: Any) -> None:
    """Refuse settings that are not at their defaults where nothing reads them."""
    usual = inspect.signature(owner).parameters
    for name, value in given.items():
        if not isinstance(value, Tensor) and value != usual[name].default:
            raise ConfigError(f"{owner.__name__}: {name} = {value!r} changes nothing: {why}")


def _check_number(name: str, value: Any, low: float, high: float, ends: str) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1 or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return  # stacked over experiments
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    value = float(value)
    if not math.isfinite(value):
        raise ConfigError(f"{name} = {value!r} is no finite number")
    above = low < value if ends[0] == "(" else low <= value
    below = value < high if ends[1] == ")" else value <= high
    if not (above and below):
        raise ConfigError(f"{name} = {value!r} is outside {ends[0]}{low:g}, {high:g}{ends[1]}")


@dataclass_transform(frozen_default=True, field_specifiers=(static, number, part, field))
def record(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass whose non-static fields are the branches of a tree."""
    own_check = getattr(cls, "__post_init__", None)  # inherited ones hold for subclasses too

    def __post_init__(self: Any) -> None:
        check_fields(self)
        if own_check is not None:
            own_check(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    made = dataclass(frozen=True)(cls)
    branches = [f.name for f in fields(made) if not f.metadata.get("static")]  # type: ignore[arg-type]
    shape = [f.name for f in fields(made) if f.metadata.get("static")]  # type: ignore[arg-type]

    def flatten(x: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(x, n) for n in branches], tuple(getattr(x, n) for n in shape)

    def unflatten(values: Any, context: Any) -> Any:
        return _made(made, [*branches, *shape], [*values, *context])

    def flatten_with_keys(x: Any) -> tuple[list[Any], tuple[Any, ...]]:
        values, context = flatten(x)
        keys = [_pytree.GetAttrKey(n) for n in branches]
        return list(zip(keys, values, strict=True)), context

    _RECORDS[made] = (branches, shape)
    _pytree.register_pytree_node(
        made,
        flatten,
        unflatten,
        serialized_type_name=f"{made.__module__}.{made.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    return made


def _made(kind: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    x: Any = object.__new__(kind)  # leaves may be tensors mid-transform: skip the checks
    for name, value in zip(names, values, strict=True):
        object.__setattr__(x, name, value)
    return x


def replace(record: T, **changes: Any) -> T:
    """Copy a record with some fields changed, checks included."""
    return dataclasses.replace(record, **changes)  # type: ignore[type-var]


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply `function` leaf by leaf; a None stays None."""
    # by hand: a round maps hundreds of small trees, and torch's pytree takes several times longer
    if tree is None:
        if any(other is not None for other in others):
            raise ValueError(f"trees differ: {[None, *others]}")
        return None
    kind = type(tree)
    if kind in _LEAVES:
        return function(tree, *others)
    if kind in _RECORDS:
        branches, fixed = _RECORDS[kind]
        _check_alike(kind, tree, others, fixed)
        values = [tree_map(function, *(getattr(t, n) for t in (tree, *others))) for n in branches]
        return _made(kind, [*branches, *fixed], [*values, *(getattr(tree, n) for n in fixed)])
    if isinstance(tree, tuple | list):
        _check_alike(kind, tree, others)
        found = [tree_map(function, *parts) for parts in zip(tree, *others, strict=True)]
        return kind(*found) if hasattr(tree, "_fields") else kind(found)
    if kind is dict:
        if any(type(t) is not dict or t.keys() != tree.keys() for t in others):
            raise ValueError(f"trees differ: {[list(t) for t in (tree, *others)]}")
        return {k: tree_map(function, *(t[k] for t in (tree, *others))) for k in tree}
    return function(tree, *others)


def _check_alike(
    kind: type, tree: Tree, others: tuple[Tree, ...], fixed: Sequence[str] = ()
) -> None:
    for other in others:
        if type(other) is not kind or any(_differ(other, tree, n) for n in fixed):
            raise ValueError(f"trees differ: {tree!r} and {other!r}")


def _differ(one: Any, other: Any, name: str) -> bool:
    a, b = getattr(one, name), getattr(other, name)
    return a is not b and bool(a != b)


def records(tree: Tree) -> Iterator[tuple[Any, list[Any]]]:
    """Find every record of a tree with its static values, and whatever is neither tree nor leaf."""
    kind = type(tree)
    if kind in _RECORDS:
        branches, fixed = _RECORDS[kind]
        yield tree, [getattr(tree, name) for name in fixed]
        parts: Any = [getattr(tree, name) for name in branches]
    elif isinstance(tree, tuple | list):
        parts = tree
    elif kind is dict:
        parts = tree.values()
    else:
        parts = ()
        if tree is not None and kind not in _LEAVES:
            yield tree, []
    for part in parts:
        yield from records(part)


def is_whole(tree: Tree) -> bool:
    """Whether a tree is all in its leaves and static fields, so that it can be made again."""
    return all(
        type(one) in _RECORDS
        and vars(one).keys() == {n for some in _RECORDS[type(one)] for n in some}
        for one, _ in records(tree)
    )


def leaves(tree: Tree) -> list[Any]:
    """List the leaves of a tree, in its fixed order; `None` is a tree without leaves."""
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Tree, found: list[Any]) -> None:
    kind = type(tree)
    if kind in _RECORDS:
        parts: Any = [getattr(tree, name) for name in _RECORDS[kind][0]]
    elif isinstance(tree, tuple | list):
        parts = tree
    elif kind is dict:
        parts = tree.values()
    else:
        found += [] if tree is None else [tree]
        return
    for part in parts:
        _collect(part, found)


class Structure(NamedTuple):
    """What is left of a tree without its leaves."""

    spec: Any  # torch's, which takes a None for a leaf
    absent: tuple[int, ...]  # where one is: what is not set makes another tree than a number


def structure(tree: Tree) -> Structure:
    """Describe a tree without its leaves; equal structures compare equal."""
    found, spec = _pytree.tree_flatten(tree)
    return Structure(spec, tuple(i for i, leaf in enumerate(found) if leaf is None))


def rebuild(tree_structure: Structure, tree_leaves: Sequence[Any]) -> Tree:
    """Put leaves back into a structure."""
    spec, absent = tree_structure
    found = list(tree_leaves)
    for place in absent:
        found.insert(place, None)
    return _pytree.tree_unflatten(found, spec)


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Leaves by path, e.g. `{"states.0.m": tensor}`: the names that checkpoints use."""
    pairs, _ = _pytree.tree_flatten_with_path(tree)
    return {".".join(_key(k) for k in path): leaf for path, leaf in pairs if leaf is not None}


def _key(entry: Any) -> str:
    for name in ("name", "key", "idx"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    raise AssertionError(f"a tree entry of an unknown kind: {entry!r}")


def stack(trees: Sequence[T]) -> T:
    """Stack E trees of one structure into one tree with a leading axis of length E.

    >>> from undrift.rules import Prox
    >>> stack([Prox(mu=0.1), Prox(mu=0.2)]).mu.shape
    torch.Size([2])
    """
    if not trees:
        raise ConfigError("nothing to stack: give at least one tree")
    first = structure(trees[0])
    for tree in trees[1:]:
        if structure(tree) != first:
            odd = sorted(named_leaves(trees[0]).keys() ^ named_leaves(tree).keys())
            what = (
                f"only one has {', '.join(odd)}" if odd else f"{first.spec}, {structure(tree).spec}"
            )
            raise ConfigError(f"cannot stack trees: their structures differ ({what})")
    stacked: T = tree_map(lambda *v: torch.stack([_as_number(x) for x in v]), *trees)
    return stacked


def _as_number(x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if isinstance(x, int | float):
        # float64 keeps a hyper-parameter as exact as the Python number it replaces.
        return torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
    raise ConfigError(f"cannot stack {x!r}: it is no number; make its class a record")


def unstack(tree: T, size: int) -> list[T]:
    """Undo `stack`: E trees, each without the leading axis."""
    return [tree_map(lambda v, e=e: v[e], tree) for e in range(size)]


def where(condition: Tensor, new: T, old: T) -> T:
    """Choose one of two trees by a scalar condition; never multiplies, so NaN does not spread."""
    chosen: T = tree_map(lambda a, b: torch.where(condition, a, b), new, old)
    return chosen


def where_rows(mask: Tensor, new: T, old: T) -> T:
    """Choose row by row: mask [C], leaves [C, ...]; never multiplies, so NaN does not spread."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(mask.reshape(-1, *[1] * (a.dim() - 1)), a, b)

    chosen: T = tree_map(choose, new, old)
    return chosen


def zeros_like(tree: T) -> T:
    """Make a tree of zeros with the same shapes."""
    zeros: T = tree_map(lambda v: torch.zeros_like(v) if isinstance(v, Tensor) else 0.0 * v, tree)
    return zeros


def size_in_bytes(tree: Tree) -> int:
    """Count the bytes of a tree; a plain number takes 8."""
    return sum(v.numel() * v.element_size() if isinstance(v, Tensor) else 8 for v in leaves(tree))


def size_in_floats(tree: Tree) -> int:
    """Count the numbers in a tree: what it costs to send, in floats."""
    return sum(v.numel() if isinstance(v, Tensor) else 1 for v in leaves(tree))
