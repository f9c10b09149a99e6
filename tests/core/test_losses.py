"""Every loss of torch gives plain PyTorch's number on a padded batch, or is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import undrift as fl
from undrift.core.losses import PLAIN_MEANS, WEIGHTED_MEANS
from undrift.core.ops import Pass
from undrift.core.task import Batch, Buffers, Output
from undrift.errors import ConfigError, TaskError, UndriftError

F64 = torch.float64
ROWS, REAL, CLASSES = 7, 5, 3
WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=F64)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=F64)


def classes(*shape, low=0):
    made = torch.Generator().manual_seed(5)
    return torch.randint(low, CLASSES, shape, generator=made)


def chances(*shape):
    return draw(*shape).softmax(1)


NUMBERS = (draw(ROWS, CLASSES), draw(ROWS, CLASSES) * 2)
SIGNS = (NUMBERS[0], NUMBERS[1].sign())
LABELS = (draw(ROWS, CLASSES), classes(ROWS))
TOKENS = (draw(ROWS, CLASSES, 4), classes(ROWS, 4))
SHARES = (draw(ROWS, CLASSES), chances(ROWS, CLASSES))
BITS = (draw(ROWS, CLASSES).sigmoid(), classes(ROWS, CLASSES).clamp(max=1).to(F64))
LOGITS = (draw(ROWS, CLASSES), BITS[1])
SETS = (draw(ROWS, CLASSES), torch.tensor([[1, -1, 0]] * 4 + [[2, 0, -1]] * 3))
CASES = [
    *[
        (kind(**weight, **ignored, **smooth), data)
        for kind in WEIGHTED_MEANS
        for data in (LABELS, TOKENS)
        for weight in ({}, {"weight": WEIGHT})
        for ignored in ({}, {"ignore_index": 0})
        for smooth in (({}, {"label_smoothing": 0.2}) if kind is nn.CrossEntropyLoss else ({},))
    ],
    *[
        (nn.CrossEntropyLoss(weight=weight, label_smoothing=smooth), SHARES)
        for weight in (None, WEIGHT)
        for smooth in (0.0, 0.2)
    ],
    (nn.MSELoss(), NUMBERS),
    (nn.MSELoss(), (draw(ROWS), draw(ROWS))),
    (nn.L1Loss(), NUMBERS),
    *[(nn.SmoothL1Loss(beta=beta), NUMBERS) for beta in (0.5, 1.0)],
    *[(nn.HuberLoss(delta=delta), NUMBERS) for delta in (0.5, 1.0)],
    *[(nn.BCELoss(weight=weight), BITS) for weight in (None, WEIGHT)],
    *[
        (nn.BCEWithLogitsLoss(weight=weight, pos_weight=positive), LOGITS)
        for weight in (None, WEIGHT)
        for positive in (None, WEIGHT.flip(0))
    ],
    *[
        (nn.PoissonNLLLoss(log_input=log, full=full), (NUMBERS[0].exp(), NUMBERS[1].exp()))
        for log in (True, False)
        for full in (True, False)
    ],
    (nn.SoftMarginLoss(), SIGNS),
    *[(nn.HingeEmbeddingLoss(margin=margin), SIGNS) for margin in (0.5, 1.0)],
    *[
        (nn.KLDivLoss(reduction=mean, log_target=log), (draw(ROWS, 3).log_softmax(1), target))
        for mean in ("mean", "batchmean")
        for log, target in ((False, SHARES[1]), (True, SHARES[1].log()))
    ],
    *[
        (nn.MultiMarginLoss(p=p, margin=0.7, weight=weight), LABELS)
        for p in (1, 2)
        for weight in (None, WEIGHT)
    ],
    (nn.MultiLabelMarginLoss(), SETS),
    *[(nn.MultiLabelSoftMarginLoss(weight=weight), LOGITS) for weight in (None, WEIGHT)],
]


def told(case) -> str:
    loss, (_, target) = case
    kept = [f"{n}={getattr(loss, n)}" for n in ("ignore_index", "label_smoothing", "p")
            if hasattr(loss, n)]  # fmt: skip
    weighted = "weighted" if getattr(loss, "weight", None) is not None else ""
    return " ".join([type(loss).__name__, weighted, loss.reduction, *kept, str(target.dim())])


def task_with(loss, **settings) -> fl.Task:
    return fl.Task(nn.Linear(1, 1), loss, dtype=F64, **settings)


def output(value: Tensor) -> Output:
    return Output(value, None, Buffers(value.new_zeros(0), value.new_zeros(0)))


def padded(y: Tensor, real: int) -> Batch:
    mask = torch.arange(len(y)) < real
    return Batch(y, y, mask, torch.arange(len(y)))


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("case", CASES, ids=told)
def test_a_padded_batch_has_plain_pytorchs_loss_and_gradient(case):
    loss, (value, y) = case
    value = value.clone().requires_grad_()
    plain = loss(value[:REAL], y[:REAL])
    ours = task_with(loss).mean_loss(output(value), padded(y, REAL))
    torch.testing.assert_close(ours, plain, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(v, value)[0] for v in (ours, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)


def test_every_loss_of_torch_is_a_case_or_refused():
    own = {name for name in dir(nn) if name.endswith(("Loss", "Loss2d"))}
    covered = {kind.__name__ for kind in (*PLAIN_MEANS, *WEIGHTED_MEANS)}
    covered |= {"NLLLoss2d", "AdaptiveLogSoftmaxWithLoss"}
    more_inputs = {
        *("CosineEmbeddingLoss", "MarginRankingLoss", "TripletMarginLoss", "GaussianNLLLoss"),
        *("TripletMarginWithDistanceLoss", "CTCLoss"),
    }
    assert own - {"LinearCrossEntropyLoss"} == covered | more_inputs  # torch 2.13 has it
    x, y = draw(4, 1).float(), classes(4)
    for name in more_inputs:
        with pytest.raises(UndriftError):
            fl.Task(nn.Linear(1, CLASSES), getattr(nn, name)()).check(x, y)
    with pytest.raises(TaskError, match="has parameters, which nobody would train"):
        task_with(nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2]))


@pytest.mark.parametrize("kind", [*PLAIN_MEANS, *WEIGHTED_MEANS])
def test_a_sum_is_refused_and_none_is_a_plain_mean(kind):
    with pytest.raises(ConfigError, match="is a sum, which grows with the batch"):
        task_with(kind(reduction="sum"))
    _, (value, y) = next(c for c in CASES if isinstance(c[0], kind))
    loss = kind(reduction="none")
    ours = task_with(loss).mean_loss(output(value), padded(y, REAL))
    torch.testing.assert_close(ours, loss(value[:REAL], y[:REAL]).mean(), rtol=1e-13, atol=0)


def test_a_batch_without_a_valid_target_teaches_nothing():
    value = draw(4, CLASSES).requires_grad_()
    y = torch.zeros(4, dtype=torch.int64)
    loss = task_with(nn.CrossEntropyLoss(ignore_index=0)).mean_loss(output(value), padded(y, 4))
    loss.backward()
    assert float(loss.detach()) == 0 and not value.grad.any()


# ---- whole runs ------------------------------------------------------------------------------
class Tagger(nn.Module):
    """Gives every token a class; class 0 stands for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x)).transpose(1, 2)


