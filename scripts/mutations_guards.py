"""Plant mistakes in what keeps damage out, and count how many the tests notice.

    python scripts/mutations_guards.py             # all; writes docs/records/mutations-guards.txt
    python scripts/mutations_guards.py wire shelf  # the modules of these names alone
    python scripts/mutations_guards.py --every 3   # a third of them, where time is short
    python scripts/mutations_guards.py --page      # the section of docs/mutations.md again

Aggregation, checkpoints, checks of what clients send, privacy.  A mistake is one change: a
comparison that is off by its edge or the other way round, `and` for `or`, a condition turned round,
an error that is not raised, a check that is not called, a number one larger, plus for minus, times
for over.  Each lives in a forked process that imports the changed module; nothing on disk changes.
What is judged stands in the record and is not judged again.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import io
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "records" / "mutations-guards.txt"
PAGE = ROOT / "docs" / "mutations.md"
LONGEST = 240  # seconds; what takes longer hangs, which nobody overlooks
SIDE_BY_SIDE = 2

HOSTILE = [f"tests/federated/test_{name}.py" for name in ("wire", "hostile", "bounds")]
GUARDS = {
    "federated.checks": [*HOSTILE, "tests/federated/test_failing.py"],
    "federated.wire": HOSTILE,
    "federated.letters": HOSTILE,
    "federated.shelf": ["tests/federated/test_shelf.py", "tests/federated/test_resume.py"],
    "rules.bounded": ["tests/rules/test_bounded.py", "tests/federated/test_failing.py"],
    "engines.sums": ["tests/engines/test_sums.py", "tests/engines/test_shards.py"],
    "engines.shards": ["tests/engines/test_shards.py", "tests/engines/test_sharded.py"],
    "state.checkpoint": ["tests/state/test_checkpoint.py", "tests/state/test_disk.py"],
}
SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip


class Planted(NamedTuple):
    """A mistake, and the module that has it."""

    module: str
    line: int
    before: str
    after: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.before} -> {self.after}"


def source_of(module: str) -> Path:
    return ROOT / "src" / "undrift" / (module.replace(".", "/") + ".py")


def mistakes_in(module: str) -> list[Planted]:
    """Make every mistake of a module, one tree each."""
    tree = ast.parse(source_of(module).read_text())
    skipped, found = _skipped(tree), dict[str, Planted]()
    for number, node in enumerate(ast.walk(tree)):
        ways = [] if node in skipped or not hasattr(node, "lineno") else list(_ways(node))
        for which in range(len(ways)):
            copy = deepcopy(tree)
            changed = next(n for i, n in enumerate(ast.walk(copy)) if i == number)
            list(_ways(changed))[which]()
            ast.fix_missing_locations(copy)
            one = Planted(module, node.lineno, _text(node), _text(changed), copy)
            found.setdefault(str(one), one)
    return list(found.values())


def _text(node: ast.AST) -> str:
    shown = node.test if isinstance(node, ast.If | ast.While) else node
    return " ".join(ast.unparse(shown).split())[:160]


def _skipped(tree: ast.Module) -> set[ast.AST]:
    """Leave out annotations and the text of errors and logs."""
    found: set[ast.AST] = set()
    for outer in ast.walk(tree):
        inner = [getattr(outer, "annotation", None), getattr(outer, "returns", None)]
        if isinstance(outer, ast.JoinedStr):
            inner += outer.values
        if isinstance(outer, ast.Raise):
            inner += [outer.exc, outer.cause]
        found.update(n for one in inner if one is not None for n in ast.walk(one))
    return found


def _ways(node: ast.AST) -> Iterator:
    if isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops[:2]):
            if type(op) in SWAPPED:
                yield lambda p=place, o=op: node.ops.__setitem__(p, SWAPPED[type(o)]())
    if isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPPED:
        yield lambda: setattr(node, "op", SWAPPED[type(node.op)]())
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        flip = isinstance(node.value, bool)
        yield lambda: setattr(node, "value", not node.value if flip else node.value + 1)
    called = type(node) is ast.Expr and isinstance(node.value, ast.Call)
    if called or isinstance(node, ast.Raise):
        yield lambda: _nothing(node)


def _nothing(node: ast.AST) -> None:
    """Make a statement do nothing."""
    empty = ast.Expr(ast.Constant(...), lineno=node.lineno, col_offset=node.col_offset)
    node.__class__, node.__dict__ = ast.Expr, empty.__dict__


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a module with a mistake in the place of the real one."""

    def __init__(self, planted: Planted) -> None:
        self.planted, self.name = planted, f"undrift.{planted.module}"

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        where = str(source_of(self.planted.module))
        return importlib.util.spec_from_file_location(name, where, loader=self)

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        exec(compile(self.planted.tree, module.__spec__.origin, "exec"), module.__dict__)


