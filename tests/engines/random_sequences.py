"""Blocks of random modules for sequences [B, T, W]."""

from __future__ import annotations

import random
from typing import Any

import torch
from random_blocks import Do, Shape, divisor, part
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


@part("sequence")
def recurrent(draw: random.Random, shape: Shape) -> nn.Module:
    first, layers = draw.random() < 0.6, draw.choice([1, 2])
    kind = draw.choice([nn.RNN, nn.LSTM, nn.GRU])
    options = {"nonlinearity": draw.choice(["tanh", "relu"])} if kind is nn.RNN else {}
    layer = kind(
        shape[-1], 4, layers, bidirectional=draw.random() < 0.4, batch_first=first,
        bias=draw.random() < 0.8, dropout=0.2 * (layers - 1) * (draw.random() < 0.5), **options,
    )  # fmt: skip
    begun = draw.random() < 0.3 and kind is not nn.LSTM

    def run(self: Any, x: Tensor) -> Tensor:
        x = x if first else x.transpose(0, 1)
        rows = x.shape[0 if first else 1]
        start = self.start.expand(-1, rows, -1) if begun else None
        y = self.layer(x, start)[0]
        return y if first else y.transpose(0, 1)

    return Do(run, layer=layer, start=torch.randn(layers * (1 + layer.bidirectional), 1, 4))


@part("sequence")
def loops(draw: random.Random, shape: Shape) -> nn.Module:
    """A recurrent network by hand, whose outputs are written one after the other."""
    cell = draw.choice([nn.RNNCell, nn.GRUCell])(shape[-1], 4)

    def run(self: Any, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 4, dtype=x.dtype)
        outputs = torch.empty(len(x), x.shape[1], 4, dtype=x.dtype)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outputs[:, t] = h
        return outputs

    return Do(run, cell=cell)


@part("sequence to")
def final(draw: random.Random, shape: Shape) -> nn.Module:
    """The last states of a recurrent network."""
    kind, both = draw.choice([nn.LSTM, nn.GRU, nn.RNN]), draw.random() < 0.5
    layer = kind(shape[-1], 3, bidirectional=both, batch_first=True)

    def run(self: Any, x: Tensor) -> Tensor:
        h = self.layer(x)[1]
        return torch.cat(h, -1).mean(0) if kind is nn.LSTM else h.transpose(0, 1).flatten(1)

    return Do(run, layer=layer)


@part("sequence")
def heads(draw: random.Random, shape: Shape) -> nn.Module:
    first, weights = draw.random() < 0.6, draw.random() < 0.3
    width, masked = shape[-1], draw.choice(["no", "causal", "bool"])
    options = {"bias": draw.random() < 0.7, "add_bias_kv": draw.random() < 0.2}
    layer = nn.MultiheadAttention(width, divisor(draw, width), batch_first=first, **options)

    def run(self: Any, x: Tensor) -> Tensor:
        mask = ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        x = x if first else x.transpose(0, 1)
        causal = masked == "causal"
        y, _ = self.layer(
            x, x, x, need_weights=weights, attn_mask=None if masked == "no" else mask,
            is_causal=causal,
        )  # fmt: skip
        return y if first else y.transpose(0, 1)

    return Do(run, layer=layer)


@part("sequence")
def attention(draw: random.Random, shape: Shape) -> nn.Module:
    width = shape[-1]
    count, masked = divisor(draw, width), draw.choice(["no", "causal", "bool", "added"])

    def run(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, count, -1)).permute(2, 0, 3, 1, 4)
        square = (x.shape[1], x.shape[1])
        mask = {"bool": x[:, None, None, :, 0] > -1, "added": self.bias.expand(*square)}
        y = F.scaled_dot_product_attention(
            q, k, v, mask.get(masked), is_causal=masked == "causal", scale=0.4
        )
        return y.transpose(1, 2).flatten(2)

    return Do(run, qkv=nn.Linear(width, 3 * width), bias=torch.randn(1, shape[0]))


@part("sequence")
def transformer(draw: random.Random, shape: Shape) -> nn.Module:
    width, first = shape[-1], draw.random() < 0.5
    sizes = (width, divisor(draw, width), 8, 0.0, draw.choice(["relu", "gelu"]))
    options = {"batch_first": True, "norm_first": first}
    if draw.random() < 0.3:
        layer: nn.Module = nn.TransformerDecoderLayer(*sizes, **options)
        return Do(lambda self, x: self.layer(x, x.roll(1, 1)), layer=layer)
    layer = nn.TransformerEncoderLayer(*sizes, **options)
    if draw.random() < 0.4:
        layer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not (first or sizes[1] % 2))

    def run(self: Any, x: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]) >= x.shape[1] - 1
        return self.layer(x, src_key_padding_mask=padding.expand(x.shape[:2]))

    return Do(run if draw.random() < 0.5 else lambda self, x: self.layer(x), layer=layer)


@part("sequence")
def positions(draw: random.Random, shape: Shape) -> nn.Module:
    return Do(
        lambda self, x: x + self.place[: x.shape[1]], place=torch.randn(2 * shape[0], shape[-1])
    )


@part("sequence")
def lines(draw: random.Random, shape: Shape) -> nn.Module:
    """Convolutions along a sequence, of several kinds."""
    width, groups = shape[-1], draw.choice([1, shape[-1]])
    apart = draw.choice([1, 2]) if shape[0] > 3 else 1
    layer: nn.Module = nn.Conv1d(width, width, 2, dilation=apart, groups=groups)
    if draw.random() < 0.3:
        layer = parametrizations.weight_norm(layer)

    def causal(self: Any, x: Tensor) -> Tensor:
        return self.layer(F.pad(x.transpose(1, 2), (apart, 0))).transpose(1, 2)

    return Do(causal, layer=layer)


@part("sequence")
def pooled_lines(draw: random.Random, shape: Shape) -> nn.Module:
    pool = draw.choice([
        nn.MaxPool1d(2, 1, 1), nn.AvgPool1d(2, 1, 1), nn.AdaptiveAvgPool1d(4),
        nn.AdaptiveMaxPool1d(3), nn.Upsample(scale_factor=2), nn.ConvTranspose1d(shape[-1], 4, 3),
        nn.ReflectionPad1d(1), nn.CircularPad1d(1),
    ])  # fmt: skip
    return Do(lambda self, x: self.pool(x.transpose(1, 2)).transpose(1, 2), pool=pool)