def tagged(sizes=(5, 3, 300)):
    made = torch.Generator().manual_seed(2)
    return [
        (
            torch.randint(0, 6, (n, 4), generator=made),
            torch.randint(0, CLASSES, (n, 4), generator=made) * (torch.arange(n) % 3 > 0)[:, None],
        )
        for n in sizes
    ]


def valid_mean(value: Tensor, target: Tensor) -> fl.WeightedMean:
    counts = target != 0
    return fl.WeightedMean(F.cross_entropy(value, target, reduction="none") * counts, counts)


TAGS = [
    nn.CrossEntropyLoss(ignore_index=0),
    valid_mean,
    nn.CrossEntropyLoss(weight=WEIGHT.float(), ignore_index=0, label_smoothing=0.1),
]


def trainer_of(loss, algorithm, clients, **options) -> fl.Trainer:
    torch.manual_seed(0)
    task = fl.Task(Tagger(), loss, dtype=F64)
    work = fl.Work(epochs=1, batch=4)
    return fl.Trainer(task, fl.Federation.of(clients), algorithm, work=work, **options)


def plain_loss(loss):
    if loss is valid_mean:
        return nn.CrossEntropyLoss(ignore_index=0)
    return copy.deepcopy(loss).to(F64)


@pytest.mark.parametrize("loss", TAGS, ids=["ignored", "own", "weighted"])
def test_training_and_judging_are_plain_pytorchs(loss):
    """FedAvg of one client with one step; then the loss of the model on other examples."""
    (x, y), (test_x, test_y) = tagged((4, 700))
    trainer = trainer_of(loss, fl.fedavg(0.5), [(x, y)])
    net, criterion = copy.deepcopy(trainer.task.original).double(), plain_loss(loss)
    trainer.round()
    criterion(net(x), y).backward()
    for own, mine in zip(net.parameters(), trainer.parameters().values(), strict=True):
        own.data -= 0.5 * own.grad
        torch.testing.assert_close(mine, own.data, rtol=0, atol=1e-13)
    with torch.no_grad():
        wanted, here = (float(criterion(net(a), b)) for a, b in ((test_x, test_y), (x, y)))
    for batch in (64, 1024):
        found = trainer.evaluate(test_x, test_y, batch=batch)["loss"]
        assert found == pytest.approx(wanted, abs=1e-12)
    judged = trainer.judge_clients([0])
    assert judged.each()["loss"][0] == pytest.approx(here, abs=1e-12)
    assert judged.result()["loss"] == pytest.approx(here, abs=1e-12)


