"""What recorded operations do with vectors: whether they combine them linearly, place by place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

Made = set[int] | None  # of which vectors; none: independent of them; None: in no linear way

# Operations that leave every number as it is, at its place or at another one along earlier axes:
# of these only where the last axis stays the last one,
TURNS = {
    aten.select.int, aten.permute.default, aten.transpose.int, aten.movedim.int,
}  # fmt: skip
# and of these always.
SAME = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.slice.Tensor, aten.clone.default,
    aten.detach.default, aten.alias.default, aten._to_copy.default, aten.contiguous.default,
    aten.lift_fresh_copy.default, aten.neg.default,
}  # fmt: skip
# These take no more of a vector than its shape.
SHAPES = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
}  # fmt: skip
# These add up numbers, or their squares, and are given this besides.
SUMS = {
    aten.sum.dim_IntList: ("dim", "keepdim", "dtype"),
    aten.linalg_vector_norm.default: ("ord", "dim", "keepdim", "dtype"),
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
    made = follow(graph, marks, length)
    # what writes could do so through a view, anywhere
    known = [made.get(node) if isinstance(node, fx.Node) else None for node in outputs(graph)]
    return [None] * len(known) if made == {} else known


def follow(
    graph: fx.Graph, marks: Mapping[int, int], length: int, sums: list[fx.Node] | None = None
) -> dict[fx.Node, Made]:
    """Tell the same of every operation; nothing if any of them writes.

    With `sums`, what adds up a combination or its squares over the vectors is put there, and
    passes for a number that has nothing to do with them.
    """
    made: dict[fx.Node, Made] = {}
    if _writes(graph):
        return made
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for i, node in enumerate(inputs):
        made[node] = {marks[i]} if i in marks else set()
    for node in graph.nodes:
        if node.op == "get_attr":
            made[node] = set()
        elif node.op == "call_function":
            if sums is not None and _adds_up(node, made):
                sums.append(node)
                made[node] = set()
            else:
                made[node] = _in_place(node, _of(node, made, length), length)
    return made


def chooses(graph: fx.Graph, made: Mapping[fx.Node, Made]) -> bool:
    """Whether any operation chooses between combinations: times 0 is not what is left out."""
    return any(
        node.target is aten.where.self and any(made[n] for n in node.all_input_nodes)
        for node in graph.nodes
    )


def _adds_up(node: Any, made: Mapping[fx.Node, Made]) -> bool:
    """Whether it adds up a combination of vectors, or its squares, over the whole last axis."""
    if node.target not in SUMS or not made[node.args[0]]:
        return False
    axes = node.args[0].meta["val"].dim()
    given = dict(zip(SUMS[node.target], node.args[1:], strict=False)) | node.kwargs
    over = [axis % axes for axis in given.get("dim") or range(axes)]
    usual = given.get("ord", 2) == 2 and not given.get("keepdim") and given.get("dtype") is None
    return bool(usual and over == [axes - 1])


def zero(graph: fx.Graph) -> list[bool]:
    """Tell which outputs are 0, whatever goes in."""
    return [not _writes(graph) and is_zero(node) for node in outputs(graph)]


def alike(one: fx.GraphModule, other: fx.GraphModule, lengths: tuple[int, int]) -> bool:
    """Whether two recordings are the same but for the sizes of what is made, of these lengths.

    What is empty does not count.  A rule that looks at the length of a vector differs elsewhere.
    """
    pairs: dict[fx.Node, fx.Node] = {}
    nodes = [[n for n in made.graph.nodes if not _is_empty(n)] for made in (one, other)]
    for a, b in zip_longest(*nodes):
        if a is None or b is None or not _is_same_kind(a, b, one, other):
            return False
        if not _equal(_given(a), _given(b), pairs, lengths):
            return False
        pairs[a] = b
    return True


def reads(graph: fx.Graph, marked: Collection[int]) -> bool:
    """Whether any output depends on one of these inputs, in whatever way."""
    if _writes(graph):
        return True
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    touched = {node for i, node in enumerate(inputs) if i in marked}
    for node in graph.nodes:
        if node.target not in SHAPES and touched.intersection(node.all_input_nodes):
            touched.add(node)
    return any(node.op == "output" for node in touched)


def _in_place(node: fx.Node, made: Made, length: int) -> Made:
    """Refuse what moves numbers along the vectors: these keep their length, as their last axis."""
    if not made:
        return made
    value = node.meta.get("val")
    kept = isinstance(value, Tensor) and value.dim() and value.shape[-1] == length
    return made if kept else None


def _of(node: fx.Node, made: Mapping[fx.Node, Made], length: int) -> Made:
    """Tell of which vectors one operation makes its result."""
    sources = [made[n] for n in node.all_input_nodes]
    if node.target in SHAPES:
        return set()
    if any(of is None for of in sources):
        return None
    if not any(sources):
        return None if _measures(node, length) else set()
    rule = RULES.get(node.target)
    if rule is None or _moves(node.target, node.args) or _rounds(node):
        return None
    return rule(node.args, made)


def _measures(node: fx.Node, length: int) -> bool:
    """Whether something independent of vectors may tell their length, or differ along them.

    What is made in their shape is the same everywhere, and stays so number by number.
    """
    shown = [n.meta["val"].shape for n in node.all_input_nodes if _is_tensor(n)]
    tags = getattr(node.target, "tags", ())
    by_number = node.target in SAME | TURNS or torch.Tag.pointwise in tags
    return not by_number and any(length in shape for shape in shown)


def _moves(target: Any, args: Any) -> bool:
    """Whether the last axis becomes another one, or is left out."""
    if target not in TURNS:
        return False
    axes = args[0].meta["val"].dim()
    if target is aten.permute.default:
        return bool(args[1][-1] % axes != axes - 1)
    ends = args[1:2] if target is aten.select.int else args[1:3]
    return any(end % axes == axes - 1 for end in ends)


def _rounds(node: fx.Node) -> bool:
    return (
        node.target in SAME
        and len({n.meta["val"].dtype for n in (node, *node.all_input_nodes)}) > 1
    )


def _same(args: Any, made: Mapping[fx.Node, Made]) -> Made:
    return _made(args[0], made)


def _put_together(args: Any, made: Mapping[fx.Node, Made]) -> Made:
    return _made(args[0][0], made) if len(args[0]) == 1 else None


def _chosen(args: Any, made: Mapping[fx.Node, Made]) -> Made:
    return None if _made(args[0], made) else _sum(args[1:3], made)


def _product(args: Any, made: Mapping[fx.Node, Made]) -> Made:
    a, b = (_made(v, made) for v in args[:2])
    return None if a and b else a or b


def _ratio(args: Any, made: Mapping[fx.Node, Made]) -> Made:
    return None if _made(args[1], made) else _made(args[0], made)


def _added(args: Any, made: Mapping[fx.Node, Made]) -> Made:
    return _sum(args[:2], made)


def _sum(values: Any, made: Mapping[fx.Node, Made]) -> Made:
    """Add combinations; anything else that is not 0 makes it none."""
    found: set[int] = set()
    for value in values:
        of = _made(value, made)
        if of is None or (not of and not is_zero(value)):
            return None
        found |= of
    return found


def _made(value: Any, made: Mapping[fx.Node, Made]) -> Made:
    return made[value] if isinstance(value, fx.Node) else set()


def is_zero(value: Any) -> bool:
    """Whether a number, or what an operation gives, is known to be 0."""
    if not isinstance(value, fx.Node):
        return bool(value == 0)
    if value.target in ZEROS:
        return True
    if value.target in FILLED:
        return bool(value.args[FILLED[value.target]] == 0)
    if value.target in SAME | TURNS:
        return is_zero(value.args[0])
    return False


def _is_same_kind(a: Any, b: Any, one: fx.GraphModule, other: fx.GraphModule) -> bool:
    if a.op == b.op == "get_attr":
        held = (getattr(one, a.target), getattr(other, b.target))
        return all(isinstance(v, Tensor) for v in held) and torch.equal(*held)
    return bool(a.op == b.op and (a.op == "placeholder" or a.target == b.target))


def _given(node: Any) -> list[Any]:
    """List what an operation is given; a placeholder's argument is of no account."""
    return [] if node.op == "placeholder" else [*node.args, *node.kwargs, *node.kwargs.values()]


