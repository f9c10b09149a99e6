"""The seam's ops on the kernels: in every mode, with rows of one matrix as weights."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

pytest.importorskip("triton", reason="the kernels need triton")

from crossed import crossed
from undrift import kernels
from undrift.core.convolution import ConvShape, Seam, Way, convolve
from undrift.core.dense import dense
from undrift.core.dropping import drop
from undrift.core.random import fold
from undrift.errors import MissingExtra, TaskError
from undrift.kernels import candidates, convolution, tuner
from undrift.kernels.problem import Problem
from undrift.testing.compare import distance

C, E, B = 2, 2, 2
SHAPES = {
    "plain": ConvShape(),
    "relu": ConvShape(padding=(1, 1), relu=True),
    "pool": ConvShape(pool=True),
    "both": ConvShape(padding=(1, 1), relu=True, pool=True),
}
BOUND = {"float32": 1e-5, "fp16": 4e-3}


def plain(x: Tensor, w: Tensor, b: Tensor | None, shape: ConvShape) -> Tensor:
    y = F.conv2d(x, w, b, *shape[:4])
    y = y.relu() if shape.relu else y
    return F.max_pool2d(y, 2) if shape.pool else y


def operands(channels: int, device, *lead: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and bias are views of one matrix; values are those that fp16 holds."""
    source = torch.Generator().manual_seed(channels)
    size = 6 * channels * 9
    rows = torch.randn((*lead, size + 6 + 5), generator=source).half().float().to(device)
    x = torch.randn((*lead, B, channels, 4, 5), generator=source).half().float().to(device)
    w = (rows[..., 3 : size + 3] * 0.25).unflatten(-1, (6, channels, 3, 3))
    return w, rows[..., -6:], x


