"""The pages about algorithms say what the code is now; nothing is trained to check it."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from undrift.core.rule import Rule
from undrift.experiment.shipped import shipped_experiments
from undrift.experiment.spec import load
from undrift.rules.named import catalogue

ROOT = Path(__file__).parent.parent
PARTS = (
    *("algorithm_facts", "algorithm_costs", "algorithm_records", "digits_page"),
    "algorithm_pages",
)


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield {name: importlib.import_module(name) for name in PARTS}
    sys.path.remove(str(ROOT / "scripts"))


def test_pages_are_as_the_script_writes_them(scripts: dict[str, Any]) -> None:
    made = scripts["algorithm_pages"].pages()
    for path, text in made.items():
        assert path.is_file(), f"{path.name} is missing: run scripts/algorithm_pages.py"
        assert path.read_text("utf-8") == text, f"{path.name}: run scripts/algorithm_pages.py"
    found = set((ROOT / "docs/algorithms").glob("*.md"))
    assert found == {p for p in made if p.parent.name == "algorithms"}, "a page of nothing"


def test_every_name_has_a_page_a_picture_and_a_place_in_the_comparison(
    scripts: dict[str, Any],
) -> None:
    for name in (n for n in catalogue() if ":" not in n):
        assert (ROOT / f"docs/algorithms/{name}.md").is_file()
        assert (ROOT / f"docs/pictures/algorithms/{name}.png").stat().st_size < 60_000
        assert scripts["algorithm_records"].home_of(name)


def test_every_hook_of_every_rule_stands_below_a_formula(scripts: dict[str, Any]) -> None:
    facts = scripts["algorithm_facts"]
    shown = facts.hooks_shown()
    for name in facts.entries():
        algorithm = facts.build(name)
        for part in (*algorithm.rules, algorithm.aggregate, algorithm.server):
            missing = {h for h in facts.hooks_of(part) if (type(part).__name__, h) not in shown}
            assert type(part) is Rule or not missing, f"{name}: {type(part).__name__} {missing}"


def test_a_setting_without_a_source_is_named(
    scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = scripts["algorithm_facts"]
    known = facts.facts_of("fedprox")
    bare = {**known, "settings": {}}
    read = facts.facts_of
    monkeypatch.setattr(facts, "facts_of", lambda n: bare if n == "fedprox" else read(n))
    with pytest.raises(facts.Incomplete, match=r"fedprox\(mu=0.01\) has no source"):
        facts.check_facts("fedprox")
    monkeypatch.setattr(facts, "facts_of", lambda n: {**known, "settings": {"nu": "?"}})
    with pytest.raises(facts.Incomplete, match="no setting 'nu' now"):
        facts.check_facts("fedprox")


def test_a_wrong_cost_is_found(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    costs = scripts["algorithm_costs"]
    monkeypatch.setattr(costs, "facts_of", lambda name: {"cost": {"down": "n + N"}})
    with pytest.raises(costs.Incomplete, match="said to be n \\+ N, but 43 were counted"):
        costs.cost_of.__wrapped__("fedavg", scripts["algorithm_facts"].build("fedavg"))


def test_promises_of_the_optimum_were_measured(scripts: dict[str, Any]) -> None:
    ended = scripts["algorithm_pages"].ended
    for name in scripts["algorithm_costs"].PROMISES:
        assert ended(name).said == "reached"
    assert "away" in ended("fedavg").said


@pytest.mark.parametrize("name", [n for n in shipped_experiments() if n.startswith("all-digits")])
def test_every_algorithm_of_a_comparison_says_where_its_settings_come_from(
    name: str, scripts: dict[str, Any]
) -> None:
    records = scripts["algorithm_records"]
    shipped = shipped_experiments()[name]
    kept = records.RECORDS / f"{name}.toml"
    assert shipped.read_text("utf-8") == kept.read_text("utf-8"), "the record is of another file"
    chosen = records.choices(name)
    assert all(choice.why for choice in chosen.values())
    made = load(name)
    assert list(chosen) == list(dict.fromkeys(e.label for e in made))
    runs = {(k["label"], k["seed"]) for k in records.lines_kept(name)}
    assert runs == {(e.label, e.seed_number) for e in made}


def test_the_page_on_papers_names_tests_that_exist(scripts: dict[str, Any]) -> None:
    text = (ROOT / "docs/papers.md").read_text("utf-8")
    named = re.findall(r"\[[\w ]+\]\(\.\./tests/[^)]+\)", text)
    assert len(named) > 50
    facts = scripts["algorithm_facts"]
    assert facts.relinked(text) == text, "run scripts/algorithm_pages.py"
    with pytest.raises(facts.Incomplete, match="no test is called test_gone"):
        facts.relinked("[gone](../tests/test_docs.py)")
