"""Blocks of random modules for images [B, C, H, W] and volumes [B, C, D, H, W], and bridges."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from random_blocks import Do, Shape, divisor, part
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


@part("image", "volume")
def convolution(draw: random.Random, shape: Shape) -> nn.Module:
    flat, c = len(shape) == 3, shape[0]
    kind = nn.Conv2d if flat else nn.Conv3d
    groups = draw.choice([1, c, divisor(draw, c)])
    size = 3 if min(shape[1:]) > 3 else 2
    around = draw.choice([0, 1, "same" if size == 3 else 0])
    stride = 1 if around == "same" else draw.choice([1, 1, 2])
    if min(shape[1:]) < size:
        size, around, stride = 1, 0, 1
    mode = draw.choice(["zeros", "zeros", "circular", "reflect" if flat else "replicate"])
    apart = draw.choice([1, 2]) if min(shape[1:]) > 4 and size == 3 else 1
    layer: nn.Module = kind(
        c, c * draw.choice([1, 2]), size, stride, around, groups=groups, dilation=apart,
        bias=draw.random() < 0.7, padding_mode=mode if min(shape[1:]) > 2 else "zeros",
    )  # fmt: skip
    if draw.random() < 0.2:
        layer = parametrizations.weight_norm(layer)
    return layer


@part("image", "volume")
def transposed(draw: random.Random, shape: Shape) -> nn.Module:
    c, groups = shape[0], divisor(draw, shape[0])
    kind = nn.ConvTranspose2d if len(shape) == 3 else nn.ConvTranspose3d
    stride = draw.choice([1, 2]) if max(shape[1:]) < 7 else 1
    return kind(c, c, 2, stride, groups=groups, output_padding=stride - 1)


@part("image", "volume")
def pooled(draw: random.Random, shape: Shape) -> nn.Module:
    if min(shape[1:]) < 2:
        return nn.Identity()
    if len(shape) == 4:
        kinds = [nn.MaxPool3d(2, 1), nn.AvgPool3d(2, 1), nn.AdaptiveAvgPool3d(2),
                 nn.AdaptiveMaxPool3d((2, 1, 2)), nn.LPPool3d(2, 2, 1)]  # fmt: skip
        return draw.choice(kinds)
    kinds = [
        nn.MaxPool2d(2), nn.MaxPool2d(2, 1, ceil_mode=True),
        nn.AvgPool2d(2, count_include_pad=False),
        nn.AdaptiveAvgPool2d((3, 2)), nn.AdaptiveMaxPool2d(2), nn.LPPool2d(2, 2, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(size=(5, 4), mode="bicubic"),
        nn.Upsample(scale_factor=1.5), nn.ZeroPad2d((1, 0, 0, 1)), nn.ReplicationPad2d(1),
    ]  # fmt: skip
    return draw.choice(kinds)


@part("image")
def excited(draw: random.Random, shape: Shape) -> nn.Module:
    c = shape[0]

    def run(self: Any, x: Tensor) -> Tensor:
        return x * self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()

    return Do(run, down=nn.Conv2d(c, 2, 1), up=nn.Conv2d(2, c, 1))


@part("image")
def rearranged(draw: random.Random, shape: Shape) -> nn.Module:
    c = shape[0]
    ways: list[Callable[[Any, Tensor], Tensor]] = [
        lambda self, x: F.channel_shuffle(x, 2) if c % 2 == 0 else x,
        lambda self, x: F.pixel_shuffle(x, 2) if c % 4 == 0 else x,
        lambda self, x: F.fold(F.unfold(x, 2), x.shape[2:], 2),
        lambda self, x: F.local_response_norm(x, 2),
        lambda self, x: F.grid_sample(
            x, F.affine_grid(self.turn.expand(len(x), 2, 3), list(x.shape), align_corners=False),
            align_corners=False,
        ),
        lambda self, x: _unpooled(x),
        lambda self, x: x.permute(0, 1, 3, 2).contiguous(memory_format=torch.channels_last),
        lambda self, x: x.rot90(1, (2, 3)),
        lambda self, x: x.narrow(2, 0, 1) + x,
    ]  # fmt: skip
    return Do(draw.choice(ways), turn=torch.tensor([[0.9, 0.1, 0.0], [-0.1, 0.8, 0.1]]))


def _unpooled(x: Tensor) -> Tensor:
    if min(x.shape[2:]) < 2:
        return x
    y, at = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y, at, 2, output_size=x.shape)


# ---------------------------------------------------------------------------------------- bridges
@part("sequence to")
def last(draw: random.Random, shape: Shape) -> nn.Module:
    return Do(lambda self, x: x[:, -1])


@part("sequence to", "image to", "volume to")
def mean(draw: random.Random, shape: Shape) -> nn.Module:
    return Do(lambda self, x: x.mean(1) if x.dim() == 3 else x.flatten(2).mean(-1))


@part("sequence to", "image to", "volume to")
def flat(draw: random.Random, shape: Shape) -> nn.Module:
    return nn.Flatten()


@part("sequence to")
def weighed(draw: random.Random, shape: Shape) -> nn.Module:
    """A mean, weighted by what is seen."""

    def run(self: Any, x: Tensor) -> Tensor:
        return (self.score(x).softmax(1).transpose(1, 2) @ x).squeeze(1)

    return Do(run, score=nn.Linear(shape[-1], 1))


@part("image to", "volume to")
def patches(draw: random.Random, shape: Shape) -> nn.Module:
    """Positions become a sequence."""
    return Do(lambda self, x: x.flatten(2).transpose(1, 2))
