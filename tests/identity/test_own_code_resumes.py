"""A run goes on only with the experiment that it was begun with, down to its code."""

from __future__ import annotations

import pytest

import undrift as fl
from undrift.errors import ChangedExperiment
from undrift.identity import unlike

from .kinds import KINDS, Kind, built


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
