"""Any nn.Module becomes a function of one vector, or is refused with a reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import undrift as fl
from undrift.core.ops import Pass
from undrift.core.task import Batch
from undrift.errors import ConfigError, TaskError

F64 = torch.float64


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def _data(rows=6, dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(rows, 4, dtype=dtype), torch.randint(0, 3, (rows,))


def _forward(task, x, training=True):
    mask = torch.ones(len(x), dtype=torch.bool)
    key = torch.zeros((), dtype=torch.int64)
    return task.forward(*task.initial(), x, Pass(mask, key, training))


def _batch(x, y):
    mask = torch.ones(len(x), dtype=torch.bool)
    return Batch(x, y, mask, torch.arange(len(x)))


# ---- losses --------------------------------------------------------------------------------------
def _mean_loss(task, x, y):
    return float(task.mean_loss(_forward(task, x), _batch(x, y)))


def test_the_forward_pass_is_the_modules_own():
    net, (x, _) = _net(), _data()
    assert torch.equal(_forward(fl.Task(net), x).value, net(x))


def test_cross_entropy_and_mse_are_torchs():
    net, (x, y) = _net(), _data()
    target = torch.randn(6, 3)
    with torch.no_grad():
        value = net(x)
    assert _mean_loss(fl.Task(net), x, y) == pytest.approx(float(F.cross_entropy(value, y)))
    assert _mean_loss(fl.Task(net, "mse"), x, target) == pytest.approx(
        float(F.mse_loss(value, target))
    )


def test_an_own_loss_may_have_one_value_per_example_or_more():
    net, (x, y) = _net(), _data()
    with torch.no_grad():
        value = net(x)
    one = fl.Task(net, lambda output, target: output.square().sum(1))  # [B]
    more = fl.Task(net, lambda output, target: output.square())  # [B, T]
    assert _mean_loss(one, x, y) == pytest.approx(float(value.square().sum(1).mean()))
    assert _mean_loss(more, x, y) == pytest.approx(float(value.square().mean()))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="none")])
def test_torchs_loss_objects_are_taken(loss):
    net, (x, y) = _net(), _data()
    before = loss.reduction
    task = fl.Task(net, loss)
    task.check(x, y)
    with torch.no_grad():
        assert _mean_loss(task, x, y) == pytest.approx(float(F.cross_entropy(net(x), y)))
    assert loss.reduction == before  # the user's object stays as it was


def test_a_scalar_loss_is_refused():
    x, y = _data()
    task = fl.Task(_net(), lambda output, target: F.cross_entropy(output, target))
    with pytest.raises(TaskError, match=r"one value per example .* use reduction='none'"):
        task.check(x, y)


def test_an_unknown_loss_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'cross_entropy'"):
        fl.Task(_net(), "crossentropy")


def test_padding_enters_neither_loss_nor_scores():
    x, y = _data()
    task = fl.Task(_net())
    mask = torch.tensor([True] * 4 + [False] * 2)
    out = _forward(task, torch.cat([x[:4], x[4:] * torch.nan]))
    padded = Batch(x, y, mask, torch.arange(6))
    real = _batch(x[:4], y[:4])
    torch.testing.assert_close(
        task.mean_loss(out, padded), task.mean_loss(_forward(task, x[:4]), real)
    )
    assert task.scores(out, padded)["accuracy"].isfinite()


# ---- the vector ----------------------------------------------------------------------------------
def test_vector_and_names_undo_each_other():
    task = fl.Task(_net())
    w, _ = task.initial()
    assert w.shape == (task.size,) == (43,)
    assert torch.equal(task.flat(task.named(w)), w)
    with pytest.raises(TaskError, match=r"do not match the module: 2\.bias"):
        task.flat({n: v for n, v in task.named(w).items() if n != "2.bias"})


@pytest.mark.parametrize("in_place", [False, True])
def test_frozen_parameters_stay_out_and_unchanged(in_place):
    net, (x, y) = _net(), _data()
    for p in net[0].parameters():
        p.requires_grad_(False)
    frozen = net[0].weight.clone()
    task = fl.Task(net)
    assert task.names == ("2.weight", "2.bias")
    federation, algorithm = fl.Federation.of([(x, y)] * 2), fl.fedavg(lr=1.0)
    trainer = fl.Trainer(task, federation, algorithm, in_place=in_place)
    trainer.run(2)
    model = trainer.model()
    assert torch.equal(model[0].weight, frozen)
    assert not torch.equal(model[2].weight, net[2].weight)


def test_nothing_to_learn_is_refused():
    net = _net().requires_grad_(False)
    with pytest.raises(TaskError, match="no trainable parameter"):
        fl.Task(net)


def test_slices_mark_parameters_by_pattern():
    task = fl.Task(_net())
    assert int(task.slice("0.*").sum()) == 25
    assert int(task.slice("*.bias").sum()) == 8
    assert bool(task.slice("*").all())
    with pytest.raises(ConfigError, match=r"no parameter named '2\.wieght'\. Did you mean"):
        task.slice("2.wieght")


def test_float64_is_exact_and_other_types_are_refused():
    net, (x, _) = _net(), _data(dtype=F64)
    value = _forward(fl.Task(net, dtype=F64), x).value
    assert value.dtype == F64
    torch.testing.assert_close(value, net.double()(x), rtol=0, atol=1e-15)
    with pytest.raises(ConfigError, match=r"float32 or torch\.float64"):
        fl.Task(net, dtype=torch.float16)


def test_the_users_module_is_not_touched():
    net, (x, y) = _net(), _data()
    before = {n: v.clone() for n, v in net.state_dict().items()}
    fl.Trainer(fl.Task(net, dtype=F64), fl.Federation.of([(x, y)]), fl.fedavg()).run(2)
    assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())


# ---- features ------------------------------------------------------------------------------------
def test_the_feature_layer_by_name_and_by_its_input():
    net, (x, _) = _net(), _data()
    hidden = net[1](net[0](x))
    assert torch.equal(_forward(fl.Task(net, feature="1"), x).features, hidden)
    assert torch.equal(_forward(fl.Task(net, feature="2:input"), x).features, hidden)
    assert _forward(fl.Task(net), x).features is None


def test_an_unknown_feature_layer_is_refused():
    net = nn.Sequential()
    net.add_module("hidden", nn.Linear(4, 3))
    with pytest.raises(ConfigError, match=r"no layer named 'hiden'\. Did you mean 'hidden'\?"):
        fl.Task(net, feature="hiden")
    with pytest.raises(ConfigError, match="'layer' or 'layer:input'"):
        fl.Task(net, feature="hidden:output")


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


def test_a_feature_layer_that_is_never_called_is_refused():
    with pytest.raises(TaskError, match="'idle' is never called"):
        fl.Task(Unused(), feature="idle").check(*_data())


# ---- what is refused -----------------------------------------------------------------------------
def test_a_module_in_evaluation_mode_is_refused():
    with pytest.raises(TaskError, match=r"evaluation mode: call module\.train\(\)"):
        fl.Task(_net().eval())


class Careless(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.dropout(x, 0.5, self.training))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x + torch.randn_like(x))


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.head(x - self.mean)


class RemembersInPlace(Remembers):
    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0).detach())
        return self.head(x - self.mean)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Careless(), r"Careless draws random numbers .*F\.dropout.* use nn\.Dropout"),
        (nn.Sequential(Noisy()), r"'0' \(Noisy\) draws random numbers with (randn_like|normal_)"),
        (Remembers(), "changes the buffer 'mean'"),
        (RemembersInPlace(), "changes the buffer 'mean'"),
    ],
    ids=["F.dropout", "noise", "own buffer", "own buffer in place"],
)
def test_what_clients_would_share_is_refused_by_name(module, message):
    x, y = _data()
    with pytest.raises(TaskError, match=message):
        fl.Trainer(fl.Task(module), fl.Federation.of([(x, y)]), fl.fedavg())


def test_a_module_that_fails_on_the_shapes_says_which():
    x, y = torch.randn(6, 7), torch.zeros(6, dtype=torch.long)
    with pytest.raises(TaskError, match=r"fails on inputs \(2, 7\) torch.float32 and targets"):
        fl.Trainer(fl.Task(_net()), fl.Federation.of([(x, y)]), fl.fedavg())
    with pytest.raises(TaskError, match=r"targets \(6, 2\)"):
        fl.Task(_net(), "mse").check(_data()[0], torch.randn(6, 2))


# ---- going back to the plain module --------------------------------------------------------------
def test_batch_norm_buffers_come_back():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    x, y = _data(8)
    trainer = fl.Trainer(fl.Task(net), fl.Federation.of([(x, y), (x + 1, y)]), fl.fedavg())
    trainer.run(2)
    model = trainer.model()
    assert type(model[1]) is nn.BatchNorm1d
    assert int(model[1].num_batches_tracked) == 2
    assert not torch.equal(model[1].running_mean, net[1].running_mean)
    w, buffers = trainer.server.w, trainer.server.buffers
    out = trainer.task.forward(w, buffers, x, Pass(None, None, False))
    torch.testing.assert_close(model.eval()(x), out.value)
    net.load_state_dict(model.state_dict())


# ---- a transformer -------------------------------------------------------------------------------
class Reader(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x.view(len(x), -1, 8)).mean(1))


# torch has no batching rule for its CPU attention: it works, slowly, and says so
SLOW_ATTENTION = pytest.mark.filterwarnings("ignore:There is a performance drop")


def _readers_world():
    torch.manual_seed(0)
    return [(torch.randn(n, 24, dtype=F64), torch.randint(0, 3, (n,))) for n in (5, 3)]


@SLOW_ATTENTION
def test_a_transformer_without_dropout_trains_and_engines_agree():
    torch.manual_seed(0)
    task, work = fl.Task(Reader(0.0), dtype=F64), fl.Work(batch=4)
    models = []
    for engine in ("vectorised", "reference"):
        federation = fl.Federation.of(_readers_world())
        trainer = fl.Trainer(task, federation, fl.fedprox(lr=0.1), work=work, engine=engine)
        trainer.run(2)
        models.append(trainer.server.w)
    torch.testing.assert_close(*models, rtol=0, atol=1e-12)


def test_a_transformer_whose_attention_draws_is_refused_clearly():
    with pytest.raises(TaskError, match=r"'layer.self_attn' .* draws random numbers"):
        fl.Trainer(fl.Task(Reader(0.1)), fl.Federation.of(_readers_world()), fl.fedavg())


@SLOW_ATTENTION
def test_a_transformer_with_dropout_outside_of_attention_trains():
    torch.manual_seed(0)
    net = Reader(0.1)
    net.layer.self_attn.dropout = 0.0
    task = fl.Task(net, dtype=F64)
    results = fl.Trainer(task, fl.Federation.of(_readers_world()), fl.fedavg(lr=0.1)).run(2)
    assert all(not r.skipped for r in results)
