"""Keyed dropout of a cohort in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.kernels import interpreted
from undrift.kernels.interpreter import mend
from undrift.kernels.programs import dropout
from undrift.kernels.tuner import Launch, on_device

BLOCK = 1024

if interpreted():
    mend()


def drop(x: Tensor, keys: Tensor, words: tuple[int, int], threshold: int, scale: float) -> Tensor:
    """Scale what is kept of x [C, B, ...] and drop the rest.

    Draw i of fold(keys[c], *words) decides element i of client c.  Elements are numbered as torch
    does; x may have its channels last in memory, and so has y.
    """
    last = x.dim() == 5 and x.shape[2] > 1 and x.permute(0, 1, 3, 4, 2).is_contiguous()
    x = x if last else x.contiguous()
    y = torch.empty_like(x)
    size = x[0].numel()
    channels, pixels = (x.shape[2], x[0, 0, 0].numel()) if last else (1, 1)
    constants = dict(SIZE=size, CHANNELS=channels, PIXELS=pixels, BLOCK=BLOCK, num_warps=4)
    arguments = (x, keys.contiguous(), y, *words, threshold, scale)
    with on_device(x):
        Launch(dropout.drop, (-(-size // BLOCK), len(x)), arguments, constants).run()
    return y
