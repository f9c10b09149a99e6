"""A steered federation on a CUDA device: the CPU's numbers; a policy inside recorded rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import undrift as fl
from agent.test_environment import TABLE
from undrift.agent import Episodes, load_agent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def played(device: str) -> tuple[np.ndarray, np.ndarray]:
    """Play three episodes of four rounds with the same actions."""
    changes = [f"engine.device={device}", "task.dtype=float64"]
    episodes = Episodes(*load_agent(TABLE, changes), range(3))
    for slot in range(3):
        episodes.begin(slot, 7)
    actions = np.random.default_rng(1).uniform(-1, 1, (4, 3, 2))
    seen, values = [], []
    for action in actions:
        seen.append(episodes.observe())
        values.append([turned.value for turned in episodes.act(action)])
    return np.array(seen), np.array(values)


def test_episodes_are_those_of_the_cpu():
    seen, values = played("cuda")
    mine, own = played("cpu")
    assert np.abs(seen - mine).max() < 1e-6
    assert np.abs(values - own).max() < 1e-9


@pytest.mark.parametrize("pca", ["clients", "rounds"])
def test_a_policy_acts_inside_recorded_rounds(pca):
    made = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(12, 6, generator=made), torch.randint(0, 3, (12,), generator=made))
        for _ in range(6)
    ]
    ends = []
    for device in ("cpu", "cuda"):
        task = fl.Task.build(lambda: torch.nn.Linear(6, 3), 3, dtype=torch.float64)
        algorithm = fl.fedrl(0.1, policy="digits", pca=pca)
        runner = fl.Trainer(task, fl.Federation.of(clients), algorithm, device=device, seed=2)
        runner.run(12)
        ends.append((runner.server.w.cpu(), runner.server.states[0].knobs.cpu()))
    for one, other in zip(*ends, strict=True):
        assert (one - other).abs().max() < 1e-9
