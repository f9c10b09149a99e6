"""Networks that read token ids."""

import numpy as np
import pytest
import torch

import undrift as fl
from undrift.core.ops import Pass
from undrift.core.task import Task
from undrift.errors import ConfigError
from undrift.models import build

SMALL = {"vocabulary": 6, "width": 3, "hidden": 4}


def table(rows=6, width=3):
    return np.arange(rows * width, dtype=np.float64).reshape(rows, width) / 10


def small(**settings):
    return build("sent140_lstm", 0, **{**SMALL, **settings})


def features(ids, net):
    task = Task(net, feature="feature", dtype=torch.float64)
    return task.forward(*task.initial(), ids, Pass()).features


def test_the_feature_is_the_output_at_the_last_word():
    net = small().double()
    ids = torch.tensor([[3, 1, 0, 0], [2, 0, 5, 0], [4, 2, 1, 5]])
    outputs, _ = net.lstm(net.embed(ids))
    wanted = torch.stack([outputs[0, 1], outputs[1, 2], outputs[2, 3]])
    assert torch.allclose(features(ids, net), wanted, atol=1e-14)


def test_padding_at_the_end_changes_nothing():
    net, ids = small(), torch.tensor([[3, 1, 2]])
    longer = torch.tensor([[3, 1, 2, 0, 0, 0, 0]])
    assert torch.allclose(net(ids), net(longer), atol=1e-6)


def test_nothing_but_padding_reads_the_first_step():
    net, ids = small(), torch.zeros(2, 4, dtype=torch.int64)
    outputs, _ = net.lstm(net.embed(ids))
    assert torch.equal(net(ids), net.head(outputs[:, 0]))


def test_every_step_of_shakespeare_is_real():
    net = build("shakespeare_lstm", 0, classes=5, hidden=4)
    ids = torch.tensor([[3, 1, 0, 0], [2, 0, 4, 0]])
    outputs, _ = net.lstm(net.embed(ids))
    assert torch.equal(net(ids), net.head(outputs[:, -1]))


def test_ids_may_be_bytes():
    ids = torch.tensor([[3, 1, 0]])
    assert torch.equal(small()(ids.to(torch.uint8)), small()(ids))


def test_word_vectors_are_neither_trained_nor_sent():
    net = small(embedding=table())
    task = Task(net)
    assert "embed.weight" not in task.names
    assert task.size == sum(p.numel() for p in net.parameters()) - 18
    ids = torch.tensor([[3, 1, 0], [2, 2, 5], [4, 0, 0], [1, 5, 3]])
    clients = [(ids[:2], torch.tensor([0, 1])), (ids[2:], torch.tensor([1, 0]))]
    trainer = fl.Trainer(task, fl.Federation.of(clients), fl.fedavg(0.5))
    (result,) = trainer.run(1)
    assert result.floats_down == 2 * task.size
    trained = trainer.model()
    assert np.allclose(trained.embed.weight.detach().numpy(), table())
    assert not torch.equal(trained.lstm.weight_ih_l0, net.lstm.weight_ih_l0)


def test_word_vectors_come_from_an_array_a_tensor_or_a_file(tmp_path):
    path = tmp_path / "vectors.npy"
    np.save(path, table())
    given = [table(), torch.from_numpy(table()), str(path)]
    for embedding in given:
        made = small(embedding=embedding).embed.weight
        assert np.allclose(made.numpy(), table()) and not made.requires_grad
    given[0][:] = 7.0
    assert not (small(embedding=str(path)).embed.weight == 7).any()


def test_a_network_keeps_its_own_copy_of_the_word_vectors():
    shared = torch.from_numpy(table()).float()
    net = small(embedding=shared)
    shared.zero_()
    assert net.embed.weight.any()


def test_the_stand_in_is_the_same_for_every_seed_and_zero_at_padding():
    one, two = (build("sent140_lstm", seed, **SMALL) for seed in (1, 2))
    assert torch.equal(one.embed.weight, two.embed.weight)
    assert not torch.equal(one.lstm.weight_hh_l1, two.lstm.weight_hh_l1)
    assert not one.embed.weight[0].any() and one.embed.weight[1:].all()


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        (table(5), r"embedding has shape \[5, 3\], but vocabulary = 6 and width = 3"),
        (np.full((6, 3), np.nan), "embedding holds NaN"),
        ("nowhere.npy", "embedding = 'nowhere.npy' cannot be read"),
        (__file__, "cannot be read as a .npy file"),
        (np.array([["a"] * 3] * 6), "embedding must be an array of numbers"),
        (3, r"embedding has shape \[\]"),
    ],
)
def test_word_vectors_that_cannot_be_used_are_refused(embedding, message):
    with pytest.raises(ConfigError, match=message):
        small(embedding=embedding)
