"""Networks for tables: what they compute, and that engines train them alike."""

import numpy as np
import pytest
import torch

import undrift as fl
from undrift.models import build, feature_of
from undrift.models.tabular import Columns

BLOCKS = (1, 2, 5, 1, 3)  # two columns are embedded
SIZES = (4, 1, 6)  # one site has a single row


def rows(n, draw):
    """Numbers and one-hot blocks, as a preparation makes them; one level is not named."""
    x = torch.randn(n, sum(BLOCKS), generator=draw, dtype=torch.float64)
    x[:, 3:8] = torch.eye(5, dtype=torch.float64)[torch.randint(0, 5, (n,), generator=draw)]
    x[:, 9:12] = torch.eye(3, dtype=torch.float64)[torch.randint(0, 3, (n,), generator=draw)]
    x[0, 3:8] = 0.0
    return x


def long_hand_mlp(x, weights):
    """Look levels up one by one, then multiply."""
    found = []
    for row in x:
        parts = [row[0:3]]
        for name, block in (("columns.maps.0", row[3:8]), ("columns.maps.1", row[9:12])):
            table = weights[f"{name}.weight"].T  # [levels, width]
            level = np.flatnonzero(block)
            parts += [table[level[0]] if len(level) else np.zeros(table.shape[1])]
            parts += [row[8:9]] if name.endswith("0") else []
        h = np.concatenate(parts)
        for layer in ("fc1", "fc2"):
            h = np.maximum(weights[f"{layer}.weight"] @ h + weights[f"{layer}.bias"], 0)
        found.append(weights["head.weight"] @ h + weights["head.bias"])
    return np.array(found)


def long_hand_resnet(x, weights):
    def norm(h, name):
        h = (h - h.mean()) / np.sqrt(h.var() + 1e-5)
        return h * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(h, name):
        return weights[f"{name}.weight"] @ h + weights[f"{name}.bias"]

    found = []
    for row in x:
        h = linear(row, "enter")
        for i in (1, 2):
            inner = np.maximum(linear(norm(h, f"block{i}.norm"), f"block{i}.fc1"), 0)
            h = h + linear(inner, f"block{i}.fc2")
        found.append(linear(np.maximum(norm(h, "norm"), 0), "head"))
    return np.array(found)


def numbers_of(net):
    return {n: p.detach().double().numpy() for n, p in net.named_parameters()}


def test_the_mlp_looks_levels_up_and_a_block_of_zeros_is_zeros():
    net = build("tabular_mlp", 3, inputs=12, classes=2, blocks=BLOCKS, hidden=(7, 5))
    x = rows(9, torch.Generator().manual_seed(1))
    found = net.double()(x).detach().numpy()
    assert np.abs(found - long_hand_mlp(x.numpy(), numbers_of(net))).max() < 1e-12


def test_the_resnet_adds_what_its_blocks_compute():
    net = build("tabular_resnet", 3, inputs=12, classes=2, width=8)
    x = rows(9, torch.Generator().manual_seed(1))
    found = net.double()(x).detach().numpy()
    assert np.abs(found - long_hand_resnet(x.numpy(), numbers_of(net))).max() < 1e-12


def test_an_embedding_has_the_width_that_is_asked_for():
    assert [m.weight.shape for m in Columns(BLOCKS, (1, 2, 3, 1, 2)).maps] == [(3, 5), (2, 3)]
    wide = build("tabular_mlp", 0, inputs=300, blocks=(300,))
    assert wide.columns.maps[0].weight.shape == (50, 300)


def test_levels_start_as_spread_out_as_numbers_whatever_their_count():
    net = build("tabular_mlp", 0, inputs=410, blocks=(10, 400), embedding=40)
    for found in net.columns.maps:
        assert 0.5 < found.weight.detach().std() < 0.65  # of a uniform one in [-1, 1]: 0.577


NETWORKS = {
    "logistic": {},
    "tabular_mlp": {"blocks": BLOCKS, "hidden": (7, 5)},
    "tabular_resnet": {"blocks": BLOCKS, "width": 6},
}
PATHS = [{"chunk": 3}, {"chunk": 3, "in_place": False}, {"chunk": 1}, {"graph": True, "chunk": 3}]


def train(name, algorithm, engine, **options):
    draw = torch.Generator().manual_seed(4)
    clients = [(rows(n, draw), torch.randint(0, 3, (n,), generator=draw)) for n in SIZES]
    net = build(name, 1, inputs=12, classes=3, **NETWORKS[name])
    task = fl.Task(net, feature=feature_of(name), dtype=torch.float64)
    work = fl.Work(steps=2, batch=2)
    trainer = fl.Trainer(
        task, fl.Federation.of(clients), algorithm, work=work, engine=engine, **options
    )
    before = trainer.server.w.clone()
    losses = torch.tensor([r.loss for r in trainer.run(2)], dtype=torch.float64)
    for part, moved in task.named(trainer.server.w - before).items():
        assert moved.abs().max() > 1e-7, part
    return torch.cat([trainer.server.w, losses])


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("algorithm", [fl.fedavg(0.3), fl.scaffold(0.3)], ids=["avg", "scaffold"])
def test_engines_train_it_alike(name, algorithm):
    plain = train(name, algorithm, "reference")
    for options in PATHS:
        found = train(name, algorithm, "vectorised", **options)
        assert (found - plain).abs().max() < 1e-12, options


def test_dropout_changes_training_and_not_what_is_judged():
    with_it = build("tabular_mlp", 3, inputs=12, blocks=BLOCKS, dropout=0.5)
    without = build("tabular_mlp", 3, inputs=12, blocks=BLOCKS)
    x = rows(9, torch.Generator().manual_seed(1)).float()
    assert torch.equal(with_it.eval()(x), without.eval()(x))
    assert not torch.equal(with_it.train()(x), without(x))
    deep = build("tabular_resnet", 3, inputs=12, blocks=BLOCKS, dropout=0.5)
    assert not torch.equal(deep.train()(x), deep.eval()(x))
