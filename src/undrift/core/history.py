"""Wide linear layers of a cohort, remembered by what moved them instead of by their weights.

Under plain SGD from a common start the weights of a client after some steps are

    W = W0 - sum over earlier steps of lr * G^T X      X [B, in] inputs, G [B, out] gradients by y

so that, with all slots side by side (X [K*B, in], G [K*B, out], empty ones zero),

    forward    y  = x W0^T - (x X^T) lr G + b
    backward   dx = g W0   - (g G^T) lr X

and a client's own weights are neither read nor written until its last step is taken.  W0 is shared
by the clients of an experiment: its products are large ones.  Biases move in place as ever.

Everything lies in buffers that keep their place and nothing is decided on the host, so a step can
be recorded and replayed.

Letters: S experiments, C clients of each, K steps, B rows of a batch, n = S * m clients that step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from undrift.core.dense import add_product, multiply
from undrift.core.precision import operand_type

if TYPE_CHECKING:
    from undrift.core.local import Sgd
    from undrift.core.task import Task

# A cohort's weights of one layer.  Below that, launches cost more than moving weights.
LEAST_WEIGHTS = 2**24
# fp16 ends at 65504: products of two inputs or two gradients are kept at a fraction of their size.
SHRUNK = 2.0**-10


@dataclass(frozen=True)
class Extent:
    """How much is to be remembered, and of what."""

    experiments: int
    clients: int
    steps: int
    batch: int

    @property
    def rows(self) -> int:
        """Tell how many examples a client sees."""
        return self.steps * self.batch


@dataclass
class Moves:
    """The learning rates of all slots and where this step writes: the same for every layer."""

    rates: Tensor  # [S, C, K + 1], -lr in units of `scale`; 0 where nothing is remembered
    scale: float
    slots: Tensor  # [n], among S * C * (K + 1)


class History:
    """One layer.  A client has K slots and a spare one, where it writes while it stands still.

    The spare slot is never read, so a client without a step adds nothing, whatever it computed.
    """

    def __init__(
        self, layer: nn.Linear, first: int, precision: str, extent: Extent, moves: Moves
    ) -> None:
        kind, device = operand_type(precision, layer.weight.dtype), moves.rates.device
        sizes = (extent.experiments, extent.clients, extent.steps + 1, extent.batch)
        self.precision, self.kind, self.extent, self.moves = precision, kind, extent, moves
        self.columns = slice(first, first + layer.weight.numel())  # of the cohort's matrix
        self.w0 = torch.zeros((extent.experiments, *layer.weight.shape), dtype=kind, device=device)
        self.x = torch.zeros((*sizes, layer.in_features), dtype=kind, device=device)
        self.g = torch.zeros((*sizes, layer.out_features), dtype=kind, device=device)
        self.used: bool | None = None  # whether it remembers: known after the first step

    def takes(self, x: Tensor) -> bool:
        """Whether x [n, rows, in] is a step's batch; a layer may be applied to more rows.

        The answer is the same in every step.
        """
        self.used = x.shape[1] == self.extent.batch
        return self.used

    def begin(self, w0: Tensor) -> None:
        """Start from the models w0 [S, P], with nothing remembered."""
        self.w0.copy_(w0[:, self.columns].view_as(self.w0))
        self.x.zero_()  # not by rates of 0: NaN of the last round would survive
        self.g.zero_()

    def forward(self, x: Tensor, b: Tensor | None, result: torch.dtype) -> tuple[Tensor, Tensor]:
        """Apply the layer to x [n, B, in]; gives y and x in the operand type."""
        operand = x.to(self.kind)
        y = self._by_start(operand, self.w0.transpose(1, 2))
        for part, held in self._parts(len(x)):
            overlap = self._overlap(operand[part], held.x)
            self._add(y[part], self._weighted(overlap, held.rates), held.g)
        if b is None:
            return y.to(result), operand
        return torch.add(y, b[:, None], out=torch.empty_like(y, dtype=result)), operand

    def backward(self, g: Tensor, x: Tensor, result: torch.dtype | None) -> Tensor | None:
        """Remember a step: inputs x in the operand type, gradient g [n, B, out].

        Gives the gradient by x in the type `result`, or none.
        """
        g, back = g.to(self.kind), None
        if result is not None:
            # A narrow result takes the second product on top of the rounded first one: its own
            # rounding once more, for half of the memory traffic.
            back = self._by_start(g, self.w0, result)
            for part, held in self._parts(len(g)):
                overlap = multiply(g[part], held.g.transpose(1, 2), self.precision)
                self._add_inputs(back[part], self._weighted(overlap, held.rates), held.x)
        _write(self.x, x, self.moves.slots)  # last: the weights above are those before the step
        _write(self.g, g, self.moves.slots)
        return back

    def finish(self, w: Tensor, start: Tensor) -> None:
        """Write the weights into the cohort's matrix w [S * C, P], from the models start [S, P].

        What is there is not read.  A layer that does not remember has moved by itself.
        """
        if self.used is False:
            return
        own, first = (m[:, self.columns].unflatten(1, self.w0.shape[1:]) for m in (w, start))
        each = len(w) // len(start)
        for part, held in self._parts(len(w)):
            # no longer shrunk: most rates are then 1, and gradients what they were
            rates, slots = held.rates / SHRUNK, (self.extent.steps, self.extent.batch)
            g = torch.empty_like(held.g)
            torch.mul(held.g.unflatten(1, slots), rates[..., None, None], out=g.unflatten(1, slots))
            theirs = first[part.start // each : -(-part.stop // each)]
            self._rebuild(own[part], theirs, g, held.x, self.moves.scale * SHRUNK)

    def _rebuild(self, w: Tensor, start: Tensor, g: Tensor, x: Tensor, scale: float) -> None:
        """Write start [S, out, in] + scale * g^T x into w [n, out, in], n / S clients each."""
        if self.kind != torch.float64 and _has_kernels(w.device):
            from undrift.kernels import linear

            sizes = (len(w), x.shape[1], x.shape[2], g.shape[2])
            problem = linear.LinearProblem(*sizes, self.precision)
            if linear.rebuilds(problem):
                linear.rebuild(problem, g, x, start, w, scale)
                return
        w.unflatten(0, (len(start), -1)).copy_(start[:, None])
        add_product(w, g.transpose(1, 2), x, scale, self.precision)

    def _by_start(self, a: Tensor, w0: Tensor, result: torch.dtype | None = None) -> Tensor:
        """Multiply everybody's rows by the start of their experiment."""
        rows = a.reshape(len(w0), -1, a.shape[2])
        return multiply(rows, w0, self.precision, result).view(*a.shape[:2], -1)

    def _overlap(self, rows: Tensor, held: Tensor) -> Tensor:
        """Multiply rows [n, B, in] by all inputs [n, K*B, in] that are held."""
        problem = self._problem(rows, held)
        if problem is None:
            return multiply(rows, held.transpose(1, 2), self.precision)
        from undrift.kernels import linear

        return linear.forward(problem, rows, held, None, torch.float32)

    def _add_inputs(self, y: Tensor, weighted: Tensor, held: Tensor) -> None:
        """Add the inputs that are held to y [n, B, in], by weights [n, B, K*B]."""
        problem = self._problem(y, held)
        if problem is None or not y.is_contiguous():
            self._add(y, weighted, held)
            return
        from undrift.kernels import linear

        linear.add_rows(problem, weighted, held, y, self.moves.scale)

    def _problem(self, rows: Tensor, held: Tensor) -> Any:
        """Describe a product with all slots to the kernels, or give None where they do not run.

        Torch's products do badly at these shapes: few rows and long sums.
        """
        if self.kind == torch.float64 or not _has_kernels(rows.device):
            return None
        from undrift.kernels import linear

        count, slots, inputs = held.shape
        problem = linear.LinearProblem(count, rows.shape[1], inputs, slots, self.precision)
        return problem if linear.takes(problem, held) else None

    def _add(self, y: Tensor, weighted: Tensor, held: Tensor) -> None:
        add_product(y, weighted, held, self.moves.scale, self.precision)

    def _weighted(self, overlap: Tensor, rates: Tensor) -> Tensor:
        """Multiply [n, B, K*B] by every slot's rate; the result is an operand."""
        made = torch.empty_like(overlap, dtype=self.kind)
        slots = (self.extent.steps, self.extent.batch)
        by_slot = overlap.unflatten(2, slots)
        torch.mul(by_slot, rates[:, None, :, None], out=made.unflatten(2, slots))
        return made

    def _parts(self, count: int) -> Iterator[tuple[slice, _Held]]:
        """View what some clients remember, in one piece where their memory is."""
        width, steps = count // self.extent.experiments, self.extent.steps
        x, g = (t[:, :width, :steps].flatten(2, 3) for t in (self.x, self.g))
        rates = self.moves.rates[:, :width, :steps]
        if self.extent.experiments == 1 or width == self.extent.clients:
            yield slice(0, count), _Held(*(t.flatten(0, 1) for t in (x, g, rates)))
            return
        for e in range(self.extent.experiments):
            yield slice(e * width, (e + 1) * width), _Held(x[e], g[e], rates[e])


