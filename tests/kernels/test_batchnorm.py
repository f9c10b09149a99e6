"""A cohort's BatchNorm on the kernels, against the plain arithmetic in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

pytest.importorskip("triton", reason="the kernels need triton")

from crossed import crossed
from undrift.core.batchnorm import Running, normalise, remember
from undrift.core.normalising import Norm, normalised
from undrift.kernels import batchnorm
from undrift.testing.compare import distance

C, E, B = 3, 2, 5
EPS = 1e-5
BOUND = 2e-6  # of float32 against float64, relative to the largest value
SIZES = {
    "images": (6, 4, 6),
    "odd": (3, 5, 3),
    "wide": (10, 2, 2),
    "vectors": (70,),
    "lines": (6, 7),
}
NAN = float("nan")


def channels_last(x: Tensor) -> Tensor:
    """Lay out [..., c, H, W] as convolutions do."""
    return x.movedim(-3, -1).contiguous().movedim(-1, -3)


def operands(size: tuple[int, ...], device, *lead: int) -> tuple[Tensor, ...]:
    """x, mask, scale, shift and a gradient; scale and shift are views of one matrix."""
    source = torch.Generator().manual_seed(sum(size))
    x = 3.0 + 2.0 * torch.randn((*lead, B, *size), generator=source)
    rows = torch.randn((*lead, 2 * size[0] + 3), generator=source)
    scale, shift = rows[..., 1 : size[0] + 1] + 1.5, rows[..., -size[0] :]
    mask = torch.rand((*lead, B), generator=source) < 0.7
    g = torch.randn((*lead, B, *size), generator=source)
    return tuple(t.to(device) for t in (x, mask, scale, shift, g))


def plain(x: Tensor, mask, scale, shift, how: Norm, fixed=None):
    """What the op means."""
    y, stats = normalise(x, mask, fixed, scale, shift, how.eps)
    y = y.relu() if how.relu else y
    return F.max_pool2d(y, 2) if how.pool else y, stats


def objective(op, how: Norm):
    def one(x, scale, shift, mask, g):
        y, stats = op(x, mask, scale, shift, how)
        weight = g[tuple(slice(n) for n in y.shape)]
        return (y.float() * weight).sum(), (y, stats)

    return grad(one, (0, 1, 2), has_aux=True)


def kernels(x, mask, scale, shift, how: Norm, fixed=None):
    return normalised(x, mask, fixed, scale, shift, how, use_kernels=True)


def both(x: Tensor, mask, scale, shift, g, how: Norm, times: int = 1):
    """Outputs, statistics and gradients: the kernels', and those of the plain op in float64."""
    mine, other = objective(kernels, how), objective(plain, how)
    for _ in range(times):
        mine, other = vmap(mine), vmap(other)
    found = mine(x, scale, shift, mask, g)
    wide = (t.double() for t in (x, scale, shift))
    return found, other(*wide, mask, g.double())


def gap(found, wanted) -> float:
    """The largest difference, relative to the largest value of each tensor."""
    ours, theirs = torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted)
    return max(
        float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30))
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture
def used(monkeypatch) -> list[str]:
    """Record the calls that really reach the kernels."""
    calls: list[str] = []
    for name in ("statistics", "apply", "gradients"):
        original = getattr(batchnorm, name)

        def counted(*args, name=name, original=original):
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(batchnorm, name, counted)
    return calls


@pytest.mark.parametrize(("size", "relu"), crossed(SIZES, [True, False]))
def test_values_statistics_and_gradients(size, relu, device, used):
    how = Norm(EPS, torch.float32, relu)
    assert gap(*both(*operands(SIZES[size], device, C), how)) <= BOUND
    assert used == ["statistics", "apply", "gradients"]


@pytest.mark.parametrize(("relu", "planes"), crossed([True, False], [False, True]))
def test_pooled_and_in_the_order_of_convolutions(relu, planes, device):
    x, *rest, g = operands(SIZES["images"], device, C)
    x = channels_last(x)
    how = Norm(EPS, torch.float32, relu, True, planes)
    (grads, (y, stats)), wanted = both(x, *rest, g, how)
    assert gap((grads, (y, stats)), wanted) <= BOUND
    assert y.is_contiguous() if planes else channels_last(y).stride() == y.stride()
    assert grads[0].stride() == x.stride(), "nothing is copied on the way back"


