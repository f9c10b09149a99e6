"""Small networks, and what the tests of layers share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from undrift.core.ops import Pass, running

F64 = torch.float64
KEY = torch.tensor(1234567)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.conv(x))))
        return self.fc(self.drop(x.flatten(1)))


class Reader(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True, **options)
        self.fc = nn.Linear(10 if self.lstm.bidirectional else 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(self.embed(x))[0][:, -1])


def seeded(make, *args, **options):
    torch.manual_seed(0)
    return make(*args, **options).to(F64)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def gradients(module: nn.Module, x: Tensor, run: Pass, rows: int) -> tuple[Tensor, list[Tensor]]:
    """Output of the first rows, and the gradients of something uneven in them."""
    x = x.clone().requires_grad_(x.is_floating_point())
    with running(run):
        y = module(x)
    y = (y[0] if isinstance(y, tuple) else y)[:rows]
    wanted = [p for p in module.parameters() if p.requires_grad] + [x] * x.is_floating_point()
    return y.detach(), list(torch.autograd.grad(y.sin().sum(), wanted))
