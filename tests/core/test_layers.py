"""The exchanged layers equal torch's, padded too: BatchNorm, Dropout, LSTM."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from core.nets import F64, KEY, close, gradients, numbers, seeded
from undrift.core.ops import Pass, prepare, read_buffers, running
from undrift.errors import TaskError

# --- BatchNorm ------------------------------------------------------------------------------------
NORMS = [
    (nn.BatchNorm1d, (7, 3)),
    (nn.BatchNorm1d, (7, 3, 4)),
    (nn.BatchNorm2d, (7, 3, 4, 2)),
    (nn.BatchNorm3d, (7, 3, 2, 2, 2)),
]
OPTIONS = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": 0.3, "eps": 0.1},
]


def norm_of(kind, options) -> nn.Module:
    norm = kind(3, **options).to(F64)
    with torch.no_grad():
        for i, p in enumerate(norm.parameters()):
            p.copy_(numbers(3) + i)
        if norm.running_mean is not None:
            norm.running_mean.copy_(numbers(3))
            norm.running_var.copy_(numbers(3).exp())
            norm.num_batches_tracked.fill_(3)
    return norm


@pytest.mark.parametrize("kind, shape", NORMS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("padding", [None, 0, 3])
def test_batch_norm_equals_torch(kind, shape, options, padding):
    norm, x = norm_of(kind, options), numbers(*shape)
    ours = prepare(norm)
    padded, mask = x, None
    if padding is not None:
        padded = torch.cat([x, torch.full((padding, *shape[1:]), float("nan"), dtype=F64)])
        mask = torch.arange(len(padded)) < 7
    run = Pass(mask, KEY, True)
    y, g = gradients(ours, padded, run, 7)
    before = copy.deepcopy(norm.state_dict())
    expected, h = gradients(norm, x, Pass(), 7)
    close(y, expected)
    for a, b in zip(g, h, strict=True):
        close(a[:7] if a.dim() > 1 else a, b)
    assert run.new_buffers.keys() == read_buffers(ours).keys()
    for name, value in run.new_buffers.items():
        close(value, norm.state_dict()[name])
        assert torch.equal(read_buffers(ours)[name], before[name])


def test_the_cumulative_average_starts_at_the_first_batch():
    norm = nn.BatchNorm1d(3, momentum=None).to(F64)
    with running(Pass(training=True)) as p:
        prepare(norm)(numbers(6, 3))
    norm(numbers(6, 3))
    close(p.new_buffers["running_var"], norm.running_var)


@pytest.mark.parametrize("run, flag", [(Pass(), True), (Pass(key=KEY, training=True), False)])
def test_batch_norm_in_evaluation_uses_what_it_remembers(run, flag):
    norm, x = norm_of(nn.BatchNorm2d, {}), numbers(7, 3, 4, 2)
    ours = prepare(norm).train(flag)
    y, g = gradients(ours, x, run, 7)
    expected, h = gradients(norm.eval(), x, Pass(), 7)
    close(y, expected)
    for a, b in zip(g, h, strict=True):
        close(a, b)
    assert not run.new_buffers


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_gradients_of_padding_stay_there(bad):
    ours, x = prepare(norm_of(nn.BatchNorm1d, {})), numbers(5, 3).requires_grad_()
    mask = torch.arange(5) < 4
    with running(Pass(mask, KEY, True)):
        y = ours(x)
    coming = torch.where(mask[:, None], torch.ones_like(y), bad)
    for g in torch.autograd.grad(y, [x, *ours.parameters()], coming):
        assert g.isfinite().all()


@pytest.mark.parametrize("eps", [1e-5, 0.0])
def test_a_batch_of_padding_only_changes_nothing(eps):
    ours = prepare(norm_of(nn.BatchNorm2d, {"eps": eps, "momentum": None}))
    run = Pass(torch.zeros(5, dtype=torch.bool), KEY, True)
    y, g = gradients(ours, torch.full((5, 3, 2, 2), float("nan"), dtype=F64), run, 5)
    assert y.isfinite().all()
    assert all((v == 0).all() for v in g)
    for name, value in read_buffers(ours).items():
        assert torch.equal(run.new_buffers[name], value)


def test_a_single_value_per_channel_is_normalised_to_the_bias():
    ours = prepare(norm_of(nn.BatchNorm1d, {"momentum": 0.25}))
    with running(Pass(torch.tensor([True, False]), KEY, True)) as p:
        y = ours(numbers(2, 3))
    close(y[0], ours.bias.detach())
    close(p.new_buffers["running_var"], 0.75 * ours.running_var)


def test_batch_norm_in_half_precision_keeps_wide_statistics():
    ours = prepare(nn.BatchNorm1d(3)).to(torch.bfloat16)
    ours.running_mean = ours.running_mean.float()
    with running(Pass(training=True)) as p:
        y = ours(numbers(6, 3).bfloat16())
    assert y.dtype == torch.bfloat16
    assert p.new_buffers["running_mean"].dtype == torch.float32


def test_rows_that_are_not_examples_are_refused():
    ours = prepare(nn.Sequential(nn.BatchNorm1d(3)))
    with (
        pytest.raises(TaskError, match="'0' got 8 rows in a batch of 4"),
        running(Pass(torch.ones(4, dtype=torch.bool), KEY, True)),
    ):
        ours(torch.zeros(8, 3))


# --- Dropout --------------------------------------------------------------------------------------
def dropped(module: nn.Module, x: Tensor, key: Tensor | None = KEY) -> Tensor:
    with running(Pass(key=key, training=True)):
        return module(x)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share_and_scales_it(p):
    y = dropped(prepare(nn.Dropout(p)), torch.ones(100, 200, dtype=F64))
    share = (y != 0).double().mean().item()
    assert abs(share - (1 - p)) < 4 * (p * (1 - p) / 20000) ** 0.5
    close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


def test_dropout_of_nothing_and_of_everything():
    x = numbers(4, 3).requires_grad_()
    assert torch.equal(dropped(prepare(nn.Dropout(0.0)), x), x)
    y = dropped(prepare(nn.Dropout(1.0)), x)
    assert (y == 0).all()
    assert (torch.autograd.grad(y.sum(), x)[0] == 0).all()


def test_decisions_do_not_depend_on_precision_padding_or_company():
    ours, x = prepare(nn.Dropout(0.4)), torch.ones(7, 5)
    y = dropped(ours, x)
    assert torch.equal(y != 0, dropped(ours, x.double()) != 0)
    assert torch.equal(y, dropped(ours, torch.ones(10, 5))[:7])
    keys = torch.stack([torch.tensor(5), KEY])
    assert torch.equal(y, vmap(lambda k: dropped(ours, x, k))(keys)[1])
    assert not torch.equal(y, dropped(ours, x, keys[0]))


def test_layers_uses_and_keys_decide_apart():
    drop = nn.Dropout(0.5)
    ours, x = prepare(nn.ModuleList([drop, nn.Dropout(0.5)])), torch.ones(50, 50)
    with running(Pass(key=KEY, training=True)):
        a, b, c = ours[0](x), ours[0](x), ours[1](x)
    d = dropped(ours[0], x, KEY + 1)
    for other in (b, c, d):
        assert abs(((a != 0) == (other != 0)).double().mean() - 0.5) < 0.05
    assert torch.equal(a, dropped(ours[0], x))


@pytest.mark.parametrize(
    "kind, shape",
    [(nn.Dropout1d, (4, 50, 3)), (nn.Dropout2d, (4, 50, 3, 2)), (nn.Dropout3d, (4, 50, 2, 1, 2))],
)
def test_channel_dropout_drops_whole_channels(kind, shape):
    y = dropped(prepare(kind(0.5)), torch.ones(shape)).flatten(2)
    assert torch.equal(y.amin(2), y.amax(2))
    assert 0 < (y[..., 0] == 0).sum() < 200


def test_dropout_rests_in_evaluation():
    ours, x = prepare(nn.Dropout(0.5)), numbers(4, 3)
    with running(Pass()):
        assert torch.equal(ours(x), x)
    assert torch.equal(dropped(ours.eval(), x, None), x)


def test_dropout_without_a_key_is_refused():
    with pytest.raises(TaskError, match="no key"):
        dropped(prepare(nn.Dropout(0.5)), torch.ones(2, 3), None)


# --- LSTM -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_lstm_equals_torch(layers, both, bias, batch_first, given):
    options = {"bidirectional": both, "bias": bias, "batch_first": batch_first}
    plain = seeded(nn.LSTM, 3, 4, layers, **options)
    x = numbers(2, 5, 3) if batch_first else numbers(5, 2, 3)
    size = layers * (2 if both else 1)
    state = (numbers(size, 2, 4), numbers(size, 2, 5)[..., 1:]) if given else None
    results = []
    for module in (plain, prepare(plain)):
        inputs = [x.clone().requires_grad_(), *module.parameters()]
        with running(Pass(key=KEY, training=True)):
            y, (h, c) = module(inputs[0], state)
        loss = y.sin().sum() + (h * h).sum() + c.cos().sum()
        results.append([y, h, c, *torch.autograd.grad(loss, inputs)])
    for a, b in zip(*results, strict=True):
        close(a, b)


def test_lstm_takes_a_single_sequence():
    plain = seeded(nn.LSTM, 3, 4, batch_first=True)
    x, state = numbers(5, 3), (numbers(1, 4), numbers(1, 4))
    with running(Pass()):
        y, (h, c) = prepare(plain)(x, state)
    expected, (h2, c2) = plain(x, state)
    for a, b in [(y, expected), (h, h2), (c, c2)]:
        close(a, b)


@pytest.mark.parametrize("batch_first", [False, True])
def test_dropout_between_lstm_layers_ignores_padding(batch_first):
    ours = prepare(seeded(nn.LSTM, 3, 4, 3, dropout=0.5, batch_first=batch_first))
    rows = 0 if batch_first else 1
    x = numbers(7, 5, 3).transpose(0, rows)
    padded = torch.cat([x, torch.zeros_like(x)], rows)
    y = dropped(ours, x)[0]
    close(dropped(ours, padded)[0].narrow(rows, 0, 7), y)
    assert not torch.allclose(y, dropped(ours, x, KEY + 1)[0])
    assert not torch.allclose(y, dropped(prepare(ours).eval(), x)[0])


def test_lstm_refuses_what_it_cannot_do():
    with pytest.raises(TaskError, match="proj_size=2"):
        prepare(nn.LSTM(3, 4, proj_size=2))
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3, 3)])
    with pytest.raises(TaskError, match="PackedSequence"):
        dropped(prepare(nn.LSTM(3, 4)), packed)
    state = (torch.zeros(1, 2, 4), torch.zeros(1, 1, 4))
    with pytest.raises(RuntimeError, match="c_0"), running(Pass()):
        prepare(nn.LSTM(3, 4))(torch.zeros(5, 2, 3), state)
