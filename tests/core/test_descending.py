"""Layers of a seam that take their SGD step while going back: the same as gradients and a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from undrift.core.blocks import moving
from undrift.core.convolution import WAYS, Seam
from undrift.core.linear import Descent, take_step
from undrift.core.ops import Pass
from undrift.core.task import Batch, Task
from undrift.testing.compare import distance

C, B = 3, 2


def network() -> nn.Sequential:
    return nn.Sequential(
        *(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 3, 2, bias=False),
        ),
        *(
            nn.Tanh(),
            nn.GroupNorm(1, 3),
            nn.Flatten(),
            nn.Linear(27, 5),
            nn.ReLU(),
            nn.Linear(5, 3),
        ),
    )


RATES = {
    "numbers": Descent(0.1, 0.9),
    "per client": Descent(
        torch.tensor([0.1, 0.0, 0.3]).double(), torch.tensor([0.9, 1.0, 0.7]).double()
    ),
    "rates only": Descent(torch.tensor([0.1, 0.0, 0.3]).double(), 1.0),
}


def world() -> tuple[Task, Tensor, Batch]:
    task = Task.build(network, seed=0, dtype=torch.float64)
    source = torch.Generator().manual_seed(1)
    w, _ = task.initial()
    # rows further apart than they are long
    matrix = torch.randn((C, len(w) + 5), generator=source, dtype=torch.float64) * 0.3
    x = torch.randn((C, B, 2, 8, 8), generator=source, dtype=torch.float64)
    y = torch.randint(0, 3, (C, B), generator=source)
    mask = torch.ones((C, B), dtype=torch.bool)
    return task, matrix[:, : len(w)], Batch(x, y, mask, mask.long())


def parts_of(task: Task, rows: Tensor) -> dict[str, Tensor]:
    pieces = rows.split(task.sizes, 1)
    shapes = zip(task.names, pieces, task.shapes, strict=True)
    return {n: p.view(C, *s) for n, p, s in shapes}


def step(task: Task, rows: Tensor, batch: Batch, seam: Seam | None, descent: Descent | None):
    """Go forward and back: (loss, the gradients that came out)."""
    leaves = {n: p.detach().requires_grad_() for n, p in parts_of(task, rows).items()}
    _, buffers = task.initial()

    def loss(parts, batch):
        run = Pass(batch.mask, None, True, descent=descent, seam=seam)
        return task.mean_loss(task.forward_named(parts, buffers, batch.x, run), batch)

    losses = vmap(loss)(leaves, batch)
    losses.sum().backward()
    return losses.detach(), {n: leaf.grad for n, leaf in leaves.items()}


@pytest.mark.parametrize("how", RATES.values(), ids=RATES)
@pytest.mark.parametrize("way", WAYS)
def test_moving_going_back_is_a_step(way, how):
    task, rows, batch = world()
    wanted = rows.clone()
    loss, gradients = step(task, wanted, batch, None, None)
    for name, part in parts_of(task, wanted).items():
        take_step(part, gradients[name], how)
    found = rows.clone()
    other, left = step(task, found, batch, Seam(default=way), how)
    names = moving(task.module)
    assert {n for n, g in left.items() if g is None} == names
    assert names == {"0.weight", "0.bias", "3.weight", "7.weight", "7.bias", "9.weight", "9.bias"}
    for name, part in parts_of(task, found).items():
        if name not in names:
            take_step(part, left[name], how)
    assert distance([other, found], [loss, wanted]) <= 1e-12
    assert distance([found], [rows]) > 1e-3


def test_a_step_by_hand():
    w = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    g = torch.tensor([[1.0, 1.0], [float("nan"), 1.0]])
    take_step(w, g, Descent(torch.tensor([0.5, 0.0]), torch.tensor([0.5, 1.0])))
    assert w.tolist() == [[0.0, 0.5], [3.0, 4.0]]  # the second stands still, NaN or not
    take_step(w, None, Descent(1.0, 0.5))
    assert w.tolist() == [[0.0, 0.25], [1.5, 2.0]]
    take_step(w, torch.ones(2, 2), Descent(2.0, 1.0))
    assert w.tolist() == [[-2.0, -1.75], [-0.5, 0.0]]


def test_a_first_layer_needs_no_input_gradient(monkeypatch):
    """Neither does a descent ask for it."""
    asked = []
    from undrift.core import conv_ways, convolution

    original = conv_ways.TORCH_WAYS["loop"]

    def backward(*args):
        asked.append(args[-1])
        return original.backward(*args)

    ways = {**conv_ways.TORCH_WAYS, "loop": conv_ways.TorchWay(original.forward, backward)}
    monkeypatch.setattr(convolution, "TORCH_WAYS", ways)
    task, rows, batch = world()
    step(task, rows.clone(), batch, Seam(default="loop"), RATES["numbers"])
    assert asked == [(True, True), (False, True)]  # from the back
