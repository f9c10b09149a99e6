"""Everything with a name gives the same numbers on CUDA."""

from __future__ import annotations

import pytest
import torch

import undrift as fl
from rules.needs import built, world_for
from undrift.core.noise import Secret, draws_noise
from undrift.rules import compat
from undrift.testing import tiny_world
from undrift.testing.compare import distance
from undrift.testing.world import numbers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OTHERS = {
    "noise": fl.rfedavg(0.05, noise=fl.FeatureNoise()),
    "noise, plus": fl.rfedavg_plus(0.05, noise=fl.FeatureNoise()),
    "each gamma": fl.fedvra(0.05, gamma=[0.1, 0.2, 0.3, 0.1, 0.2, 0.3]),
    "plateau": fl.adabest(0.05, unbalanced=True, patience=1),
    "two models": fl.moon(0.05, stored=2),
    "two rounds": fl.moon(0.05, stored=2, pool="rounds"),
    "adam": fl.mime(0.05, base="adam", bias_correction=True),
    "ahead": fl.fedadc(0.05, form="nesterov"),
    "mix": fl.comfed(local_momentum="mimelite"),
    "add": fl.comfed(local_momentum="fedadc"),
    "keep": fl.slowmo(buffers="keep", local=fl.AdamW(lr=0.01)),
    "average": fl.slowmo(buffers="average", local=fl.HeavyBall(lr=0.05)),
    "at start": fl.Algorithm((compat.RFedAvgPlusAtStart(0.1, batch=2),)),
    "ball": fl.fedvra_u(0.05, objective=fl.PseudoLabels(classes=3, every=2), radius=1.0),
}


def trained(name: str, device: str) -> dict[str, torch.Tensor]:
    world = tiny_world()
    chosen = world_for(name, world.sampler, world.work)
    algorithm = OTHERS[name] if name in OTHERS else built(name, lr=0.05)
    if draws_noise(algorithm):  # the same on both devices
        chosen["private_key"] = Secret(bytes(range(32)))
    trainer = fl.Trainer(world.task, world.federation, algorithm, device=device, **chosen)
    trainer.run(3)
    return {n: v.cpu() for n, v in numbers(trainer).items()}


@pytest.mark.parametrize("name", [*fl.catalogue(), *OTHERS])
def test_the_same_on_both_devices(name):
    here, there = trained(name, "cpu"), trained(name, "cuda")
    gaps = {n: distance([v], [here[n]]) for n, v in there.items()}
    assert max(gaps.values()) <= 1e-9, gaps