def objectives(shape: ConvShape, how: Way):
    def mine(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return (convolve(x, w, b, shape, how).float() ** 2).mean()

    def torchs(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return (plain(x, w, b, shape) ** 2).mean()

    return mine, torchs


@pytest.fixture
def used(monkeypatch):
    """Count the calls that really reach the kernels."""
    calls = []
    for name in ("convolve", "gradients"):
        original = getattr(convolution, name)

        def counted(*args, name=name, original=original):
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(convolution, name, counted)
    return calls


@pytest.mark.parametrize(
    ("name", "channels", "precision"),
    [
        *[("plain", 5, "float32"), ("both", 3, "float32")],
        *[("relu", 3, "fp16"), ("pool", 3, "fp16"), ("both", 5, "fp16")],
    ],
)
def test_gradients_inside_vmap(name, channels, precision, device, used):
    mine, torchs = objectives(SHAPES[name], Way("triton", precision))
    values = operands(channels, device, C)
    found = vmap(grad(mine, (0, 1, 2)))(*values)
    assert distance(list(found), list(vmap(grad(torchs, (0, 1, 2)))(*values))) <= BOUND[precision]
    assert used == ["convolve", "gradients"]


@pytest.mark.parametrize("channels", [3, 5])
def test_other_modes(channels, device, used):
    shape, how = SHAPES["both"], Way("triton", "fp16")
    mine, torchs = objectives(shape, how)
    leaves = [v.clone().requires_grad_() for v in operands(channels, device, C)]
    found = torch.autograd.grad(vmap(mine)(*leaves).sum(), leaves)
    wanted = torch.autograd.grad(vmap(torchs)(*leaves).sum(), leaves)
    assert distance(found, wanted) <= BOUND["fp16"]
    nested = operands(channels, device, E, C)
    found = vmap(vmap(grad(mine, (0, 1))))(*nested)
    assert distance(found, vmap(vmap(grad(torchs, (0, 1))))(*nested)) <= BOUND["fp16"]
    (w, b, _), (_, _, x) = operands(channels, device), operands(channels, device, C)
    shared = vmap(grad(mine), in_dims=(None, None, 0))(w, b, x)
    assert distance([shared], [vmap(grad(torchs), (None, None, 0))(w, b, x)]) <= BOUND["fp16"]
    alone = grad(mine)(w, b, x[0])
    assert distance([alone], [grad(torchs)(w, b, x[0])]) <= BOUND["fp16"]
    assert used == ["convolve", "gradients"] * 4


@pytest.mark.parametrize(("name", "channels"), crossed(["pool", "both", "relu"], [3, 5]))
def test_planes_are_the_same_values_where_flatten_wants_them(name, channels, device):
    operand = operands(channels, device, C)
    shape, found = SHAPES[name], []
    for planes in (False, True):
        how = Way("triton", "float32", planes=planes)
        w, b, x = (t.clone().requires_grad_() for t in operand)
        y = vmap(lambda w, b, x, how=how: convolve(x, w, b, shape, how))(w, b, x)
        assert not (planes and shape.pool) or y.is_contiguous()
        (y.flatten(2) * torch.arange(y[0, 0].numel(), device=device)).sum().backward()
        found.append((y, w.grad, b.grad, x.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("precision", ["float32", "fp16", "tf32", "bf16"])
def test_every_configuration_lays_planes(precision, device, monkeypatch):
    if kernels.interpreted() and precision == "bf16":
        pytest.skip("the interpreter does not know bf16")
    p = Problem(2, 3, 8, 8, 16, 40, (3, 3), relu=True, pool=True, precision=precision, narrow=True)
    draw = torch.Generator().manual_seed(0)
    x, w, rows = (
        torch.randn(s, generator=draw).to(device)
        for s in ((2, 3, 16, 8, 8), (2, 40, 16, 3, 3), (2, 57))
    )
    for config in candidates.for_convolution(p):
        monkeypatch.setattr(convolution, "configuration", lambda *_, config=config: config)
        y, place, _ = convolution.convolve(p, x, w, rows[:, 5:45])
        z, where, _ = convolution.convolve(p._replace(planes=True), x, w, rows[:, 5:45])
        assert torch.equal(y, z) and torch.equal(place, where), config
        assert z.is_contiguous() and not y.is_contiguous()


def test_between_two_layers_activations_stay_narrow(device):
    w, b, x = operands(3, device, C)
    again = operands(6, device, C)
    shape = SHAPES["both"]

    def net(narrow: bool):
        def run(w, b, v, c, x):
            h = convolve(x, w, b, shape, Way("triton", "fp16", narrow))
            assert h.dtype == (torch.float16 if narrow else torch.float32)
            assert h.stride(-3) == 1, "channels are last in memory"
            return (
                convolve(h, v, c, ConvShape(relu=True, padding=(1, 1)), Way("triton", "fp16")) ** 2
            ).mean()

        return vmap(grad(run, (0, 1, 2, 3)))(w, b, *again[:2], x)

    assert distance(list(net(True)), list(net(False))) <= BOUND["fp16"]


@pytest.mark.parametrize(("channels", "scale"), crossed([3, 5], [1e-9, 1e9]))
def test_tf32_gradients_of_any_size(channels, scale, device):
    """Weight gradients round to fp16, whose range they would leave without scaling."""
    mine, torchs = objectives(SHAPES["both"], Way("triton", "tf32"))
    w, b, x = operands(channels, device, C)

    def scaled(f):
        return vmap(grad(lambda w, b, x: scale * f(w, b, x), (0, 1)))(w, b, x)

    found, wanted = scaled(mine), scaled(torchs)
    for a, r in zip(found, wanted, strict=True):
        assert float((a - r).norm() / r.norm()) <= 2e-3


def test_what_the_kernels_leave_to_torch(device, used):
    w, b, x = operands(4, device, C)
    for shape in (ConvShape(stride=(2, 2)), ConvShape(padding=(3, 3), dilation=(1, 1))):
        y = vmap(lambda x, w, b, s=shape: convolve(x, w, b, s, Way("triton", "float32")))(x, w, b)
        assert distance([y], [vmap(lambda x, w, b, s=shape: plain(x, w, b, s))(x, w, b)]) <= 1e-5
    double = [t.double() for t in (x, w, b)]
    y = vmap(lambda x, w, b: convolve(x, w, b, SHAPES["both"], Way("triton")))(*double)
    assert distance([y], [vmap(lambda x, w, b: plain(x, w, b, SHAPES["both"]))(*double)]) <= 1e-12
    assert not used


def test_second_derivatives_are_refused(device):
    mine, _ = objectives(SHAPES["relu"], Way("triton", "float32"))
    w, b, x = operands(5, device)
    with pytest.raises(TaskError, match="no second derivatives"):
        grad(lambda w: grad(mine)(w, b, x).square().sum())(w)


# ---- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["as torch", "channels last"])
def test_dropout_decides_as_torch_does(order, device):
    x = torch.randn(C, B, 3, 4, 5, device=device)
    if order == "channels last":
        x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    keys = fold(7, torch.arange(C, device=device))

    def loss(use_kernel: bool, p: float):
        def run(x, key):
            y = drop(x, key, (3, 1), p, x.dim(), use_kernel)
            return (y**2).sum(), y

        return vmap(grad(run, has_aux=True))(x, keys)

    for p in (0.25, 0.9, 1.0, 1e-19):
        (g, y), (other, wanted) = loss(True, p), loss(False, p)
        assert torch.equal(y, wanted)
        assert torch.equal(g, other)
        assert y.stride() == x.stride()
    half = vmap(lambda x, k: drop(x, k, (0, 2), 0.25, x.dim(), True))(x.half(), keys)
    assert torch.equal(
        half == 0, vmap(lambda x, k: drop(x, k, (0, 2), 0.25, x.dim()))(x.half(), keys) == 0
    )


# ---- choosing ------------------------------------------------------------------------------------


def test_configurations_travel_as_json():
    key = "convolution: some problem, some card"
    kernels.use({key: {"BM": 64, "BY_ROW": True}})
    assert json.loads(json.dumps(kernels.tuned()))[key] == {"BM": 64, "BY_ROW": True}
    kernels.tuned()[key]["BM"] = 1
    assert tuner.chosen[key]["BM"] == 64


def test_a_wrong_candidate_is_never_chosen(monkeypatch):
    """Three candidates: the fastest writes zeros, one leaves memory as it was, one cannot run."""
    out = torch.zeros(4)

    class Stub:
        def __init__(self, config):
            self.config = config

        def run(self):
            match self.config["kind"]:
                case "zeros":
                    out.zero_()
                case "broken":
                    raise RuntimeError("out of shared memory")
                case "right":
                    out.fill_(1.0)

    times = {"zeros": 0.1, "nothing": 0.2, "right": 5.0, "broken": 0.0}
    monkeypatch.setattr(tuner, "_time", lambda launches: times[launches[0].config["kind"]])
    trial = tuner.Trial(
        [dict(kind=kind) for kind in times], lambda config: [Stub(config)], [out],
        lambda: float((out - 1).norm()) if bool(out.isfinite().all()) else float("inf"), "fp16",
    )  # fmt: skip
    assert tuner.tune("a key", trial) == {"kind": "right"}
    assert tuner.timings["a key"][0].configuration == {"kind": "right"}
    only = trial._replace(candidates=[dict(kind="zeros")])
    with pytest.raises(RuntimeError, match="no configuration of the kernel works here: a key"):
        tuner.tune("a key", only)


def test_a_seam_may_name_one_layer(device):
    seam = Seam("fp16", {"conv1": "triton"})
    assert seam.may_use_kernels and Seam(default="auto").may_use_kernels
    assert not Seam("fp16", {"conv1": "loop"}).may_use_kernels
    assert seam.way("conv1", True) == Way("triton", "fp16", True)
    assert seam.way("conv2") == Way("grouped", "fp16", False)


def test_missing_triton_is_explained(monkeypatch, device):
    monkeypatch.setattr(kernels, "_installed", lambda: False)
    assert not kernels.available(device)
    with pytest.raises(MissingExtra, match="pip install triton"):
        kernels.need(device)
    w, b, x = operands(4, device)
    with pytest.raises(MissingExtra, match="choose another way"):
        convolve(x, w, b, None, Way("triton"))


def test_other_devices_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernels.available("cpu")
    with pytest.raises(MissingExtra, match="run on CUDA, not on cpu"):
        kernels.need("cpu")


# -------------------------------------------------------------------------------------- ranges
@pytest.mark.parametrize("size", [1e5, pytest.param(1e-6, marks=pytest.mark.slow), 1e-8])
def test_tf32_has_the_range_of_float32(size: float, device) -> None:
    source = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(device)

    def error(got: Tensor, wanted: Tensor) -> float:
        return float((got - wanted).norm() / wanted.norm())

    way = Way("triton", "tf32")
    for channels in (3, 16):  # a first layer, and another
        x, w, q = draw(2, 2, channels, 6, 6) * size, draw(2, 4, channels, 3, 3), draw(2, 2, 4, 4, 4)
        by_weight = vmap(grad(lambda w, x, q: (convolve(x, w, None, ConvShape(), way) * q).sum()))
        whole = vmap(grad(lambda w, x, q: (F.conv2d(x, w) * q).sum()))
        assert error(by_weight(w, x, q), whole(w, x, q)) < 2e-3
    x, w, q = draw(2, 5, 40), draw(2, 7, 40), draw(2, 5, 7)
    by_both = vmap(grad(lambda w, x, q: (dense(x, w, None, way) * q).sum(), argnums=(0, 1)))
    assert error(by_both(w, size * x, q)[0], q.mT @ (size * x)) < 2e-3
    assert error(by_both(size * w, x, q)[1], q @ (size * w)) < 2e-3
