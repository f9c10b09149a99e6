"""What a user may hand over by mistake: one clear error of ours each, before any training."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import undrift as fl
from undrift.describe import describe
from undrift.errors import ChangedExperiment, ClientError, ConfigError, DataError, TaskError


def data(classes=3, **changes):
    maker = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(n, 6, generator=maker), torch.randint(0, classes, (n,), generator=maker))
        for n in (7, 12, 5, 9)
    ]
    return fl.Federation.of(changes.get("clients", pairs))


def net(outputs=3):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs))


def trainer(task=None, federation=None, algorithm=None, **settings):
    return fl.Trainer(
        task or fl.Task(net()), federation or data(), algorithm or fl.fedavg(0.1), **settings
    )


BAD = {
    "module None": lambda: fl.Task(None),
    "module a string": lambda: fl.Task("net"),
    "metrics a list": lambda: fl.Task(net(), metrics=["accuracy"]),
    "metrics no functions": lambda: fl.Task(net(), metrics={"a": "accuracy"}),
    "feature a number": lambda: fl.Task(net(), feature=3),
    "loss a number": lambda: fl.Task(net(), 3),
    "loss unknown": lambda: fl.Task(net(), "crossentropy"),
    "dtype": lambda: fl.Task(net(), dtype=torch.float16),
    "clients None": lambda: fl.Federation.of(None),
    "clients a dict": lambda: fl.Federation.of({0: 1}),
    "clients no pairs": lambda: fl.Federation.of([torch.zeros(3, 2)]),
    "clients triples": lambda: fl.Federation.of([(1, 2, 3)]),
    "parts a number": lambda: fl.Federation.split(torch.zeros(3, 2), torch.zeros(3), 5),
    "task a module": lambda: trainer(task=net()),
    "federation a list": lambda: trainer(federation=[1]),
    "algorithm without parentheses": lambda: trainer(algorithm=fl.fedavg),
    "algorithm a name": lambda: trainer(algorithm="fedavg"),
    "algorithm a rule": lambda: trainer(algorithm=fl.Prox(0.1)),
    "work a number": lambda: trainer(work=5),
    "work a class": lambda: trainer(work=fl.Work),
    "sampler a number": lambda: trainer(sampler=2),
    "sampler a class": lambda: trainer(sampler=fl.Uniform),
    "sampler too many": lambda: trainer(sampler=fl.Uniform(count=99)),
    "seed a string": lambda: trainer(seed="a"),
    "seed a float": lambda: trainer(seed=1.5),
    "seed a truth": lambda: trainer(seed=True),
    "seed None": lambda: trainer(seed=None),
    "seeds too large": lambda: trainer(seed=fl.Seeds(0, 0, 2**64)),
    "engine a list": lambda: trainer(engine=["vectorised"]),
    "engine unknown": lambda: trainer(engine="vectorized"),
    "device gpu": lambda: trainer(device="gpu"),
    "device meta": lambda: trainer(device="meta"),
    "enrolled a string": lambda: trainer(enrolled="ab"),
    "enrolled a number": lambda: trainer(enrolled=3),
    "enrolled fractions": lambda: trainer(enrolled=[0.7, 1.2]),
    "enrolled nobody": lambda: trainer(enrolled=[]),
    "chunk a string": lambda: trainer(chunk="2"),
    "chunk a fraction": lambda: trainer(chunk=2.0),
    "workers infinite": lambda: trainer(workers=float("inf")),
    "rounds a string": lambda: trainer().run("a"),
    "rounds negative": lambda: trainer().run(-1),
    "folder None": lambda: trainer().save(None),
    "folder a number": lambda: trainer().load(3),
    "leave a number": lambda: trainer().leave(1),
    "client unknown": lambda: trainer().client_state(99),
    "evaluate batch": lambda: trainer().evaluate(torch.zeros(2, 6), torch.zeros(2), batch=0),
    "evaluate nothing": lambda: trainer().evaluate(torch.zeros(0, 6), torch.zeros(0)),
    "lr None": lambda: fl.Sgd(lr=None),
    "lr infinite": lambda: fl.fedavg(float("inf")),
    "lr NaN": lambda: fl.fedavg(float("nan")),
    "lr negative tensor": lambda: fl.fedavg(torch.tensor(-1.0)),
    "mu None": lambda: fl.Prox(None),
    "mu text": lambda: fl.Prox("0.1"),
    "beta1 one": lambda: fl.AdamW(beta1=1.0),
    "alpha one": lambda: fl.RmsProp(alpha=1.0),
    "schedule a number": lambda: fl.Sgd(schedule=0.9),
    "milestones uneven": lambda: fl.Milestones((1, 2), (0.1,)),
    "milestones unsorted": lambda: fl.Milestones((5, 2), (0.01, 0.1)),
    "comfed server": lambda: fl.comfed("sgd", "adamw"),
    "comfed client": lambda: fl.comfed("scaffold", "sgd"),
    "comfed settings": lambda: fl.comfed("sgd", "sgd", tau=3),
    "nesterov alone": lambda: fl.sgd(0.1, nesterov=True),
    "two learning rates": lambda: fl.scaffold(0.1, local=fl.Sgd(lr=0.2)),
    "scaffold option": lambda: fl.scaffold(0.1, option="III"),
    "adaptive kind": lambda: fl.Adaptive("adamax"),
    "adagrad bias": lambda: fl.Adaptive("adagrad", bias_correction="standard"),
    "nova clipped": lambda: fl.fednova(local=fl.Sgd(clip=1.0)),
    "scaffold with adam": lambda: fl.scaffold(local=fl.AdamW()),
    "aggregate as rule": lambda: fl.Algorithm((fl.Nova(),)),
    "stack nothing": lambda: fl.stack([]),
    "stacked trainer": lambda: trainer(algorithm=fl.stack([fl.fedavg(0.1), fl.fedavg(0.2)])),
    "work steps 0": lambda: fl.Work(steps=0),
    "work both": lambda: fl.Work(epochs=1, steps=1),
    "work last": lambda: fl.Work(last="throw"),
    "NaN features": lambda: fl.Federation.of([(torch.tensor([[float("nan")]]), torch.zeros(1))]),
    "label too large": lambda: trainer(federation=data(classes=9)),
    "label negative": lambda: trainer(
        federation=data(clients=[(torch.zeros(2, 6), torch.tensor([0, -1]))])
    ),
    "width": lambda: trainer(task=fl.Task(nn.Linear(5, 3))),
    "integer features": lambda: trainer(
        federation=data(clients=[(torch.zeros(2, 6, dtype=torch.uint8), torch.tensor([0, 1]))])
    ),
    "mse broadcast": lambda: trainer(
        task=fl.Task(net(1), "mse"), federation=data(clients=[(torch.zeros(2, 6), torch.zeros(2))])
    ),
    "loss a scalar": lambda: trainer(task=fl.Task(net(), F.cross_entropy)),
    "metric a scalar": lambda: trainer(
        task=fl.Task(net(), metrics={"a": lambda o, y: (o.argmax(1) == y).double().mean()})
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_gets_one_clear_error(name):
    with pytest.raises(fl.UndriftError) as caught:
        BAD[name]()
    assert len(str(caught.value)) > 20


def test_labels_out_of_range_name_the_client():
    clients = [(torch.zeros(2, 6), torch.tensor([0, 1])), (torch.zeros(1, 6), torch.tensor([7]))]
    with pytest.raises(DataError, match=r"client 1 has the label 7, but the module has 3 outputs"):
        trainer(federation=fl.Federation.of(clients))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_any_whole_type_are_taken(dtype):
    clients = [(torch.zeros(3, 6), torch.tensor([0, 1, 2], dtype=dtype))]
    assert trainer(federation=fl.Federation.of(clients)).round().round == 1


class Centred(nn.Module):
    """Subtracts the batch's mean: padding would change it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


