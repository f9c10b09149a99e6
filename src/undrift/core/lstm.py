"""LSTM on nn.LSTM's own weights, in operations that vmap and grad both take.

Shapes.  T steps, B rows, H hidden units, D directions, L layers; inside, time comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from undrift.core.lstm_steps import Start, take_steps


class Weights(NamedTuple):
    """One layer in one direction; the gates lie in torch's order: input, forget, cell, output."""

    inner: Tensor  # [4H, features], weight_ih
    recurrent: Tensor  # [4H, H], weight_hh
    bias: Tensor | None  # [4H], bias_ih + bias_hh


class State(NamedTuple):
    """Hidden and cell state."""

    h: Tensor
    c: Tensor


Drop = Callable[[Tensor], Tensor]  # what happens between layers
Pair = tuple[Tensor, Tensor]  # (h, c), as nn.LSTM takes and gives them


def run_lstm(layer: nn.LSTM, x: Tensor, hx: Pair | None, drop: Drop) -> tuple[Tensor, Pair]:
    """Do what nn.LSTM does, in its layouts."""
    if x.dim() == 2:
        return _one_sequence(layer, x, hx, drop)
    shape = layer.get_expected_hidden_size(x, None)
    start = State(x.new_zeros(shape), x.new_zeros(shape)) if hx is None else State(*hx)
    layer.check_hidden_size(start.h, shape, "expected h_0 of size {}, got {}")
    layer.check_hidden_size(start.c, shape, "expected c_0 of size {}, got {}")
    flip = layer.batch_first
    output, end = sweep_layers(x.transpose(0, 1) if flip else x, start, weights(layer), drop)
    return (output.transpose(0, 1) if flip else output), (end.h, end.c)


def _one_sequence(layer: nn.LSTM, x: Tensor, hx: Pair | None, drop: Drop) -> tuple[Tensor, Pair]:
    rows = 0 if layer.batch_first else 1
    start = hx and (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
    output, (h, c) = run_lstm(layer, x.unsqueeze(rows), start, drop)
    return output.squeeze(rows), (h.squeeze(1), c.squeeze(1))


def weights(layer: nn.LSTM) -> list[list[Weights]]:
    """Collect the weights of a layer, [L][D]."""
    sides = ("", "_reverse") if layer.bidirectional else ("",)
    return [[_weights(layer, f"l{n}{side}") for side in sides] for n in range(layer.num_layers)]


def _weights(layer: nn.LSTM, end: str) -> Weights:
    def named(name: str) -> Tensor:
        return cast(Tensor, getattr(layer, f"{name}_{end}"))

    bias = named("bias_ih") + named("bias_hh") if layer.bias else None
    return Weights(named("weight_ih"), named("weight_hh"), bias)


def sweep_layers(
    x: Tensor,  # [T, B, features]
    start: State,  # of [L * D, B, H]
    layers: Sequence[Sequence[Weights]],  # [L][D]
    drop: Drop,
) -> tuple[Tensor, State]:
    """Run all layers; gives the last layer's output [T, B, D * H] and the final states."""
    ends: list[State] = []
    for number, directions in enumerate(layers):
        outputs = []
        for backwards, w in enumerate(directions):
            first = State(start.h[len(ends)], start.c[len(ends)])
            output, end = _sweep(x, first, w, bool(backwards))
            outputs.append(output)
            ends.append(end)
        x = torch.cat(outputs, dim=-1)
        if number < len(layers) - 1:
            x = drop(x)
    return x, State(torch.stack([e.h for e in ends]), torch.stack([e.c for e in ends]))


def _sweep(x: Tensor, start: State, w: Weights, backwards: bool) -> tuple[Tensor, State]:
    # One large product for all steps; only the recurrent half has to wait for its turn.
    steps = F.linear(x, w.inner, w.bias)
    outputs, c = take_steps(Start(steps.flip(0) if backwards else steps, *start, w.recurrent))
    end = State(outputs[-1], c)
    return outputs.flip(0) if backwards else outputs, end
