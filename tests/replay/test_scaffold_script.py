"""The script that judges SCAFFOLDs: it finds every planted bug, and nothing in ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from undrift.replay import replay

SCRIPT = Path(__file__).parent.parent.parent / "docs/scripts/is_your_scaffold_right.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("is_your_scaffold_right", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Point(nn.Module):
    """A model of one number; its loss is a quadratic of it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x)) - x[:, 1]


def ours(
    a: Sequence[float],
    b: Sequence[float],
    cohorts: Sequence[Sequence[int]],
    steps: int,
    lr: float,
) -> list[float]:
    def loss(gap: Tensor, curvature: Tensor) -> Tensor:
        return curvature / 2 * gap**2

    clients = [
        (torch.tensor([[ai, bi]]).double(), torch.tensor([ai]).double())
        for ai, bi in zip(a, b, strict=True)
    ]
    moments = replay(
        Point(), clients, fl.scaffold(lr=lr), cohorts, steps=steps, loss=loss, engine="vectorised"
    )
    return [float(moment.server["w"]) for moment in moments]


def test_ours_is_right_on_the_first_rounds_and_at_the_end() -> None:
    judge = script()
    for cohorts in (judge.everybody(40), judge.half(40)):
        mine = ours(judge.A, judge.B, cohorts, judge.STEPS, judge.LR)
        right = judge.scaffold(judge.A, judge.B, cohorts, judge.STEPS, judge.LR)
        assert max(abs(u - v) for u, v in zip(mine, right, strict=True)) < 1e-12


def test_the_right_one_passes() -> None:
    judge = script()
    assert judge.judge(judge.scaffold) == []


@pytest.mark.parametrize("bug", script().BUGS)
def test_every_planted_bug_is_found_and_named(bug: str) -> None:
    judge = script()
    found = judge.judge(lambda *given: judge.scaffold(*given, bug=bug))
    assert found[-1] == f"its path is that of a known bug: {bug}"
    assert len(found) >= 2
