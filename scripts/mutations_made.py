"""Find the rules and the mistakes that can be planted in them."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import undrift.rules
from undrift.core import local
from undrift.core.rule import Aggregate, Rule
from undrift.core.tree import Tree, tree_map

PER_RULE = 3
NOT_MUTATED = ("check", "__post_init__", "rows")  # refusals have tests of their own


class Mutation(NamedTuple):
    """One changed line; `number` counts the changes that its method allows."""

    kind_of: type
    method: str
    number: int
    kind: str
    before: str
    after: str

    @property
    def where(self) -> str:
        return f"{self.kind_of.__name__}.{self.method}"

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.before} -> {self.after}"


def rule_classes() -> list[type]:
    """List every rule, aggregate and local optimizer with a method of its own."""
    modules = [local]
    for found in pkgutil.walk_packages(undrift.rules.__path__, "undrift.rules."):
        modules.append(importlib.import_module(found.name))
    kinds = {}
    for module in modules:
        for kind in vars(module).values():
            ours = isinstance(kind, type) and kind.__module__ == module.__name__
            if ours and issubclass(kind, (Rule, Aggregate, local.Sgd)) and methods(kind):
                kinds[kind] = None
    return list(kinds)


def methods(kind: type) -> list[str]:
    return [
        name
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and name not in NOT_MUTATED and not name.startswith("__")
    ]


def tree_of(kind: type, method: str) -> ast.FunctionDef:
    made = ast.parse(textwrap.dedent(inspect.getsource(vars(kind)[method]))).body[0]
    assert isinstance(made, ast.FunctionDef)
    return made


def mutations_of(kind: type) -> list[Mutation]:
    """Choose some of a rule's possible mistakes, as different as they can be."""
    found = []
    for method in methods(kind):
        for number, (name, before, after) in enumerate(changes(kind, method)):
            found.append(Mutation(kind, method, number, name, before, after))
    chosen: list[Mutation] = []
    while found and len(chosen) < PER_RULE:
        seen = [(m.kind, m.method) for m in chosen]
        found.sort(
            key=lambda m: (
                sum(k == m.kind for k, _ in seen),
                sum(o == m.method for _, o in seen),
                m.number,
            )
        )
        chosen.append(found.pop(0))
    return chosen


def changes(kind: type, method: str) -> list[tuple[str, str, str]]:
    """List what can be changed: (kind, before, after)."""
    tree = tree_of(kind, method)
    listed = []
    for place, (name, _) in enumerate(_edits(tree, kind, method)):
        changed = copy.deepcopy(tree)
        _apply(changed, kind, method, place)
        listed.append((name, *_difference(tree, changed)))
    return listed


def _difference(tree: ast.AST, changed: ast.AST) -> tuple[str, str]:
    pairs = zip(ast.unparse(tree).splitlines(), ast.unparse(changed).splitlines(), strict=True)
    before, after = next((a, b) for a, b in pairs if a != b)
    return before.strip(), after.strip()


def _apply(tree: ast.FunctionDef, kind: type, method: str, number: int) -> None:
    list(_edits(tree, kind, method))[number][1]()


def _edits(tree: ast.FunctionDef, kind: type, method: str) -> list:
    """List (name, function that changes the tree in place), in a fixed order."""
    found: list = []
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                for name, new in _instead(child, kind):
                    found.append((name, _setter(node, field, at, new)))
    found += _states(tree, kind, method)
    return found


def _setter(node: ast.AST, field: str, at: int | None, new: ast.AST):
    def change() -> None:
        if at is None:
            setattr(node, field, new)
        else:
            getattr(node, field)[at] = new

    return change


SWAPPED = {"population": "count", "count": "population", "steps": "path", "path": "steps"}


def _instead(node: object, kind: type) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.BinOp):
        yield from _other_sums(node)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign", node.operand
    swappable = isinstance(node, ast.Attribute) and node.attr in SWAPPED and _is(node.value, "view")
    # where nobody asks for ||a||_1, view.path is view.steps: no mistake
    if swappable and (node.attr not in ("steps", "path") or getattr(kind, "needs_path", False)):
        yield "weight", ast.Attribute(node.value, SWAPPED[node.attr], ast.Load())
    if isinstance(node, ast.IfExp):
        yield "branch", ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.Attribute) and node.attr == "zeros_like":
        yield "start", ast.Attribute(node.value, "ones_like", ast.Load())


def _other_sums(node: ast.BinOp) -> Iterator[tuple[str, ast.AST]]:
    opposite = {ast.Add: ast.Sub(), ast.Sub: ast.Add()}
    if type(node.op) in opposite and not isinstance(node.left, (ast.List, ast.Tuple)):
        yield "sign", ast.BinOp(node.left, opposite[type(node.op)], node.right)
    if isinstance(node.op, ast.Mult):
        yield "factor", node.right
    if isinstance(node.op, ast.Div):
        yield "factor", node.left


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


STARTS = ("init", "init_client", "init_server", "resize")
KEPT = {"finish": "view.mine", "server": "state", "begin": "view.mine", "observe": "state"}


def _states(tree: ast.FunctionDef, kind: type, method: str) -> list:
    """Give back the old state instead of the new one; send nothing new."""
    found = []
    arguments = {a.arg for a in tree.args.args}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Return) or node.value is None:
            continue
        old = KEPT.get(method)
        if method == "begin":
            found.append(("state not kept", _setter(node, "value", None, _expression(old))))
        empty = isinstance(node.value, (ast.Tuple, ast.Constant)) or _is(node.value, "EMPTY")
        if not empty and method not in STARTS:
            found.append(("negated", _setter(node, "value", None, _negative(node.value))))
        if isinstance(node.value, ast.Tuple) and old and old.split(".")[0] in arguments:
            if ast.unparse(node.value.elts[1]) not in (old, "EMPTY"):
                new = _expression(old)
                found.append(("state not kept", _setter(node.value, "elts", 1, new)))
            first = ast.BinOp(ast.Constant(2), ast.Mult(), node.value.elts[0])
            found.append(("doubled", _setter(node.value, "elts", 0, first)))
    return found


def _negative(value: ast.expr) -> ast.expr:
    return ast.Call(_expression("tree_negative"), [value], [])


def tree_negative(tree: Tree) -> Tree:
    """Turn every number of a state or a vector round."""
    return tree_map(lambda v: -v, tree)


def _expression(text: str | None) -> ast.expr:
    return ast.parse(text or "None", mode="eval").body


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """Replace one method by its mistaken form."""
    original = vars(mutation.kind_of)[mutation.method]
    tree = tree_of(mutation.kind_of, mutation.method)
    tree.decorator_list = []
    _apply(tree, mutation.kind_of, mutation.method, mutation.number)
    module = ast.fix_missing_locations(ast.Module([tree], []))
    space: dict = {}
    known = {**original.__globals__, "tree_negative": tree_negative}
    exec(compile(module, "<planted>", "exec"), known, space)
    setattr(mutation.kind_of, mutation.method, space[mutation.method])
    try:
        yield
    finally:
        setattr(mutation.kind_of, mutation.method, original)
