"""What cannot be trained for many clients at once is named before it is tried."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.nets import Cnn, Reader
from undrift.core.ops import prepare
from undrift.core.trouble import find_trouble


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
