"""The convolution seam: every way gives torch's numbers, however vmap and grad are nested."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from torch.nn import functional as F

from undrift.core import choosing, conv_ways, precision
from undrift.core.conv_ways import TORCH_WAYS, TorchWay
from undrift.core.convolution import WAYS, ConvShape, Seam, Way, convolve
from undrift.core.dense import dense
from undrift.errors import ConfigError, TaskError
from undrift.testing.compare import distance

C, E, B = 3, 2, 2
SHAPES = {
    "plain": ConvShape(),
    "relu": ConvShape(relu=True),
    "pool": ConvShape(pool=True),
    "both": ConvShape(padding=(1, 1), relu=True, pool=True),
    "odd": ConvShape((2, 1), (1, 2), (1, 2), 1, True, True),
    "groups": ConvShape(groups=2, relu=True),
}


def plain(x: Tensor, w: Tensor, b: Tensor | None, shape: ConvShape) -> Tensor:
    y = F.conv2d(x, w, b, *shape[:4])
    y = y.relu() if shape.relu else y
    return F.max_pool2d(y, 2) if shape.pool else y


def numbers(*sizes: int) -> Tensor:
    source = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, generator=source, dtype=torch.float64)


def operands(shape: ConvShape, *lead: int) -> tuple[Tensor, Tensor, Tensor]:
    outputs = 5 if shape.groups == 1 else 6
    w = numbers(*lead, outputs, 4 // shape.groups, 3, 3)
    return w, numbers(*lead, outputs), numbers(*lead, B, 4, 9, 8)


def objective(op, shape: ConvShape):
    """A scalar function of (w, b, x) whose gradient differs everywhere."""

    def value(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return (op(x, w, b) ** 2).mean()

    return value


def both(way: str, shape: ConvShape):
    def seamed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return convolve(x, w, b, shape, Way(way))

    return objective(seamed, shape), objective(lambda x, w, b: plain(x, w, b, shape), shape)


def close(found, wanted) -> None:
    assert distance(list(found), list(wanted)) <= 1e-12


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("way", WAYS)
class TestEveryWay:
    def test_alone(self, way, shape):
        w, b, x = operands(shape)
        close([convolve(x, w, b, shape, Way(way))], [plain(x, w, b, shape)])
        close([convolve(x, w, None, shape, Way(way))], [plain(x, w, None, shape)])
        mine, torchs = both(way, shape)
        close(grad(mine, (0, 1, 2))(w, b, x), grad(torchs, (0, 1, 2))(w, b, x))

    def test_gradients_inside_vmap(self, way, shape):
        mine, torchs = both(way, shape)
        values = operands(shape, C)
        each = [grad(torchs, (0, 1, 2))(*one) for one in zip(*values, strict=True)]
        close(vmap(grad(mine, (0, 1, 2)))(*values), map(torch.stack, zip(*each, strict=True)))

    def test_gradients_outside_vmap(self, way, shape):
        mine, torchs = both(way, shape)
        leaves = [v.requires_grad_() for v in operands(shape, C)]
        found = torch.autograd.grad(vmap(mine)(*leaves).sum(), leaves)
        close(found, torch.autograd.grad(sum(map(torchs, *leaves)), leaves))

    def test_two_axes(self, way, shape):
        mine, torchs = both(way, shape)
        values = operands(shape, E, C)
        flat = [v.flatten(0, 1) for v in values]
        wanted = vmap(grad(torchs, (0, 1, 2)))(*flat)
        found = vmap(vmap(grad(mine, (0, 1, 2))))(*values)
        close([v.flatten(0, 1) for v in found], wanted)

    def test_shared(self, way, shape):
        mine, torchs = both(way, shape)
        (w, b, _), (_, _, x) = operands(shape), operands(shape, C)
        for dims, values in (
            ((None, None, 0), (w, b, x)),
            ((0, 0, None), (*operands(shape, C)[:2], x[0])),
        ):
            found = vmap(grad(mine, (0, 1, 2)), in_dims=dims)(*values)
            close(found, vmap(grad(torchs, (0, 1, 2)), in_dims=dims)(*values))


def test_shared_weights_outside_vmap():
    shape = SHAPES["both"]
    mine, torchs = both("unfold", shape)
    (w, b, _), (_, _, x) = operands(shape), operands(shape, C)
    leaves = [w.requires_grad_(), b.requires_grad_()]
    found = torch.autograd.grad(vmap(mine, (None, None, 0))(w, b, x).sum(), leaves)
    close(found, torch.autograd.grad(sum(torchs(w, b, one) for one in x), leaves))


def test_a_vmap_inside_shares_the_outer_ones_weights():
    shape = SHAPES["relu"]
    mine, torchs = both("loop", shape)
    (w, b, _), (_, _, x) = operands(shape, E), operands(shape, C)

    def nested(f):
        inner = vmap(grad(f), in_dims=(None, None, 0))
        return vmap(inner, in_dims=(0, 0, None))(w, b, x)

    close([nested(mine)], [nested(torchs)])


@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives(way):
    mine, torchs = both(way, SHAPES["both"])
    values = operands(SHAPES["both"])
    close([jacrev(grad(mine))(*values)], [jacrev(grad(torchs))(*values)])


def test_decisions_at_zero_and_ties():
    """ReLU has no gradient at 0; of equal values the first of a pooled square gets it."""
    x = torch.tensor([[1.0, 1.0, -2.0, 0.0], [1.0, 0.0, 0.0, -1.0]], dtype=torch.float64)[
        None, None
    ]
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for shape in (ConvShape(relu=True), ConvShape(pool=True), ConvShape(relu=True, pool=True)):
        found = grad(lambda v, s=shape: convolve(v, one, None, s, Way("loop")).sum())(x)
        wanted = grad(lambda v, s=shape: plain(v, one, None, s).sum())(x)
        assert torch.equal(found, wanted)


def spied(monkeypatch, name: str) -> list[tuple[int, ...]]:
    """Record which gradients a way is asked for."""
    asked: list[tuple[int, ...]] = []

    def backward(*args):
        asked.append(args[-1])
        return TORCH_WAYS[name].backward(*args)

    ways = {**TORCH_WAYS, "spy": TorchWay(TORCH_WAYS[name].forward, backward)}
    monkeypatch.setattr("undrift.core.convolution.TORCH_WAYS", ways)
    monkeypatch.setattr("undrift.core.convolution.WAYS", tuple(ways))
    return asked


def test_a_first_layer_needs_no_input_gradient(monkeypatch):
    asked = spied(monkeypatch, "grouped")
    mine, _ = both("spy", SHAPES["both"])
    w, b, x = operands(SHAPES["both"], C)
    vmap(grad(mine, (0, 1)))(w, b, x)
    leaves = [w.requires_grad_(), b.requires_grad_()]
    torch.autograd.grad(vmap(mine)(w, b, x).sum(), leaves)
    grad(mine, (0, 1))(w[0].detach(), b[0].detach(), x[0])
    assert asked == [(False, True)] * 3


def test_a_frozen_layer_passes_its_gradient_on(monkeypatch):
    asked = spied(monkeypatch, "grouped")
    mine, torchs = both("spy", SHAPES["relu"])
    w, b, x = operands(SHAPES["relu"], C)
    close([vmap(grad(mine, 2))(w, b, x)], [vmap(grad(torchs, 2))(w, b, x)])
    assert asked == [(True, False)]


@pytest.mark.parametrize(("kind", "bound"), [("bf16", 2e-2), ("fp16", 2e-3), ("tf32", 1e-6)])
@pytest.mark.parametrize("way", ["grouped", "channels_last", "unfold", "loop"])
def test_precisions(way, kind, bound):
    shape = ConvShape(padding=(1, 1))
    w, b, x = (t.float() for t in operands(shape, C))
    for narrow in (False, True):
        how = Way(way, kind, narrow)
        y = vmap(lambda x, w, b, how=how: convolve(x, w, b, shape, how))(x, w, b)
        wanted = vmap(lambda x, w, b: plain(x, w, b, shape))(x, w, b)
        assert distance([y.float()], [wanted]) <= bound
        assert y.dtype == (precision.PRECISIONS[kind] if narrow else torch.float32)
    mine = objective(lambda x, w, b: convolve(x, w, b, shape, Way(way, kind)), shape)
    torchs = objective(lambda x, w, b: plain(x, w, b, shape), shape)
    found, right = vmap(grad(mine, (0, 1, 2)))(w, b, x), vmap(grad(torchs, (0, 1, 2)))(w, b, x)
    assert distance(list(found), list(right)) <= bound
    assert {t.dtype for t in found} == {torch.float32}


def test_float64_stays_float64():
    w, b, x = operands(SHAPES["both"])
    y = convolve(x, w, b, SHAPES["both"], Way("grouped", "bf16", narrow=True))
    close([y], [plain(x, w, b, SHAPES["both"])])


def switches() -> tuple[str, str]:
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision


def set_matmul(value: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = value == "tf32"  # torch wants both in agreement
    torch.backends.cuda.matmul.fp32_precision = value


@pytest.mark.parametrize("before", ["none", "tf32", "ieee"])
@pytest.mark.parametrize("name", ["tf32", "float32"])
def test_tf32_switches_go_back(monkeypatch, name, before):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    set_matmul(before)
    try:
        kept = switches()
        with pytest.raises(ZeroDivisionError), precision.multiplying(name):
            assert [s == "tf32" for s in switches()] == [name == "tf32"] * 2
            assert torch.backends.cuda.matmul.allow_tf32 == (name == "tf32")
            assert torch.backends.cudnn.allow_tf32 == (name == "tf32")
            assert torch.backends.cudnn.deterministic
            raise ZeroDivisionError
        assert switches() == kept and not torch.backends.cudnn.deterministic
    finally:
        set_matmul("none")


def test_workers_that_multiply_at_once_leave_the_switch_as_it_was():
    """One comes after another has come, and goes after it has gone."""
    assert not torch.backends.cudnn.deterministic
    first, second = (precision.multiplying("float32") for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.backends.cudnn.deterministic, "the second is still inside"
    second.__exit__(None, None, None)
    assert not torch.backends.cudnn.deterministic


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="named 'gruped'"):
        Seam(default="gruped")
    with pytest.raises(ConfigError, match="way to convolve"):
        Seam(choices={"conv1": "cudnn"})
    with pytest.raises(ConfigError, match="named 'bf61'"):
        Seam("bf61")
    w, _, x = operands(ConvShape())
    with pytest.raises(ConfigError, match="way to convolve"):
        convolve(x, w, None, None, Way("none"))
    with pytest.raises(TaskError, match=r"got \(4, 9, 8\)"):
        convolve(x[0], w, None)


# ---- linear layers -------------------------------------------------------------------------------


def linear_values(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    return numbers(*lead, 5, 7), numbers(*lead, 5), numbers(*lead, B, 3, 7)


def linear_both(kind: str = "float32"):
    def mine(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return (dense(x, w, b, Way("grouped", kind)) ** 2).mean()

    return mine, lambda w, b, x: (F.linear(x, w, b) ** 2).mean()


def test_linear_layers_in_every_mode():
    mine, torchs = linear_both("bf16")
    all_of = (0, 1, 2)
    w, b, x = linear_values()
    close(grad(mine, all_of)(w, b, x), grad(torchs, all_of)(w, b, x))
    close([dense(x[0, 0], w, None, Way("grouped", "tf32"))], [F.linear(x[0, 0], w)])
    wanted = vmap(grad(torchs, all_of))(*linear_values(C))
    close(vmap(grad(mine, all_of))(*linear_values(C)), wanted)
    leaves = [v.requires_grad_() for v in linear_values(C)]
    close(torch.autograd.grad(vmap(mine)(*leaves).sum(), leaves), wanted)
    nested = vmap(vmap(grad(mine, all_of)))(*linear_values(E, C))
    close(nested, vmap(vmap(grad(torchs, all_of)))(*linear_values(E, C)))
    values = (*linear_values()[:2], linear_values(C)[2])
    dims = (None, None, 0)
    close(vmap(grad(mine), dims)(*values), vmap(grad(torchs), dims)(*values))
    close([jacrev(grad(mine))(w, b, x)], [jacrev(grad(torchs))(w, b, x)])


@pytest.mark.parametrize(("kind", "bound"), [("bf16", 2e-2), ("fp16", 2e-3), ("tf32", 1e-6)])
def test_linear_precisions(kind, bound):
    mine, torchs = linear_both(kind)
    values = [v.float() for v in linear_values(C)]
    found = vmap(grad(mine, (0, 1, 2)))(*values)
    assert distance(list(found), list(vmap(grad(torchs, (0, 1, 2)))(*values))) <= bound
    assert {t.dtype for t in found} == {torch.float32}
    w, b, x = (v[0] for v in values)
    assert dense(x, w, b, Way("grouped", kind, True)).dtype == precision.PRECISIONS[kind]
    assert dense(x, w, b, Way("grouped", kind)).dtype == torch.float32


def test_a_linear_layer_says_what_does_not_fit():
    w, b, x = linear_values()
    with pytest.raises(TaskError, match=r"takes 7 inputs, got x of \(2, 3, 6\)"):
        dense(x[..., :6], w, b, Way())


def test_output_sizes():
    for shape in SHAPES.values():
        w, b, x = operands(shape)
        size = F.conv2d(x, w, b, *shape[:4]).shape[-2:]
        assert conv_ways.output_size(x.shape, w.shape, shape) == tuple(size)


# ---- choosing ------------------------------------------------------------------------------------


@pytest.fixture
def no_choices(monkeypatch):
    monkeypatch.setattr(choosing, "_ways", {})


def test_the_fastest_way_is_taken_and_remembered(no_choices, monkeypatch):
    asked = []
    times = {"grouped": 3.0, "unfold": 1.0, "loop": 2.0}
    monkeypatch.setattr(choosing, "_seconds", lambda work, device: times[work()])
    for _ in range(2):
        found = choosing.choose(
            "a layer", torch.device("cpu"), times, lambda n: asked.append(n) or n
        )
        assert found == "unfold"
    assert asked == list(times)
    assert choosing.chosen_ways() == {"a layer, cpu": "unfold"}
    choosing.use_ways({"a layer, cpu": "loop"})
    assert choosing.choose("a layer", torch.device("cpu"), times, lambda n: n) == "loop"


def test_a_way_that_fails_is_not_taken(no_choices):
    def work(name: str) -> None:
        if name == "first":
            raise RuntimeError("out of memory")

    assert choosing.choose("x", torch.device("cpu"), ["first", "second"], work) == "second"


def test_auto_chooses_for_the_whole_cohort(no_choices):
    mine, torchs = both("auto", SHAPES["both"])
    values = operands(SHAPES["both"], C)
    close(vmap(grad(mine, (0, 1, 2)))(*values), vmap(grad(torchs, (0, 1, 2)))(*values))
    (key,) = choosing.chosen_ways()
    assert key.startswith("convolution (3, 2, 4, 9, 8) by (5, 4, 3, 3)")