def _equal(a: Any, b: Any, pairs: Mapping[fx.Node, fx.Node], lengths: Any, depth: int = 0) -> bool:
    """Whether two operations are given the same; sizes come in lists."""
    if isinstance(a, fx.Node):
        return pairs.get(a) is b
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        own, others = ([v for v in held if not _is_empty(v)] for held in (a, b))
        return len(own) == len(others) and all(
            _equal(*two, pairs, lengths, depth + 1) for two in zip(own, others, strict=True)
        )
    return bool(a == b) or (depth > 1 and (a, b) == lengths)


def outputs(graph: fx.Graph) -> Any:
    """List what a recording gives."""
    return next(node for node in graph.nodes if node.op == "output").args[0]


def _writes(graph: fx.Graph) -> bool:
    """Whether any operation changes what is there; one of many results has no schema."""
    calls = [getattr(node.target, "_schema", None) for node in graph.nodes]
    return any(schema is not None and schema.is_mutable for schema in calls)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_empty(value: Any) -> bool:
    return isinstance(value, fx.Node) and _is_tensor(value) and not value.meta["val"].numel()


RULES: dict[Any, Callable[[Any, Mapping[fx.Node, Made]], Made]] = {
    **dict.fromkeys(SAME | TURNS, _same),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor), _added),
    aten.cat.default: _put_together,
    aten.where.self: _chosen,
    aten.mul.Tensor: _product,
    aten.div.Tensor: _ratio,
}
