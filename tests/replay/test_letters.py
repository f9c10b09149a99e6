"""The table of states in the documentation is the present one, and complete."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import undrift as fl
from replay.world import DATA, SGD, SOME, N, net
from undrift.replay import letters, replay
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


def test_letters_are_told_of_everybody() -> None:
    """Also of clients that have not taken part: they have their first states."""
    algorithm = fl.scaffold(local=SGD)
    first, second = replay(net(), DATA, algorithm, [[0, 1], [2]], steps=2)
    told = letters(algorithm, first)
    assert set(told.clients) == set(range(N))
    assert not told.clients[3]["c_i"].any() and told.clients[1]["c_i"].any()
    assert letters(algorithm, second).clients[0]["c_i"].equal(told.clients[0]["c_i"])


def test_reports_are_those_of_participants() -> None:
    """Each in the round in which it takes part; the length only where something divides by it."""
    for algorithm, known in (
        (fl.fednova(local=SGD), {"norm(a_i)"}),
        (fl.qfedavg(local=SGD), {"F_i", "h_i"}),
        (fl.fedavg(local=SGD), set()),
    ):
        for moment, ids in zip(replay(net(), DATA, algorithm, SOME, steps=3), SOME, strict=True):
            assert {i: set(told) for i, told in moment.reports.items()} == dict.fromkeys(ids, known)
    two = fl.Algorithm((fl.AdaBest(),), SGD, fl.QFair())
    told = letters(two, replay(net(), DATA, two, [[0, 1]], steps=2)[0]).clients[0]
    assert told["h_i"].shape == (43,) and told["h_i of q-FFL"].shape == ()