class _Held(NamedTuple):
    x: Tensor  # [n, K*B, in]
    g: Tensor  # [n, K*B, out]
    rates: Tensor  # [n, K]


class Histories:
    """All layers of a task for which it pays."""

    def __init__(
        self, layers: dict[str, History], extent: Extent, moves: Moves, unit: float
    ) -> None:
        self.layers, self.extent, self._moves, self._unit = layers, extent, moves, unit
        self._starts = moves.slots.view(extent.experiments, extent.clients)  # of a client's slots

    @classmethod
    def for_task(
        cls,
        task: Task,
        local: Sgd,
        extent: Extent,
        device: torch.device,
        least: int = LEAST_WEIGHTS,
    ) -> Histories | None:
        """Make room for the layers where it pays; None if there are none.

        There are none without a seam, which alone looks into histories, or with weight decay.
        """
        if task.seam is None or local.weight_decay != 0:
            return None
        # Rates are remembered in units of the usual one, gradients as they come: with loss scale.
        unit = float(local.lr) or 1.0
        sizes = (extent.experiments, extent.clients, extent.steps + 1)
        rates = torch.zeros(sizes, dtype=task.dtype, device=device)
        first_slots = torch.arange(rates.numel(), device=device)[:: extent.steps + 1].clone()
        moves = Moves(rates, unit / task.loss_scale / SHRUNK, first_slots)
        firsts = dict(zip(task.names, _starts(task.sizes), strict=True))
        layers = {
            name: History(part, firsts[_weight(name)], task.seam.precision, extent, moves)
            for name, part in task.module.named_modules()
            if isinstance(part, nn.Linear)
            and _weight(name) in firsts
            and pays(part, task.seam.precision, extent, least)
        }
        return cls(layers, extent, moves, unit) if layers else None

    def begin(self, w0: Tensor) -> None:
        """Start a round from the models w0 [S, P]."""
        self._moves.rates.zero_()
        for layer in self.layers.values():
            layer.begin(w0)

    def at(self, k: Tensor, lr: Tensor) -> Histories:
        """Turn to step k, [] or [n], with rates lr [n]: the first clients of each experiment."""
        return self.turn_to(self.place(self.held(len(lr)), k, lr))

    def held(self, count: int) -> tuple[Tensor, Tensor]:
        """Give what `place` reads and writes for so many clients."""
        width = count // self.extent.experiments
        return self._starts[:, :width].reshape(-1), self._moves.rates.view(-1)

    def place(self, held: tuple[Tensor, Tensor], k: Tensor, lr: Tensor) -> Tensor:
        """Write down a step's rates; gives its slots, for `turn_to`.  A pure function of tensors.

        Rates do no harm before the step is remembered: its slot is still zero.
        """
        starts, rates = held
        slots = starts + torch.where(lr == 0, self.extent.steps, k.long())
        rates.index_copy_(0, slots, lr * (-SHRUNK / self._unit))
        return slots

    def turn_to(self, slots: Tensor) -> Histories:
        """Let all layers remember in these slots."""
        self._moves.slots = slots
        return self

    @property
    def known(self) -> bool:
        """Whether a step has told which layers remember."""
        return all(layer.used is not None for layer in self.layers.values())

    def others(self, w: Tensor) -> list[Tensor]:
        """View what is not remembered of models w [..., P]: the rest is written by `finish`."""
        columns = sorted((h.columns for h in self.layers.values() if h.used), key=lambda c: c.start)
        starts = [0, *(c.stop for c in columns)]
        stops = [*(c.start for c in columns), w.shape[-1]]
        return [w[..., a:b] for a, b in zip(starts, stops, strict=True) if a < b]

    def finish(self, w: Tensor, start: Tensor) -> None:
        """Write the layers into the cohort's matrix w [S * C, P]; start [S, P] began the round."""
        for layer in self.layers.values():
            layer.finish(w, start)


