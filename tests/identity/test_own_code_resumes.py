"""A run goes on only with the experiment that it was begun with, down to its code."""

from __future__ import annotations

import pytest

import undrift as fl
from undrift.errors import ChangedExperiment
from undrift.identity import unlike

from .kinds import KINDS, Kind, built, trainer


@pytest.mark.parametrize("name", KINDS)
def test_another_experiment_is_refused_and_the_same_one_goes_on(tmp_path, name):
    kind = KINDS[name]
    first = built(tmp_path / "one", kind, "1.0")
    first.round()
    first.save(tmp_path / "run")
    assert built(tmp_path / "again", kind, "1.0").load(tmp_path / "run")
    other = built(tmp_path / "other", kind, "2.0")
    with pytest.raises(ChangedExperiment) as caught:
        other.load(tmp_path / "run")
    assert kind.place in str(caught.value)
    assert other.rounds_done == 0


def test_a_run_that_was_described_in_another_way_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("undrift.trainer.FINGERPRINT", 1)
    kind = KINDS["a tensor"]
    first = built(tmp_path / "one", kind, "1.0")
    first.save(tmp_path / "run")
    fl.run(first, tmp_path / "folder", rounds=1)
    monkeypatch.undo()
    again = built(tmp_path / "again", kind, "2.0")
    with pytest.raises(ChangedExperiment, match=r"fingerprint: stored 1, given 2.*\n.*finish it"):
        again.load(tmp_path / "run")
    with pytest.raises(ChangedExperiment) as caught:
        fl.run(again, tmp_path / "folder", rounds=1)
    assert str(caught.value).count("\n") == 2
    assert "trainer.fingerprint: 1 there, 2 now" in str(caught.value)


def test_what_nobody_can_look_into_is_named_when_a_run_goes_on(tmp_path, caplog):
    kind = Kind(
        """
class Loss:
    def __init__(self):
        self.noise = torch.Generator()

    def __call__(self, output, target):
        return plain(output, target)

made = dict(loss=Loss())
""",
        "",
    )
    first = built(tmp_path / "one", kind, "")
    first.save(tmp_path / "run")
    assert not caplog.records
    assert built(tmp_path / "again", kind, "").load(tmp_path / "run")
    (record,) = caplog.records
    assert "loss.noise (Generator)" in record.getMessage()


def test_a_loss_that_counts_its_calls_does_not_stand_in_its_own_way(tmp_path):
    kind = Kind(
        """
class Loss:
    calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return plain(output, target)

made = dict(loss=Loss())
""",
        "",
    )
    first = built(tmp_path / "one", kind, "")
    first.run(2)
    first.save(tmp_path / "run")
    assert built(tmp_path / "again", kind, "").load(tmp_path / "run")


