"""BatchNorm's kernels on a device: large shapes, every type, and a VGG's step as a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

pytest.importorskip("triton", reason="the kernels need triton")

import undrift as fl
from undrift import models
from undrift.core.batchnorm import normalise
from undrift.core.convolution import Seam
from undrift.core.normalising import normalised
from undrift.core.ops import Pass
from undrift.core.task import Batch, Task
from undrift.core.tree import tree_map
from undrift.kernels.problem import Norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(8, 100, 64, 32, 32), (10, 100, 512, 2, 2), (130, 10, 64, 16, 16), (3, 7, 20, 9, 5)]
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def operands(size: tuple[int, ...], kind: torch.dtype, last: bool) -> tuple[Tensor, ...]:
    source = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, device="cuda")

    clients, batch, channels, *pixels = size
    x = (3.0 + 2.0 * draw(clients, batch, *pixels, channels)).to(kind).movedim(-1, 2)
    x = x if last else x.contiguous()
    mask = torch.rand((clients, batch), generator=source, device="cuda") < 0.9
    mask[-1] = False
    rows = draw(clients, 2 * channels)
    return x, rows[:, :channels] + 1.5, rows[:, channels:], mask, draw(*size)


def gradients(op, how: Norm, values: tuple[Tensor, ...]):
    def one(x, scale, shift, mask, g):
        y, stats = op(x, mask, scale, shift)
        return (y * g[:, :, : y.shape[2], : y.shape[3]]).sum(), (y, stats)

    return vmap(grad(one, (0, 1, 2), has_aux=True))(*values)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("kind", BOUND)
@pytest.mark.parametrize("size", SHAPES)
def test_values_and_gradients_are_those_of_float64(size, kind, pool, last):
    values, how = operands(size, kind, last), Norm(1e-5, kind, True, pool)

    def mine(x, mask, scale, shift):
        return normalised(x, mask, None, scale, shift, how, use_kernels=True)

    def plain(x, mask, scale, shift):
        y, stats = normalise(x, mask, None, scale, shift, how.eps)
        return F.max_pool2d(y.relu(), 2) if pool else y.relu(), stats

    found, again = (gradients(mine, how, values) for _ in range(2))
    wide = (*(v.double() for v in values[:3]), values[3], values[4].double())
    (by, (y, stats)), (by_plain, (y_plain, known)) = found, gradients(plain, how, wide)
    for a, b in zip(stats, known, strict=True):
        assert apart(a, b) <= 1e-5
    # a sign or a maximum that rounding turns moves a whole gradient: one of 50 million is 1e-4
    turned = 10 if pool or kind == torch.float32 else 1
    for a, b in zip((y, *by), (y_plain, *by_plain), strict=True):
        assert apart(a, b) <= turned * BOUND[kind]
    assert not y[-1].any() and not any(t[-1].any() for t in by)
    leaves = (torch.utils._pytree.tree_leaves(run) for run in (found, again))
    assert all(map(torch.equal, *leaves)), "the same bits"


C, B = 4, 8


def vgg() -> tuple[Task, tuple]:
    """A cohort of VGGs: weights, buffers, batches and keys."""
    task = Task(models.build("fedrl_vgg", seed=0))
    w, buffers = task.initial()
    source = torch.Generator().manual_seed(1)
    rows = w + 0.01 * torch.randn((C, len(w)), generator=source)
    x, y = torch.randn((C, B, 3, 32, 32), generator=source), torch.arange(C * B).view(C, B) % 10
    mask = torch.arange(B).expand(C, B) < torch.tensor([[B], [B - 1], [B // 2], [0]])
    held = tree_map(lambda t: t.expand(C, *t.shape), buffers)
    data = (rows, held, Batch(x, y, mask, mask.long()), torch.arange(C))
    return task, tree_map(lambda t: t.cuda().contiguous(), data)


def vgg_step(task: Task, seam: Seam, data):
    def loss(w, buffers, batch, key):
        out = task.forward(w, buffers, batch.x, Pass(batch.mask, key, True, seam=seam))
        return task.mean_loss(out, batch), out.buffers.floats

    g, floats = vmap(grad(loss, has_aux=True))(*data)
    return g, floats


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16", "float32"])
def test_a_captured_step_of_a_vgg_is_the_eager_one(precision):
    task, data = vgg()
    seam = Seam(precision, default="triton")
    wanted = vgg_step(task, seam, data)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        vgg_step(task, seam, data)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = vgg_step(task, seam, data)
    for t in found:
        t.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, wanted))
    assert all(t.isfinite().all() for t in wanted)


@pytest.mark.parametrize(("precision", "bound"), [("float32", 0.05), ("tf32", 0.1)])
def test_a_step_of_a_vgg_is_that_of_the_plain_way(precision, bound):
    """Bounds are wide: behind 13 layers a turned ReLU is worth 1 % in float32 on a CPU, too."""
    task, data = vgg()
    names = [n for n, part in task.module.named_modules() if n.startswith("norm")]
    plain = Seam(precision, dict.fromkeys(names, "grouped"), "triton")
    found = vgg_step(task, Seam(precision, default="triton"), data)
    wanted = vgg_step(task, plain, data)
    assert apart(found[0], wanted[0]) <= bound and apart(found[1], wanted[1]) <= bound / 10


def test_rounds_as_graphs_repeat_their_bits():
    clients = [(torch.randn(n, 3, 32, 32), torch.arange(n) % 10) for n in (12, 7, 9)]

    def run(**settings) -> Tensor:
        task = Task(models.build("fedrl_vgg", seed=0))
        trainer = fl.Trainer(
            task, fl.Federation.of(clients), fl.fedavg(0.01), work=fl.Work(epochs=1, batch=4),
            device="cuda", **settings,
        )  # fmt: skip
        trainer.run(4)
        return trainer.server.w.cpu()

    first = run()
    assert first.isfinite().all() and torch.equal(first, run())
