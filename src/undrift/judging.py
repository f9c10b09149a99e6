"""Judge models on examples without waiting for a device.

Letters: C clients, n examples, M numbers told of each: the loss, then the task's metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from undrift.core.losses import Values, WeightedMean, mean_of, shares
from undrift.core.ops import Pass
from undrift.core.rule import ClientInfo
from undrift.core.task import Batch, Buffers, Output, Task, Vec
from undrift.core.transfer import send
from undrift.core.tree import Tree, tree_map
from undrift.data.spool import Rows
from undrift.engines.capacity import is_out_of_memory
from undrift.engines.chunks import cut
from undrift.engines.engine import PIECE, Assignment, Engine
from undrift.engines.graphs import Buffers as Held
from undrift.engines.graphs import Piece, copied, lasting_pool
from undrift.errors import DataError, UndriftError
from undrift.rounds import Judged, JudgedClients

MOST_RECORDED = 6  # kinds of evaluation that are kept as graphs


class Judge:
    """Judges models of one task; sums stay where they are made until somebody reads them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._mask = torch.ones(0, dtype=torch.bool, device=engine.device)
        self._recorded: dict[Any, Recorded] = {}

    @property
    def task(self) -> Task:
        """The engine's task: judged as it is trained, in its precision."""
        return self.engine.task

    @property
    def names(self) -> list[str]:
        """Name what is told."""
        return ["loss", *self.task.metrics]

    @torch.no_grad()
    def examples(self, w: Vec, buffers: Buffers, x: Rows, y: Rows, batch: int) -> Judged:
        """Judge one model on examples, some at a time."""

        def judge(w: Vec, buffers: Buffers) -> Tensor:
            return self._examples(w, buffers, x, y, batch)

        here = isinstance(x, Tensor) and isinstance(y, Tensor) and x.is_cuda and y.is_cuda
        key = (_place(x), _place(y), batch) if here else None
        try:
            found = self._replayed(key, judge, w, buffers)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if isinstance(error, UndriftError) or is_out_of_memory(error):
                raise
            shapes = f"inputs {list(x[:1].shape[1:])} and targets {list(y[:1].shape[1:])}"
            raise DataError(
                f"the model or its loss fails on these examples, {shapes}: {error}"
            ) from error
        return Judged(self.names, found)

    def _examples(self, w: Vec, buffers: Buffers, x: Rows, y: Rows, batch: int) -> Tensor:
        """Give what a mean divides, and by what: [2, M]."""
        total = torch.zeros(2, len(self.names), dtype=torch.float64, device=self.engine.device)
        for start in range(0, len(x), batch):
            seen = self._batch(*(self._here(v[start : start + batch]) for v in (x, y)))
            out = forward_seldom(self.task, w, buffers, seen.x, seen.mask)
            metrics = self.task.measured(out.value, seen.y).values()
            told = (self.task.losses(out.value, seen.y), *metrics)
            total += torch.stack([_sums(values, seen.mask) for values in told], 1)
        return total

    def _replayed(self, key: Any, function: Callable[..., Tensor], *inputs: Tree) -> Tensor:
        """Call function(*inputs), as a graph where one is recorded under this key.

        What else the function reads keeps its place in memory as long as the function lives.
        """
        if key is None or not getattr(self.engine, "graph", False):
            return function(*inputs)
        if key not in self._recorded and len(self._recorded) == MOST_RECORDED:
            self._recorded.pop(next(iter(self._recorded)))
        if key not in self._recorded:
            self._recorded[key] = Recorded(function, self.engine.device)
        found: Tensor = self._recorded[key](*inputs)
        return found

    def _here(self, values: Tensor) -> Tensor:
        here = send(values, self.engine.device)
        return here.to(self.task.dtype) if here.is_floating_point() else here

    def _batch(self, x: Tensor, y: Tensor) -> Batch:
        if len(self._mask) < len(x):
            self._mask = torch.ones(len(x), dtype=torch.bool, device=self.engine.device)
        mask = self._mask[: len(x)]
        return Batch(x, y, mask, mask)  # no loss or metric asks for positions

    @torch.no_grad()
    def clients(
        self, w: Vec, buffers: Buffers, who: Assignment, batch: int, stays: bool = False
    ) -> JudgedClients:
        """Judge clients on their own examples: one model [P], or one for each of them [C, P].

        Many models may be said to `stay`: they lie at the same place after every round.
        """
        sizes = who.sizes.tolist()
        longest, parts = max(sizes), self._parts(sizes, batch)

        def judge(info: ClientInfo, *model: Tree) -> Tensor:
            own, found = model or (w, buffers), []
            for part, most in parts:
                mine = own if own[0].dim() == 1 else tree_map(lambda v, p=part: v[p], own)
                some = tree_map(lambda v, part=part: v[part], info)
                found.append(self._some_clients(mine, some, most))
            return torch.cat(found, 2)

        kind = (len(who.ids), longest, batch)
        if w.dim() == 1:
            sums = self._replayed((kind, "one"), judge, who.info, w, buffers)
        else:
            sums = self._replayed((kind, _place(w)) if stays else None, judge, who.info)
        return JudgedClients(who.ids, self.names, sums)

    def _parts(self, sizes: list[int], batch: int) -> list[tuple[slice, int]]:
        """Cut clients into parts, and tell how long the longest of each is."""
        count, longest = len(sizes), max(sizes)
        if self.engine.device.type == "cuda":  # parts by sizes would be a graph for every cohort
            width = max(1, batch // longest)
            return [(slice(i, min(i + width, count)), longest) for i in range(0, count, width)]
        return [(part, max(sizes[part])) for part in cut(sizes, count, batch)]

    def _some_clients(self, model: tuple[Vec, Buffers], info: ClientInfo, longest: int) -> Tensor:
        """Give what the means of each client divide, and by what: [2, M, C]."""
        shape, device = (2, len(self.names), len(info.id)), self.engine.device
        total = torch.zeros(shape, dtype=torch.float64, device=device)
        for start in range(0, longest, PIECE):
            at = torch.arange(start, min(start + PIECE, longest), device=device)
            # by the sizes that are on the device already: sending them would wait for it
            positions = torch.where(at < info.size[:, None], at, -1)
            seen = self.engine.batch(info.id, positions)
            if self.engine.one_by_one:
                total += self._one_by_one(model, seen)
                continue
            if model[0].dim() == 2:
                told = vmap(self._told, out_dims=2)(*model, seen.x, seen.y, seen.mask)
            else:  # one model: all examples are one batch
                x, y, mask = (v.flatten(0, 1) for v in (seen.x, seen.y, seen.mask))
                told = self._told(*model, x, y, mask).unflatten(2, seen.mask.shape)
            total += torch.where(seen.mask, told, 0.0).sum(3)
        return total

    def _one_by_one(self, model: tuple[Vec, Buffers], seen: Batch) -> Tensor:
        """Judge each client by itself, without padding: [2, M, C]."""
        found = seen.mask.new_zeros(2, len(self.names), len(seen.mask), dtype=torch.float64)
        for c, mask in enumerate(seen.mask):
            w, buffers = model if model[0].dim() == 1 else tree_map(lambda v, c=c: v[c], model)
            if mask.any():
                told = self._told(w, buffers, seen.x[c][mask], seen.y[c][mask], mask[mask])
                found[:, :, c] = told.sum(2)
        return found

    def _told(self, w: Vec, buffers: Buffers, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Give of every example what the means divide, and by what: [2, M, n]."""
        out = forward_seldom(self.task, w, buffers, x, mask).value
        told = [self.task.losses(out, y), *self.task.measured(out, y).values()]
        pairs = [torch.stack([v.double() for v in shares(values)]) for values in told]
        return torch.stack(pairs, 1)


def _sums(values: Values, mask: Tensor) -> Tensor:
    """Give what the mean of a batch divides, and by what: [2]."""
    if isinstance(values, WeightedMean):
        return torch.stack([v.double().sum() for v in shares(values)])
    mean, count = mean_of(values, mask).double(), float(len(mask))
    return torch.stack([mean * count, torch.full_like(mean, count)])


def forward_seldom(task: Task, w: Vec, buffers: Buffers, x: Tensor, mask: Tensor) -> Output:
    """Run a network to judge it; no kernel is tuned for what runs once in a while."""
    if task.seam is None or not task.seam.may_use_kernels:
        return task.forward(w, buffers, x, Pass(mask, None, False))
    from undrift.kernels.tuner import in_a_hurry

    with in_a_hurry():
        return task.forward(w, buffers, x, Pass(mask, None, False))


class Recorded:
    """A function of trees, recorded as a graph on a device; results are the caller's own."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self.function, self._buffers = function, Held()
        self._piece = Piece(self._call, _pool(device))

    def __call__(self, *inputs: Tree) -> Any:
        self._buffers.put("in", inputs)
        self._piece()
        return copied(self._buffers["out"])

    def _call(self) -> None:
        self._buffers.hold("out", self.function(*self._buffers["in"]))


@cache
def _pool(device: torch.device) -> Any:
    """Give the memory that all evaluations share: one runs after the other."""
    return lasting_pool(device)


def _place(t: Rows) -> tuple[Any, ...]:
    """Tell where a tensor lies and how."""
    assert isinstance(t, Tensor), "asked for before"
    return t.data_ptr(), t.shape, t.stride(), t.dtype