def passes(planted: Planted | None, files: list[str]) -> bool:
    """Run tests with a mistake; dying and hanging count as being noticed."""
    process = get_context("fork").Process(target=_run, args=(planted, files))
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode == 0


def _run(planted: Planted | None, files: list[str]) -> None:
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    if planted is not None:
        sys.meta_path.insert(0, Finder(planted))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what this script imports
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        code = pytest.main([*files, *options])
    os._exit(int(code))


def judged() -> dict[str, str]:
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    return {text: by for by, _, text in (line.partition("\t") for line in lines)}


def main(wanted: list[str]) -> int:
    torch.set_num_threads(1)
    assert not any(name.split(".")[0] == "undrift" for name in sys.modules), "imported too early"
    every = 1
    if "--every" in wanted:
        at = wanted.index("--every")
        every, wanted = int(wanted[at + 1]), wanted[:at] + wanted[at + 2 :]
    chosen = [m for m in GUARDS if not wanted or m.split(".")[-1] in wanted or wanted == ["--page"]]
    planned, known = [one for m in chosen for one in mistakes_in(m)], judged()
    jobs = [one for one in planned[::every] if str(one) not in known]
    jobs = [] if wanted == ["--page"] else jobs
    for module in {one.module for one in jobs}:
        assert passes(None, GUARDS[module]), f"the tests of {module} fail without any mistake"
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        waiting = {pool.submit(passes, one, GUARDS[one.module]): one for one in jobs}
        for done in as_completed(waiting):
            one, survives = waiting[done], done.result()
            known[str(one)] = "SURVIVES" if survives else "noticed"
            with RECORD.open("a") as record:
                record.write(f"{known[str(one)]}\t{one}\n")
            print(f"{known[str(one)]:8} {one}", flush=True)
    found = [(one, known[str(one)] == "noticed") for one in planned if str(one) in known]
    if wanted in ([], ["--page"]):
        write_section(found, len(planned))
    caught = sum(good for _, good in found)
    print(f"{caught} of {len(found)} noticed ({100 * caught / max(1, len(found)):.1f} %)")
    return 0 if caught >= 0.8 * len(found) else 1


HEAD = "## What keeps damage out"
TEXT = """{head}

`python scripts/mutations_guards.py` changes one comparison, condition, number, operator, error or
call at a time in what adds reports up, writes checkpoints, checks what clients send and adds noise,
and runs the fast tests of that module. {judged}**{caught} of {all} are noticed ({share:.1f} %)**;
[the record](records/mutations-guards.txt) has them all, survivors included.

| module | planted | noticed | |
|---|---:|---:|---:|
{rows}
"""


def write_section(found: list[tuple[Planted, bool]], planned: int) -> None:
    """Write our part of the page; the rest is another script's."""
    rows = []
    for module in GUARDS:
        mine = [good for one, good in found if one.module == module]
        if mine:
            share = 100 * sum(mine) / len(mine)
            rows.append(f"| `{module}` | {len(mine)} | {sum(mine)} | {share:.0f} % |")
    caught = sum(good for _, good in found)
    told = f"Of {planned} such changes {len(found)} were tried. " if len(found) < planned else ""
    share = 100 * caught / max(1, len(found))
    text = TEXT.format(head=HEAD, judged=told, caught=caught, all=len(found), share=share,
                       rows="\n".join(rows))  # fmt: skip
    page = re.sub(rf"\n*{HEAD}.*", "", PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(page.rstrip("\n") + "\n\n" + text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
