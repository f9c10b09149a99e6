"""What users write themselves and name in an experiment, or hand over in Python."""

from __future__ import annotations

from typing import Any

from undrift.errors import ConfigError

from .case import Case, command, python, setting, wrote

OWN = "Your own code"

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F
import undrift as fl
from undrift.sources import Examples, Info

x, y, owner = torch.linspace(-1, 1, 200).reshape(40, 5), torch.arange(40) % 3, torch.arange(40) % 4

def examples(**changes):
    given = {"train_x": x, "train_y": y, "test_x": x[:9], "test_y": y[:9], "classes": 3,
             "info": Info("mine", "generated"), "train_clients": owner, "test_clients": owner[:9]}
    return Examples(**{**given, **changes})

"""


def own(title: str, source: str, change: str, says: str, code: int = 2, **rest: Any) -> Case:
    """Name something in `mine.py`."""
    before = wrote("mine.py", HEAD + source)
    return setting(OWN, title, change, says, code, before=before, **rest)


def model(title: str, body: str, says: str, code: int = 2, **rest: Any) -> Case:
    """Name a function that should make a model."""
    source = f"def net(inputs, classes):\n    {body}\n"
    return own(title, source, "model=mine:net", says, code, **rest)


def loss(title: str, body: str, says: str, **rest: Any) -> Case:
    """Name a loss."""
    return own(
        title, f"def cost(output, target):\n    {body}\n", "task.loss=mine:cost", says, **rest
    )


def data(title: str, name: str, body: str, says: str, **rest: Any) -> Case:
    """Name a function that should make examples."""
    return own(title, f"def {name}():\n    {body}\n", f"data=mine:{name}", says, **rest)


def rule(title: str, hook: str, body: str, says: str, **rest: Any) -> Case:
    """Name a rule."""
    source = f"@fl.record\nclass Mine(fl.Rule):\n    def {hook}:\n        {body}\n"
    return own(title, source, "\"algorithm={rules=[{use='mine:Mine'}]}\"", says, **rest)


def part(title: str, section: str, source: str, says: str, **rest: Any) -> Case:
    """Name a sampler or a partition."""
    return own(title, source, f"{section}=mine:Mine", says, **rest)


MIXES = """\
class Mixes(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.layer = nn.Linear(inputs, classes)
    def forward(self, x):
        return self.layer(x - x.mean(0))
"""
STRANGERS = """\
import numpy as np
from undrift.data.sampler import Cohort
@fl.record
class Mine:
    def probability(self, population):
        return np.ones(population.count)
    def sample(self, seed, round, population):
        return Cohort(np.array([0, 77]), np.ones(2))
"""
SPLIT = "@fl.record\nclass Mine:\n    def split(self, labels, seed, keys=None):\n        %s\n"

MODEL_CASES = [
    setting(
        OWN,
        "a module that is not there",
        "model=mine:net",
        r"cannot import 'mine:net' \(No module named 'mine'\); it is looked for in the current",
    ),
    own("a function that is not there", "", "model=mine:net", r"module 'mine' has no attribute"),
    own(
        "a module with a slip",
        "def net(:\n",
        "model=mine:net",
        r"mine\.py, line \d+",
    ),
    own(
        "a module that fails",
        "raise RuntimeError('no GPU')\n",
        "model=mine:net",
        r"importing 'mine:net' failed: RuntimeError: no GPU",
    ),
    own(
        "a module that is a program",
        "raise SystemExit(3)\n",
        "model=mine:net",
        r"importing 'mine",
    ),
    model(
        "a model function that fails",
        "raise RuntimeError('no such layer')",
        r"model 'mine:net': RuntimeError: no such layer",
    ),
    model("a model function that gives nothing", "pass", r"'mine:net': .*an nn\.Module, got None"),
    model(
        "a model without parameters", "return nn.Flatten()", r"no trainable parameter: nothing to"
    ),
    model("a model of another size", "return nn.Linear(inputs + 1, classes)", r"fails on inputs"),
    own(
        "a model function that wants more",
        "def net(inputs, classes, width): pass\n",
        "model=mine:net",
        r"model 'mine:net': needs the setting 'width'",
    ),
    own(
        "a setting that a model function does not take",
        "def net(inputs, classes): pass\n",
        "\"model={use='mine:net', width=3}\"",
        r"no setting named 'width'\. Known: inputs, classes",
    ),
    own(
        "no function at all",
        "net = 3\n",
        "model=mine:net",
        r"'mine:net'",
    ),
    setting(OWN, "a function of the system", "model=os:system", r"needs the setting 'command'"),
    setting(
        OWN,
        "a function of the system that does something",
        "\"model={use='os:system', command='true'}\"",
        r"model 'os:system': .*an nn\.Module, got 0",
    ),
    setting(
        OWN,
        "a function that ends the program",
        "model=sys:exit",
        r"sys:exit",
    ),
    own(
        "a model that mixes the examples of a batch",
        MIXES,
        "model=mine:Mixes",
        r"influence each other .*engine.*reference",
    ),
    own(
        "the same, one client at a time: trains",
        MIXES,
        "model=mine:Mixes engine.use=reference",
        r"2 rounds",
        0,
    ),
    loss(
        "a loss that is one number",
        "return F.cross_entropy(output, target)",
        r"one value per example .*use reduction='none'",
    ),
    loss("a loss that fails", "raise ValueError('no target')", r"loss fails on .*no target"),
    loss(
        "a loss that ignores the model",
        "return torch.zeros(len(target))",
        r"the loss does not depend on",
    ),
    own("a loss that is not there", "", "task.loss=mine:cost", r"task\.loss: cannot import"),
]

DATA_CASES = [
    data("data that are a list", "a_list", "return [1, 2]", r"gives list, not Examples"),
    data(
        "data without an example",
        "empty",
        "return examples(train_x=x[:0], train_y=y[:0], train_clients=owner[:0])",
        r"data 'mine:empty' has no example to train on",
    ),
    data(
        "data that cannot be read",
        "away",
        "open('away.bin')",
        r"data 'mine:away': .*away\.bin",
    ),
    data("data with NaN", "nan", "return examples(train_x=x / 0 * 0)", r"holds NaN or infinity"),
    data(
        "data with NaN to test on",
        "test_nan",
        "return examples(test_x=x[:9] / 0 * 0)",
        r"holds NaN or infinity",
    ),
    data(
        "a label too many", "labels", "return examples(train_y=owner)", r"client 3 has the label 3"
    ),
    data(
        "fewer owners than examples",
        "owners",
        "return examples(train_clients=owner[:39])",
        r"39 keys for 40 examples; give one key each",
    ),
    data(
        "a test set of another width",
        "narrow",
        "return examples(test_x=x[:9, :4])",
        r"fails on the test set, inputs \[4\]",
    ),
    command(
        OWN,
        "fewer class names than classes",
        "undrift run my.toml data=mine:two",
        r"names 2 of its 3 classes",
        before=wrote(
            "mine.py",
            HEAD + "def two():\n    return examples("
            "info=Info('mine', 'generated', class_names=('a', 'b')))\n",
        ),
    ),
]

PART_CASES = [
    part(
        "a sampler of strangers", "sampler", STRANGERS, r"sample gave clients \[0, 77\] in round 0"
    ),
    part(
        "a sampler that is no record",
        "sampler",
        STRANGERS.replace("@fl.record\n", ""),
        r"@undrift\.record",
    ),
    part(
        "a sampler that cannot sample",
        "sampler",
        "@fl.record\nclass Mine: pass\n",
        r"an object with a method `sample`",
    ),
    part(
        "a partition that gives an example twice",
        "partition",
        SPLIT % "return [[0, 1], [1, 2]]",
        r"example 1 is given to clients 0 and 1",
    ),
    part(
        "a partition that invents examples",
        "partition",
        SPLIT % "return [[0], [1000]]",
        r"client 1: index 1000 is out of range; there are 108 examples",
    ),
    part(
        "a partition that gives nothing",
        "partition",
        SPLIT % "return None",
        r"mine:Mine|Mine",
    ),
    part(
        "a partition that fails",
        "partition",
        SPLIT % "return {}['a']",
        r"KeyError: 'a'",
    ),
    rule(
        "a rule that fails",
        "direction(self, g, view)",
        "return {}['strength']",
        r"client 0, stage 'direction', rule 'Mine', step 0: KeyError: 'strength'",
    ),
    rule(
        "a rule of the wrong size", "direction(self, g, view)", "return g[:3]", r"client 0, stage"
    ),
    rule(
        "a rule whose server half fails",
        "server(self, update, state, view)",
        "raise RuntimeError('no server')",
        r"server.*rule 'Mine'.*no server",
    ),
    own(
        "an algorithm function that gives nothing",
        "def method(): pass\n",
        "\"algorithm={use='mine:method'}\"",
        r"'mine:method' gives None, not an Algorithm",
    ),
    own(
        "an algorithm function that fails",
        "def method(): raise RuntimeError('no method')\n",
        "\"algorithm={use='mine:method'}\"",
        r"'mine:method': .*no method",
    ),
    python(
        OWN,
        "a rule of the program itself, in an experiment",
        "Mine = type('Mine', (fl.Rule,), {'__module__': '__main__'}); "
        "fl.Experiment('digits', 'mlp', fl.Algorithm((fl.record(Mine)(),))).to_toml()",
        ConfigError,
        r"Mine is defined where an experiment cannot import it from; put it into",
    ),
]

PYTHON_CASES = [
    python(
        OWN,
        "a name for an experiment",
        "fl.run('digits')",
        ConfigError,
        r"run takes an Experiment or a Trainer, got 'digits'",
    ),
    python(OWN, "a trainer without rounds", "fl.run(trainer())", ConfigError, r"needs rounds="),
    python(
        OWN,
        "an algorithm without its brackets",
        "trainer(algorithm=fl.fedavg)",
        ConfigError,
        r"algorithm must be an? Algorithm, got <function fedavg",
    ),
    python(
        OWN,
        "a table for the evaluation",
        "fl.run(trainer(), rounds=1, evaluate={'every': 2})",
        ConfigError,
        r"Evaluation",
    ),
    python(OWN, "nothing to compare", "fl.compare([], 'out')", ConfigError, r"at least one"),
    python(
        OWN,
        "one experiment to compare",
        "fl.compare(fl.load_experiments('my.toml')[0], 'out')",
        ConfigError,
        r"a list of experiments",
    ),
    python(
        OWN,
        "one experiment twice",
        "fl.compare(fl.load_experiments('my.toml') * 2, 'out')",
        ConfigError,
        r"twice",
    ),
    python(
        OWN,
        "a word for the target",
        "fl.compare(fl.load_experiments('my.toml'), 'out', target='high', jobs=1)",
        ConfigError,
        r"target",
    ),
    python(
        OWN,
        "a metric that was not measured",
        "fl.run(trainer(), rounds=1, test=(x, y))['test_acc']",
        ConfigError,
        r"no metric named 'test_acc'\. Did you mean 'test_accuracy'\?",
    ),
]

CASES: list[Case] = [*MODEL_CASES, *DATA_CASES, *PART_CASES, *PYTHON_CASES]
