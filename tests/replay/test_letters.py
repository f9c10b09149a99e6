"""The table of states in the documentation is the present one, and complete."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import undrift as fl
from undrift.replay.letters import LETTERS, documented, entries, letter_of
from undrift.rules import compat

ROOT = Path(__file__).parent.parent.parent


def script() -> Any:
    spec = importlib.util.spec_from_file_location("replay_page", ROOT / "scripts/replay_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_present_table() -> None:
    text = (ROOT / "docs/replay.md").read_text("utf-8")
    assert script().page(text) == text, "run scripts/replay_page.py"


def test_every_algorithm_is_in_the_table() -> None:
    text = (ROOT / "docs/replay.md").read_text("utf-8")
    for name in fl.catalogue():
        assert f"| `{name}` |" in text or name.startswith("comfed"), name


def test_every_state_has_a_letter() -> None:
    """Of every rule that comes with the package, under every name and option of the table."""
    for name, algorithm in documented().items():
        for entry in entries(algorithm.chain):
            assert entry.letter.name != entry.name, f"{name}: {entry.name}"
    others = [getattr(compat, name) for name in compat.__all__]
    for kind in [k for k in others if isinstance(k, type) and issubclass(k, fl.Rule)]:
        for entry in entries((kind(),)):
            assert entry.letter.name != entry.name, entry.name


def test_a_rule_that_is_not_known_keeps_its_own_names() -> None:
    @fl.record
    class Strange(fl.Rule):
        pass

    assert letter_of(Strange(), 0, "h") is None
    assert letter_of(compat.FedAdmmRestart(), 1, "a").name == "a_i"  # its base class's
    assert all(isinstance(kind, type) for kind in LETTERS)