@pytest.mark.parametrize("loss", TAGS, ids=["ignored", "own", "weighted"])
@pytest.mark.parametrize("build", [fl.fedavg, fl.scaffold, fl.mime, fl.qfedavg])
def test_engines_agree_where_examples_weigh_differently(loss, build):
    runs = [
        trainer_of(loss, build(0.1), tagged(), **options)
        for options in ({}, {"engine": "reference"}, {"graph": True})
    ]
    for run in runs:
        run.run(2)
        assert (run.server.w - runs[0].server.w).abs().max() < 1e-12


def test_a_probe_over_many_examples_is_the_gradient_over_all_of_them():
    """Pieces of the own data hold unequal numbers of valid targets, so there is one piece."""
    (x, y) = tagged((600,))[0]
    trainer = trainer_of(TAGS[0], fl.scaffold(0.1, option="I"), [(x, y)])
    net = copy.deepcopy(trainer.task.original).double()
    trainer.round()
    nn.CrossEntropyLoss(ignore_index=0)(net(x), y).backward()
    wanted = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
    torch.testing.assert_close(
        trainer.client_state(0)["0.ScaffoldGradient"], wanted, rtol=0, atol=1e-13
    )


# ---- losses of somebody's own ----------------------------------------------------------------
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        lambda v, y: (v.mean(), y),
        lambda v, y: fl.WeightedMean(v.sum(), torch.ones(len(y))),
        lambda v, y: 0.5,
    ],
)
def test_what_is_not_one_value_per_example_is_refused(loss):
    task = fl.Task(nn.Linear(1, CLASSES), loss)
    with pytest.raises(TaskError, match=r"must return one value per example .*WeightedMean"):
        task.check(draw(4, 1).float(), classes(4))


def mse(output: Tensor, target: Tensor) -> Tensor:
    return 3 * (output - target).square()


def test_an_own_loss_may_have_the_name_of_another():
    task = task_with(mse)
    value, y = draw(4, 1), draw(4, 1).flip(0)
    ours = float(task.mean_loss(output(value), padded(y, 4)))
    assert ours == pytest.approx(3 * float(F.mse_loss(value, y)))
    trainer = fl.Trainer(task, fl.Federation.of([(value, y)]), fl.fedavg())
    assert trainer.describe()["task"]["loss"] != "mse"


def test_a_class_in_the_place_of_a_loss_is_refused():
    with pytest.raises(ConfigError, match=r"write MSELoss\(\)"):
        task_with(nn.MSELoss)


def test_the_loss_is_a_copy_in_the_tasks_precision():
    loss = nn.CrossEntropyLoss(weight=WEIGHT.float())
    task = fl.Task(nn.Linear(1, CLASSES), loss, dtype=F64)
    loss.weight.zero_()
    run = Pass(None, None, False)
    value = task.forward(*task.initial(), draw(4, 1), run).value
    assert float(task.mean_loss(output(value), padded(classes(4), 4))) > 0
