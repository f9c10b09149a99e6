"""Augmentation: a pure function (x [B, ...], key) -> x that changes every row by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from undrift.core.random import fold
from undrift.errors import TaskError

Augment = Callable[[Tensor, Tensor], Tensor]


def augment_rows(augment: Augment, x: Tensor, key: Tensor) -> Tensor:
    """Augment one batch of one step; `key` is the step's own."""
    # in the layout of x: a CPU's convolutions lose a third of their speed without it
    return torch.empty_like(x).copy_(augment(x, fold(key, "augment")))


def check_augment(augment: Augment, x: Tensor) -> None:
    """Try an augmentation on a few examples and explain what would go wrong in training."""
    key = torch.zeros((), dtype=torch.int64, device=x.device)
    try:
        # copies, for it may work in place
        once, again, alone = (augment(v.clone(), key) for v in (x, x, x[:1]))
    except Exception as error:
        raise TaskError(
            f"Task.augment fails on {tuple(x.shape)} {x.dtype} and a key: {error}"
        ) from error
    if not isinstance(once, Tensor):
        raise TaskError(f"Task.augment must give back x, got {type(once).__name__}")
    if once.shape != x.shape or once.dtype != x.dtype:
        raise TaskError(
            f"Task.augment made {tuple(once.shape)} {once.dtype} of {tuple(x.shape)} {x.dtype}: "
            "shape and type must stay (undrift.core.random.uniform is float64)"
        )
    if not torch.equal(once, again):
        raise TaskError(
            "Task.augment gives another result for the same x and key: draw its randomness from "
            "the key, e.g. with undrift.core.random.uniform(key, row)"
        )
    if not torch.equal(once[:1], alone):
        raise TaskError(
            "Task.augment gives a row another result when other rows follow it: batches are "
            "padded, so row i may depend on the key, i and its own example alone"
        )
