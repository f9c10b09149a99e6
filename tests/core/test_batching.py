"""What a module's call exchanges under vmap: torch's numbers, and no warning."""

from __future__ import annotations

import itertools
import logging
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import undrift as fl
from core.nets import close, numbers, seeded
from undrift.core.batching import Batching
from undrift.core.ops import Pass, prepare, running
from undrift.errors import ClientError, TaskError


def fixed(*shape: int) -> Tensor:
    """Give numbers without a generator, which vmap refuses."""
    return torch.arange(math.prod(shape), dtype=torch.float64).add(1).sin().view(shape)


WORDS = torch.tensor([[1, 2, 2, 0], [3, 0, 0, 0], [0, 0, 0, 0]])


def bag(**options):
    return lambda w: F.embedding_bag(WORDS, w.view(5, 6), **options)


def cell(function, gates):
    def run(w: Tensor) -> Tensor:
        inner, outer = w[: gates * 6].view(gates * 2, 3), w[: gates * 4].view(gates * 2, 2)
        h, bias = torch.zeros(4, 2, dtype=w.dtype), w[-gates * 2 :]
        state = (h, h) if function is torch.lstm_cell else h
        with_bias = function(fixed(4, 3), state, inner, outer, bias, bias * 0.5)
        without = function(fixed(4, 3), state, inner, outer)
        return torch.cat([*with_bias, *without])

    return run


FUNCTIONS = {
    "weight norm": lambda w: torch._weight_norm(w.view(5, 6), w.view(5, 6)[:, :1], 0),
    "weight norm of columns": lambda w: torch._weight_norm(w.view(5, 6), w.view(5, 6)[:1], 1),
    "weight norm of all": lambda w: torch._weight_norm(w.view(5, 6), w.view(5, 6)[0, 0], -1),
    "bilinear": lambda w: F.bilinear(fixed(4, 3), fixed(4, 5), w.view(2, 3, 5), w[:2]),
    "bilinear, no bias": lambda w: F.bilinear(fixed(3), fixed(5), w.view(2, 3, 5)),
    "prelu": lambda w: F.prelu(w.view(2, 3, 5), w[:1]),
    "prelu by channel": lambda w: F.prelu(w.view(2, 3, 5), w[:3]),
    "one hot": lambda w: F.one_hot(WORDS, 5).to(w) @ w[:5],
    "sums": bag(mode="sum"),
    "sums of known": bag(mode="sum", padding_idx=0),
    "means": bag(),
    "means of known": bag(padding_idx=-5),
    "largest": bag(mode="max"),
    "largest of known": bag(mode="max", padding_idx=0),
    "weighed": lambda w: F.embedding_bag(
        WORDS, w.view(5, 6), mode="sum", per_sample_weights=w[:12].view(3, 4)
    ),
    "tanh": cell(torch.rnn_tanh_cell, 1),
    "relu": cell(torch.rnn_relu_cell, 1),
    "gru": cell(torch.gru_cell, 3),
    "lstm": cell(torch.lstm_cell, 4),
    "solve": lambda w: torch.linalg.solve(_sound(w, 3), fixed(4, 3, 1)),
    "solve for vectors": lambda w: torch.linalg.solve(_sound(w, 3), w[:3]),
    "solve for many": lambda w: torch.linalg.solve(_sound(w, 2).expand(4, 2, 2), fixed(4, 2)),
    "solve from the right": lambda w: torch.linalg.solve(_sound(w, 3), fixed(4, 2, 3), left=False),
    "channels last": lambda w: w.view(1, 2, 3, 5).contiguous(memory_format=torch.channels_last),
}


def _sound(w: Tensor, size: int) -> Tensor:
    return w[: size**2].view(size, size) + 9 * torch.eye(size, dtype=w.dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_exchanged_function_equals_torch(name):
    def loss(w: Tensor) -> Tensor:
        return FUNCTIONS[name](w).sin().pow(2).sum()

    models = numbers(4, 30)
    with Batching():
        found = vmap(FUNCTIONS[name])(models), vmap(grad(loss))(models)
    for one, y, g in zip(models, *found, strict=True):
        close(y, FUNCTIONS[name](one))
        close(g, grad(loss)(one))


LAYERS = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 4)),
    "bilinear": lambda: Of(nn.Bilinear(6, 6, 4), lambda layer, x: layer(x, x)),
    "bags": lambda: Of(nn.EmbeddingBag(7, 4), lambda layer, x: layer((x > 0).long())),
    "gru cell": lambda: nn.GRUCell(6, 4),
    "lstm cell": lambda: Of(nn.LSTMCell(6, 4), lambda layer, x: layer(x)[0]),
    "solve": lambda: Of(nn.Linear(6, 6), lambda layer, x: torch.linalg.solve(
        layer.weight + 9 * torch.eye(6, dtype=x.dtype), x[..., None]).squeeze(-1)[:, :4]),
}  # fmt: skip


