"""The exchanged modules equal torch's, alone, padded and under vmap."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from undrift.core.trouble import find_trouble
from undrift.core.ops import Pass, current_pass, prepare, read_buffers, running
from undrift.errors import TaskError

F64 = torch.float64
KEY = torch.tensor(1234567)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.conv(x))))
        return self.fc(self.drop(x.flatten(1)))


class Reader(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True, **options)
        self.fc = nn.Linear(10 if self.lstm.bidirectional else 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(self.embed(x))[0][:, -1])


def seeded(make, *args, **options):
    torch.manual_seed(0)
    return make(*args, **options).to(F64)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def gradients(module: nn.Module, x: Tensor, run: Pass, rows: int) -> tuple[Tensor, list[Tensor]]:
    """Output of the first rows, and the gradients of something uneven in them."""
    x = x.clone().requires_grad_(x.is_floating_point())
    with running(run):
        y = module(x)
    y = (y[0] if isinstance(y, tuple) else y)[:rows]
    wanted = [p for p in module.parameters() if p.requires_grad] + [x] * x.is_floating_point()
    return y.detach(), list(torch.autograd.grad(y.sin().sum(), wanted))


# --- prepare ------------------------------------------------------------------------------------


def test_names_shapes_and_flags_stay():
    model = nn.ModuleDict({"cnn": Cnn(), "reader": Reader(bidirectional=True)})
    model["cnn"].norm.weight.requires_grad_(False)
    model["cnn"].drop.eval()
    twin = prepare(model)
    facts = [
        [(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()]
        + [(n, b.shape, b.dtype) for n, b in m.named_buffers()]
        + [(n, part.training) for n, part in m.named_modules()]
        for m in (model, twin)
    ]
    assert facts[0] == facts[1]
    assert list(model.state_dict()) == list(twin.state_dict())
    model.load_state_dict(twin.state_dict())


def test_the_original_is_left_alone():
    model = Cnn()
    prepare(model)
    assert type(model.norm) is nn.BatchNorm2d
    model(torch.zeros(2, 2, 4, 4))


def test_shared_submodules_stay_shared():
    norm = nn.BatchNorm1d(3)
    twin = prepare(nn.Sequential(norm, nn.Linear(3, 3), norm))
    assert twin[0] is twin[2]


def test_a_shared_batch_norm_updates_twice():
    norm = nn.BatchNorm1d(3).to(F64)
    model, x = nn.Sequential(norm, nn.Tanh(), norm), numbers(6, 3)
    with running(Pass(training=True)) as p:
        prepare(model)(x)
    model(x)
    close(p.new_buffers["0.running_mean"], norm.running_mean)
    close(p.new_buffers["0.running_var"], norm.running_var)
    assert p.new_buffers["0.num_batches_tracked"] == 2


def test_an_own_forward_is_left_alone_and_other_subclasses_are_not():
    class Own(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:
            return input

    class Named(nn.BatchNorm1d):
        def half(self) -> float:
            return self.eps / 2

    twin = prepare(nn.Sequential(Own(), Named(3)))
    assert type(twin[0]) is Own
    assert isinstance(twin[1], Named)
    assert twin[1].half() > 0
    assert list(read_buffers(twin)) == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]


def test_preparing_twice_changes_nothing():
    once = prepare(nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
    twice = prepare(once)
    assert type(twice[1]) is type(once[1])
    assert list(read_buffers(twice)) == list(read_buffers(once))


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_prepared_module_copies_and_pickles(twin_of):
    module = prepare(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.LSTM(3, 2)))
    x = torch.randn(4, 3)
    results = []
    for m in (module, twin_of(module)):
        with running(Pass(key=KEY, training=True)):
            results.append(m(x)[0])
    assert torch.equal(*results)


def test_the_root_itself_may_be_exchanged():
    assert "running_mean" in read_buffers(prepare(nn.BatchNorm1d(3)))


def test_a_lazy_module_is_refused():
    with pytest.raises(TaskError, match="lazy"):
        prepare(nn.LazyBatchNorm1d())


def test_a_call_outside_of_a_pass_is_refused():
    with pytest.raises(TaskError, match="outside of a pass"):
        prepare(nn.BatchNorm1d(3))(torch.zeros(2, 3))


# --- BatchNorm ----------------------------------------------------------------------------------

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


# --- Dropout ------------------------------------------------------------------------------------


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


# --- LSTM ---------------------------------------------------------------------------------------


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


# --- many clients at once -----------------------------------------------------------------------


def world(make, x: Tensor):
    """Three clients with their own parameters, buffers, data, masks and keys."""
    module = prepare(seeded(make))
    params = {
        n: p.detach() + 0.1 * torch.stack([numbers(*p.shape, c + 1)[..., 0] for c in range(3)])
        for n, p in module.named_parameters()
    }
    buffers = {n: torch.stack([b, b + 1, b + 2]) for n, b in read_buffers(module).items()}
    y = torch.arange(3 * x.shape[1]).reshape(3, -1) % 3
    mask = torch.arange(x.shape[1]) < torch.tensor([[4], [6], [0]])
    return module, (params, buffers, x, y, mask, torch.tensor([3, 4, 5]))


def client_gradient(module: nn.Module):
    """A step of one client: gradients, loss and new buffers."""

    def loss(params, buffers, x, y, mask, key):
        with running(Pass(mask, key, True)) as p:
            out = functional_call(module, {**params, **buffers}, (x,))
        each = torch.where(mask, F.cross_entropy(out, y, reduction="none"), 0.0)
        value = each.sum() / mask.sum().clamp(min=1)
        return value, (value, p.new_buffers)

    return grad(loss, has_aux=True)


def one(tree, c: int):
    return {n: v[c] for n, v in tree.items()} if isinstance(tree, dict) else tree[c]


WORLDS = {
    "cnn": (Cnn, numbers(3, 6, 2, 4, 4)),
    "reader": (
        lambda: Reader(dropout=0.4, bidirectional=True),
        torch.arange(90).view(3, 6, 5) % 11,
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_together_equals_one_after_the_other(name):
    module, args = world(*WORLDS[name])
    step = client_gradient(module)
    together_g, (together_loss, together_b) = vmap(step)(*args)
    assert together_b.keys() == read_buffers(module).keys()
    for c in range(3):
        g, (loss, b) = step(*(one(a, c) for a in args))
        close(together_loss[c], loss)
        for n in [*g]:
            close(together_g[n][c], g[n])
        for n in [*b]:
            close(together_b[n][c], b[n])


@pytest.mark.parametrize("name", WORLDS)
def test_the_unpadded_client_alone_gives_the_same(name):
    module, args = world(*WORLDS[name])
    together_g, (_, together_b) = vmap(client_gradient(module))(*args)
    params, buffers, x, y, mask, key = (one(a, 0) for a in args)
    g, (_, b) = client_gradient(module)(params, buffers, x[:4], y[:4], mask[:4], key)
    for n in [*g]:
        close(together_g[n][0], g[n])
    for n in [*b]:
        close(together_b[n][0], b[n])


def test_a_client_without_examples_stands_still():
    module, args = world(*WORLDS["cnn"])
    g, (_, b) = vmap(client_gradient(module))(*args)
    assert all((v[2] == 0).all() for v in g.values())
    assert all(torch.equal(v[2], args[1][n][2]) for n, v in b.items())


def test_the_whole_network_equals_torch():
    plain = seeded(Cnn)
    plain.drop.p = 0.0
    x = numbers(6, 2, 4, 4)
    run = Pass(torch.ones(6, dtype=torch.bool), KEY, True)
    y, g = gradients(prepare(plain), x, run, 6)
    expected, h = gradients(plain, x, Pass(), 6)
    close(y, expected)
    for a, b in zip(g, h, strict=True):
        close(a, b)
    close(run.new_buffers["norm.running_var"], plain.norm.running_var)


def test_threads_do_not_see_each_other():
    module, args = world(*WORLDS["cnn"])
    clients = [tuple(one(a, c) for a in args) for c in range(2)]
    alone = [client_gradient(module)(*client) for client in clients]
    found: dict[int, list[bool]] = {0: [], 1: []}
    ready = threading.Barrier(2)

    def work(c: int) -> None:
        step = client_gradient(copy.deepcopy(module))
        ready.wait()
        for _ in range(20):
            g, (loss, _) = step(*clients[c])
            same = all(torch.equal(g[n], alone[c][0][n]) for n in g)
            found[c].append(same and torch.equal(loss, alone[c][1][0]))

    threads = [threading.Thread(target=work, args=(c,)) for c in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == {0: [True] * 20, 1: [True] * 20}


def test_passes_nest():
    outer, inner = Pass(), Pass()
    with running(outer):
        with running(inner):
            assert current_pass() is inner
        assert current_pass() is outer


# --- find_trouble -------------------------------------------------------------------------------


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training) + torch.randn_like(x)


class Average(nn.Module):
    def __init__(self, assign: bool) -> None:
        super().__init__()
        self.assign = assign
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.assign:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        else:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


@pytest.mark.parametrize("train", [False, True])
def test_random_operations_are_named(train):
    module = prepare(nn.Sequential(nn.Linear(3, 3), Noisy())).train(train)
    state = torch.get_rng_state()
    first, second = find_trouble(module, torch.ones(4, 3))
    assert torch.equal(state, torch.get_rng_state())
    assert "'1' (Noisy)" in first
    assert "F.dropout" in first
    assert "randn_like" in second
    assert module.training is train


@pytest.mark.parametrize("assign", [False, True])
def test_buffers_that_change_are_named(assign):
    module = prepare(nn.Sequential(nn.Linear(3, 3), Average(assign)))
    (sentence,) = find_trouble(module, torch.ones(4, 3))
    assert "'1.mean'" in sentence
    assert torch.equal(module[1].mean, torch.zeros(3))


@pytest.mark.parametrize(
    "make", [Cnn, Reader, lambda: nn.TransformerEncoderLayer(4, 2, dropout=0.0)]
)
def test_a_good_module_has_no_trouble(make):
    inputs = {"Cnn": torch.ones(4, 2, 4, 4), "Reader": torch.ones(4, 5, dtype=torch.int64)}
    module = make()
    x = inputs.get(type(module).__name__, torch.ones(4, 5, 4))
    assert find_trouble(prepare(module), x) == []


def test_a_refusal_is_trouble():
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.reshape(-1, 3))

    (sentence,) = find_trouble(prepare(Folded()), torch.ones(4, 2, 3))
    assert "'norm'" in sentence


def test_more_inputs_are_passed_on():
    assert find_trouble(prepare(nn.Bilinear(2, 3, 1)), torch.ones(4, 2), torch.ones(4, 3)) == []


def test_random_state_is_restored_after_a_failure():
    module = prepare(nn.Sequential(Noisy(), nn.Linear(9, 9)))
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        find_trouble(module, torch.ones(4, 3))
    assert torch.equal(state, torch.get_rng_state())
