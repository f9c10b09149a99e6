"""Owners of shards on a GPU: the same numbers as one client at a time."""

from functools import partial

import pytest
import torch

from undrift.engines import ENGINES, Sharded
from undrift.engines.sharded import Here
from undrift.testing.compare import distance
from undrift.testing.engines import standard_algorithms
from undrift.testing.world import numbers, tiny_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("label", standard_algorithms())
def test_owners_on_a_gpu_agree_with_the_reference_engine(label, monkeypatch):
    monkeypatch.setitem(ENGINES, "owners", Sharded)
    world, algorithm = tiny_world(), standard_algorithms()[label]
    wanted = world.trainer(algorithm, engine="reference")
    hire = partial(Here, device="cuda")
    trainer = world.trainer(algorithm, engine="owners", actors=2, hire=hire)
    for one in (wanted, trainer):
        one.run(3)
    gap = distance(list(numbers(trainer).values()), list(numbers(wanted).values()))
    assert gap <= 1e-10
