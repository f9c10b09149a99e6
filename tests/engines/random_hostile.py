"""Blocks that the default engine refuses before training, or no engine trains."""

from __future__ import annotations

from typing import Any

import torch
from random_blocks import Build, Do
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Counting(nn.Module):
    """Changes a buffer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


def _renormalised() -> nn.Module:
    """An embedding that shortens its own rows whenever they are read."""
    table = nn.Embedding(3, 1, max_norm=0.1)
    return Do(lambda self, x: x + self.table((x > 0).long()).squeeze(-1), table=table)


class OldStyle(torch.autograd.Function):
    """An own gradient without a batching rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


HOSTILE: dict[str, Build] = {
    "buffer": lambda draw, shape: Counting(),
    "functional dropout": lambda draw, shape: Do(lambda self, x: F.dropout(x, 0.2)),
    "alpha dropout": lambda draw, shape: nn.AlphaDropout(0.2),
    "rrelu": lambda draw, shape: nn.RReLU(),
    "noise": lambda draw, shape: Do(lambda self, x: x + torch.randn_like(x)),
    "spectral norm": lambda draw, shape: parametrizations.spectral_norm(
        nn.Linear(shape[-1], shape[-1])
    ),
    "number": lambda draw, shape: Do(lambda self, x: x * float(x.sum().detach() > 0)),
    "branch": lambda draw, shape: Do(lambda self, x: x if x.sum() > 0 else -x),
    "selection": lambda draw, shape: Do(lambda self, x: x + x[x > 0].mean()),
    "nonzero": lambda draw, shape: Do(lambda self, x: x + len((x > 0).nonzero())),
    "own generator": lambda draw, shape: Do(
        lambda self, x: x * torch.rand((), generator=torch.Generator().manual_seed(0))
    ),
    "batch statistic": lambda draw, shape: Do(lambda self, x: x - x.mean(0)),
    "numpy": lambda draw, shape: Do(
        lambda self, x: x + torch.from_numpy(x.detach().numpy()).sum() * 0.1
    ),
    "unique": lambda draw, shape: Do(lambda self, x: x * len(x.detach().round().unique())),
    "old gradient": lambda draw, shape: Do(lambda self, x: OldStyle.apply(x)),
    "checkpoint": lambda draw, shape: Do(
        lambda self, x: checkpoint(torch.tanh, x, use_reentrant=False)
    ),
    "renormalised": lambda draw, shape: _renormalised(),
}