def pays(layer: nn.Linear, precision: str, extent: Extent, least: int = LEAST_WEIGHTS) -> bool:
    """Whether remembering moves clearly less memory than weights that move at every step."""
    weight = layer.weight.element_size()
    operand = operand_type(precision, layer.weight.dtype).itemsize
    # Per input and client.  Weights: read going forward, read and written going back.
    moving = extent.steps * 3 * weight * layer.out_features
    # Remembered: all slots are read going forward and going back.  Once a round they are zeroed,
    # and read again to read and write the weights.
    slots = operand * extent.rows
    remembered = extent.steps * 2 * slots + 2 * slots + 2 * weight * layer.out_features
    count = extent.experiments * extent.clients * layer.weight.numel()
    return 3 * remembered <= 2 * moving and count >= least


def _write(held: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write rows [n, B, ...] into their slots of held [S, C, K + 1, B, ...]."""
    target, source = held.view(-1, held.shape[3] * held.shape[4]), rows.reshape(len(rows), -1)
    packed = 8 // source.element_size()
    even = source.shape[1] % packed == 0 and source.storage_offset() % packed == 0
    if even and source.is_contiguous():
        # one index is looked up per element: let elements be large
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.index_copy_(0, slots, source)


def _has_kernels(device: torch.device) -> bool:
    from undrift import kernels

    return kernels.available(device)


def _weight(name: str) -> str:
    return f"{name}.weight" if name else "weight"


def _starts(sizes: tuple[int, ...]) -> list[int]:
    return [sum(sizes[:at]) for at in range(len(sizes))]