class Of(nn.Module):
    """A layer, and how it is called."""

    def __init__(self, layer: nn.Module, call) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def trainer(module: nn.Module, algorithm=None, sizes=(5, 2, 7), **options) -> fl.Trainer:
    clients = [(numbers(n, 6) + n, torch.arange(n) % 3) for n in sizes]
    task = fl.Task(module, dtype=torch.float64)
    work = fl.Work(epochs=1, batch=4)
    return fl.Trainer(
        task, fl.Federation.of(clients), algorithm or fl.mime(0.1), work=work, **options
    )


@pytest.mark.parametrize("name", LAYERS)
def test_layers_without_a_batching_rule_train_as_in_the_reference(name, caplog):
    module = nn.Sequential(seeded(LAYERS[name]), seeded(nn.Linear, 4, 3))
    found = []
    for options in ({"engine": "reference"}, {}, {"graph": True}):
        run = trainer(module, **options)
        run.run(2)
        found.append(run.server.w)
        close(found[-1], found[0])
    assert "batching rule" not in caplog.text


def test_classes_and_outputs_may_be_written_as_torch_users_do(caplog):
    """One-hot targets in a loss, and results that are written into memory made before."""

    def written(layer: nn.Module, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 3, dtype=x.dtype)
        outputs = torch.empty(len(x), 2, 3, dtype=x.dtype)
        for t in range(2):
            h += layer(x + t).tanh()
            outputs[:, t] = h
        return outputs.mean(1)

    def loss(value: Tensor, target: Tensor) -> Tensor:
        return (value - F.one_hot(target, 3)).pow(2).sum(-1)

    clients = [(numbers(n, 6) + n, torch.arange(n) % 3) for n in (5, 2, 7)]
    for algorithm in (fl.fedavg, fl.moon, fl.qfedavg):  # the model of all is read, too
        found = []
        for options in ({"engine": "reference"}, {}, {"graph": True}):
            net = nn.Sequential(Of(seeded(nn.Linear, 6, 3), written), seeded(nn.Linear, 3, 3))
            task = fl.Task(net, loss, dtype=torch.float64, feature="1:input")
            run = fl.Trainer(task, fl.Federation.of(clients), algorithm(0.1), **options)
            run.run(2)
            found.append(run.server.w)
            close(found[-1], found[0])
    assert not caplog.messages


def test_examples_that_mix_are_refused_though_the_loss_ignores_them():
    """Padding would change what the module says of an example without a loss."""

    def mixed(layer: nn.Module, x: Tensor) -> Tensor:
        return F.normalize(layer(x - x.mean(0)), dim=-1)

    clients = [(numbers(n, 6), torch.zeros(n, dtype=torch.int64)) for n in (5, 4)]
    task = fl.Task(Of(seeded(nn.Linear, 6, 3), mixed), nn.CrossEntropyLoss(ignore_index=0))
    with pytest.raises(TaskError, match="influence each other"):
        fl.Trainer(task, fl.Federation.of(clients), fl.fedavg(0.1))


def unpooled(layer: nn.Module, x: Tensor) -> Tensor:
    y, at = F.max_pool1d(layer(x)[:, None], 2, return_indices=True)
    return F.max_unpool1d(y, at, 2).squeeze(1)


def test_an_operation_that_goes_client_by_client_is_named_once(caplog):
    """torch would say it at every step."""
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        caplog.clear()
        run = trainer(Of(seeded(nn.Linear, 6, 4), unpooled))
        assert [r for r in caplog.messages if "max_unpool2d" in r] == caplog.messages
        assert len(caplog.messages) == 1
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run.run(2)
        assert len(caplog.messages) == 1
        assert not seen
    reference = trainer(Of(seeded(nn.Linear, 6, 4), unpooled), engine="reference")
    reference.run(2)
    close(run.server.w, reference.server.w)


def test_own_warnings_of_a_module_reach_the_user():
    def loud(layer: nn.Module, x: Tensor) -> Tensor:
        warnings.warn("as I wanted to say", stacklevel=2)
        return layer(x)

    with pytest.warns(UserWarning, match="as I wanted to say"):
        trainer(Of(seeded(nn.Linear, 6, 4), loud))