def test_the_order_of_memory_changes_nothing(device):
    x, mask, scale, shift, g = operands(SIZES["wide"], device, C)
    how = Norm(EPS, torch.float32, True)
    for ours, theirs in ((x, channels_last(g)), (channels_last(x), g)):
        assert gap(*both(ours, mask, scale, shift, theirs, how)) <= BOUND


def test_clients_that_lie_between_each_other(device, monkeypatch):
    """As grouped convolutions leave them; far apart they are copied, for offsets have 32 bits."""
    x, mask, scale, shift, g = operands(SIZES["images"], device, C)
    mixed = x.transpose(0, 1).contiguous().transpose(0, 1)
    how = Norm(EPS, torch.float32, True)
    assert batchnorm._flat(mixed).data_ptr() == mixed.data_ptr()
    assert gap(*both(mixed, mask, scale, shift, g, how)) <= BOUND
    monkeypatch.setattr(batchnorm, "MOST_OFFSETS", x[0].numel())
    assert batchnorm._flat(x).data_ptr() == x.data_ptr() and batchnorm._flat(mixed).is_contiguous()
    assert gap(*both(mixed, mask, scale, shift, g, how)) <= BOUND


def test_an_odd_image_is_pooled_apart(device, used):
    how = Norm(EPS, torch.float32, True, True, planes=True)
    found, wanted = both(*operands(SIZES["odd"], device, C), how)
    assert gap(found, wanted) <= BOUND
    assert used == ["statistics", "apply", "gradients"] and found[1][0].is_contiguous()


@pytest.mark.parametrize("pool", [False, True])
def test_rows_of_padding_count_for_nothing(pool, device):
    x, mask, scale, shift, g = operands(SIZES["images"], device, C)
    mask[0], mask[1] = True, False  # one client has no example at all
    mask[2] = torch.arange(B, device=device) < 2
    how = Norm(0.0, torch.float32, True, pool)
    wanted = vmap(objective(kernels, how))(x.clone(), scale, shift, mask, g)
    x[~mask], g[~mask] = NAN, NAN
    found, (y, stats) = vmap(objective(kernels, how))(x, scale, shift, mask, g)
    for a, b in zip((*found, y, *stats), (*wanted[0], wanted[1][0], *wanted[1][1]), strict=True):
        assert torch.equal(a, b)
    assert not y[~mask].any() and not found[0][~mask].any()
    assert stats.size.tolist() == [B * 24.0, 0.0, 48.0]
    assert not stats.mean[1].any() and torch.equal(stats.var[1], torch.ones_like(stats.var[1]))
    assert not any(by[1].any() for by in found)


@pytest.mark.parametrize("pool", [False, True])
def test_a_client_that_diverged_is_seen_and_alone(pool, device):
    x, mask, scale, shift, g = operands(SIZES["images"], device, C)
    mask[:] = True
    x[1, 2, 3, 0, 0] = NAN
    (by, (y, _)), (by_plain, (wanted, _)) = both(
        *(x, mask, scale, shift, g), Norm(EPS, torch.float32, True, pool)
    )
    assert y[1, :, 3].isnan().all()
    for a, b in zip((y, *by), (wanted, *by_plain), strict=True):
        assert torch.equal(a.isnan(), b.isnan())


def test_without_a_mask_and_without_scale_or_shift(device):
    x, _, scale, shift, g = operands(SIZES["images"], device, C)
    how = Norm(EPS, torch.float32, True)

    for a, b in ((None, shift), (scale, None), (None, None)):

        def one(op, x, a=a, b=b):
            dims = (0, None if a is None else 0, None if b is None else 0, 0)
            run = vmap(grad(lambda x, a, b, g: (op(x, None, a, b, how)[0] * g).sum()), dims)
            return run(x, a, b, g.to(x.dtype))

        if a is not None:
            a = a.double()
        found = one(kernels, x)
        wanted = one(plain, x.double(), a, None if b is None else b.double())
        assert gap(found, wanted) <= BOUND


