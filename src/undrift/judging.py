"""Judge models on examples without waiting for a device.

Letters: C clients, n examples, M numbers told of each: the loss, then the task's metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import vmap

from undrift.core.ops import Pass
from undrift.core.task import Batch, Buffers, Output, Task, Vec, per_example
from undrift.core.transfer import send
from undrift.core.tree import tree_map
from undrift.data.spool import Rows
from undrift.engines.engine import PIECE, Assignment, Engine
from undrift.rounds import Judged, JudgedClients


class Judge:
    """Judges models of one task; sums stay where they are made until somebody reads them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._mask = torch.ones(0, dtype=torch.bool, device=engine.device)

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
        total = torch.zeros(len(self.names), dtype=torch.float64, device=self.engine.device)
        with self._alone():
            for start in range(0, len(x), batch):
                seen = self._batch(*(self._here(v[start : start + batch]) for v in (x, y)))
                out = self._forward(w, buffers, seen.x, seen.mask)
                means = [self.task.mean_loss(out, seen), *self.task.scores(out, seen).values()]
                total += torch.stack([v.double() for v in means]) * len(seen.x)
        return Judged(self.names, total, len(x))

    def _forward(self, w: Vec, buffers: Buffers, x: Tensor, mask: Tensor) -> Output:
        """Run the network; no kernel is tuned for what runs once in a while."""
        with self._seldom():
            return self.task.forward(w, buffers, x, Pass(mask, None, False))

    @contextmanager
    def _seldom(self) -> Iterator[None]:
        seam = self.task.seam
        if seam is None or not seam.may_use_kernels:
            yield
            return
        from undrift.kernels.tuner import in_a_hurry

        with in_a_hurry():
            yield

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let torch compute the layers of a single model, which is what it is good at."""
        seam = self.task.seam
        if seam is not None:
            self.task.seam = replace(seam, default="channels_last", choices={})
        try:
            yield
        finally:
            self.task.seam = seam

    def _here(self, values: Tensor) -> Tensor:
        here = send(values, self.engine.device)
        return here.to(self.task.dtype) if here.is_floating_point() else here

    def _batch(self, x: Tensor, y: Tensor) -> Batch:
        if len(self._mask) < len(x):
            self._mask = torch.ones(len(x), dtype=torch.bool, device=self.engine.device)
        mask = self._mask[: len(x)]
        return Batch(x, y, mask, mask)  # no loss or metric asks for positions

    @torch.no_grad()
    def clients(self, w: Vec, buffers: Buffers, who: Assignment, batch: int) -> JudgedClients:
        """Judge clients on their own examples: one model [P], or one for each of them [C, P]."""
        width = max(1, batch // max(who.sizes.tolist()))
        found = []
        for start in range(0, len(who.ids), width):
            part = slice(start, start + width)
            model = (w, buffers)
            if w.dim() == 2:
                model = tree_map(lambda v, part=part: v[part], model)
            found.append(self._some_clients(model, who.part(part)))
        return JudgedClients(who.ids, self.names, torch.cat(found, 1), who.sizes)

    def _some_clients(self, model: tuple[Vec, Buffers], who: Assignment) -> Tensor:
        """Sum over the examples of each client: [M, C]."""
        total = torch.zeros(
            len(self.names), len(who.ids), dtype=torch.float64, device=self.engine.device
        )
        longest = max(who.sizes.tolist())
        for start in range(0, longest, PIECE):
            at = torch.arange(start, min(start + PIECE, longest), device=self.engine.device)
            # by the sizes that are on the device already: sending them would wait for it
            positions = torch.where(at < who.info.size[:, None], at, -1)
            seen = self.engine.batch(who.info.id, positions)
            if model[0].dim() == 2:
                told = vmap(self._told, out_dims=1)(*model, seen.x, seen.y, seen.mask)
            else:  # one model: all examples are one batch
                flat = (v.flatten(0, 1) for v in (seen.x, seen.y, seen.mask))
                with self._alone():
                    told = self._told(*model, *flat).unflatten(1, seen.mask.shape)
            total += torch.where(seen.mask, told, 0.0).sum(2)
        return total

    def _told(self, w: Vec, buffers: Buffers, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """What is told of every example: [M, n]."""
        out = self._forward(w, buffers, x, mask).value
        metrics = [per_example(metric(out, y)) for metric in self.task.metrics.values()]
        return torch.stack([v.double() for v in (self.task.losses(out, y), *metrics)])
