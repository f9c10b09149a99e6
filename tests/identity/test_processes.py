"""What an object is does not depend on the process that looks at it, nor on copies of it."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.identity import portrait, same, unlike
from undrift.identity.code import body

from .kinds import HEAD, KINDS, built

PRINTED = """
import json, sys
from undrift.identity import portrait

def shown(made):
    return json.dumps({n: portrait(part).told() for n, part in made.items()}, sort_keys=True)
"""
TEXT = f"""{HEAD}{PRINTED}
KEPT = frozenset(("a", "b", "c", "d"))

class Loss:
    held = {{"x": 1, "y": {{"p", "q", "r"}}}}

    def __init__(self):
        self._weight = torch.arange(3.0)
        self.change = lambda v: v if v in {{"a", "b", "c"}} else [w for w in KEPT]

    def __call__(self, output, target):
        return self._weight[target] * plain(output, target)

@fl.record
class Own(fl.Rule):
    by: float = 0.5

    def direction(self, g, view):
        return self._helper(g)

    def _helper(self, g):
        return self.by * g

made = dict(loss=Loss(), rules=(Own(),), module=nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
if __name__ == "__main__":
    print(shown(made))
"""


def printed(folder: Path, seed: str, *arguments: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True,
                          text=True, check=True)  # fmt: skip
    return done.stdout


@pytest.mark.slow
def test_every_process_sees_the_same_however_it_was_started(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(TEXT)
    importing = "import sys; sys.path.insert(0, '.'); import mine; print(mine.shown(mine.made))"
    seen = {
        printed(tmp_path / "one", "1", "mine.py"),
        printed(tmp_path / "two", "2", "mine.py"),
        printed(tmp_path / "two", "3", "-m", "mine"),
        printed(tmp_path / "one", "4", "-c", importing),
    }
    assert len(seen) == 1
    assert "code" in json.loads(seen.pop())["loss"]


@pytest.mark.parametrize("name", KINDS)
def test_copies_are_the_same(tmp_path, name):
    one = built(tmp_path / "one", KINDS[name], "2.0")
    twin = copy.deepcopy((one.task.original, one.task.loss, one.task.augment, one.algorithm))
    parts = ("module", "loss", "augmentation", "algorithm")
    for part, again in zip(parts, twin, strict=True):
        assert unlike(one.portraits()[part], portrait(again, twin[0])) is None


def test_what_was_pickled_is_the_same():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2), nn.Dropout(0.1))
    for one in (module, fl.scaffold(0.1), fl.Work(epochs=2), nn.CrossEntropyLoss(torch.ones(3))):
        assert same(one, pickle.loads(pickle.dumps(one)))


def function(text: str):
    scope: dict[str, object] = {}
    exec(text, scope)
    return scope["f"]


SOURCELESS = [
    ("def f(x):\n    return x + 1\n", "\n\ndef f(x):\n    '''Told.'''\n    return x + 1\n", True),
    ("def f(x):\n    return x + 1\n", "def f(x):\n    return x + 2\n", False),
    ("def f(x):\n    return x + 1\n", "def f(x):\n    return x + 1.0\n", False),
    ("def f(x):\n    return x.a\n", "def f(x):\n    return x.b\n", False),
    ("def f(x):\n    return -0.0\n", "def f(x):\n    return 0.0\n", False),
    ("def f(*x):\n    return x\n", "def f(x):\n    return x\n", False),
    (
        "def f(x):\n    g = lambda y: y + x\n    return g(1)\n",
        "def f(x):\n    g = lambda y: y * x\n    return g(1)\n",
        False,
    ),
]


@pytest.mark.parametrize("one, other, alike", SOURCELESS)
def test_code_without_its_source_is_known_by_its_instructions(one, other, alike):
    marks = [body(f.__code__, f.__globals__) for f in (function(one), function(other))]
    assert (marks[0] == marks[1]) is alike
    assert marks[0].startswith(f"{sys.version_info.major}.{sys.version_info.minor}:")


def test_a_file_that_was_changed_after_its_import_is_not_believed(tmp_path):
    kind = KINDS["a function of the module"]
    one = built(tmp_path / "one", kind, "1.0")
    before = one.portraits()["loss"].told()
    (tmp_path / "one" / "mine.py").write_text(HEAD + kind.text.replace("<v>", "2.0"))
    assert portrait(one.task.loss).told() == before
    late = built(tmp_path / "late", kind, "1.0")
    assert late.portraits()["loss"].told() == before
    sys.modules.pop("mine")


def test_the_source_stands_for_the_code_in_every_version_of_python(tmp_path):
    told = built(tmp_path / "one", KINDS["a function of the module"], "1.0").portraits()["loss"]
    # written down once: another version of Python must find the same
    assert told.code["mine.scaled"]["body"] == "78a036ebadac5dd4"


class Node:
    def __init__(self, *held):
        self.held = held


def test_what_never_ends_or_lies_too_deep_is_unknown():
    wide, deep = Node(1.0), Node()
    for _ in range(40):
        wide = Node(wide, wide)  # 2 ** 40 paths
    for _ in range(5000):
        deep = Node(deep)
    for held in (wide, deep):
        told, other = portrait(held), portrait(copy.copy(held.held[0]))
        assert told.unknown and unlike(told, other) is not None
    many = [Node(1.0)] * 1000
    assert not portrait(many).unknown and same(many, [Node(1.0) for _ in range(1000)])


def test_long_lists_are_looked_at_whole():
    one, other = list(range(100_000)), list(range(100_000))
    assert same(one, other)
    other[5_000] = -1
    assert not same(one, other)
    assert len(json.dumps(portrait(one).told())) < 100
