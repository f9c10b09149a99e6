"""What the source may say: engines know no algorithm, imports point one way, rules stay short."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import undrift as fl
from undrift import rules
from undrift.core.rule import Aggregate, Rule
from undrift.rules import client, compat, server

SOURCE = Path(fl.__file__).parent
ENGINES = sorted(
    p
    for part in ("engines", "layers", "program", "federated")
    for p in (SOURCE / part).glob("*.py")
)

# Words that name something else in an engine as well:
ALLOWED = {
    "sgd",  # the local optimizer that the in-place path is about, not an algorithm
    "mean",  # averages of probes, rows and losses
    "step",  # local steps; `Step` is the server optimizer
    "m",  # the tail of scaffold_m
    "u",  # the tail of fedvra_u
    "plus",  # the tail of rfedavg_plus; `Traffic.plus` adds
    "rule",  # the base classes: engines may say what they run
    "aggregate",
    "private",  # keys that nobody else may know
}


def vocabulary() -> set[str]:
    """Every word of the catalogue's names and of the rule and aggregate classes."""
    named = {word for name in fl.catalogue() for word in re.findall(r"[a-z]+", name)}
    kinds = {
        name.lower()
        for module in (rules, client, server, compat)
        for name, thing in vars(module).items()
        if isinstance(thing, type) and issubclass(thing, (Rule, Aggregate))
    }
    return (named | kinds) - ALLOWED


@pytest.mark.parametrize("path", ENGINES, ids=lambda p: p.name)
def test_engines_name_no_algorithm(path):
    text = path.read_text()
    words = {w.lower() for w in re.findall(r"[A-Za-z]+", text)}
    words |= {w.lower() for w in re.findall(r"[A-Z]?[a-z]+", text)}  # parts of CamelCase
    assert not words & vocabulary()


def test_the_vocabulary_is_not_empty():
    assert {"scaffold", "fedavg", "nova", "prox", "yogi", "comfed"} <= vocabulary()


# ---- imports -------------------------------------------------------------------------------------

# core <- {rules, state <- data} <- engines <- trainer <- experiment <- {report, trackers, papers}
# <- cli
MAY_IMPORT = {
    "core": {"core", "kernels"},
    "kernels": {"kernels"},
    "native": {"kernels", "native"},
    "rules": {"core", "rules"},
    "data": {"core", "data", "state"},
    "state": {"core", "state"},
    "layers": {"core", "kernels", "layers"},
    "identity": {"core", "data", "identity"},
    "program": {"core", "kernels", "layers", "program"},
    "engines": {
        *("core", "identity", "kernels", "native", "program", "data", "state", "engines"),
    },
    "models": {"core", "models"},
    "tabular": {"data", "models", "tabular"},
    "sources": {"core", "data", "models", "state", "sources", "tabular"},
    "metrics": {"metrics"},
    "experiment": {
        *("core", "rules", "data", "state", "engines", "models", "sources", "trainer", "fleet"),
        *("tabular", "rounds", "judging", "replay", "describe", "interrupts"),
        *("experiment", "metrics", "version"),
    },
    "agent": {"core", "data", "experiment", "fleet", "interrupts", "rules", "state", "agent"},
    "federated": {
        *("core", "data", "state", "engines", "arguments", "roster", "rounds", "judging"),
        *("trainer", "experiment", "sources", "version", "federated", "metrics"),
        *("norms", "describe", "interrupts", "private_key", "metrics", "tabular", "using"),
    },
    "deploy": {"data", "state", "experiment", "federated", "deploy"},
    "trackers": {"experiment", "models", "state", "trackers"},
    "using": {"core", "experiment", "rules", "state", "tabular", "version", "using"},
    "papers": {"core", "data", "experiment", "metrics", "rules", "sources", "state", "papers"},
}
EVERYWHERE = {"errors", "guarded", "own", "safe_path"}


def imported(path: Path) -> set[str]:
    """Parts of undrift that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in found if name.split(".")[0] == "undrift"]
    return {part[1] if len(part) > 1 else "undrift" for part in parts}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part):
    files = sorted((SOURCE / part).rglob("*.py"))
    assert files
    for path in files:
        assert imported(path) <= MAY_IMPORT[part] | EVERYWHERE, path.name


def test_nothing_below_imports_the_trainer():
    for part in (*set(MAY_IMPORT) - {"experiment", "federated"}, "errors.py"):
        place = SOURCE / part
        for path in [place] if place.is_file() else place.rglob("*.py"):
            assert "trainer" not in imported(path), path


# ---- rules ---------------------------------------------------------------------------------------


def rule_classes() -> list[type]:
    found = {}
    for path in (SOURCE / "rules").rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        module = __import__(f"undrift.{name}", fromlist=["_"])
        for thing in vars(module).values():
            own = isinstance(thing, type) and thing.__module__ == module.__name__
            if own and issubclass(thing, (Rule, Aggregate)):
                found[thing.__qualname__] = thing
    return [found[name] for name in sorted(found)]


def code_lines(cls: type) -> int:
    """Count the lines of a class that do something: no comments, docstrings, declarations."""
    source = inspect.getsource(cls)
    tree = ast.parse(source)
    quiet: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            quiet |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        if isinstance(node, ast.AnnAssign) and "ClassVar" in ast.unparse(node.annotation):
            quiet.add(node.lineno)
    lines = enumerate(source.splitlines(), 1)
    return sum(n not in quiet and bool(t.strip()) and t.strip()[0] != "#" for n, t in lines)


@pytest.mark.parametrize("cls", rule_classes(), ids=lambda c: c.__name__)
def test_a_rule_is_at_most_25_lines(cls):
    assert code_lines(cls) <= 25


@pytest.mark.parametrize("cls", rule_classes(), ids=lambda c: c.__name__)
def test_a_rule_keeps_nothing_on_itself(cls):
    """Frozen records: state goes in and out, never onto `self`."""
    assert cls.__dataclass_params__.frozen
    tree = ast.parse(inspect.getsource(cls))
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    assert not [n for n in stored if isinstance(n.ctx, ast.Store)]
