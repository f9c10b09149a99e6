"""The networks of the papers train alike in every engine, on inputs of their real kind."""

import pytest
import torch

import undrift as fl
from undrift.models import build, feature_of

SIZES = (4, 3, 5)
PATHS = {
    "together": {"chunk": 3},
    "together, general": {"chunk": 3, "in_place": False},
    "in turn": {"chunk": 1},
    "device round": {"graph": True, "chunk": 3},
}


def words(n, draw):
    """Ids with padding at the end; one row is all padding."""
    lengths = torch.randint(1, 6, (n, 1), generator=draw)
    lengths[0] = 0 if n == 4 else 5
    ids = torch.randint(1, 40, (n, 5), generator=draw)
    return torch.where(torch.arange(5) < lengths, ids, 0)


def characters(n, draw):
    return torch.randint(0, 12, (n, 6), generator=draw)


def pictures(channels, pixels):
    return lambda n, draw: torch.randn(n, channels, pixels, pixels, generator=draw).double()


# name, settings, examples, classes, local steps in a round
SMALL = {
    "sent140_lstm": ({"vocabulary": 40, "width": 7, "hidden": 9}, words, 2, 2),
    "shakespeare_lstm": ({"classes": 12, "hidden": 9}, characters, 12, 2),
    "lenet": ({"pixels": 16, "channels": 1}, pictures(1, 16), 10, 2),
}
LARGE = {
    "sent140_lstm": ({}, words, 2, 1),
    "shakespeare_lstm": ({}, characters, 80, 1),
    "vgg11": ({}, pictures(3, 32), 10, 1),
    "vgg11_bn": ({"batch_norm": True}, pictures(3, 32), 10, 1),
    "fedrl_vgg": ({}, pictures(3, 32), 10, 1),
    "lenet": ({}, pictures(3, 32), 10, 1),
}


def federation(examples, classes):
    draw = torch.Generator().manual_seed(4)
    return fl.Federation.of(
        [(examples(n, draw), torch.randint(0, classes, (n,), generator=draw)) for n in SIZES]
    )


def train(name, case, algorithm, engine, **options):
    settings, examples, classes, steps = case
    name = name.removesuffix("_bn")
    task = fl.Task(build(name, 1, **settings), feature=feature_of(name), dtype=torch.float64)
    trainer = fl.Trainer(
        task,
        federation(examples, classes),
        algorithm,
        work=fl.Work(steps=steps, batch=2),
        engine=engine,
        **options,
    )
    before = trainer.server.w.clone()
    losses = torch.tensor([r.loss for r in trainer.run(2)], dtype=torch.float64)
    for name, moved in task.named(trainer.server.w - before).items():
        idle = task.float_buffers and name.startswith("conv") and name.endswith("bias")
        assert idle or moved.abs().max() > 1e-7, name  # BatchNorm takes the bias before it away
    assert options.get("graph", False) == getattr(trainer.engine, "graph", False), "a path was left"
    return torch.cat([trainer.server.w, trainer.server.buffers.floats, losses])


def apart(name, case, algorithm, paths):
    plain = train(name, case, algorithm, "reference")
    assert plain.isfinite().all()
    return {
        path: float((train(name, case, algorithm, "vectorised", **PATHS[path]) - plain).abs().max())
        for path in paths
    }


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_train_alike_on_every_path(name):
    found = apart(name, SMALL[name], fl.fedavg(0.3), PATHS)
    assert max(found.values()) < 1e-10, found


def test_rules_that_look_at_features_see_the_last_word_on_every_path():
    algorithm = fl.rfedavg_plus(0.3, strength=0.1)
    found = apart("sent140_lstm", SMALL["sent140_lstm"], algorithm, ("together", "device round"))
    assert max(found.values()) < 1e-10, found
    without = train("sent140_lstm", SMALL["sent140_lstm"], fl.fedavg(0.3), "reference")
    aligned = train("sent140_lstm", SMALL["sent140_lstm"], algorithm, "reference")
    assert (without - aligned).abs().max() > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_networks_of_full_size_train_alike_on_every_path(name):
    paths = ("together", "device round") if "vgg" in name else PATHS
    found = apart(name, LARGE[name], fl.fedavg(0.05), paths)
    assert max(found.values()) < 1e-10, found
