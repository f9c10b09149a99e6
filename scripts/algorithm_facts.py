"""What is written by hand about every algorithm (docs/algorithms/facts), checked against the code.

A facts file has a title, the paper, one sentence, the formulas step by step with the names of our
lines that do them, a source for every default, and the tests that show what holds.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from dataclasses import fields
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from undrift import rules
from undrift.core.algorithm import Algorithm
from undrift.core.local import Schedule
from undrift.core.rule import Rule
from undrift.experiment.names import parameters
from undrift.rules.named import Named, catalogue, comfed
from undrift.rules.policy import Policy

ROOT = Path(__file__).parent.parent
FACTS = ROOT / "docs/algorithms/facts"
TEXTS = ("title", "authors", "paper", "where", "what")
Facts = dict[str, Any]


class Incomplete(Exception):
    """The facts and the code do not fit together."""


class Setting(NamedTuple):
    """One setting of a builder."""

    name: str
    default: Any
    source: str  # what it is, and where its default comes from


def entries() -> dict[str, Named]:
    """Name every algorithm that has a page: the single names, and ComFed once."""
    singles = {n: e for n, e in catalogue().items() if ":" not in n}
    return {**singles, "comfed": Named("comfed", comfed, "ComFed")}


def build(name: str, **settings: Any) -> Algorithm:
    """Build an algorithm at its defaults, for worlds of three classes where that matters."""
    if name == "fedvra_u":
        settings = {"objective": rules.PseudoLabels(classes=3, every=3), **settings}
    return entries()[name].build(**settings)


@cache
def facts_of(name: str) -> Facts:
    """Read the facts of one algorithm, or the common ones."""
    path = FACTS / f"{name}.toml"
    if not path.is_file():
        raise Incomplete(
            f"docs/algorithms/facts/{name}.toml is missing: `undrift list` names {name!r}; write "
            "its formulas and sources as in the files beside it"
        )
    return tomllib.loads(path.read_text("utf-8"))


# ----------------------------------------------------------------------------------- settings
def settings_of(name: str) -> list[Setting]:
    """List the settings with their defaults and sources; complain about one without."""
    own, common = facts_of(name).get("settings", {}), facts_of("common")["settings"]
    build_it, made = entries()[name].build, []
    known = parameters(build_it)
    for stale in own.keys() - known.keys():
        raise Incomplete(f"docs/algorithms/facts/{name}.toml: {name} has no setting {stale!r} now")
    direct = inspect.signature(build_it).parameters
    for setting, parameter in known.items():
        source = own.get(setting, common.get(setting))
        if source is None:
            raise Incomplete(
                f"{name}({setting}={parameter.default!r}) has no source: say under [settings] of "
                f"docs/algorithms/facts/{name}.toml what it is and where the default comes from"
            )
        default = parameter.default if setting in direct else handed_on(name, setting, parameter)
        made.append(Setting(setting, default, source))
    return sorted(made, key=lambda s: list(known).index(s.name) + 100 * (s.name not in direct))


def handed_on(name: str, setting: str, parameter: inspect.Parameter) -> Any:
    """Look up what the server optimizer was given: a builder may have other defaults than it."""
    adaptive = {"server": "adam"} if name == "comfed" else {}
    return getattr(build(name, **adaptive).server, setting, parameter.default)


# --------------------------------------------------------------------------------- our own lines
def find(reference: str) -> Any:
    """Find `Class.method` or `module:function` of undrift.rules, or anything below `undrift.`."""
    module, _, path = reference.rpartition(":")
    home = importlib.import_module(module if module.startswith("undrift.") else _home(module))
    found: Any = home
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise Incomplete(f"{reference!r} is not in the package any more: {error}") from error
    return found


def _home(module: str) -> str:
    return f"undrift.rules.{module}" if module else "undrift.rules"


def lines_of(references: list[str]) -> str:
    """Write our lines as one block; methods stand below the name of their class."""
    blocks = []
    for owner, group in groupby(references, key=_owner):
        methods = [inspect.getsource(find(r)).rstrip() for r in group]
        if owner:
            blocks.append(f"class {owner}:\n" + "\n\n".join(methods))
        else:
            blocks += methods
    return "\n\n\n".join(blocks)


def _owner(reference: str) -> str:
    return reference.rpartition(":")[2].rpartition(".")[0]


# who joins, who is refused: no part of a formula
HOUSEKEEPING = {"resize", "check", "check_beside", "caution", "linear"}


def hooks_of(part: Any) -> set[str]:
    """Name the methods that a rule or an aggregate has of its own, but for housekeeping."""
    own = {n for n, v in vars(type(part)).items() if inspect.isfunction(v)}
    return {n for n in own if not n.startswith("_")} - HOUSEKEEPING


# ------------------------------------------------------------------------------------ sentences
def sentence(algorithm: Algorithm) -> str:
    """Write how an algorithm is composed, part by part."""
    parts = {
        "rules": ", ".join(map(phrase, algorithm.rules)) or "none",
        "local": phrase(algorithm.local, quiet=True),
        "aggregate": phrase(algorithm.aggregate),
        "server": phrase(algorithm.server) if type(algorithm.server) is not Rule else "x - update",
    }
    return "\n".join(f"{name:<10} {said}" for name, said in parts.items())


def phrase(part: Any, quiet: bool = False) -> str:
    """Write a record with its settings; `quiet`: only those that are not the defaults, and lr."""
    named = [(f.name, getattr(part, f.name)) for f in fields(part)]
    named = [(n, v) for n, v in named if not isinstance(v, Schedule) or v != Schedule()]
    if quiet:
        plain = type(part)()
        named = [(n, v) for n, v in named if n in ("lr", "momentum") or v != getattr(plain, n)]
    return f"{type(part).__name__}({', '.join(f'{n}={shown(v)}' for n, v in named)})"


def shown(value: Any) -> str:
    """Write a value as one types it."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Policy):
        return f'Policy("{value.source}")'  # its digest changes with every training
    return phrase(value) if hasattr(value, "__dataclass_fields__") else repr(value)


