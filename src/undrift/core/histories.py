"""All wide layers of a task that remember their steps (history.py), and where that pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from undrift.core.chain import parameter
from undrift.core.history import PLAIN, SHRUNK, Extent, History, Moves, Vectors
from undrift.core.precision import operand_type

if TYPE_CHECKING:
    from undrift.core.local import Sgd
    from undrift.core.task import Task
from undrift.kernels.problem import Lying

# A cohort's weights of one layer.  Below that, launches cost more than moving weights.
LEAST_WEIGHTS = 2**24


class Numbers(NamedTuple):
    """What stands for the vectors that move, and where the next step is remembered."""

    rates: Tensor  # [carried, S, C, K + 1]
    terms: Tensor  # [carried, S, C, shared + own]
    slots: Tensor  # [S, C], among S * C * (K + 1)


class Fresh(NamedTuple):
    """What a round begins with."""

    rates: Tensor
    terms: tuple[Tensor, ...]  # one, or none where layers step by themselves
    slots: tuple[Tensor, ...]
    shared: list[Tensor]  # by layer [S, shared, out, in]
    starts: Tensor  # [S, C], a client's first slot


class Histories:
    """All layers of a task for which it pays."""

    def __init__(
        self, layers: dict[str, History], extent: Extent, moves: Moves, unit: float
    ) -> None:
        self.layers, self.extent, self._moves, self._unit = layers, extent, moves, unit
        self.rates = moves.rates[None]  # [carried, S, C, K + 1]: of the model and what else moves
        self.terms: Tensor | None = None  # [carried, S, C, shared + own]
        first = moves.slots.clone()  # of a client's slots
        self._starts = first.view(extent.experiments, extent.clients)
        # whether what is remembered may be not finite: then 0 times it is not 0
        self.spoiled = torch.ones((), dtype=torch.bool, device=first.device)

    @staticmethod
    def could_pay(task: Task, extent: Extent, least: int = LEAST_WEIGHTS) -> bool:
        """Whether some layer would remember under the chain of rules that it pays most for."""
        best, seam = Vectors(carried=3, in_place=False), task.seam
        layers = [part for part in task.module.modules() if isinstance(part, nn.Linear)]
        return seam is not None and any(
            pays(layer, seam.precision, extent, least, best) for layer in layers
        )

    @classmethod
    def for_task(
        cls,
        task: Task,
        local: Sgd,
        extent: Extent,
        device: torch.device,
        vectors: Vectors = PLAIN,
        least: int = LEAST_WEIGHTS,
    ) -> Histories | None:
        """Make room for the layers where it pays; None if there are none.

        There are none without a seam, which alone looks into histories; with weight decay where
        layers step by themselves; and where fp16 would have to hold vectors of any size.
        """
        plain = vectors.carried == 0
        if task.seam is None or (plain and local.weight_decay != 0):
            return None
        if not plain and operand_type(task.seam.precision, task.dtype) == torch.float16:
            return None
        # Rates are remembered in units of the usual one, gradients as they come: with loss scale.
        unit = float(local.lr) or 1.0
        sizes = (extent.experiments, extent.clients, extent.steps + 1)
        rates = torch.zeros((max(1, vectors.carried), *sizes), dtype=task.dtype, device=device)
        first_slots = torch.arange(rates[0].numel(), device=device)[:: extent.steps + 1].clone()
        moves = Moves(rates[0], unit / task.loss_scale / SHRUNK, first_slots)
        terms = None
        if not plain:
            terms = rates.new_zeros((*rates.shape[:3], vectors.shared + vectors.own))
            moves.weights = terms[0]
        firsts = dict(zip(task.names, _starts(task.sizes), strict=True))
        layers = {
            name: History(
                part, firsts[parameter(name, "weight")], task.seam.precision, extent, moves, vectors
            )
            for name, part in task.module.named_modules()
            if isinstance(part, nn.Linear)
            and parameter(name, "weight") in firsts
            and pays(part, task.seam.precision, extent, least, vectors)
        }
        if not layers:
            return None
        made = cls(layers, extent, moves, unit)
        made.rates, made.terms = rates, terms
        return made

    def begin(
        self, w0: Tensor, more: Sequence[Tensor] = (), own: Sequence[Tensor] = (),
        steps: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Start a round from the models w0 [S, P] and the other vectors, [S, P] and [S, C, P].

        Of clients that take so many `steps` [S, C], where layers do not step by themselves.
        """
        self.set_out(self.fresh, w0, more, steps)
        self.clear()
        self.take_in(own)

    @property
    def fresh(self) -> Fresh:
        """Give what `set_out` writes, where it lies, and reads."""
        shared = [layer.shared for layer in self.layers.values()]
        if self.terms is None:
            return Fresh(self.rates, (), (), shared, self._starts)
        slots = self._moves.slots.view_as(self._starts)
        return Fresh(self.rates, (self.terms,), (slots,), shared, self._starts)

    def set_out(
        self, fresh: Fresh, w0: Tensor, more: Sequence[Tensor], steps: Tensor | None
    ) -> None:
        """Begin with nothing remembered, at the received models.  A pure function of tensors."""
        fresh.rates.zero_()
        for terms in fresh.terms:
            terms.zero_()
            terms[0, ..., 0].fill_(1.0)  # everybody begins at the received model, all else at 0
        # Where layers step by themselves `turn_to` brings slots of its own, which are not to be
        # written: a recorded round would go on to write there when others have that memory.
        if steps is not None:
            first = fresh.starts + torch.where(steps > 0, 0, self.extent.steps)
            for slots in fresh.slots:
                slots.copy_(first)
        for layer, shared in zip(self.layers.values(), fresh.shared, strict=True):
            for j, vector in enumerate((w0, *more)):
                shared[:, j].copy_(layer.of(vector))

    def clear(self) -> None:
        """Forget what was remembered."""
        for layer in self.layers.values():
            layer.clear(self.spoiled)

    def take_in(self, own: Sequence[Tensor | Lying], *, on_the_way: bool = False) -> None:
        """Narrow the vectors that each client has, [S, C, P]: now, or when they are first read.

        The latter where steps are told how many came before (`after`).
        """
        for layer in self.layers.values():
            layer.take_in(own, on_the_way=on_the_way)

    def at(self, k: Tensor, lr: Tensor) -> Histories:
        """Turn to step k, [] or [n], with rates lr [n]: the first clients of each experiment."""
        return self.turn_to(self.place(self.held(len(lr)), k, lr))

    def held(self, count: int) -> tuple[Tensor, Tensor]:
        """Give what `place` reads and writes for so many clients."""
        width = count // self.extent.experiments
        return self._starts[:, :width].reshape(-1), self._moves.rates.view(-1)

    def place(self, held: tuple[Tensor, Tensor], k: Tensor, lr: Tensor) -> Tensor:
        """Write down a step's rates; gives its slots, for `turn_to`.  A pure function of tensors.

        Rates do no harm before the step is remembered: gradients in its slot are still zero.
        """
        starts, rates = held
        slots = starts + torch.where(lr == 0, self.extent.steps, k.long())
        rates.index_copy_(0, slots, lr * (-SHRUNK / self._unit))
        return slots

    @contextmanager
    def after(self, steps: int) -> Iterator[None]:
        """Take a step of which it is known how many came before it in the round.

        Only so much of what is remembered is read; in the first one all are at the received model.
        """
        self._moves.taken = steps
        try:
            yield
        finally:
            self._moves.taken = None

    @contextmanager
    def awaiting(self, ready: Callable[[], None]) -> Iterator[None]:
        """Take a step whose layers call this before they read anything that is remembered."""
        self._moves.awaited = ready
        try:
            yield
        finally:
            self._moves.awaited = None

    @contextmanager
    def once_remembered(self, call: Callable[[], None]) -> Iterator[None]:
        """Make a call when all layers have remembered the step that is taken inside.

        What other layers still do while going back needs nothing of it.
        """
        layers = 0

        def told() -> None:
            nonlocal layers
            layers += 1
            if layers == sum(bool(layer.used) for layer in self.layers.values()):
                call()

        self._moves.told = told
        try:
            yield
        finally:
            self._moves.told = None
        if not layers:
            call()

    def turn_to(self, slots: Tensor) -> Histories:
        """Let all layers remember in these slots."""
        self._moves.slots = slots
        return self

    @property
    def known(self) -> bool:
        """Whether a step has told which layers remember."""
        return all(layer.used is not None for layer in self.layers.values())

    @property
    def used(self) -> bool:
        """Whether all layers remember."""
        return all(layer.used for layer in self.layers.values())

    @property
    def by_kernels(self) -> bool:
        """Whether kernels close a round for every layer that remembers."""
        return all(h.closes_by_kernels for h in self.layers.values() if h.used)

    def others(self, w: Tensor) -> list[Tensor]:
        """View what is not remembered of models w [..., P]: the rest is written by `finish`."""
        return [w[..., columns] for columns in self.rest(w.shape[-1])]

    def rest(self, size: int) -> list[slice]:
        """Tell which columns of so many are not remembered."""
        columns = sorted((h.columns for h in self.layers.values() if h.used), key=lambda c: c.start)
        starts, stops = [0, *(c.stop for c in columns)], [*(c.start for c in columns), size]
        return [slice(a, b) for a, b in zip(starts, stops, strict=True) if a < b]

    def finish(
        self, w: Tensor, start: Tensor, more: Sequence[Tensor] = (), own: Sequence[Tensor] = ()
    ) -> None:
        """Write the layers into the cohort's matrix w [S * C, P]; start [S, P] began the round."""
        for layer in self.layers.values():
            layer.finish(w, start, more, own)

    @property
    def numbers(self) -> Numbers:
        """Give what `advance` moves, where it lies."""
        assert self.terms is not None, "layers that step have none"
        return Numbers(self.rates, self.terms, self._moves.slots.view_as(self._starts))

    def advance(self, numbers: Numbers, moved: Tensor, k: Tensor, steps: Tensor) -> None:
        """Take a step of the numbers themselves, in place.  A pure function of tensors.

        moved [carried, S, C, carried + 1 + vectors] says of what each vector that moves is made
        after step k [S]: of those that move, of the gradient, of those that do not move.
        """
        rates, terms, slots = numbers
        carried, count = len(rates), self.extent.steps
        this = torch.arange(count + 1, device=k.device) == k[:, None, None]
        after, made = [], []
        for of in moved:
            before, gradient = of[..., :carried].unbind(-1), of[..., carried, None]
            held = sum(a[..., None] * r for a, r in zip(before, rates, strict=True))
            after.append(torch.where(this, gradient * (SHRUNK / self._unit), held))
            held = sum(a[..., None] * t for a, t in zip(before, terms, strict=True))
            made.append(held + of[..., carried + 1 :])
        rates.copy_(torch.stack(after))
        terms.copy_(torch.stack(made))
        goes_on = k[:, None] + 1 < steps
        slots.add_(torch.where(goes_on, 1, count - slots % (count + 1)))