def test_fixed_statistics(device, used):
    x, mask, scale, shift, g = operands(SIZES["images"], device, C)
    mean, var = scale - 1, shift.square() + 0.5
    how = Norm(EPS, torch.float32, True, True)

    def run(op, kind):
        def one(x, scale, shift, mean, var, mask, g):
            y, _ = op(x, mask, scale, shift, how, (mean, var))
            return (y * g[:, :, :2, :3]).sum(), y

        parts = (t.to(kind) for t in (x, scale, shift, mean, var))
        return vmap(grad(one, (0, 1, 2), has_aux=True))(*parts, mask, g.to(kind))

    assert gap(run(kernels, torch.float32), run(plain, torch.float64)) <= BOUND
    assert used == ["apply", "gradients"]


def test_by_fixed_statistics_one_pixel_spoils_its_square_alone(device):
    x, _, scale, shift, _ = (t[0] for t in operands(SIZES["images"], device, 1))
    x[1, 2, 2, 3] = NAN  # the second of its square
    how, fixed = Norm(EPS, torch.float32, True, True), (shift, scale.square() + 0.5)
    found, wanted = (op(x, None, scale, shift, how, fixed)[0] for op in (kernels, plain))
    assert torch.equal(found.isnan(), wanted.isnan()) and int(found.isnan().sum()) == 1


def test_other_modes(device, used):
    """Nested vmaps, gradients taken outside of them, shared weights, one client."""
    how = Norm(EPS, torch.float32, True, True)
    assert gap(*both(*operands(SIZES["images"], device, E, 2), how, times=2)) <= BOUND
    x, mask, scale, shift, g = operands(SIZES["images"], device, C)
    assert gap(*both(x[0], mask[0], scale[0], shift[0], g[0], how, times=0)) <= BOUND
    leaves = [t.clone().requires_grad_() for t in (x, scale, shift)]
    y = vmap(lambda x, a, b, m: kernels(x, m, a, b, how)[0])(*leaves, mask)
    outside = torch.autograd.grad((y * g[:, :, :, :2, :3]).sum(), leaves)
    inside = vmap(objective(kernels, how))(x, scale, shift, mask, g)[0]
    assert all(map(torch.equal, outside, inside))
    shared = vmap(objective(kernels, how), (0, None, None, 0, 0))(x, scale[0], shift[0], mask, g)
    alone = objective(kernels, how)(x[1], scale[0], shift[0], mask[1], g[1])
    assert torch.equal(shared[0][1][1], alone[0][1])
    assert used == ["statistics", "apply", "gradients"] * 6


def test_a_large_mean_costs_no_digits_of_a_small_variance(device, monkeypatch):
    monkeypatch.setattr(batchnorm, "VALUES", 128)  # so that there are several parts
    x, mask, *_ = operands(SIZES["images"], device, C)
    x = 1000.0 + 0.01 * x
    x[0, 0, :, 0] += 10.0  # the first values are unlike the others
    mask[0], mask[1] = True, torch.arange(B, device=device) > 2  # or padding

    def stats(op, x: Tensor):
        return vmap(lambda x, m: op(x, m, None, None, Norm(EPS, x.dtype))[1])(x, mask)

    found, wanted = stats(kernels, x), stats(plain, x.double())
    assert gap(found.var, wanted.var) <= 1e-6 and gap(found.mean, wanted.mean) <= 1e-7


def test_equal_inputs_give_equal_bits(device, monkeypatch):
    """Once more, and for a client without its cohort."""
    monkeypatch.setattr(batchnorm, "VALUES", 16)
    x, mask, scale, shift, g = operands((3, 2, 2), device, C)
    step = objective(kernels, Norm(EPS, torch.float32, True))
    first, again = (vmap(step)(x[:2], scale[:2], shift[:2], mask[:2], g[:2]) for _ in range(2))
    alone = step(x[1], scale[1], shift[1], mask[1], g[1])
    ours, theirs, own = map(torch.utils._pytree.tree_leaves, (first, again, alone))
    assert all(map(torch.equal, ours, theirs))
    assert all(torch.equal(a[1], b) for a, b in zip(ours, own, strict=True))


