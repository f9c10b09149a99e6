"""A step of a linear chain of rules, which layers take where they make their gradients.

With SGD and momentum, control variates, duals, pulls and weight decay a step gives every vector
that moves a combination of what lies at the same place (engines/linear_chain.py finds that out):

    carried_i <- sum over j of table[i, j] * (carried ..., gradient, shared ..., own ...)_j

So a layer that has its gradient can move its part of all of them at once, and no gradient [C, P]
is ever put together.

Letters: n clients of E experiments, P weights of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undrift import kernels
from undrift.kernels.settling import ChainStep, Mixed


@dataclass
class Chain:
    """The vectors of everybody's step, where they lie, and its numbers as soon as they are told."""

    carried: Sequence[Tensor]  # [n, P] each, the model first
    shared: Sequence[Tensor]  # [E, P] each
    own: Sequence[Tensor]  # [n, P] each
    needs: tuple[tuple[int, ...], ...]  # which of all each vector that moves is made of
    places: Mapping[str, slice]  # of parameters, by name
    scale: float = 1.0  # gradients come as many times too large
    table: Tensor | None = None  # [carried, n, number]
    live: Tensor | None = None  # [n], who moves

    def tell(self, table: Tensor, live: Tensor) -> None:
        """Say what this step does to each vector, before anybody goes back."""
        self.table, self.live = table, live

    def step(self, weight: str, bias: str | None = None) -> ChainStep:
        """Give the step of one layer's parameters to the kernels."""
        first = self.places[weight].start
        more, shared, own = (
            [v[:, first:] for v in vectors] for vectors in (self.carried[1:], self.shared, self.own)
        )
        assert self.table is not None and self.live is not None, "told before"
        behind = 0 if bias is None else self.places[bias].start - first
        unscaled = 1 / self.scale
        return ChainStep(more, shared, own, self.table, self.live, self.needs, unscaled, behind)

    def take(self, name: str, gradient: Tensor) -> None:
        """Take the step of a parameter whose gradient [n, ...] is known."""
        assert self.table is not None, "told before"
        if self.table.dtype == torch.float32 and self.table.is_cuda and kernels.available("cuda"):
            from undrift.kernels.settling import take

            own = self.carried[0][:, self.places[name]]
            take(self.step(name), own, gradient.flatten(1))
        else:
            self._take(self.places[name], gradient.flatten(1))

    @torch.no_grad()
    def _take(self, columns: slice, gradient: Tensor) -> None:
        assert self.table is not None and self.live is not None, "told before"
        carried, own = ([v[:, columns] for v in some] for some in (self.carried, self.own))
        each = len(gradient) // len(self.shared[0]) if self.shared else 1
        shared = [v[:, columns].repeat_interleave(each, 0) for v in self.shared]
        read = [*carried, gradient / self.scale, *shared, *own]
        made = [
            sum((row[:, j, None] * read[j] for j in needs), torch.zeros_like(carried[0]))
            for row, needs in zip(self.table, self.needs, strict=True)
        ]
        for old, new in zip(carried, made, strict=True):
            old.copy_(torch.where(self.live[:, None], new, old))


@dataclass
class Chains:
    """The steps of clients who stand side by side, under several chains."""

    sections: Sequence[tuple[slice, Chain]]

    def step(self, weight: str, bias: str | None = None) -> Mixed:
        """Give the step of one layer's parameters to the kernels."""
        return Mixed([(own, chain.step(weight, bias)) for own, chain in self.sections])

    def take(self, name: str, gradient: Tensor) -> None:
        """Take the step of a parameter whose gradient [n, ...] is known."""
        for own, chain in self.sections:
            chain.take(name, gradient[own])


def parameter(layer: str, name: str) -> str:
    """Name a layer's parameter; the module itself may be the layer."""
    return f"{layer}.{name}" if layer else name
