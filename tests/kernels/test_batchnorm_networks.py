"""Networks with BatchNorm under a seam: what is fused, and the numbers of the plain way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

pytest.importorskip("triton", reason="the kernels need triton")

import undrift as fl
from undrift.core.convolution import Seam
from undrift.core.ops import Pass
from undrift.core.task import Batch, Task
from undrift.core.tree import tree_map
from undrift.kernels import batchnorm, convolution

C, B = 2, 4
NORMS = ("1", "5", "9")


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5, affine=False), nn.ReLU(inplace=True)),
        *(nn.Flatten(), nn.Linear(20, 6), nn.BatchNorm1d(6, momentum=None), nn.ReLU()),
        nn.Linear(6, 3),
    )


class Own(nn.Module):
    """Calls its layers itself, and `view`s what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu()
        return self.head(h.view(len(x), -1))


def by_torch(precision: str) -> Seam:
    return Seam(precision)


def by_kernels(precision: str) -> Seam:
    """BatchNorms alone: an interpreter takes long for convolutions."""
    return Seam(precision, dict.fromkeys((*NORMS, "norm"), "triton"))


def batch(device) -> Batch:
    source = torch.Generator().manual_seed(1)
    x = torch.randn((C, B, 2, 4, 4), generator=source)
    y = torch.randint(0, 3, (C, B), generator=source)
    mask = torch.tensor([[True] * B, [True] * (B - 1) + [False]])
    x[~mask] = 100.0
    return Batch(*(t.to(device) for t in (x, y, mask, mask.long())))


def trained(task: Task, seam: Seam | None, device, steps: int = 2) -> tuple[Tensor, ...]:
    """Take steps of SGD: weights, and what the BatchNorms remember."""
    data = batch(device)
    w, buffers = task.initial()
    source = torch.Generator().manual_seed(2)
    rows = (w + 0.1 * torch.randn((C, len(w)), generator=source)).to(device)
    held = tree_map(lambda b: b.to(device).expand(C, *b.shape), buffers)

    def loss(w: Tensor, buffers, batch: Batch):
        out = task.forward(w, buffers, batch.x, Pass(batch.mask, None, True, seam=seam))
        return task.mean_loss(out, batch), out.buffers

    for _ in range(steps):
        g, held = vmap(grad(loss, has_aux=True))(rows, held, data)
        rows = rows - 0.1 * g
    return rows, *held


@pytest.fixture
def calls(monkeypatch) -> list:
    """Record what the kernels are asked for: (ReLU, pool, type read, type written, planes)."""
    seen: list = []
    apply = batchnorm.apply

    def spy(x, known, how):
        seen.append((how.relu, how.pool, x.dtype, how.result, how.planes))
        return apply(x, known, how)

    monkeypatch.setattr(batchnorm, "apply", spy)
    return seen


@pytest.mark.parametrize(
    ("module", "precision", "bound"),
    [
        (network, "float32", 1e-5),
        pytest.param(network, "fp16", 1e-2, marks=pytest.mark.slow),
        (Own, "float32", 1e-5),
    ],
)
def test_steps_are_those_of_the_plain_way(module, precision, bound, device, calls):
    task = Task.build(module, seed=3)
    found = trained(task, by_kernels(precision), device)
    assert len(calls) == 2 * (3 if module is network else 1)
    wanted = trained(task, by_torch(precision), device)
    assert len(calls) == 2 * (3 if module is network else 1), "these are torch's"
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


def test_what_follows_is_fused_and_activations_stay_narrow(device, calls):
    wide, narrow = torch.float32, torch.float16
    trained(Task.build(network, seed=3), by_kernels("fp16"), device, steps=1)
    assert calls == [
        (True, True, narrow, narrow, False),
        (True, False, narrow, narrow, True),  # `flatten` reads channel by channel
        (True, False, narrow, narrow, False),
    ]
    calls.clear()
    module = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten())
    module.append(nn.Linear(64, 3))
    trained(Task(module), by_kernels("fp16"), device, steps=1)
    assert calls == [(False, False, narrow, wide, True)], "what leaves the seam is float32"


@pytest.mark.parametrize(
    ("hooked", "wanted"),
    [
        pytest.param("0", (True, True), marks=pytest.mark.slow),
        ("1", (False, False)),
        pytest.param("2", (False, False), marks=pytest.mark.slow),
        ("3", (True, False)),
    ],
)
def test_layers_with_hooks_are_called_themselves(hooked, wanted, device, calls):
    task, seen = Task.build(network, seed=3), []
    layer = task.module.get_submodule(hooked)
    layer.register_forward_hook(lambda m, a, out: seen.append((a[0].dtype, out.dtype)))
    trained(task, by_kernels("fp16"), device, steps=1)
    assert calls[0][:2] == wanted
    assert set(seen) == {(torch.float32, torch.float32)}


def test_evaluation(device, calls):
    task = Task.build(network, seed=3)
    w, buffers = tree_map(lambda t: t.to(device), task.initial())
    x = batch(device).x[0]
    found, wanted = (
        task.forward(w, buffers, x, Pass(seam=seam)).value
        for seam in (by_kernels("float32"), by_torch("float32"))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert len(calls) == 3


def test_no_kernels_without_a_seam_that_asks(device, calls):
    for seam in (None, Seam(), Seam(default="loop")):
        trained(Task.build(network, seed=3), seam, device, steps=1)
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_nothing_is_copied_between_a_convolution_and_its_norm(precision, device, monkeypatch):
    copied, channels_last = [], convolution.channels_last

    def spy(t: Tensor, dtype: torch.dtype) -> Tensor:
        made = channels_last(t, dtype)
        if made.data_ptr() != t.data_ptr():
            copied.append(t.shape[2])
        return made

    monkeypatch.setattr(convolution, "channels_last", spy)
    trained(Task.build(network, seed=3), Seam(precision, default="triton"), device, steps=1)
    assert set(copied) <= {2}, "only images come in another order"


@pytest.mark.parametrize(
    "ways",
    [dict.fromkeys(NORMS, "triton"), pytest.param("triton", marks=pytest.mark.slow)],
    ids=["norms", "all layers"],
)
def test_a_federation_is_trained_as_the_reference_engine_does(ways, device, calls):
    """Clients of unequal size: padded batches, and batches of padding alone."""
    source = torch.Generator().manual_seed(5)
    clients = [
        (torch.randn((n, 2, 4, 4), generator=source), torch.randint(0, 3, (n,), generator=source))
        for n in (5, 3, 9)
    ]

    def run(**settings):
        task = Task.build(network, seed=3)
        work = fl.Work(epochs=1, batch=4)
        trainer = fl.Trainer(task, fl.Federation.of(clients), fl.fedavg(0.1), work=work, **settings)
        trainer.round()
        return trainer.server.w.cpu(), trainer.server.buffers.floats.cpu()

    found = run(ways=ways, device=device, precision="float32")
    assert calls
    wanted = run(engine="reference", device="cpu")
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
