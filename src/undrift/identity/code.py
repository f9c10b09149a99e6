"""What a function does, as a digest that comments, formatting and docstrings do not change.

The syntax tree of the source stands for the code where the source is at hand and compiles to this
very code: it is the same for every version of Python.  Otherwise the bytecode stands for it, whose
digest begins with the version of Python.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import linecache
import re
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

DefinedHere = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# what decides no number, or is a matter of the version of Python
_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_params", "returns", "type_ignores"})
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_files: dict[str, tuple[str, _File]] = {}
_known: dict[int, tuple[CodeType, str]] = {}  # the code is held, so that its id stays its own


class _File(NamedTuple):
    codes: dict[CodeType, int]  # everything that is compiled in it; of equal ones there is one
    nodes: dict[tuple[str, int], list[DefinedHere]]  # by name and first line


def body(code: CodeType, names: dict[str, Any]) -> str:
    """Digest what this code does; `names` are the globals of its function."""
    known = _known.get(id(code))
    if known is None:
        node = _node(code, names)
        mark = _bytecode(code) if node is None else _digest(_text(node))
        known = _known[id(code)] = (code, mark)
    return known[1]


def file_text(path: str) -> str | None:
    """Digest what a whole file of source does; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return _digest(_text(ast.parse(file.read())))
    except (OSError, SyntaxError, ValueError):
        return None


_read: dict[int, tuple[CodeType, Reads]] = {}


class Reads(NamedTuple):
    """What code looks up elsewhere when it runs."""

    globals: list[str]
    attributes: frozenset[str]  # every name that it uses at all
    imports: list[tuple[str, int]]  # modules, with the level of a relative import
    texts: frozenset[str]  # texts in it that could name a module


def reads(code: CodeType) -> Reads:
    """List what code looks up, that of the functions inside of it included."""
    known = _read.get(id(code))
    if known is None:
        known = _read[id(code)] = (code, _reads(code))
    return known[1]


def _reads(code: CodeType) -> Reads:
    looked: set[str] = set()
    imports: set[tuple[str, int]] = set()
    used: set[str] = set()
    texts: set[str] = set()
    for part in _all_codes(code):
        used.update(part.co_names)
        texts.update(c for c in part.co_consts if isinstance(c, str) and _MODULE.fullmatch(c))
        loaded: list[Any] = []
        for step in dis.get_instructions(part):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                looked.add(step.argval)
            elif step.opname == "IMPORT_NAME":
                level = loaded[-2] if len(loaded) > 1 and isinstance(loaded[-2], int) else 0
                imports.add((step.argval, level))
            elif step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                loaded.append(step.argval)
    return Reads(sorted(looked), frozenset(used), sorted(imports), frozenset(texts))


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_codes(constant)


# --------------------------------------------------------------------------------- by its source
def _node(code: CodeType, names: dict[str, Any]) -> DefinedHere | None:
    """Find the syntax tree of this very code; None if there is none, or more than one."""
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, names)
    source = "".join(lines)
    known = _files.get(code.co_filename)
    if known is None or known[0] != source:
        known = _files[code.co_filename] = (source, _parsed(source))
    found = known[1]
    if code not in found.codes:
        return None  # the file is not what was imported
    nodes = found.nodes.get((code.co_name, code.co_firstlineno), [])
    if len(nodes) > 1:
        nodes = [n for n in nodes if isinstance(n, ast.Lambda) and _ends(code, n)]
    return nodes[0] if len(nodes) == 1 else None


def _parsed(source: str) -> _File:
    try:
        tree = ast.parse(source)
        whole = compile(source, "<source>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return _File({}, {})
    nodes: dict[tuple[str, int], list[DefinedHere]] = {}
    for node in ast.walk(tree):
        if isinstance(node, DefinedHere):
            nodes.setdefault(_place(node), []).append(node)
    return _File(dict.fromkeys(_all_codes(whole), 1), nodes)


def _place(node: DefinedHere) -> tuple[str, int]:
    if isinstance(node, ast.Lambda):
        return "<lambda>", node.lineno
    first = min(n.lineno for n in (node, *node.decorator_list))
    return node.name, first


def _ends(code: CodeType, node: ast.Lambda) -> bool:
    """Whether the last instruction is that of this lambda, of several in one line."""
    last = list(code.co_positions())[-1]
    at = node.body
    return last == (at.lineno, at.end_lineno, at.col_offset, at.end_col_offset)


def _text(node: Any) -> str:
    """Write a syntax tree without places, docstrings and whatever is empty."""
    if isinstance(node, list):
        return "[" + ",".join(_text(n) for n in node if not _is_remark(n)) + "]"
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__}:{_constant(node.value)}"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = [
        f"{name}={_text(value)}"
        for name, value in ast.iter_fields(node)
        if name not in _LEFT_OUT and value is not None and value != []
        and not (name == "annotation" and isinstance(node, ast.arg))
    ]  # fmt: skip
    return f"{type(node).__name__}({','.join(parts)})"


def _is_remark(node: Any) -> bool:
    """Whether a statement is a text that nobody reads."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# ------------------------------------------------------------------------------- by its bytecode
def _bytecode(code: CodeType) -> str:
    """Digest the instructions and what they work on; not where the code stands."""
    text = "|".join(_instructions(part) for part in _all_codes(code))
    return f"{sys.version_info.major}.{sys.version_info.minor}:{_digest(text)}"


def _instructions(code: CodeType) -> str:
    # not by their numbers: a docstring moves every constant to another place
    steps = [(s.opname, _constant(s.argval)) for s in dis.get_instructions(code)]
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    flags = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR)
    return f"{steps}{shape}{flags}{code.co_exceptiontable.hex()}"


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return "code"  # which is listed by itself
    if isinstance(value, frozenset):  # its order changes from process to process
        return f"frozenset{sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"({','.join(map(_constant, value))},)"
    return f"{type(value).__name__} {value!r}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
