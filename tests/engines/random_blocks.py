"""What random modules are made of: blocks for values of each kind, by name.

Kinds: vector [B, D], sequence [B, T, W], image [B, C, H, W], volume [B, C, D, H, W].
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

Shape = tuple[int, ...]  # of one example
Build = Callable[[random.Random, Shape], nn.Module]
PARTS: dict[str, dict[str, Build]] = {}


class Do(nn.Module):
    """A module whose forward is a function of it and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module | Tensor):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def part(*kinds: str) -> Callable[[Build], Build]:
    """Let a block stand in values of these kinds."""

    def keep(build: Build) -> Build:
        for kind in kinds:
            PARTS.setdefault(kind, {})[build.__name__.strip("_")] = build
        return build

    return keep


ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Sigmoid, nn.Hardswish,
    nn.PReLU, nn.Mish, nn.SELU, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Hardtanh, nn.CELU,
    nn.ReLU6, nn.Hardsigmoid, nn.Softshrink, lambda: nn.Softmax(-1), lambda: nn.ReLU(inplace=True),
]  # fmt: skip


def divisor(draw: random.Random, n: int) -> int:
    """Draw a number that n can be divided by."""
    return draw.choice([d for d in range(1, n + 1) if n % d == 0])


class Symmetric(nn.Module):
    """A parametrization of one's own."""

    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


# ------------------------------------------------------------------------------ every kind of value
@part("vector", "sequence", "image", "volume")
def activation(draw: random.Random, shape: Shape) -> nn.Module:
    return Do(lambda self, x: self.act(x * 1.5), act=draw.choice(ACTIVATIONS)())


@part("vector", "sequence", "image", "volume")
def dropout(draw: random.Random, shape: Shape) -> nn.Module:
    kinds = {1: [nn.Dropout], 2: [nn.Dropout, nn.Dropout1d], 3: [nn.Dropout, nn.Dropout2d]}
    return draw.choice(kinds.get(len(shape), [nn.Dropout, nn.Dropout3d]))(0.3)


@part("vector", "sequence", "image", "volume")
def batch_norm(draw: random.Random, shape: Shape) -> nn.Module:
    kind = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][len(shape) - 1]
    return kind(
        shape[0], affine=draw.random() < 0.8, track_running_stats=draw.random() < 0.8,
        momentum=draw.choice([0.1, 0.3, None]),
    )  # fmt: skip


@part("sequence", "image", "volume")
def instance_norm(draw: random.Random, shape: Shape) -> nn.Module:
    kind = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d][len(shape) - 2]
    return kind(shape[0], affine=draw.random() < 0.5)


@part("vector", "sequence", "image", "volume")
def group_norm(draw: random.Random, shape: Shape) -> nn.Module:
    return nn.GroupNorm(divisor(draw, shape[0]), shape[0])


@part("vector", "sequence", "image", "volume")
def layer_norm(draw: random.Random, shape: Shape) -> nn.Module:
    axes = draw.randrange(len(shape))
    return draw.choice([nn.LayerNorm, nn.RMSNorm])(list(shape[axes:]))


@part("vector", "sequence", "image", "volume")
def scaled(draw: random.Random, shape: Shape) -> nn.Module:
    scale = torch.randn(*[n if draw.random() < 0.5 else 1 for n in shape])
    return Do(lambda self, x: torch.addcmul(x, x.sin(), self.scale), scale=scale)


