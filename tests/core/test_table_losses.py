"""The losses that tables need, against loops written from their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from undrift import native
from undrift.core.losses import LOSSES, Focal, Pinball, counts_alone, mean_of, shares
from undrift.engines import native_steps
from undrift.engines.dense_steps import is_dense
from undrift.errors import DataError, TaskError

F64 = torch.float64
WEIGHTS = [0.5, 2.0, 0.0]
ROWS, CLASSES = 9, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def labels(n: int = ROWS, seed: int = 1) -> Tensor:
    return torch.randint(0, CLASSES, (n,), generator=torch.Generator().manual_seed(seed))


def counts(n: int = ROWS) -> Tensor:
    return torch.poisson(draw(n, 1).abs() * 3, generator=torch.Generator().manual_seed(3))


# ---- long-hand: one number at a time ---------------------------------------------------------
def hand_focal(o: list[float], y: int, gamma: float) -> float:
    p = math.exp(o[y]) / sum(map(math.exp, o))
    return -((1 - p) ** gamma) * math.log(p)


def hand_numbers(name: str, o: float, y: float, q: float = 0.5) -> float:
    gap = abs(o - y)
    return {
        "mse": gap * gap,
        "mae": gap,
        "huber": gap * gap / 2 if gap < 1 else gap - 0.5,
        "pinball": (q if y > o else 1 - q) * gap,
        "poisson": math.exp(o) - y * o,
    }[name]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0, 5.0])
def test_focal_is_its_definition(gamma: float) -> None:
    value, y = draw(ROWS, CLASSES) * 3, labels()
    each = [hand_focal(o, c, gamma) for o, c in zip(value.tolist(), y.tolist(), strict=True)]
    assert Focal(gamma)(value, y).tolist() == pytest.approx(each, rel=1e-12)
    weights = [WEIGHTS[c] for c in y.tolist()]
    mean = sum(w * v for w, v in zip(weights, each, strict=True)) / sum(weights)
    weighted = Focal(gamma, torch.tensor(WEIGHTS, dtype=F64))(value, y)
    found = mean_of(weighted, torch.ones(ROWS, dtype=torch.bool))
    assert float(found) == pytest.approx(mean, rel=1e-12)


def test_focal_without_gamma_is_cross_entropy_with_its_weights() -> None:
    value, y, weight = draw(ROWS, CLASSES), labels(), torch.tensor(WEIGHTS, dtype=F64)
    mine, mask = Focal(0.0, weight)(value, y), torch.ones(ROWS, dtype=torch.bool)
    plain = nn.CrossEntropyLoss(weight)(value, y)
    torch.testing.assert_close(mean_of(mine, mask), plain, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "pinball", "poisson"])
def test_losses_of_numbers_are_their_definitions(name: str) -> None:
    value, y = draw(ROWS, 1) * 2, counts() if name == "poisson" else draw(ROWS, 1, seed=7)
    pairs = list(zip(value.flatten().tolist(), y.flatten().tolist(), strict=True))
    each = [hand_numbers(name, *pair) for pair in pairs]
    assert LOSSES[name](value, y).flatten().tolist() == pytest.approx(each, rel=1e-12)
    if name == "pinball":
        each = [hand_numbers(name, *pair, q=0.9) for pair in pairs]
        assert Pinball(0.9)(value, y).flatten().tolist() == pytest.approx(each, rel=1e-12)


ALL = {
    "focal": (Focal(2.0), labels()),
    "focal flat": (Focal(0.5), labels()),
    "focal weighted": (Focal(1.5, torch.tensor(WEIGHTS, dtype=F64)), labels()),
    "huber": (LOSSES["huber"], draw(ROWS, CLASSES, seed=4) * 2),
    "mae": (LOSSES["mae"], draw(ROWS, CLASSES, seed=4)),
    "pinball": (Pinball(0.2), draw(ROWS, CLASSES, seed=4)),
    "poisson": (LOSSES["poisson"], counts().expand(ROWS, CLASSES)),
}


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    loss, y = ALL[name]
    value = (draw(ROWS, CLASSES) * 1.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: shares(loss(v, y)).totals, (value,))


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_a_certain_example_has_no_focal_loss_and_no_slope(gamma: float) -> None:
    value = torch.tensor([[1000.0, 0.0], [0.0, 1000.0]], requires_grad=True)
    each = Focal(gamma)(value, torch.tensor([0, 0]))
    (slope,) = torch.autograd.grad(each.sum(), value)
    assert each.tolist() == [0.0, 1000.0] and slope.tolist() == [[0.0, 0.0], [-1.0, 1.0]]


# ---- through every engine --------------------------------------------------------------------
def trainer_of(loss, y_of, algorithm, outputs: int, **options) -> fl.Trainer:
    clients = [(draw(n, 4, seed=n), y_of(n)) for n in (5, 3, 12, 1)]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))
    task = fl.Task(net, loss, dtype=F64)
    return fl.Trainer(
        task, fl.Federation.of(clients), algorithm, work=fl.Work(epochs=2, batch=4), **options
    )


KINDS = {
    "focal": ("focal", labels, 3),
    "focal weighted": (ALL["focal weighted"][0], labels, 3),
    "cross entropy weighted": (nn.CrossEntropyLoss(torch.tensor(WEIGHTS)), labels, 3),
    "huber": ("huber", lambda n: draw(n, 1), 1),
    "mae": ("mae", lambda n: draw(n, 1), 1),
    "pinball": (Pinball(0.2), lambda n: draw(n, 1), 1),
    "poisson": ("poisson", counts, 1),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("build", [fl.fedavg, fl.scaffold])
def test_engines_agree(name: str, build) -> None:
    loss, y_of, outputs = KINDS[name]
    runs = [
        trainer_of(loss, y_of, build(0.1), outputs, **options)
        for options in ({}, {"engine": "reference"}, {"graph": True})
    ]
    start = runs[0].server.w.clone()
    for run in runs:
        run.run(2)
        assert (run.server.w - runs[0].server.w).abs().max() < 1e-12
    assert (runs[0].server.w - start).abs().max() > 1e-3


@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_plain_pytorchs(name: str) -> None:
    """FedAvg of one client and one step, whose loss is summed up by hand."""
    loss, y_of, outputs = KINDS[name]
    x, y = draw(ROWS, 4), y_of(ROWS)
    net = nn.Linear(4, outputs).double()
    work = fl.Work(steps=1, batch=None)
    trainer = fl.Trainer(
        fl.Task(net, loss, dtype=F64), fl.Federation.of([(x, y)]), fl.fedavg(0.5), work=work
    )
    trainer.round()
    value = net(x)
    weights = torch.tensor(WEIGHTS, dtype=F64)
    if "cross" in name:
        total = nn.CrossEntropyLoss(weights)(value, y)
    elif "focal" in name:
        p = value.softmax(1)[torch.arange(ROWS), y]
        power = 1.5 if "weighted" in name else 2.0
        w = weights[y] if "weighted" in name else torch.ones(ROWS, dtype=F64)
        total = (-w * (1 - p) ** power * p.log()).sum() / w.sum()
    else:
        pairs = zip(value.flatten(), y.flatten().tolist(), strict=True)
        q = 0.2
        total = sum(of_number(name, o, v, q) for o, v in pairs) / ROWS
    total.backward()
    for own, mine in zip(net.parameters(), trainer.parameters().values(), strict=True):
        torch.testing.assert_close(mine, own.data - 0.5 * own.grad, rtol=0, atol=1e-13)


def of_number(name: str, o: Tensor, y: float, q: float) -> Tensor:
    gap = (o - y).abs()
    if name == "huber":
        return gap**2 / 2 if gap.item() < 1 else gap - 0.5
    if name == "pinball":
        return (q if y > o.item() else 1 - q) * gap
    return gap if name == "mae" else o.exp() - y * o


def test_loops_in_c_leave_other_losses_and_weights_alone() -> None:
    """They know plain cross-entropy only; with weights even the loops over layers step aside."""
    data = fl.Federation.of([(draw(6, 4), labels(6))])
    for loss, in_c, dense in (
        ("cross_entropy", True, True),
        ("focal", False, True),
        (Focal(1.0), False, True),
        (KINDS["focal weighted"][0], False, False),
        (KINDS["cross entropy weighted"][0], False, False),
    ):
        task = fl.Task(nn.Linear(4, 3), loss, dtype=F64)
        assert native_steps.fits(task, data) is in_c
        assert is_dense(task, 1) is dense
    assert F64 in native.BITS


def test_what_a_run_is_recognised_by_has_gamma_weights_and_quantile() -> None:
    def told(loss):
        return trainer_of(loss, labels, fl.fedavg(0.1), 3).describe()["task"]["loss"]

    losses = [Focal(1.0), Focal(2.0), KINDS["focal weighted"][0]]
    assert len({str(told(loss)) for loss in losses}) == 3
    assert told("focal") == "focal" and counts_alone(LOSSES["focal"])


def test_targets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TaskError, match="class numbers"):
        fl.Task(nn.Linear(4, 3), "focal").check(torch.ones(2, 4), torch.ones(2, 3))
    for name in ("mae", "huber", "pinball", "poisson"):
        with pytest.raises(TaskError, match=f"{name}: outputs .* would be broadcast"):
            fl.Task(nn.Linear(4, 1), name).check(torch.ones(2, 4), torch.ones(2))
    with pytest.raises(DataError, match="client 0 has the label"):
        trainer_of("focal", lambda n: labels(n) + (torch.arange(n) == 0) * 3, fl.fedavg(), 3)
