"""Networks under a seam: the same numbers, layers fused where nobody looks, hooks respected."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from undrift import models
from undrift.core import blocks
from undrift.core.convolution import WAYS, Seam, convolve
from undrift.core.ops import Pass, Place, prepare, running
from undrift.core.task import Batch, Task
from undrift.testing.compare import distance

C, B = 2, 3


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 5, 3, padding="same"), nn.MaxPool2d(2, 2), nn.ReLU(), nn.Dropout2d(0.3)),
        nn.Sequential(nn.Conv2d(5, 5, 1, bias=False), nn.Tanh(), nn.Dropout(0.4)),
        *(nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)),
    )


class Residual(nn.Module):
    """Calls its layers itself, and `view`s what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4 * 9 * 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head((h + self.second(h)).view(len(x), -1))


MODULES = {"sequence": small_cnn, "residual": Residual}


def task_of(name: str, dtype: torch.dtype = torch.float64, **settings) -> Task:
    return Task.build(MODULES[name], seed=3, dtype=dtype, **settings)


def cohort(task: Task, channels: int = 2) -> tuple[Tensor, Batch, Tensor]:
    source = torch.Generator().manual_seed(1)
    w, _ = task.initial()
    rows = w + 0.1 * torch.randn((C, len(w)), generator=source, dtype=w.dtype)
    x = torch.randn((C, B, channels, 9, 8), generator=source, dtype=w.dtype)
    y = torch.randint(0, 3, (C, B), generator=source)
    mask = torch.tensor([[True] * B, [True] * (B - 1) + [False]])
    return rows, Batch(x, y, mask, mask.long()), torch.arange(C)


def trained(task: Task, seam: Seam | None) -> tuple[Tensor, Tensor, Tensor]:
    """Give gradients, outputs and buffers of a cohort."""
    rows, batch, keys = cohort(task)
    _, buffers = task.initial()

    def loss(w: Tensor, batch: Batch, key: Tensor):
        out = task.forward(w, buffers, batch.x, Pass(batch.mask, key, True, seam=seam))
        return task.mean_loss(out, batch), (out.value, out.buffers.floats)

    g, (value, floats) = vmap(grad(loss, has_aux=True))(rows, batch, keys)
    return g, value, floats


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODULES)
def test_every_way_gives_the_same_numbers(name, way):
    task = task_of(name)
    wanted = trained(task, None)
    assert distance(trained(task, Seam("bf16", default=way)), wanted) <= 1e-12


@pytest.mark.parametrize("name", ["feddyn_cnn", "simple_cnn", "mcmahan_cnn", "fedrl_mnist"])
def test_the_papers_networks(name):
    settings = {"pixels": 28} if name == "mcmahan_cnn" else {}
    channels, pixels = (3, 32) if name in ("feddyn_cnn", "simple_cnn") else (1, 28)
    task = Task(models.build(name, seed=0, **settings), dtype=torch.float64)
    w, buffers = task.initial()
    source = torch.Generator().manual_seed(2)
    x = torch.randn((2, channels, pixels, pixels), generator=source, dtype=torch.float64)
    y = torch.tensor([1, 7])

    def loss(w: Tensor, seam: Seam | None) -> Tensor:
        key = torch.tensor(5)
        return task.losses(
            task.forward(w, buffers, x, Pass(None, key, True, seam=seam)).value, y
        ).sum()

    found, wanted = (grad(lambda v, s=s: loss(v, s))(w) for s in (Seam(), None))
    assert distance([found], [wanted]) <= 1e-12


