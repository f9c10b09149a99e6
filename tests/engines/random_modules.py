"""Modules of random structure with forwards of their own, each a function of a seed.

A network is an entry that gives one of four kinds of value, some blocks, bridges from kind to kind,
and a head.  `PARTS` names what may stand in each kind; blocks that no engine takes are hostile.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import random_images
import random_sequences
import torch
from random_blocks import PARTS, Do, Shape
from random_hostile import HOSTILE
from torch import Tensor, nn
from torch.nn import functional as F

assert random_images and random_sequences  # they tell PARTS their blocks

Build = Callable[[random.Random, Shape], nn.Module]


class Made(NamedTuple):
    """A network, what it reads, and what it is made of."""

    module: nn.Module
    inputs: Callable[[int, torch.Generator], Tensor]
    parts: tuple[str, ...]
    hostile: bool


CLASSES, WORDS = 3, 9


def numbers(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    """Draw examples of numbers."""
    return lambda n, maker: torch.randn(n, *shape, generator=maker, dtype=torch.float64)


def words(length: int) -> Callable[[int, torch.Generator], Tensor]:
    """Draw examples of words; the last ones of a text are padding."""

    def draw(n: int, maker: torch.Generator) -> Tensor:
        x = torch.randint(0, WORDS, (n, length), generator=maker)
        x[:, 0] = 1
        return x.sort(1, descending=True).values

    return draw


class Entry(NamedTuple):
    """What a network reads, and the layer that reads it."""

    kind: str
    inputs: Callable[[int, torch.Generator], Tensor]
    layer: nn.Module


def entry(draw: random.Random) -> Entry:
    """Choose what a network reads."""
    length, width = draw.choice([4, 5, 7]), draw.choice([4, 6, 8])
    channels, side = draw.choice([2, 4]), draw.choice([5, 6])
    mode, padding = draw.choice(["sum", "mean", "max"]), draw.choice([None, 0])
    table = nn.Embedding(WORDS, width, padding_idx=padding)
    bags = nn.EmbeddingBag(WORDS, width, mode=mode, padding_idx=padding)
    classes = Do(lambda self, x: F.one_hot(x, WORDS).double())
    return draw.choice(
        [
            Entry("vector", numbers(width), nn.Identity()),
            Entry("sequence", numbers(length, width), nn.Identity()),
            Entry("image", numbers(channels, side, side), nn.Identity()),
            Entry("volume", numbers(channels, 4, 3, 4), nn.Identity()),
            Entry("vector", words(length), bags),
            Entry("sequence", words(length), classes),
            Entry("sequence", words(length), table),
            Entry("sequence", words(length), _tied(table, width)),
        ]
    )


def _tied(table: nn.Embedding, width: int) -> nn.Module:
    """A table of words that scores them, too."""
    weights, back = nn.Linear(width, WORDS, bias=False), nn.Linear(WORDS, width)
    weights.weight = table.weight

    def both(self: Do, x: Tensor) -> Tensor:
        y = self.table(x)
        return y + self.back(self.weights(y).tanh())

    return Do(both, table=table, weights=weights, back=back)


class Network(nn.Module):
    """One layer after the other, some of them around themselves or twice; then a head."""

    def __init__(self, first: nn.Module, layers: list[nn.Module], width: int) -> None:
        super().__init__()
        self.first, self.layers = first, nn.ModuleList(layers)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Residual(nn.Module):
    """Around a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Twice(nn.Module):
    """The same block two times."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class ByShape(nn.Module):
    """Which way depends on the shape of the input, not on its numbers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.inner(x)] if x.shape[-1] % 2 else [x, self.inner(x)]
        for k in range(x.dim() - 2):
            parts.append(parts[-1] * (0.5 + 0.1 * k))
        return torch.stack(parts).mean(0)


WRAPPERS = {"residual": Residual, "twice": Twice, "by shape": ByShape}


def build(seed: int, hostile: float = 0.1) -> Made:
    """Make the network of a seed; so many of them hold a block that no engine takes."""
    draw = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = _network(draw, draw.random() < hostile)
        return made._replace(module=made.module.double())


def _network(draw: random.Random, hostile: bool) -> Made:
    kind, inputs, first = entry(draw)
    x = first.double()(inputs(3, torch.Generator().manual_seed(0)))
    layers: list[nn.Module] = []
    names = [type(first).__name__]
    at = draw.randrange(2) if hostile else None  # of the block that is hostile
    for number in range(draw.choice([2, 3, 4])):
        name, build = draw.choice(sorted(HOSTILE.items() if number == at else PARTS[kind].items()))
        layer, told = _wrapped(draw, name, build, x)
        layers.append(layer)
        names.append(told)
        x = layer(x)
        if kind != "vector" and draw.random() < 0.3:
            kind, x = _bridge(draw, kind, x, layers, names)
    while kind != "vector":
        kind, x = _bridge(draw, kind, x, layers, names)
    return Made(Network(first, layers, x.shape[-1]), inputs, tuple(names), hostile)


def _wrapped(draw: random.Random, name: str, build: Build, x: Tensor) -> tuple[nn.Module, str]:
    """Build a block, and put it into another one where it keeps the shape."""
    layer, told = build(draw, tuple(x.shape[1:])).double(), name
    if layer(x).shape == x.shape and draw.random() < 0.5:
        kind = draw.choice(sorted(WRAPPERS))
        layer, told = WRAPPERS[kind](layer), f"{kind} {name}"
    chance = draw.random()
    if chance < 0.1:
        layer, told = layer.requires_grad_(False), f"frozen {told}"
    elif chance < 0.15:
        layer, told = layer.eval(), f"evaluated {told}"
    elif chance < 0.2:
        layer.register_forward_hook(lambda layer, given, y: y * 0.9)
        told = f"hooked {told}"
    elif chance < 0.3:
        layer, told = nn.Sequential(layer, nn.Tanh()), f"sequence of {told}"
    return layer, told


def _bridge(
    draw: random.Random, kind: str, x: Tensor, layers: list[nn.Module], names: list[str]
) -> tuple[str, Tensor]:
    """Go on from a kind to another one."""
    name, build = draw.choice(sorted(PARTS[f"{kind} to"].items()))
    layer = build(draw, tuple(x.shape[1:])).double()
    layers.append(layer)
    names.append(name)
    x = layer(x)
    return ("vector" if x.dim() == 2 else "sequence"), x
