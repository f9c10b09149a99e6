"""Print what the house style asks about: sizes of rules, functions and files.

Code lines are lines that are neither blank, nor comment, nor docstring.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "undrift"
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def code_lines(text: str, tree: ast.Module) -> set[int]:
    """Number the lines that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        n
        for t in tokens
        if t.type not in SILENT and t.type != tokenize.ENDMARKER
        for n in range(t.start[0], t.end[0] + 1)
    }
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            text_node = node.body[0]
            lines -= set(range(text_node.lineno, (text_node.end_lineno or 0) + 1))
    return lines


def length(node: ast.AST, lines: set[int]) -> int:
    first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
    return len(lines & set(range(first, last + 1)))


def main() -> int:
    files, functions, rules = {}, {}, {}
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        lines = code_lines(text, tree)
        name = str(path.relative_to(SOURCE))
        files[name] = len(text.splitlines())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions[f"{name}:{node.name}"] = length(node, lines)
            if isinstance(node, ast.ClassDef) and name.startswith("rules/"):
                rules[node.name] = length(node, lines)
    print("rules, code lines:", dict(sorted(rules.items(), key=lambda r: -r[1])))
    for what, sizes in (("function, code lines", functions), ("file, all lines", files)):
        longest = max(sizes, key=sizes.__getitem__)
        middle = statistics.median(sizes.values())
        print(
            f"{what}: median {middle:g}, longest {sizes[longest]} ({longest}), {len(sizes)} in all"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