def test_a_module_may_use_the_transforms_of_torch():
    """They take no hooks, by which memory is counted."""

    def steep(layer: nn.Module, x: Tensor) -> Tensor:
        slopes = vmap(torch.func.jacrev(lambda row: layer(row).sin().sum()))(x)
        return layer(x) + slopes.sum(1, keepdim=True)

    found = []
    for options in ({"engine": "reference"}, {}, {"graph": True}):
        run = trainer(Of(seeded(nn.Linear, 6, 3), steep), **options)
        run.run(2)
        found.append(run.server.w)
        close(found[-1], found[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_part_is_refused_by_its_name():
    with pytest.raises(TaskError, match=r"'0' is compiled by torch\.jit"):
        fl.Task(nn.Sequential(torch.jit.script(nn.Linear(6, 4)), nn.Linear(4, 3)))


def test_what_vmap_cannot_take_is_refused_by_its_place():
    def chosen(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x if x.sum() > 0 else -x)

    module = nn.Sequential(nn.Linear(6, 6), Of(nn.Linear(6, 3), chosen))
    with pytest.raises(TaskError, match=r"many clients at once, at '1' .*engine='reference'"):
        trainer(module)


def test_other_numbers_for_many_clients_are_refused():
    """A batching rule that is wrong: noticed before training, not in its results."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output) -> None: ...

        @staticmethod
        def backward(ctx, g: Tensor) -> Tensor:
            return g * 2

        @staticmethod
        def vmap(info, dims, x: Tensor):
            return x * 2 + 1 * (x.movedim(dims[0], 0)[:1]).movedim(0, dims[0]), dims[0]

    def wrong(layer: nn.Module, x: Tensor) -> Tensor:
        return Wrong.apply(layer(x))

    with pytest.raises(TaskError, match="other numbers for many clients at once"):
        trainer(Of(nn.Linear(6, 3), wrong))


def few(layer: nn.Module, x: Tensor) -> Tensor:
    if len(x) > 4:
        raise ValueError("more than four")
    return layer(x)


@pytest.mark.parametrize("engine", ["vectorised", "reference"])
def test_a_module_that_fails_in_a_probe_is_told_by_client_and_stage(engine):
    """A step reads four examples, a probe all of them."""
    run = trainer(Of(nn.Linear(6, 3), few), engine=engine)
    with pytest.raises(ClientError, match=r"client 0, stage 'probe'.*more than four"):
        run.round()


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("affine", [False, True])
def test_instance_norm_equals_torch(dimensions, affine):
    kind = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d][dimensions - 1]
    for rows, training in itertools.product(([], [1], [4]), (True, False)):
        plain = seeded(kind, 3, affine=affine).train(training)
        x = numbers(*rows, 3, *[4, 3, 2][:dimensions])
        found = []
        for module in (plain, prepare(plain)):
            inputs = [x.clone().requires_grad_(), *module.parameters()]
            with running(Pass(training=training)):
                y = module(inputs[0])
            found.append([y, *torch.autograd.grad(y.sin().sum(), inputs)])
        for a, b in zip(*found, strict=True):
            close(a, b)


def test_the_gradient_of_instance_norm_does_not_depend_on_how_it_lies():
    """torch's own, on a CPU, for one example: zeros where its gradient lies channels last."""
    layer, x = prepare(seeded(nn.InstanceNorm2d, 3)), numbers(1, 3, 4, 4).requires_grad_()
    with running(Pass(training=True)):
        y = layer(x)
        last = y.flatten(2).transpose(1, 2)[:, -1]
    (found,) = torch.autograd.grad(last.pow(3).sum(), x, retain_graph=True)
    (wanted,) = torch.autograd.grad(y[..., -1, -1].pow(3).sum(), x)
    assert found.abs().max() > 0.1
    close(found, wanted)


def test_instance_norm_of_one_place_is_refused_as_by_torch():
    layer = prepare(nn.InstanceNorm1d(3))
    with pytest.raises(ValueError, match="more than 1 spatial element"), running(Pass()):
        layer(torch.zeros(2, 3, 1))


def test_group_norm_takes_a_last_batch_of_one():
    """Groups of a single value: torch refuses a batch of one, which only a ragged batch is."""
    module = nn.Sequential(nn.Linear(6, 4), nn.GroupNorm(4, 4), nn.Linear(4, 3))
    found = []
    for engine in ("reference", "vectorised"):
        run = trainer(module, fl.fedavg(0.1), sizes=(5, 1), engine=engine)
        run.run(1)
        found.append(run.server.w)
    close(*found)