@part("vector", "sequence", "image", "volume")
def mixed(draw: random.Random, shape: Shape) -> nn.Module:
    """Operations that see an example as a whole."""
    ways: list[Callable[[Any, Tensor], Tensor]] = [
        lambda self, x: x.cumsum(-1) * 0.3,
        lambda self, x: x.roll(1, -1) + x.flip(-1),
        lambda self, x: x - x.logsumexp(-1, keepdim=True),
        lambda self, x: F.normalize(x, dim=-1) * self.scale,
        lambda self, x: x.sort(-1).values,
        lambda self, x: x.clamp(min=-1.0, max=2.0),
        lambda self, x: torch.where(x > 0, x, self.scale * x.expm1()),
        lambda self, x: x / (1e-3 + x.norm(dim=-1, keepdim=True)) + x.amax(-1, keepdim=True),
        lambda self, x: x - x.median(-1, keepdim=True).values,
        lambda self, x: x.masked_fill(x < -1, 0.0) + x.mean(-1, keepdim=True) * self.scale,
        lambda self, x: torch.fft.rfft(x).abs().sum(-1, keepdim=True) * 0.1 + x,
        lambda self, x: x.std(-1, keepdim=True, correction=0) * self.scale + x,
        lambda self, x: F.log_softmax(x, -1).exp() + x.cummax(-1).values,
        lambda self, x: x.gather(-1, x.argsort(-1)) - x.prod(-1, keepdim=True) * 0.1,
        lambda self, x: F.threshold(x, 0.1, 0.0) + F.hardshrink(x),
        lambda self, x: F.pad(x, (1, 1), value=0.5)[..., 1:-1] * self.scale,
        lambda self, x: torch.lerp(x, x.tanh(), self.scale),
        lambda self, x: x.unfold(-1, 2, 1).mean(-1, keepdim=True).amax(-2) + x,
        lambda self, x: torch.index_select(x, -1, torch.arange(x.shape[-1] - 1, -1, -1)),
        lambda self, x: x.diff(dim=-1, prepend=x[..., :1]) + x.var(-1, keepdim=True),
        lambda self, x: F.cosine_similarity(x, x.flip(-1), -1).unsqueeze(-1) + x,
        lambda self, x: x.topk(2, -1).values.mean(-1, keepdim=True) + x,
        lambda self, x: x.clone().index_add(-1, torch.tensor([0]), x[..., :1]),
        lambda self, x: x.scatter(-1, torch.zeros_like(x[..., :1], dtype=torch.int64), 0.5),
        lambda self, x: torch.repeat_interleave(x, 2, -1)[..., ::2].sign() * x,
        lambda self, x: torch.cat([x[..., :1].detach(), x[..., 1:] * self.scale], -1),
        lambda self, x: _written(torch.zeros_like(x), x),
        lambda self, x: _written(torch.zeros(x.shape, dtype=x.dtype), x),
        lambda self, x: _written(x.new_zeros(x.shape), x),
        lambda self, x: _averaged(x) * self.scale,
        lambda self, x: x.clone(memory_format=torch.preserve_format).sigmoid() + self.scale,
        lambda self, x: x.kthvalue(2, -1, keepdim=True).values + x.atan2(self.scale),
        lambda self, x: torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0]).to(x)) * x,
        lambda self, x: F.softmin(x.movedim(-1, 1).movedim(1, -1), -1) + x.logcumsumexp(-1),
        lambda self, x: torch.stack(x.unbind(-1)[::-1], -1).nan_to_num() ** 2 * self.scale,
        lambda self, x: torch.matmul(x.unsqueeze(-1), x.unsqueeze(-2)).triu().sum(-1),
        lambda self, x: torch.tensordot(x, self.scale.expand(x.shape[-1], 3), 1).sum(-1, True) + x,
        lambda self, x: x.renorm(2, 0, 1.5) + x.aminmax(dim=-1, keepdim=True).max,
    ]
    return Do(draw.choice(ways), scale=torch.tensor([0.7]))


def _written(room: Tensor, x: Tensor) -> Tensor:
    """Write in place into a tensor made here."""
    room[..., 1:] = x[..., :-1]
    room += x
    return room.mul_(0.5)


def _averaged(x: Tensor) -> Tensor:
    """Divide by what no gradient goes through."""
    with torch.no_grad():
        size = x.abs().amax(-1, keepdim=True) + 1
    return x / size


