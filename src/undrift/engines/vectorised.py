"""The cohort is one batch axis.

Clients are sorted by their number of steps, so that those still training are a prefix; the prefix
shrinks as clients finish.  A cohort that does not fit is trained in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from undrift.core.algorithm import Algorithm, Broadcast, Client, Report, Row
from undrift.core.round import (
    Carry,
    client_begin,
    client_finish,
    client_start,
    client_step,
    measure,
)
from undrift.core.tree import Tree, leaves, tree_map
from undrift.engines.engine import Assignment, Engine, mean_rows


class Vectorised(Engine):
    """Trains `chunk` clients at a time as one batch."""

    chunk: int | None = None

    def run_clients(
        self, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> Iterator[tuple[list[int], tuple[Tree, ...], Report, Row]]:
        """Train chunk after chunk."""
        for part in self._chunks(len(work.ids)):
            some: Client = tree_map(lambda v, part=part: v[part], clients)
            own = work.part(part)
            yield own.ids, *self._train(algo, broadcast, some, own)

    def _chunks(self, count: int) -> list[slice]:
        width = self.chunk or count
        return [slice(i, min(i + width, count)) for i in range(0, count, width)]

    def _train(
        self, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> tuple[tuple[Tree, ...], Report, Row]:
        """Train one chunk, those with most steps first."""
        by_steps = work.steps.argsort(descending=True, stable=True)
        back = by_steps.argsort().to(self.device)
        work = work.part(by_steps)
        clients = _take(clients, by_steps.to(self.device))
        clients = self._begin(algo, broadcast, clients, work)
        carry = self._steps(algo, broadcast, clients, work)
        if algo.uses("review"):
            review = self._measure("review", algo, broadcast, clients, carry, work)
            clients = clients._replace(review=review)
        done = vmap(lambda c, s: client_finish(algo, self.task, broadcast, c, s))(clients, carry)
        result: tuple[tuple[Tree, ...], Report, Row] = _take(done, back)
        return result

    def _steps(
        self, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> Carry:
        def step(client: Client, carry: Carry, batch: Any, k: Tensor) -> Carry:
            return client_step(algo, self.task, broadcast, client, carry, batch, k)

        start = vmap(lambda c: client_start(algo, self.task, broadcast, c))
        carry, finished = start(clients), []
        for k in range(int(work.steps.max())):
            live = int((work.steps > k).sum())
            if live < len(carry.w):
                finished.append(_rows(carry, slice(live, None)))
                carry, clients = _rows(carry, slice(live)), _rows(clients, slice(live))
            batch = self.batch(work.info.id[:live], work.order[:live, k])
            carry = vmap(step, in_dims=(0, 0, 0, None))(clients, carry, batch, self.step_number(k))
        joined: Carry = tree_map(lambda *v: torch.cat(v), carry, *reversed(finished))
        return joined

    def _begin(
        self, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> Client:
        def begin(client: Client, batch: Any, k: Tensor) -> Client:
            return client_begin(algo, self.task, broadcast, client, batch, k)

        for number, positions in self.pieces(work.sizes) if algo.uses("begin") else ():
            batch = self.batch(work.info.id, positions)
            clients = vmap(begin, in_dims=(0, 0, None))(clients, batch, self.step_number(number))
        return clients

    def measure_clients(
        self, hook: str, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> tuple[Tree, ...]:
        """Evaluate a hook for a chunk of clients at a time."""
        found = []
        for part in self._chunks(len(work.ids)):
            some = _rows(clients, part)
            carry = vmap(lambda c: client_start(algo, self.task, broadcast, c))(some)
            found.append(self._measure(hook, algo, broadcast, some, carry, work.part(part)))
        joined: tuple[Tree, ...] = tree_map(lambda *v: torch.cat(v), *found)
        return joined

    def _measure(
        self, hook: str, algo: Algorithm, broadcast: Broadcast, clients: Client, carry: Carry,
        work: Assignment,
    ) -> tuple[Tree, ...]:
        def look(client: Client, state: Carry, batch: Any, k: Tensor) -> tuple[Tree, ...]:
            return measure(hook, algo, self.task, broadcast, client, state, batch, k)

        total: Any = None
        for number, positions in self.pieces(work.sizes):
            batch = self.batch(work.info.id, positions)
            at = self.step_number(number)
            some = vmap(look, in_dims=(0, 0, 0, None))(clients, carry, batch, at)
            total = some if total is None else tree_map(lambda a, b: a + b, total, some)
        mean: tuple[Tree, ...] = mean_rows(total, clients.info.size)
        return mean


def _rows(tree: Any, part: slice) -> Any:
    return tree_map(lambda v: v[part], tree)


def _take(tree: Any, index: Tensor) -> Any:
    """Reorder clients; nothing is copied when the order stays."""
    if not leaves(tree) or torch.equal(index, torch.arange(len(index), device=index.device)):
        return tree
    return tree_map(lambda v: v[index], tree)
