"""Turn elementwise algebra on flat vectors into algebra piece by piece.

A model is one flat vector [P] to the rules, and many tensors to its layers.  Left as it is, the
compiler puts all gradients together before the rules read them, or searches for every number the
layer that it belongs to.  Here a vector that is put together from pieces stays in pieces:

    cat(a, b) * s            becomes  cat(a * s, b * s)
    split(cat(a, b))         becomes  a, b
    cat(a, b) + cat(c, d)    becomes  cat(a + c, b + d)

so that, where nobody reads a vector as a whole, nobody writes one.  It applies to every elementwise
operation along the last axis.  Numbers stay the same to the last bit, but for what the compiler
rounds differently when it fuses other operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
# operations on leading axes: the last one stays as it is
LEADING = {aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
SHAPING = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}
SAME = {
    *(aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default),
    aten.lift_fresh_copy.default,
}


class Pieces:
    """A vector in pieces along its last axis."""

    def __init__(self, parts: Sequence[Node]) -> None:
        self.parts = list(parts)
        self.whole: Node | None = None  # once somebody needs it


def split_flat(traced: GraphModule, cuts: Sequence[int]) -> GraphModule:
    """Keep vectors that are cut at these places, 0 and P among them, in pieces."""
    if len(cuts) < 3:
        return traced
    made = _Split(traced, cuts).run()
    made.eliminate_dead_code()
    return GraphModule(traced, made)


class _Split:
    """Writes a graph anew, node by node."""

    def __init__(self, traced: GraphModule, cuts: Sequence[int]) -> None:
        self.old, self.new, self.cuts = traced.graph, Graph(), list(cuts)
        self.size = cuts[-1]
        self.widths = [b - a for a, b in pairwise(cuts)]
        self.known: dict[Node, Node | Pieces] = {}
        self.split: dict[Node, list[Node]] = {}  # of vectors that somebody splits by parameter

    def run(self) -> Graph:
        for node in self.old.nodes:
            found = self._in_pieces(node)
            self.known[node] = self._copied(node) if found is None else found
        return self.new

    # -- one node ----------------------------------------------------------------------------
    def _in_pieces(self, node: Node) -> Node | Pieces | None:
        """Give what stands for a node of vectors; None: it is copied as it is."""
        if node.op != "call_function":
            return None
        if node.target is aten.cat.default:
            return self._joined(node)
        if node.target is getitem and isinstance(node.args[0], Node):
            return self._part(node)
        first = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        held = self.known[first] if first is not None else None
        if isinstance(held, Pieces) and (found := self._moved(node, held)) is not None:
            return found
        known = [self.known[a] for a in node.all_input_nodes]
        if _is_elementwise(node) and any(isinstance(k, Pieces) for k in known):
            return self._mapped(node)
        return None

    def _moved(self, node: Node, held: Pieces) -> Node | Pieces | None:
        """Follow a vector in pieces through an operation that computes nothing."""
        if node.target is aten.split_with_sizes.default and _last(node, 2):
            self.split[node] = self._by_sizes(held, _list(node.args[1]))
        elif node.target is aten.slice.Tensor:
            return self._sliced(node, held)
        elif node.target in LEADING and _rank(node.args[0]) > 1 and not _last(node, 1):
            return self._each(node, held)
        elif node.target in SHAPING:
            return self._shaped(node, held)
        return None

    def _joined(self, node: Node) -> Pieces | None:
        """Take a concatenation apart where its parts meet at all cuts."""
        parts = _list(node.args[0])
        if not (_width(node) == self.size and _last(node, 1)):
            return None
        ends = list(accumulate((_width(p) for p in parts), initial=0))
        if not set(self.cuts) <= set(ends):
            return None
        found = []
        for start, stop in pairwise(self.cuts):
            some = [self._whole(p) for p in parts[ends.index(start) : ends.index(stop)]]
            found.append(
                some[0]
                if len(some) == 1
                else self._make(node, stop - start, aten.cat.default, some, -1)
            )
        return Pieces(found)

    def _part(self, node: Node) -> Node | None:
        """Give one of the tensors that a vector was split into."""
        whole, number = _list(node.args)
        parts = self.split.get(whole)
        return None if parts is None else parts[number]

    def _by_sizes(self, held: Pieces, sizes: list[int]) -> list[Node]:
        ends = list(accumulate(sizes, initial=0))
        return [self._range(held, a, b) for a, b in pairwise(ends)]

    def _sliced(self, node: Node, held: Pieces) -> Node | Pieces | None:
        given: list[Any] = [*node.args[1:], *(0, 0, self.size, 1)[len(node.args) - 1 :]]
        dim, start, stop, step = given
        if dim % _rank(node.args[0]) != _rank(node.args[0]) - 1:
            return self._each(node, held)
        first, last = _bound(start, self.size), _bound(stop, self.size)
        if step != 1:
            return None
        return held if (first, last) == (0, self.size) else self._range(held, first, last)

    def _range(self, held: Pieces, start: int, stop: int) -> Node:
        """Read some columns of a vector, out of one piece where they lie in one."""
        for part, low, high in zip(held.parts, self.cuts, self.cuts[1:], strict=False):
            if low <= start and stop <= high:
                if (low, high) == (start, stop):
                    return part
                return self._columns(part, start - low, stop - low)
        return self._columns(self._joined_again(held), start, stop)

    def _columns(self, held: Node, start: int, stop: int) -> Node:
        return self._make(held, stop - start, aten.slice.Tensor, held, -1, start, stop)

    def _shaped(self, node: Node, held: Pieces) -> Pieces | None:
        """Follow a change of shape that leaves the last axis alone."""
        if _width(node) != self.size or _width(node.args[0]) != self.size:
            return None
        shape = _list(node.args[1])
        found = []
        for part, width in zip(held.parts, self.widths, strict=True):
            found.append(self._make(node, width, node.target, part, [*shape[:-1], width]))
        return Pieces(found)

    def _each(self, node: Node, held: Pieces) -> Pieces:
        found = []
        for part, width in zip(held.parts, self.widths, strict=True):
            found.append(self._make(node, width, node.target, part, *node.args[1:], **node.kwargs))
        return Pieces(found)

    def _mapped(self, node: Node) -> Pieces | None:
        """Repeat an elementwise operation for every piece."""
        if _width(node) != self.size:
            return None
        found = []
        for number, width in enumerate(self.widths):
            of_piece = partial(self._of_piece, number)
            args = torch.fx.map_arg(node.args, of_piece)
            kwargs = torch.fx.map_arg(node.kwargs, of_piece)
            found.append(self._make(node, width, node.target, *args, **kwargs))
        return Pieces(found)

    def _of_piece(self, number: int, arg: Node) -> Node:
        held = self.known[arg]
        if isinstance(held, Pieces):
            return held.parts[number]
        if _width(arg) != self.size:  # a number, or one of every client
            return held
        return self._columns(held, *self.cuts[number : number + 2])

    # -- the new graph -----------------------------------------------------------------------
    def _copied(self, node: Node) -> Node:
        return self.new.node_copy(node, self._whole)

    def _whole(self, node: Node) -> Node:
        held = self.known[node]
        return self._joined_again(held) if isinstance(held, Pieces) else held

    def _joined_again(self, held: Pieces) -> Node:
        if held.whole is None:
            held.whole = self._make(held.parts[0], self.size, aten.cat.default, held.parts, -1)
        return held.whole

    def _make(self, like: Node, width: int, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call that gives the shape of `like`, so many columns wide."""
        node = self.new.call_function(target, args, kwargs)
        node.meta["val"] = torch.empty((*_value(like).shape[:-1], width), device="meta")
        return node


def _is_elementwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target in SAME


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def _rank(node: Any) -> int:
    value = _value(node)
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _width(node: Any) -> int:
    """Give the size of the last axis; -1 where there is none."""
    value = _value(node)
    return value.shape[-1] if isinstance(value, torch.Tensor) and value.dim() else -1


def _last(node: Node, place: int) -> bool:
    """Whether the axis that stands at a place of the arguments is the last of the first one's."""
    axis: Any = node.args[place] if len(node.args) > place else 0
    first: Any = node.args[0]
    rank = _rank(first[0] if isinstance(first, (list, tuple)) else first)
    if node.target is aten.unsqueeze.default:
        rank += 1
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    return any(a % rank == rank - 1 for a in axes)


def _list(value: Any) -> list[Any]:
    return list(value)


def _bound(value: Any, size: int) -> int:
    value = size if value is None else int(value)
    return max(0, min(size, value + size if value < 0 else value))
