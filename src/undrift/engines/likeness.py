"""Which algorithms one group trains: those that differ in nothing but their numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from undrift.core.tree import Tree, is_whole, records, tree_map
from undrift.identity import portrait, unlike
from undrift.identity.content import PLAIN


class Likeness:
    """What a tree of rules is beside its numbers; equal ones can be stacked, or are the same.

    Whatever a record holds outside of its fields is lost when trees are stacked, so such trees
    must be the same, numbers included.
    """

    def __init__(self, tree: Tree) -> None:
        found = list(records(tree))
        self.kinds = [type(one) for one, _ in found]
        self.fixed = [value for _, some in found for value in some]
        self.all = portrait(tree)
        self.bare = portrait(tree_map(_unnumbered, tree)) if is_whole(tree) else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Likeness) or self.kinds != other.kinds:
            return False
        if unlike(self.all, other.all) is None:
            return True
        if self.bare is None or other.bare is None or unlike(self.bare, other.bare):
            return False
        return all(map(_is_one, self.fixed, other.fixed))

    __hash__ = None  # type: ignore[assignment]


def all_the_same(trees: list[Tree]) -> bool:
    """Tell whether trees of rules are the same, numbers included."""
    first, *others = [portrait(tree) for tree in trees]
    return all(unlike(first, other) is None for other in others)


def _unnumbered(leaf: Any) -> Any:
    return "a number" if isinstance(leaf, int | float | Tensor) else leaf


def _is_one(a: Any, b: Any) -> bool:
    """Whether trees with these static values can be stacked: torch compares them by ==."""
    return a is b or (type(a) is type(b) and type(a) in (*PLAIN, tuple) and bool(a == b))