def test_without_a_seam_nothing_changes():
    """Not a bit: the exchanged Conv2d and Sequential do what torch's do."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2)
    )
    x = torch.randn(2, 2, 8, 8)
    with running(Pass(training=True)):
        assert torch.equal(prepare(plain)(x), plain(x))


class Last(nn.Module):
    """Takes the last step of what an LSTM returns: its outputs, and its state."""

    def forward(self, found: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
        return found[0][:, -1]


def test_layers_of_a_sequence_may_hand_on_anything():
    layers = (nn.LSTM(3, 4, batch_first=True), Last(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    task = Task(nn.Sequential(*layers), dtype=torch.float64)
    x = torch.randn((2, 5, 3), dtype=torch.float64)
    found, wanted = (
        task.forward(*task.initial(), x, Pass(training=True, seam=seam)).value
        for seam in (Seam(default="auto"), None)
    )
    assert distance([found], [wanted]) <= 1e-12


def test_random_decisions_do_not_depend_on_convolutions():
    """Dropouts are counted among the layers that were always exchanged."""
    task = task_of("sequence")
    layers = dict(task.module.named_modules())
    drawing = [layers[n]._place for n in ("6", "7.2", "9", "11", "12")]
    assert drawing == [Place(n, i) for i, n in enumerate(("6", "7.2", "9", "11", "12"))]


@pytest.fixture
def calls(monkeypatch) -> list:
    """Record the shape of each convolution: (ReLU, pool, narrow, type of the input)."""
    seen: list = []

    def spy(x, w, b, shape, how):
        seen.append((shape.relu, shape.pool, how.narrow, x.dtype))
        return convolve(x, w, b, shape, how)

    monkeypatch.setattr(blocks, "convolve", spy)
    return seen


def test_layers_are_fused(calls):
    trained(task_of("sequence"), Seam())
    double = torch.float64
    assert calls == [
        (True, True, True, double),
        (True, True, False, double),  # a nested sequence follows
        (False, False, False, double),
    ]


def test_between_layers_of_the_seam_activations_are_narrow(calls):
    task = task_of("sequence", torch.float32)
    wide, narrow = torch.float32, torch.bfloat16
    g, value, _ = trained(task, Seam("bf16"))
    assert [c[3] for c in calls] == [wide, narrow, wide]
    assert g.dtype == value.dtype == torch.float32
    wanted = trained(task, None)
    assert distance([g, value], list(wanted[:2])) <= 0.05


LAYERS = {
    "relu": ("1", [(False, False), (True, True)]),  # (ReLU, pool) of the first two convolutions
    "pool": ("2", [(True, False), (True, True)]),
    "second convolution": ("3", [(True, True), (False, False)]),
    "its pool": ("4", [(True, True), (False, False)]),
    "its relu": ("5", [(True, True), (False, True)]),
}


@pytest.mark.parametrize("kind", ["output", "input", "gradient"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_hooks_are_called_themselves(name, kind, calls):
    place, wanted = LAYERS[name]
    task = task_of("sequence", torch.float32)
    layer, seen = task.module.get_submodule(place), []
    if kind == "output":
        layer.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    elif kind == "input":
        layer.register_forward_pre_hook(lambda m, a: seen.append(a[0].dtype))
    else:
        layer.register_full_backward_pre_hook(lambda m, g: None)
    rows, batch, keys = cohort(task)
    _, buffers = task.initial()
    with torch.no_grad():
        task.forward(rows[0], buffers, batch.x[0], Pass(None, keys[0], True, seam=Seam("bf16")))
    assert [c[:2] for c in calls[:2]] == wanted
    assert set(seen) <= {torch.float32}


@pytest.mark.parametrize(
    "feature", ["1", "2", "3", "3:input", "5", "6", "8", "9", "10:input", "11"]
)
def test_feature_layers(feature):
    task = task_of("sequence", feature=feature)
    rows, batch, keys = cohort(task)
    _, buffers = task.initial()

    def features(seam: Seam | None) -> Tensor:
        def one(w, x, key):
            return task.forward(w, buffers, x, Pass(None, key, True, seam=seam)).features

        return vmap(one)(rows, batch.x, keys)

    assert distance([features(Seam())], [features(None)]) <= 1e-12


def test_features_are_float32():
    task = task_of("sequence", torch.float32, feature="9")
    rows, batch, keys = cohort(task)
    run = Pass(None, keys[0], True, seam=Seam("fp16"))
    out = task.forward(rows[0], task.initial()[1], batch.x[0], run)
    assert out.features.dtype == out.value.dtype == torch.float32


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, 1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
    ],
    ids=["3x3", "overlapping", "padded", "ceil"],
)
def test_other_pooling_stays_apart(pool, calls):
    torch.manual_seed(0)
    module = prepare(nn.Sequential(nn.Conv2d(2, 3, 2), pool)).double()
    x = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    with running(Pass(training=True, seam=Seam())):
        found = module(x)
    with running(Pass(training=True)):
        assert distance([found], [module(x)]) <= 1e-12
    assert [c[1] for c in calls] == [False]


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(
            nn.Conv2d(2, 3, 2, padding="same"),
            marks=pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
        ),
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
        nn.Conv1d(2, 3, 3),
    ],
    ids=["uneven padding", "reflection", "one dimension"],
)
def test_what_a_seam_leaves_to_torch(layer, calls):
    module = prepare(nn.Sequential(layer, nn.ReLU())).double()
    x = torch.randn(2, 2, *[6] * (len(layer.kernel_size)), dtype=torch.float64)
    with running(Pass(training=True, seam=Seam())):
        found = module(x)
    with running(Pass(training=True)):
        assert torch.equal(found, module(x))
    assert not calls


def test_a_single_image_and_a_slice(calls):
    """torch takes [channels, H, W] too; and part of a sequence is a sequence."""
    module = prepare(small_cnn()).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    for part in (module[:2], module[:3], module[3:6]):
        image = x if part[0].in_channels == 2 else torch.randn(4, 4, 4, dtype=torch.float64)
        with running(Pass(training=True, seam=Seam())):
            found = part(image)
        with running(Pass(training=True)):
            assert distance([found], [part(image)]) <= 1e-12
    assert len(calls) == 3


def test_evaluation():
    task = task_of("sequence")
    rows, batch, _ = cohort(task)
    _, buffers = task.initial()
    found, wanted = (
        task.forward(rows[0], buffers, batch.x[0], Pass(seam=s)).value for s in (Seam(), None)
    )
    assert distance([found], [wanted]) <= 1e-12