def pays(
    layer: nn.Linear,
    precision: str,
    extent: Extent,
    least: int = LEAST_WEIGHTS,
    vectors: Vectors = PLAIN,
) -> bool:
    """Whether remembering moves clearly less memory than weights that move at every step."""
    weight = layer.weight.element_size()
    operand = operand_type(precision, layer.weight.dtype).itemsize
    # Per input and client.
    moving = extent.steps * vectors.passes * weight * layer.out_features
    # Remembered: all slots are read going forward and going back.  Once a round they are zeroed,
    # and read again to read and write the weights.  So are a client's vectors, which are narrowed.
    slots = operand * extent.rows
    remembered = extent.steps * 2 * slots + 2 * slots + 2 * weight * layer.out_features
    each = (2 * extent.steps + 1) * operand + 2 * weight
    remembered += vectors.own * each * layer.out_features
    count = extent.experiments * extent.clients * layer.weight.numel()
    # A chain of rules has many small products in a step: it has to save more.  On an H200 SCAFFOLD
    # with momentum took 23.3 ms instead of 24.4 where this is 0.41, 4.0 instead of 6.5 at 0.34.
    times = 3 if vectors.carried == 0 else 4
    return times * remembered <= 2 * moving and count >= least


def _starts(sizes: tuple[int, ...]) -> list[int]:
    return [sum(sizes[:at]) for at in range(len(sizes))]
