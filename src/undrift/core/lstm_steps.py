"""All steps of one LSTM layer as one differentiable operation.

Left to autograd, every step multiplies and adds a weight gradient of its own, as large as the
weights.  Here they are one product over all steps, and what does not depend on the step before is
computed for all of them at once.

Shapes.  * leading axes that vmap has added, T steps, B rows, H hidden units, C all of * in one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp
from torch.overrides import handle_torch_function, has_torch_function


class Start(NamedTuple):
    """What the steps of a layer begin with."""

    inner: Tensor  # [*, T, B, 4H], the inputs' share of the gates, biases included
    h: Tensor  # [*, B, H]
    c: Tensor  # [*, B, H]
    recurrent: Tensor  # [*, 4H, H]


class Held(NamedTuple):
    """What a forward pass leaves for the way back."""

    outputs: Tensor  # [*, T, B, H]
    gates: Tensor  # [*, T, B, 4H] input, forget, cell, output
    cells: Tensor  # [*, T, B, H]


def take_steps(start: Start) -> tuple[Tensor, Tensor]:
    """Take all steps: gives the outputs [T, B, H] and the last cell state [B, H].

    A program may exchange it, as it does functions of torch.
    """
    if has_torch_function(start):
        exchanged: tuple[Tensor, Tensor] = handle_torch_function(take_steps, start, start)
        return exchanged
    if not torch.is_grad_enabled():
        return steps_plainly(*start)
    outputs, c, _, _ = _stepped(*start)
    return outputs, c


def steps_plainly(inner: Tensor, h: Tensor, c: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor]:
    """Take all steps one after the other, in operations that autograd knows."""
    outputs = []
    for step in inner.unbind(-3):
        i, f, g, o = (step + torch.matmul(h, recurrent.mT)).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs, dim=-3), c


class _Steps(torch.autograd.Function):
    """The forward pass; gates and cells come out too, for the way back alone."""

    @staticmethod
    def forward(
        inner: Tensor, h: Tensor, c: Tensor, recurrent: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        lead = inner.shape[:-3]
        held = _all_steps(_merged(Start(inner, h, c, recurrent)))
        outputs, gates, cells = (v.view(*lead, *v.shape[1:]) for v in held)
        return outputs, cells.select(-3, -1).clone(), gates, cells

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        outputs, _, gates, cells = output
        ctx.mark_non_differentiable(gates, cells)
        ctx.save_for_backward(*inputs, outputs, gates, cells)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _backed(*grads[:2], *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, dims: Any, *values: Tensor) -> Any:
        return _stepped(*_in_front(info, dims, values)), (0, 0, 0, 0)


class _Back(torch.autograd.Function):
    """The way back: gradients of `Start` from those of the outputs and of the last cell state."""

    @staticmethod
    def forward(g: Tensor, g_c: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        start, held = Start(*values[:4]), Held(*values[4:])
        lead = g.shape[:-3]
        found = _all_back(
            _flat(g, 3), _flat(g_c, 2), _merged(start), Held(*(_flat(v, 3) for v in held))
        )
        return tuple(v.view(*lead, *v.shape[1:]) for v in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:6])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Differentiate once more, which is rare: all over again, plainly."""

        def once(g: Tensor, g_c: Tensor, *start: Tensor) -> Any:
            return vjp(steps_plainly, *start)[1]((g, g_c))

        return *vjp(once, *ctx.saved_tensors)[1](grads), None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *values: Tensor) -> Any:
        return _backed(*_in_front(info, dims, values)), (0, 0, 0, 0)


def _stepped(*values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made: tuple[Tensor, Tensor, Tensor, Tensor] = _Steps.apply(*values)  # type: ignore[no-untyped-call]
    return made


def _backed(*values: Tensor) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = _Back.apply(*values)  # type: ignore[no-untyped-call]
    return made


def _in_front(info: Any, dims: Any, values: tuple[Tensor, ...]) -> list[Tensor]:
    """Move vmap's axis to the front, where the others are."""
    return [
        v.expand(info.batch_size, *v.shape) if d is None else v.movedim(d, 0)
        for v, d in zip(values, dims, strict=True)
    ]


def _flat(v: Tensor, own: int) -> Tensor:
    """Make one axis of all that lead, [*, ...] -> [C, ...]; `own` axes follow them."""
    return v.reshape(-1, *v.shape[v.dim() - own :])


def _merged(start: Start) -> Start:
    return Start(_flat(start.inner, 3), *(_flat(v, 2) for v in start[1:]))


def _all_steps(start: Start) -> Held:
    inner, h, c, recurrent = start
    gates, size = torch.empty_like(inner, memory_format=torch.contiguous_format), h.shape[-1]
    outputs, cells = (inner.new_empty(*inner.shape[:-1], size) for _ in range(2))
    across = recurrent.mT
    for t in range(inner.shape[1]):
        torch.baddbmm(inner[:, t], h, across, out=gates[:, t])
        i, f, g, o = gates[:, t].chunk(4, dim=-1)
        gates[:, t, :, : 2 * size].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        c = torch.mul(f, c, out=cells[:, t]).addcmul_(i, g)
        h = torch.mul(o, c.tanh(), out=outputs[:, t])
    return Held(outputs, gates, cells)


def _all_back(g_out: Tensor, dc: Tensor, start: Start, held: Held) -> Start:
    size = dc.shape[-1]
    i, f, g, o = held.gates.chunk(4, dim=-1)
    bent = held.cells.tanh()
    before = torch.cat([start.c[:, None], held.cells[:, :-1]], 1)
    # what a gate's gradient is, per gradient of the cell state and of the output
    by_cell = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)], -2)
    by_output, to_cell = bent * o * (1 - o), o * (1 - bent * bent)
    d_gates = torch.empty_like(held.gates)
    split = d_gates.unflatten(-1, (4, size))
    dh = g_out[:, -1]
    for t in reversed(range(g_out.shape[1])):
        dc = torch.addcmul(dc, dh, to_cell[:, t])
        torch.mul(dc[..., None, :], by_cell[:, t], out=split[:, t, :, :3])
        torch.mul(dh, by_output[:, t], out=split[:, t, :, 3])
        dc = dc * f[:, t]
        if t:
            dh = torch.baddbmm(g_out[:, t - 1], d_gates[:, t], start.recurrent)
    d_h = torch.bmm(d_gates[:, 0], start.recurrent)
    fed = torch.cat([start.h[:, None], held.outputs[:, :-1]], 1)
    d_recurrent = torch.bmm(d_gates.flatten(1, 2).mT, fed.flatten(1, 2))
    return Start(d_gates, d_h, dc, d_recurrent)
