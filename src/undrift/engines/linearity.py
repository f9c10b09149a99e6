"""What recorded operations do with vectors: whether they combine them linearly, place by place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

Made = set[int] | None  # of which vectors; none: independent of them; None: in no linear way

# Operations that leave every number as it is, at its place or at another one along earlier axes.
SAME = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.select.int, aten.slice.Tensor,
    aten.permute.default, aten.transpose.int, aten.movedim.int, aten.clone.default,
    aten.detach.default, aten.alias.default, aten._to_copy.default, aten.contiguous.default,
    aten.lift_fresh_copy.default, aten.neg.default,
}  # fmt: skip
# These take no more of a vector than its shape.
SHAPES = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.empty_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
}  # fmt: skip
ZEROS = {aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default}
FILLED = {
    aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}  # fmt: skip


def reach(graph: fx.Graph, marks: Mapping[int, int], length: int) -> list[Made]:
    """Tell for every output of which vectors it is a linear combination, place by place.

    marks: which inputs are vectors, and which.  Their last axis has a length that no other has.
    """
    made: dict[fx.Node, Made] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for i, node in enumerate(inputs):
        made[node] = {marks[i]} if i in marks else set()
    for node in graph.nodes:
        if node.op == "get_attr":
            made[node] = set()
        elif node.op == "call_function":
            made[node] = _in_place(node, _of(node, made), length)
    output = next(node for node in graph.nodes if node.op == "output")
    return [made[node] if isinstance(node, fx.Node) else None for node in output.args[0]]


def reads(graph: fx.Graph, marked: Collection[int]) -> bool:
    """Whether any output depends on one of these inputs, in whatever way."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    touched = {node for i, node in enumerate(inputs) if i in marked}
    for node in graph.nodes:
        if node.target not in SHAPES and touched.intersection(node.all_input_nodes):
            touched.add(node)
    return any(node.op == "output" for node in touched)


def _in_place(node: fx.Node, made: Made, length: int) -> Made:
    """Refuse what moves numbers along the vectors: these keep their length, as their last axis."""
    value = node.meta.get("val")
    if not made or not isinstance(value, Tensor):
        return made
    return made if value.dim() and value.shape[-1] == length else None


def _of(node: fx.Node, made: Mapping[fx.Node, Made]) -> Made:
    """Tell of which vectors one operation makes its result."""
    sources = [made[n] for n in node.all_input_nodes]
    if node.target in SHAPES or not any(of is None or of for of in sources):
        return set()
    rule = RULES.get(node.target)
    return None if rule is None or any(of is None for of in sources) else rule(node.args, made)


def _same(args: Any, made: Mapping[fx.Node, Made]) -> Made:
    return _made(args[0], made)


def _put_together(args: Any, made: Mapping[fx.Node, Made]) -> Made:
    return _made(args[0][0], made) if len(args[0]) == 1 else None


def _chosen(args: Any, made: Mapping[fx.Node, Made]) -> Made:
    return None if _made(args[0], made) else _sum(args[1:], made)


def _product(args: Any, made: Mapping[fx.Node, Made]) -> Made:
    a, b = (_made(v, made) for v in args[:2])
    return None if a and b else a or b


def _ratio(args: Any, made: Mapping[fx.Node, Made]) -> Made:
    return None if _made(args[1], made) else _made(args[0], made)


def _sum(values: Any, made: Mapping[fx.Node, Made]) -> Made:
    """Add combinations; anything else that is not 0 makes it none."""
    found: set[int] = set()
    for value in values[:2]:
        of = _made(value, made)
        if of is None or (not of and not _is_zero(value)):
            return None
        found |= of
    return found


def _made(value: Any, made: Mapping[fx.Node, Made]) -> Made:
    return made[value] if isinstance(value, fx.Node) else set()


def _is_zero(value: Any) -> bool:
    """Whether a number, or what an operation gives, is known to be 0."""
    if not isinstance(value, fx.Node):
        return bool(value == 0)
    if value.target in ZEROS:
        return True
    if value.target in FILLED:
        return bool(value.args[FILLED[value.target]] == 0)
    if value.target in SAME:
        return _is_zero(value.args[0])
    return False


RULES: dict[Any, Callable[[Any, Mapping[fx.Node, Made]], Made]] = {
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor), _sum),
    aten.cat.default: _put_together,
    aten.where.self: _chosen,
    aten.mul.Tensor: _product,
    aten.div.Tensor: _ratio,
}