def contrast(output, target):
    return F.cross_entropy(output @ output.T, torch.arange(len(output)), reduction="none")


@pytest.mark.parametrize("task", [lambda: fl.Task(Centred()), lambda: fl.Task(net(), contrast)])
def test_what_mixes_examples_is_refused_by_padding_and_run_without(task):
    with pytest.raises(TaskError, match="influence each other"):
        trainer(task=task())
    assert trainer(task=task(), engine="reference").round().round == 1


class Loud(nn.Module):
    """Behaves differently in evaluation, without a submodule that does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.training else 0 * self.layer(x)


def test_evaluation_is_evaluation():
    run = trainer(task=fl.Task(Loud()))
    value = run.evaluate(torch.randn(5, 6), torch.zeros(5, dtype=torch.long))["loss"]
    assert value == pytest.approx(float(torch.tensor(3.0).log()))


def test_training_works_where_gradients_are_off():
    with torch.no_grad():
        assert trainer().round().round == 1
        assert trainer(algorithm=fl.scaffold(0.1)).round().round == 1


class FromOutside:
    """A stranger's sampler."""

    def __init__(self, ids):
        self.ids = ids

    def sample(self, seed, round, population):
        return type("Cohort", (), {"ids": torch.tensor(self.ids).numpy(), "probability": None})()

    def probability(self, population):
        return None


