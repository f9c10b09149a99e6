"""One client at a time, nothing clever: the engine that others are compared with.

An error names the client, the stage, the rule and the step.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from undrift.core.algorithm import Algorithm, Broadcast, Client, Report, Row
from undrift.core.round import (
    client_begin,
    client_finish,
    client_start,
    client_step,
    mean_over_data,
    measure,
)
from undrift.core.rule import Aggregate, Rule
from undrift.core.task import Batch
from undrift.core.tree import Tree, tree_map
from undrift.engines.engine import Assignment, Engine
from undrift.errors import ClientError, UndriftError

T = TypeVar("T")


class Reference(Engine):
    """Calls the core functions for one client after the other, on unpadded batches."""

    def run_clients(
        self, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> Iterator[tuple[list[int], tuple[Tree, ...], Report, Row]]:
        """Train one client after the other."""
        for c, client_id in enumerate(work.ids):
            client: Client = tree_map(lambda v, c=c: v[c], clients)
            one = work.part(slice(c, c + 1)).ordered()
            outcome = self._train(algo, broadcast, client, one)
            yield [client_id], *tree_map(lambda v: v[None], outcome)

    def _train(
        self, algo: Algorithm, broadcast: Broadcast, client: Client, work: Assignment
    ) -> tuple[tuple[Tree, ...], Report, Row]:
        task, who = self.task, work.ids[0]
        for number, batch in self._own_pieces(work) if algo.uses("begin") else ():
            at = self.step_number(number)
            client = _named(
                who, "begin", number, client_begin, algo, task, broadcast, client, batch, at
            )
        carry = client_start(algo, task, broadcast, client)
        for k in range(int(work.steps[0])):
            carry = _named(
                who,
                "step",
                k,
                client_step,
                algo,
                task,
                broadcast,
                client,
                carry,
                self._own_batch(work, work.order[:, k]),
                self.step_number(k),
            )
        if algo.uses("review"):
            review = self._measure("review", algo, broadcast, client, carry, work)
            client = client._replace(review=review)
        return _named(who, "finish", None, client_finish, algo, task, broadcast, client, carry)

    def measure_clients(
        self, hook: str, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> tuple[Tree, ...]:
        """Evaluate a hook client by client."""
        found = []
        for c in range(len(work.ids)):
            client: Client = tree_map(lambda v, c=c: v[c], clients)
            carry = client_start(algo, self.task, broadcast, client)
            part = work.part(slice(c, c + 1))
            found.append(self._measure(hook, algo, broadcast, client, carry, part))
        stacked: tuple[Tree, ...] = tree_map(lambda *v: torch.stack(v), *found)
        return stacked

    def _measure(
        self,
        hook: str,
        algo: Algorithm,
        broadcast: Broadcast,
        client: Client,
        carry: Any,
        work: Assignment,
    ) -> tuple[Tree, ...]:
        total: Any = None
        for number, batch in self._own_pieces(work):
            at = self.step_number(number)
            some = _named(
                work.ids[0],
                hook,
                number,
                measure,
                hook,
                algo,
                self.task,
                broadcast,
                client,
                carry,
                batch,
                at,
            )
            total = some if total is None else tree_map(lambda a, b: a + b, total, some)
        mean: tuple[Tree, ...] = mean_over_data(total, client.info.size)
        return mean

    def _own_pieces(self, work: Assignment) -> Iterator[tuple[int, Batch]]:
        for number, positions in self.pieces(work.sizes):
            yield number, self._own_batch(work, positions)

    def _own_batch(self, work: Assignment, positions: Tensor) -> Batch:
        """Fetch a batch without padding: the plain thing to compare with."""
        kept = positions[:, positions[0] >= 0]
        batch: Batch = tree_map(lambda v: v[0], self.batch(work.info.id, kept))
        return batch


def _named(client: int, stage: str, step: int | None, function: Callable[..., T], *args: Any) -> T:
    """Call a core function; if it fails, say for whom and where."""
    try:
        return function(*args)
    except UndriftError:
        raise
    except Exception as error:
        rule, hook = _guilty(error)
        raise ClientError(client, hook or stage, rule, step, error) from error


def _guilty(error: BaseException) -> tuple[str | None, str | None]:
    """Find the innermost rule or aggregate on the traceback, and its hook."""
    found: tuple[str | None, str | None] = (None, None)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, (Rule, Aggregate)):
            found = (type(owner).__name__, frame.f_code.co_name)
    return found
