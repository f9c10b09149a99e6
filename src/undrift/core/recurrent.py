"""nn.RNN and nn.GRU on their own weights, in operations that vmap and grad both take.

Shapes.  T steps, B rows, H hidden units, D directions, L layers, G gates; inside, time comes first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Drop = Callable[[Tensor], Tensor]  # what happens between layers
Cell = Callable[[Tensor, Tensor, Tensor], Tensor]  # (inner [B, GH], recurrent [B, GH], h) -> h


def run_recurrent(
    layer: nn.RNNBase, x: Tensor, hx: Tensor | None, drop: Drop
) -> tuple[Tensor, Tensor]:
    """Do what the layer does, in its layouts: gives outputs and the last hidden states."""
    rows = 0 if layer.batch_first else 1
    if x.dim() == 2:  # one sequence
        start = None if hx is None else hx.unsqueeze(1)
        output, h = run_recurrent(layer, x.unsqueeze(rows), start, drop)
        return output.squeeze(rows), h.squeeze(1)
    sides = ("", "_reverse") if layer.bidirectional else ("",)
    shape = (layer.num_layers * len(sides), x.shape[rows], layer.hidden_size)
    start = x.new_zeros(shape) if hx is None else hx
    layer.check_hidden_size(start, shape)
    x = x.transpose(0, 1) if layer.batch_first else x
    ends: list[Tensor] = []
    for number in range(layer.num_layers):
        outputs = []
        for side in sides:
            output = _sweep(layer, x, start[len(ends)], f"l{number}{side}")
            ends.append(output[0] if side else output[-1])
            outputs.append(output)
        x = torch.cat(outputs, dim=-1)
        x = drop(x) if number < layer.num_layers - 1 else x
    return (x.transpose(0, 1) if layer.batch_first else x), torch.stack(ends)


def _sweep(layer: nn.RNNBase, x: Tensor, h: Tensor, end: str) -> Tensor:
    """Run one layer in one direction: [T, B, H], in the order of the inputs."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    inner, outer, *biases = (getattr(layer, f"{n}_{end}", None) for n in names)
    assert inner is not None and outer is not None, "every layer has weights"
    before, beside = biases if layer.bias else (None, None)
    cell, backwards = cell_of(layer), end.endswith("_reverse")
    # One large product for all steps; only the recurrent half has to wait for its turn.
    steps, outputs = F.linear(x, inner, before), []
    for step in reversed(steps.unbind(0)) if backwards else steps.unbind(0):
        h = cell(step, F.linear(h, outer, beside), h)
        outputs.append(h)
    return torch.stack(outputs[::-1] if backwards else outputs)


def cell_of(layer: nn.RNNBase) -> Cell:
    """Find what a step does."""
    if isinstance(layer, nn.GRU):
        return gru_move
    return relu_move if getattr(layer, "nonlinearity", "tanh") == "relu" else tanh_move


def tanh_move(inner: Tensor, recurrent: Tensor, h: Tensor) -> Tensor:
    """Move a plain cell."""
    return (inner + recurrent).tanh()


def relu_move(inner: Tensor, recurrent: Tensor, h: Tensor) -> Tensor:
    """Move a plain cell that only rises."""
    return (inner + recurrent).relu()


def gru_move(inner: Tensor, recurrent: Tensor, h: Tensor) -> Tensor:
    """Move by the gates in torch's order: reset, update, new."""
    (r, z, n), (hr, hz, hn) = inner.chunk(3, -1), recurrent.chunk(3, -1)
    z, n = (z + hz).sigmoid(), (n + (r + hr).sigmoid() * hn).tanh()
    return n + z * (h - n)
