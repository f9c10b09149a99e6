"""Networks that people bring, each an `nn.Module` with a `forward` of its own, and their work."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two convolutions with a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = norm(outputs), norm(outputs)
        self.around = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.around(x))


class ResNet(nn.Module):
    """ResNet-18 for small images, or a small one like it."""

    def __init__(self, norm: Callable, widths: tuple[int, ...], depth: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), norm(widths[0])
        blocks, before = [], widths[0]
        for stage, width in enumerate(widths):
            for place in range(depth):
                stride = 2 if stage and not place else 1
                blocks.append(Block(before, width, stride, norm))
                before = width
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(before, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class LeafCnn(nn.Module):
    """LEAF's network for FEMNIST."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.f, self.g = nn.Linear(3136, 2048), nn.Linear(2048, 62)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.max_pool2d(F.relu(self.b(x)), 2)
        return self.g(F.relu(self.f(x.flatten(1))))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class Layer(nn.Module):
    """A layer of a transformer, norms first."""

    def __init__(self, width: int, heads: int, causal: bool, linear: Callable) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A character model; with adapters, all else is frozen."""

    def __init__(self, width: int, layers: int, heads: int = 4, adapted: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(90, width), nn.Parameter(torch.randn(80, width) / 50)
        linear = Adapted if adapted else nn.Linear
        self.layers = nn.ModuleList(Layer(width, heads, True, linear) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 90, bias=False)
        if adapted:
            self.requires_grad_(False)
            for part in self.modules():
                if isinstance(part, Adapted):
                    part.a.requires_grad_(True)
                    part.b.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Vit(nn.Module):
    """A vision transformer for small images."""

    def __init__(self, width: int, layers: int, heads: int = 3, patch: int = 4) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.randn((32 // patch) ** 2, width) / 50)
        self.layers = nn.ModuleList(Layer(width, heads, False, nn.Linear) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class CharLstm(nn.Module):
    """LEAF's network for Shakespeare, giving every next character."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(90, 8), nn.LSTM(8, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, 90)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(x))[0])


class PflCnn(nn.Module):
    """The network of pfl-research's CIFAR-10 benchmark; its dropout as there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.f, self.g = nn.Linear(12544, 128), nn.Linear(128, 10)
        self.drop1, self.drop2 = nn.Dropout(0.25), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.b(F.relu(self.a(x)))), 2)
        return self.g(self.drop2(F.relu(self.f(self.drop1(x).flatten(1)))))

    def as_sequence(self) -> nn.Sequential:
        """Write the same network as a sequence."""
        relu, pool = nn.ReLU, nn.MaxPool2d
        return nn.Sequential(
            self.a, relu(), self.b, relu(), pool(2), self.drop1, nn.Flatten(), self.f, relu(),
            self.drop2, self.g,
        )  # fmt: skip


class FeddynCnn(nn.Module):
    """The network of FedDyn's code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 64, 5), nn.Conv2d(64, 64, 5)
        self.f, self.g, self.h = nn.Linear(1600, 384), nn.Linear(384, 192), nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.max_pool2d(F.relu(self.b(x)), 2)
        return self.h(F.relu(self.g(F.relu(self.f(x.flatten(1))))))

    def as_sequence(self) -> nn.Sequential:
        """Write the same network as a sequence."""
        relu, pool = nn.ReLU, nn.MaxPool2d
        return nn.Sequential(
            self.a, relu(), pool(2), self.b, relu(), pool(2), nn.Flatten(),
            self.f, relu(), self.g, relu(), self.h,
        )  # fmt: skip


def every_letter(output: Tensor, target: Tensor) -> Tensor:
    """Mean loss of an example's letters."""
    flat = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return flat.view(target.shape).mean(1)


class Work(NamedTuple):
    """A network and how it is trained."""

    make: Callable[[bool], nn.Module]  # of whether it is to be tiny
    data: str  # "images", "digits", "letters"
    cohort: int
    batch: int
    steps: int
    lr: float


def _resnet(norm: Callable, tiny: bool) -> nn.Module:
    return ResNet(norm, (8, 16) if tiny else (64, 128, 256, 512), 1 if tiny else 2)


def _vit(tiny: bool) -> nn.Module:
    return Vit(24, 1) if tiny else Vit(192, 6)


def _gpt(tiny: bool) -> nn.Module:
    return Gpt(16, 1) if tiny else Gpt(128, 4)


def _adapted(tiny: bool) -> nn.Module:
    return Gpt(16, 1, adapted=True) if tiny else Gpt(768, 12, 12, True)


_with_groups, _with_batches = partial(nn.GroupNorm, 2), nn.BatchNorm2d
WORKS = {
    "resnet18_gn": Work(partial(_resnet, _with_groups), "images", 10, 20, 5, 0.05),
    "resnet18_bn": Work(partial(_resnet, _with_batches), "images", 10, 20, 5, 0.05),
    "leaf_cnn": Work(lambda tiny: LeafCnn(), "digits", 20, 20, 5, 0.05),
    "gpt_4x128": Work(_gpt, "letters", 10, 10, 10, 0.1),
    "vit_6x192": Work(_vit, "images", 10, 20, 5, 0.05),
    "lstm_2x256": Work(lambda tiny: CharLstm(16 if tiny else 256), "letters", 10, 10, 10, 0.5),
    "gpt_12x768_lora": Work(_adapted, "letters", 10, 8, 5, 0.1),
    "pfl_cnn_50": Work(lambda tiny: PflCnn(), "ten", 50, 10, 5, 0.05),
    "feddyn_cnn_10": Work(lambda tiny: FeddynCnn(), "ten", 10, 50, 10, 0.05),
    "feddyn_cnn_100": Work(lambda tiny: FeddynCnn(), "ten", 100, 50, 10, 0.05),
}  # fmt: skip


SHAPES = {"images": ((3, 32, 32), 100), "ten": ((3, 32, 32), 10), "digits": ((1, 28, 28), 62)}


def draw(data: str, count: int, tiny: bool, maker: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the examples of one client."""
    if data == "letters":
        size = (count, 16 if tiny else 80)
        return tuple(torch.randint(0, 90, size, generator=maker) for _ in range(2))
    shape, classes = SHAPES[data]
    x = torch.randn(count, *shape, generator=maker)
    return x, torch.randint(0, classes, (count,), generator=maker)