HARMLESS = {
    "comments, formatting and docstrings": (
        "def loss(output, target):\n    return 2.0 * plain(output, target)\n",
        '\n\ndef loss(output,\n         target):  # a remark\n    """Twice."""\n'
        "    # another\n    return (2.0\n            * plain(output, target))\n",
    ),
    "a docstring where another stood": (
        'def loss(output, target):\n    """One."""\n    return plain(output, target)\n',
        'def loss(output, target):\n    """Two."""\n    return plain(output, target)\n',
    ),
    "annotations of arguments": (
        "def loss(output, target):\n    return 2.0 * plain(output, target)\n",
        "def loss(output: torch.Tensor, target: 'Any') -> torch.Tensor:\n"
        "    return 2.0 * plain(output, target)\n",
    ),
    "another order in the file": (
        "def one(x): return x\ndef two(x): return 2.0 * x\n"
        "def loss(output, target):\n    return one(two(plain(output, target)))\n",
        "def loss(output, target):\n    return one(two(plain(output, target)))\n"
        "def two(x): return 2.0 * x\ndef one(x): return x\n",
    ),
    "code that nobody calls": (
        "loss = lambda output, target: 2.0 * plain(output, target)\n",
        "loss = lambda output, target: 2.0 * plain(output, target)\n"
        "UNUSED = 5\ndef unused(x): return UNUSED\n",
    ),
    "the order of attributes": (
        "class Loss:\n    def __call__(self, output, target):\n"
        "        return self.a * self.b * plain(output, target)\n"
        "loss = Loss()\nloss.a = 1.0\nloss.b = 2.0\n",
        "class Loss:\n    def __call__(self, output, target):\n"
        "        return self.a * self.b * plain(output, target)\n"
        "loss = Loss()\nloss.b = 2.0\nloss.a = 1.0\n",
    ),
    "the order of methods": (
        "class Loss:\n    def one(self): return 1.0\n    def __call__(self, output, target):\n"
        "        return self.one() * plain(output, target)\nloss = Loss()\n",
        "class Loss:\n    def __call__(self, output, target):\n"
        "        return self.one() * plain(output, target)\n    def one(self): return 1.0\n"
        "loss = Loss()\n",
    ),
    "the order of keywords": (
        "def scaled(output, target, a, b): return a * b * plain(output, target)\n"
        "loss = functools.partial(scaled, a=1.0, b=2.0)\n",
        "def scaled(output, target, a, b): return a * b * plain(output, target)\n"
        "loss = functools.partial(scaled, b=2.0, a=1.0)\n",
    ),
    "the order of a set": (
        "KEPT = {'a', 'b', 'c', 'd'}\n"
        "def loss(output, target): return len(KEPT) * plain(output, target)\n",
        "KEPT = {'d', 'c', 'b', 'a'}\n"
        "def loss(output, target): return len(KEPT) * plain(output, target)\n",
    ),
    "what is worked out once": (
        "class Loss:\n    @functools.cached_property\n    def by(self): return 2.0\n"
        "    def __call__(self, output, target): return self.by * plain(output, target)\n"
        "loss = Loss()\n",
        "class Loss:\n    @functools.cached_property\n    def by(self): return 2.0\n"
        "    def __call__(self, output, target): return self.by * plain(output, target)\n"
        "loss = Loss()\nloss.by\n",
    ),
    "a copy in the place of the same object": (
        "one = torch.ones(1)\nHELD = [one, one]\n"
        "def loss(output, target): return HELD[0] * HELD[1] * plain(output, target)\n",
        "HELD = [torch.ones(1), torch.ones(1)]\n"
        "def loss(output, target): return HELD[0] * HELD[1] * plain(output, target)\n",
    ),
    "the name of a hook's handle": (
        "loss = nn.CrossEntropyLoss()\nloss.register_forward_hook(plain_hook)\n",
        "nn.ReLU().register_forward_hook(plain_hook)\n"
        "loss = nn.CrossEntropyLoss()\nloss.register_forward_hook(plain_hook)\n",
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_number_is_no_difference(tmp_path, name):
    some = [
        Kind("def plain_hook(module, given, out): return 2.0 * out\n\n"
             f"{text}\nmade = dict(loss=loss)", "")
        for text in HARMLESS[name]
    ]  # fmt: skip
    if "hook" in name:
        some = [Kind(k.text.replace("Loss()", "Loss(reduction='none')"), "") for k in some]
    first = built(tmp_path / "one", some[0], "")
    first.round()
    first.save(tmp_path / "run")
    other = built(tmp_path / "other", some[1], "")
    assert other.load(tmp_path / "run")
    for part, seen in first.portraits().items():
        assert unlike(seen, other.portraits()[part]) is None


def test_another_precision_is_refused(tmp_path):
    parts = ({}, {"precision": "float32"})
    some = [trainer(dict(chosen)) for chosen in parts]
    some[0].save(tmp_path)
    with pytest.raises(ChangedExperiment, match=r"precision: stored \(absent\), given 'float32'"):
        some[1].load(tmp_path)


STABLE = {
    "an autograd function": """
class Twice(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2.0 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 2.0 * g

def change(x):
    return Twice.apply(x)
""",
    "an enumeration": """
import enum

class Kind(enum.Enum):
    ONE = 1.0
    TWO = 2.0

class Flags(enum.IntFlag):
    A = 1
    B = 2

def change(x, kind=Kind.TWO, flag=Flags.A | Flags.B):
    return kind.value * x if kind is Kind.TWO and flag & Flags.A else x
""",
    "a named tuple and a dataclass": """
from typing import NamedTuple

class Pair(NamedTuple):
    a: float
    b: float = 2.0

@dataclass(frozen=True, order=True)
class Settings:
    pair: Pair = Pair(1.0)
    some: list = field(default_factory=lambda: [1.0])

SETTINGS = Settings()

def change(x):
    return SETTINGS.pair.b * x
""",
    "abstract and generic classes, and a protocol": """
import abc
from typing import Generic, Protocol, TypeVar, cast

T = TypeVar("T")

class Base(abc.ABC, Generic[T]):
    @abc.abstractmethod
    def by(self) -> T: ...

class Has(Protocol):
    by: float

class Real(Base[float]):
    def by(self):
        return cast(T, 2.0)

REAL = Real()

def change(x):
    return REAL.by() * x if isinstance(REAL, Base) else x
""",
    "a function that chooses by type": """
@functools.singledispatch
def by(x):
    return 2.0

@by.register
def _(x: int):
    return 3.0

def change(x):
    return by(1.0) * x
""",
    "a context, a logger, a generator": """
import logging
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)

@contextmanager
def around():
    log.debug("here")
    yield 2.0

@torch.no_grad()
def factor():
    return sum(v for v in (1.0, 1.0))

def change(x):
    with around() as by, suppress(KeyError):
        return by * factor() * x
""",
    "a class that is made in a function, and one that knows itself": """
def maker(by):
    class Scale:
        def __call__(self, x):
            return by * x if isinstance(self, Scale) else x
    return Scale

class Tree:
    def __init__(self):
        self.children, self.me = [], self
        self.parent = [self.children]

TREE, SCALE = Tree(), maker(2.0)()

def change(x):
    return SCALE(x) if TREE.me is TREE else x
""",
    "objects of many kinds": """
import collections, datetime, decimal, fractions, pathlib, re, types, uuid
import numpy as np

HELD = [
    collections.Counter("abc"), collections.deque([1, 2]), collections.OrderedDict(b=1, a=2),
    collections.defaultdict(list, a=[1]), datetime.date(2020, 1, 2), decimal.Decimal("0.1"),
    fractions.Fraction(1, 3), pathlib.PurePosixPath("/a"), re.compile("a+", re.I),
    types.SimpleNamespace(a=1), types.MappingProxyType({"a": 1}), range(3), slice(1, 2), 1j, ...,
    b"bytes", bytearray(b"more"), np.float32(0.5), np.arange(3), np.dtype("int8"), np.sqrt,
    np.array([{"a": 1}], dtype=object), torch.float16, torch.device("cpu"), torch.Size([1, 2]),
    torch.strided, torch.relu, torch.nn.functional.relu, torch.tensor(1.0).add, len, [].append,
    {1: 2, None: 3, (1, 2): 4}, frozenset({1, "a"}), print, int, list[int], "\\ud800", 10**30,
    torch.distributions.Normal(0.0, 1.0), nn.ReLU, nn.ReLU(), uuid.UUID(int=5), NotImplemented,
]

def change(x):
    return len(HELD) * x
""",
}


@pytest.mark.parametrize("name", STABLE)
def test_code_of_every_sort_is_the_same_when_it_is_imported_again(tmp_path, name):
    text = "def loss(output, target):\n    return change(plain(output, target))\n"
    kind = Kind(STABLE[name] + text + "\nmade = dict(loss=loss)", "")
    first = built(tmp_path / "one", kind, "")
    first.round()
    first.save(tmp_path / "run")
    again = built(tmp_path / "again", kind, "")
    assert again.load(tmp_path / "run")
    assert unlike(first.portraits()["loss"], again.portraits()["loss"]) is None
    assert not first.portraits()["loss"].unknown
