"""A local step of everybody as one compiled program: any module, any chain of rules.

The step of `core/round.py` is traced as a whole, with a cohort's products exchanged by function
(program/exchange.py), and torch's compiler makes kernels of all that lies between them: norms,
activations, the loss, the rules' algebra and the local optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from undrift.core.precision import multiplying
from undrift.core.round import shares_gradient, task_gradient
from undrift.core.tree import EMPTY, Tree, leaves, rebuild, structure, tree_map
from undrift.engines.fused import Fused
from undrift.engines.graphs import write_over
from undrift.engines.group import Group
from undrift.program.passes.split_flat import split_flat

LARGE = 2**15  # weights of a parameter that is a piece by itself; others share one with neighbours


class WholeStep:
    """Takes the steps of one group, in place; `plain` takes one where it cannot be traced."""

    def __init__(self, group: Group, precision: str, plain: Callable[..., Tree]) -> None:
        # here: its kernels import Triton, which need not be there
        from undrift.program.exchange import Exchange

        self._group, self._precision = copy.copy(group), precision
        self._group.task = group.task.inside(partial(Exchange, precision), precision)
        self._shape: Any = None  # of the trees that a step is called with
        self._cuts, self._plain = cuts(group.task.sizes), plain
        self._run = Fused(
            self._step, "a local step as a whole", compiled=group.compiled, plain=self._plainly,
            rewritten=lambda traced: split_flat(traced, self._cuts),
        )  # fmt: skip

    def __call__(self, *trees: Tree) -> None:
        """Take a step: (numbers, broadcast, clients, carry, batch, keys, k), with axes [A, B].

        The program is given flat vectors in pieces, so that it need not write any as a whole.
        """
        self._shape = structure(trees)
        with multiplying(self._precision):
            self._run([self._pieces(v) for v in leaves(trees)])

    def _pieces(self, value: Tensor) -> list[Tensor]:
        if value.dim() < 2 or value.shape[-1] != self._cuts[-1]:
            return [value]
        return [value[..., a:b] for a, b in pairwise(self._cuts)]

    def _trees(self, given: list[list[Tensor]]) -> Any:
        joined = [some[0] if len(some) == 1 else torch.cat(some, -1) for some in given]
        return rebuild(self._shape, joined)

    def _plainly(self, given: list[list[Tensor]]) -> Tree:
        """Take a step on the vectors of which these are the pieces."""
        whole = [some[0] if len(some) == 1 else _around(some) for some in given]
        return self._plain(*rebuild(self._shape, whole))

    def _step(self, given: list[list[Tensor]]) -> Tree:
        numbers, sent, clients, held, batch, keys, k = self._trees(given)
        group = self._group
        if shares_gradient(group.algo):
            found = self._passed(held.w, held.buffers, batch, keys)
        else:
            at = held._replace(state=clients.state)
            found = group.gradient(numbers, sent, clients, at, batch, keys)
        after = group.moved(group.task)(numbers, sent, clients, held, batch, keys, k, found)
        numbered = rebuild(self._shape, list(range(len(given))))
        for place, value in zip(leaves(numbered[3]), leaves(after), strict=True):
            write_over(given[place], _cut_like(value, given[place]))
        return EMPTY

    def _passed(self, *trees: Tree) -> Any:
        """Go forward and back, all clients of all experiments in one axis."""
        lead = trees[0].shape[:2]
        flat = tree_map(lambda v: v.flatten(0, 1), trees)
        found = vmap(partial(task_gradient, self._group.task))(*flat)
        return tree_map(lambda v: v.unflatten(0, lead), found)


def cuts(sizes: Sequence[int]) -> list[int]:
    """Choose where vectors are cut: around every large parameter.

    >>> cuts([10, 20, 100_000, 50_000, 5, 5])
    [0, 30, 100030, 150030, 150040]
    """
    found, at, open_ = [0], 0, False
    for size in sizes:
        if size >= LARGE:
            if open_:
                found.append(at)
            found.append(at + size)
        open_ = size < LARGE
        at += size
    return [*found, at] if open_ else found


def _cut_like(value: Tensor, pieces: list[Tensor]) -> list[Tensor]:
    widths = [v.shape[-1] for v in pieces]
    return [value] if len(widths) == 1 else list(value.split(widths, -1))


def _around(pieces: list[Tensor]) -> Tensor:
    """Give the vector that pieces lie in, side by side in its memory."""
    first, width = pieces[0], sum(v.shape[-1] for v in pieces)
    return first.as_strided((*first.shape[:-1], width), first.stride())