# ---------------------------------------------------------------------------------------- vectors
@part("vector", "sequence")
def linear(draw: random.Random, shape: Shape) -> nn.Module:
    width = shape[-1] if draw.random() < 0.5 else draw.choice([4, 6, 8])
    layer: nn.Module = nn.Linear(shape[-1], width, bias=draw.random() < 0.8)
    kind = draw.random()
    if kind < 0.25:
        layer = parametrizations.weight_norm(layer, dim=draw.choice([0, 1, None]))
    elif kind < 0.35 and width == shape[-1]:
        parametrize.register_parametrization(layer, "weight", Symmetric())
    elif kind < 0.45:
        layer = parametrizations.orthogonal(layer, orthogonal_map="cayley")
    return Do(lambda self, x: torch.tanh(self.layer(x)), layer=layer)


@part("vector", "sequence")
def tied(draw: random.Random, shape: Shape) -> nn.Module:
    """Down and up by the same weights."""
    there = nn.Linear(shape[-1], 5)
    return Do(lambda self, x: F.linear(self.there(x).tanh(), self.there.weight.t()), there=there)


@part("vector", "sequence")
def gated(draw: random.Random, shape: Shape) -> nn.Module:
    return Do(lambda self, x: F.glu(self.wide(x), -1), wide=nn.Linear(shape[-1], 2 * shape[-1]))


@part("vector", "sequence")
def einsum(draw: random.Random, shape: Shape) -> nn.Module:
    mix = torch.randn(shape[-1], 2, shape[-1]) / shape[-1]
    return Do(lambda self, x: torch.einsum("b...i,ikj->b...kj", x, self.mix).amax(-2), mix=mix)


@part("vector", "sequence")
def bilinear(draw: random.Random, shape: Shape) -> nn.Module:
    return Do(lambda self, x: self.pair(x, x.sin()), pair=nn.Bilinear(shape[-1], shape[-1], 4))


class Parts(nn.Module):
    """Takes a mapping of tensors or several, gives a pair of them."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(left, 4), nn.Linear(right, 4)

    def forward(
        self, given: dict[str, Tensor] | tuple[Tensor, Tensor], *, factor: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        a, b = given.values() if isinstance(given, dict) else given
        return self.left(a) * factor, {"right": self.right(b).sigmoid()}


@part("vector", "sequence")
def several_inputs(draw: random.Random, shape: Shape) -> nn.Module:
    named = draw.random() < 0.5

    def both(self: Any, x: Tensor) -> Tensor:
        a, b = x[..., :1], x[..., 1:]
        one, more = self.inner({"a": a, "b": b} if named else (a, b), factor=0.7)
        return one * more["right"] + x.mean(-1, keepdim=True)

    return Do(both, inner=Parts(1, shape[-1] - 1))


@part("vector")
def cells(draw: random.Random, shape: Shape) -> nn.Module:
    """Cells of recurrent networks, by hand."""
    kind = draw.choice([nn.RNNCell, nn.GRUCell, nn.LSTMCell])

    def steps(self: Any, x: Tensor) -> Tensor:
        h = None
        for k in range(3):
            h = self.cell(x * (k + 1) * 0.5, h)
        return h[0] if isinstance(h, tuple) else h

    return Do(steps, cell=kind(shape[-1], 4))


@part("vector")
def distances(draw: random.Random, shape: Shape) -> nn.Module:
    """Distances from learned points, or a system of equations."""
    points = torch.randn(4, shape[-1])
    if draw.random() < 0.5:
        return Do(lambda self, x: torch.cdist(x, self.points).neg().exp(), points=points)

    def solved(self: Any, x: Tensor) -> Tensor:
        a = self.points.t() @ self.points + torch.eye(x.shape[-1], dtype=x.dtype)
        return torch.linalg.solve(a, x.unsqueeze(-1)).squeeze(-1)

    return Do(solved, points=points)