# ------------------------------------------------------------------------------------- checking
def check_facts(name: str) -> None:
    """Complain about facts that say too little, or what is not so."""
    facts = facts_of(name)
    missing = [t for t in TEXTS if t not in facts] + ([] if facts.get("step") else ["[[step]]"])
    if missing:
        raise Incomplete(f"docs/algorithms/facts/{name}.toml lacks {', '.join(missing)}")
    settings_of(name)
    for step in facts["step"]:
        for reference in step["code"]:
            find(reference)
    for one in facts.get("shown", []):
        home_of_test(*one["test"].split("::"))


@cache
def home_of_test(path: str, function: str) -> str:
    """Find the file of a test: where it is said to be, or wherever it has moved to."""
    for place in [ROOT / path, *sorted((ROOT / "tests").rglob("test_*.py"))]:
        text = place.read_text("utf-8") if place.is_file() else ""
        if re.search(rf"^def {function}\(", text, re.MULTILINE):
            return str(place.relative_to(ROOT))
    raise Incomplete(f"no test is called {function} (it was in {path}): name another one")


def test_link(path: str, function: str, up: str) -> str:
    """Link a test by its name as words, so that a narrow column can break it."""
    return (
        f"[{function.removeprefix('test_').replace('_', ' ')}]({up}{home_of_test(path, function)})"
    )


def relinked(text: str) -> str:
    """Let links to tests lead to the files in which they are now."""

    def link(found: re.Match[str]) -> str:
        return test_link(found[2], "test_" + found[1].replace(" ", "_"), "../")

    return re.sub(r"\[([\w ]+)\]\(\.\./(tests/[^)]+\.py)\)", link, text)


def hooks_shown() -> set[tuple[str, str]]:
    """List (class, hook) of all our lines that some page shows."""
    references = [r for n in entries() for s in facts_of(n)["step"] for r in s["code"]]
    owned = [r.rpartition(":")[2].rpartition(".") for r in references]
    return {(owner, method) for owner, _, method in owned if owner}