@pytest.mark.parametrize("ids", [[1, 1], [99], []])
def test_a_strangers_sampler_is_checked(ids):
    with pytest.raises(ConfigError, match=r"FromOutside\.sample gave clients"):
        trainer(sampler=FromOutside(ids))


@fl.record
class Breaks(fl.Rule):
    def direction(self, g, view):
        raise KeyError("deliberate")


@pytest.mark.parametrize("engine", ["vectorised", "reference"])
def test_a_failing_rule_is_named_in_every_engine(engine):
    run = trainer(algorithm=fl.Algorithm((Breaks(),)), engine=engine)
    with pytest.raises(ClientError, match=r"client 0, stage 'direction', rule 'Breaks', step 0"):
        run.round()


def outer(scale):
    def loss(output, target):
        return scale * F.cross_entropy(output, target, reduction="none")

    return loss


def scaled(output, target, scale=1.0):
    return scale * F.cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (outer(1.0), outer(9.0)),
        (functools.partial(scaled, scale=1.0), functools.partial(scaled, scale=9.0)),
        (outer(1.0), scaled),
    ],
    ids=["a closure", "a partial", "other code"],
)
def test_a_changed_loss_is_another_experiment(tmp_path, one, other):
    trainer(task=fl.Task(net(), one)).save(tmp_path)
    with pytest.raises(ChangedExperiment, match=r"task\.loss"):
        trainer(task=fl.Task(net(), other)).load(tmp_path)


def test_sets_in_code_are_described_alike_in_every_process():
    text = "def f(x):\n    return x in {'a', 'b', 'c', 'd'}\n"
    values = []
    for _ in range(2):
        scope: dict[str, object] = {}
        exec(text, scope)
        values.append(describe(scope["f"]))
    assert values[0] == values[1]
    constants = scope["f"].__code__.co_consts  # type: ignore[attr-defined]
    assert any(isinstance(c, frozenset) for c in constants)


def test_the_plan_is_taken_over_by_workers_that_were_hired_before(tmp_path):
    first = trainer(in_place=False)
    first.run(2)
    first.save(tmp_path)
    first.run(2)
    second = trainer()
    second.run(1)
    second.load(tmp_path)
    second.run(2)
    assert torch.equal(first.server.w, second.server.w)


@fl.record
class Refuses(fl.Rule):
    """Fails when it looks at client 3's model."""

    def after_round(self, view):
        return torch.where(view.client.id == 3, torch.tensor(float("nan")), 1.0)

    def server_after(self, state, view):
        if not bool(view.accepted.all()):
            raise RuntimeError("deliberate")
        return state


def test_a_failed_enrolment_changes_nothing():
    run = trainer(algorithm=fl.Algorithm((Refuses(),)), enrolled=[0, 1])
    run.round()
    with pytest.raises(RuntimeError, match="deliberate"):
        run.enroll([3])
    assert run.enrolled == [0, 1]
