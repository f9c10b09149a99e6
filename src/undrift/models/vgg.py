"""Networks of the VGG family for 32-pixel colour images, which five pools bring to one pixel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from undrift.models.layers import sequence
from undrift.models.settings import flag, whole

Convolution = tuple[int, int]  # width, size of the kernel

# Blocks, each ends with a pool.
VGG11 = (
    ((64, 3),),
    ((128, 3),),
    ((256, 3), (256, 3)),
    ((512, 3), (512, 3)),
    ((512, 3), (512, 3)),
)
FEDRL = (
    ((64, 3), (64, 3)),
    ((128, 3), (128, 3)),
    ((128, 3), (128, 3), (128, 1)),
    ((256, 3), (256, 3), (256, 1)),
    ((512, 3), (512, 3), (512, 1)),
)


def vgg11(classes: int = 10, batch_norm: bool = False) -> nn.Sequential:
    """Make FedNova's VGG-11 for CIFAR-10: fully connected 512-512-512-classes with dropout."""
    return sequence(
        **_blocks(VGG11, flag("batch_norm", batch_norm)),
        dropout1=nn.Dropout(0.5),
        fc1=nn.Linear(512, 512),
        relu_fc1=nn.ReLU(),
        dropout2=nn.Dropout(0.5),
        fc2=nn.Linear(512, 512),
        feature=nn.ReLU(),
        head=nn.Linear(512, whole("classes", classes)),
    )


def fedrl_vgg(classes: int = 10) -> nn.Sequential:
    """Make FedRL's network for CIFAR-10: 1x1 convolutions, BatchNorm, fully connected 1024."""
    return sequence(
        **_blocks(FEDRL, batch_norm=True),
        fc1=nn.Linear(512, 1024),
        relu_fc1=nn.ReLU(),
        dropout1=nn.Dropout(0.5),
        fc2=nn.Linear(1024, 1024),
        feature=nn.ReLU(),
        dropout2=nn.Dropout(0.5),
        head=nn.Linear(1024, whole("classes", classes)),
    )


def _blocks(blocks: Sequence[Sequence[Convolution]], batch_norm: bool) -> dict[str, nn.Module]:
    """List the convolutions, each with its BatchNorm and ReLU, and the pools."""
    layers: dict[str, nn.Module] = {}
    channels = 3
    for i, block in enumerate(blocks, start=1):
        for j, (width, size) in enumerate(block, start=1):
            layers[f"conv{i}_{j}"] = nn.Conv2d(channels, width, size, padding=size // 2)
            if batch_norm:
                layers[f"norm{i}_{j}"] = nn.BatchNorm2d(width)
            layers[f"relu{i}_{j}"] = nn.ReLU()
            channels = width
        layers[f"pool{i}"] = nn.MaxPool2d(2)
    return {**layers, "flatten": nn.Flatten()}