def test_sums_in_many_parts_are_the_sums_in_one(device, monkeypatch):
    values = operands((2, 2, 4), device, 1)
    how = Norm(EPS, torch.float32, True)
    found = []
    for most in (1, 128):
        monkeypatch.setattr(batchnorm, "MOST_SPLITS", most)
        monkeypatch.setattr(batchnorm, "VALUES", 8)
        run, wanted = both(*values, how)
        assert gap(run, wanted) <= BOUND
        found.append(run)
    assert gap(*found) <= BOUND


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_narrow_inputs_and_outputs(kind, device):
    """Sums are float32 whatever is read; outputs round once."""
    if kind == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter does not know bf16")
    x, mask, scale, shift, g = operands(SIZES["images"], device, C)
    x = channels_last(x).to(kind)
    how, eps = Norm(EPS, kind, True, True), torch.finfo(kind).eps
    found, wanted = both(x, mask, scale, shift, g, how)
    assert found[0][0].dtype == found[1][0].dtype == kind
    assert gap(found[1][1], wanted[1][1]) <= BOUND, "statistics"
    assert gap(found[1][0], wanted[1][0]) <= eps and gap(found[0], wanted[0]) <= 2 * eps


def test_running_statistics(device):
    x, mask, *_ = operands(SIZES["images"], device, C)
    mask[1] = False

    def one(op, kind):
        def run(x, mask):
            old = Running(x.new_zeros(6), x.new_ones(6), torch.tensor(0, device=device))
            return remember(old, op(x, mask, None, None, Norm(EPS, kind))[1], 0.1)

        return vmap(run)(x.to(kind), mask)

    found, wanted = one(kernels, torch.float32), one(plain, torch.float64)
    assert torch.equal(found.batches, wanted.batches) and found.batches.tolist() == [1, 0, 1]
    assert gap(found[:2], wanted[:2]) <= BOUND


def test_second_derivatives_are_torchs(device):
    x, mask, scale, shift, g = operands((2, 2, 2), device, C)

    def twice(op, kind):
        def first(x, scale, shift, mask, g):
            return (op(x, mask, scale, shift, Norm(EPS, kind))[0] ** 2 * g).sum()

        def second(*t):
            return sum(p.square().sum() for p in grad(first, (0, 1, 2))(*t))

        numbers = (t.to(kind) for t in (x, scale, shift))
        return vmap(grad(second, (0, 1, 2)))(*numbers, mask, g.to(kind))

    assert gap(twice(kernels, torch.float32), twice(plain, torch.float64)) <= 1e-4


def test_what_the_kernels_leave_to_torch(device, used):
    x, mask, scale, shift, _ = operands(SIZES["images"], device, C)
    how = Norm(EPS, torch.float64, True)
    double = [t.double() for t in (x, scale, shift)]
    y = vmap(lambda x, a, b, m: kernels(x, m, a, b, how)[0])(*double, mask)
    assert distance([y], [vmap(lambda x, a, b, m: plain(x, m, a, b, how)[0])(*double, mask)]) == 0
    assert not used


@pytest.mark.parametrize("precision", ["float32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_the_programs_compile_for_a_card_that_is_not_here(precision, compiled):
    lines = compiled(precision)
    names = ["moments", "join_moments", "normalise", "slopes", "join_slopes", "input_gradient"]
    assert [name for name, _ in lines] == names
    large = [widths for name, widths in lines if not name.startswith("join")]
    assert all("v4.b32" in widths for widths in large), "channels are read 16 bytes at a time"


def test_a_device_is_asked_whether_its_numbers_are_right(device, monkeypatch, caplog):
    assert max(batchnorm._error(device, pool) for pool in (False, True)) < 1e-6
    monkeypatch.setattr(batchnorm, "interpreted", lambda: False)

    def is_wrong() -> bool:
        monkeypatch.setattr(batchnorm, "_right", set())
        monkeypatch.setattr(batchnorm, "_wrong", set())
        batchnorm.prove(device)
        return batchnorm.is_wrong(device)

    assert not is_wrong() and not caplog.text
    gradients = batchnorm.gradients
    with monkeypatch.context() as changed:
        changed.setattr(batchnorm, "gradients", lambda *v: [NAN * t for t in gradients(*v)])
        assert is_wrong(), "a gradient that is no number is not right"
    monkeypatch.setattr(batchnorm, "statistics", lambda x, mask: x.new_zeros(3, 2, 24))
    assert is_wrong() and "off by" in caplog.text
    monkeypatch.setattr(batchnorm, "apply", lambda *rest: 1 / 0)
    assert is_wrong() and "division by zero" in caplog.text
    x = torch.randn((2, 4, 6, 4, 4), device=device)
    monkeypatch.setattr(batchnorm, "takes", lambda x: True)  # torch does it, or this would fail
    normalised(x[0], None, None, None, None, Norm(EPS, torch.float32), use_kernels=True)
