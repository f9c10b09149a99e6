"""The cohort is one batch axis.

Clients are sorted by their number of steps, so that those still training are a prefix; the prefix
shrinks as clients finish.  A cohort that does not fit is trained in chunks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap

from undrift.core.algorithm import Algorithm, Broadcast, Client, Report, Row
from undrift.core.ops import Pass
from undrift.core.round import (
    client_begin,
    client_finish,
    client_start,
    client_step,
    measure,
)
from undrift.core.rule import Sizes
from undrift.core.task import Batch, Task
from undrift.core.tree import Tree, leaves, tree_map
from undrift.core.views import Carry
from undrift.data.checks import check_whole
from undrift.data.federation import Federation
from undrift.engines.capacity import is_small, need_of, width_for, workers_for
from undrift.engines.engine import Assignment, Engine, mean_rows
from undrift.engines.plain import PlainSteps, is_plain, is_sequence
from undrift.engines.reference import Reference
from undrift.engines.workers import in_order, limited
from undrift.errors import TaskError, UndriftError
from undrift.state.store import ClientStateStore


class Steps(Protocol):
    """One way to take the local steps of a chunk of clients."""

    def start(self, clients: Client) -> Carry:
        """Begin local training."""

    def step(self, clients: Client, carry: Carry, batch: Batch, k: Tensor) -> Carry:
        """Take one local step."""


class GeneralSteps:
    """The core functions under vmap: any chain of rules, any local optimizer."""

    def __init__(self, task: Task, algo: Algorithm, broadcast: Broadcast) -> None:
        self.shared = (algo, task, broadcast)

    def start(self, clients: Client) -> Carry:
        """Begin local training."""
        begun: Carry = vmap(lambda c: client_start(*self.shared, c))(clients)
        return begun

    def step(self, clients: Client, carry: Carry, batch: Batch, k: Tensor) -> Carry:
        """Take one local step."""

        def one(client: Client, carry: Carry, batch: Batch) -> Carry:
            return client_step(*self.shared, client, carry, batch, k)

        if len(carry.w) > 1:
            moved: Carry = vmap(one)(clients, carry, batch)
            return moved
        # a single client: the plain call is faster
        alone = one(*_rows((clients, carry, batch), 0))
        return tree_map(lambda v: v[None], alone)


class Vectorised(Engine):
    """Trains `chunk` clients at a time as one batch."""

    def __init__(
        self,
        task: Task,
        federation: Federation,
        store: ClientStateStore,
        *,
        chunk: int | None = None,
        workers: int | None = None,
        in_place: bool = True,
    ) -> None:
        super().__init__(task, federation, store)
        _check_count("chunk", chunk)
        _check_count("workers", workers)
        self.in_place, self.chunk, self.workers = in_place, chunk, workers
        self._decided = False
        self._threads: int | None = None  # of torch's own, while clients train; None: as they are
        self._crew: list[Vectorised] = []
        check_vectorises(task, self._first_batch())

    def _first_batch(self) -> Batch:
        """Take one or two examples of whoever has some."""
        rows = self.federation.members[:2]
        mask = torch.ones(len(rows), dtype=torch.bool, device=self.device)
        return Batch(self.federation.x[rows], self.federation.y[rows], mask, mask.long())

    def plan(self) -> dict[str, Any]:
        """Give the choices that decide rounding."""
        made = {"chunk": self.chunk, "workers": self.workers, "in_place": self.in_place}
        return {**made, "decided": self._decided, "threads": self._threads}

    def use_plan(self, plan: dict[str, Any]) -> None:
        """Repeat the choices of a recorded run."""
        self.chunk, self.workers = plan["chunk"], plan["workers"]
        self.in_place, self._decided = plan["in_place"], plan["decided"]
        self._threads = plan["threads"]
        self._crew = []  # workers copy these choices

    def _decide(self, algo: Algorithm, work: Assignment) -> None:
        """Choose chunk and workers once, by what one client needs."""
        if self._decided or not work.order.numel():
            return
        batch: Batch = _rows(self.batch(work.info.id[:1], work.order[:1, 0]), 0)
        sizes = Sizes(self.federation.num_clients, self.federation.max_size, 1)
        need = need_of(algo, self.task, batch, sizes)
        self._threads = 1 if is_small(need, self.device, len(work.ids)) else None
        if self.workers is None:
            self.workers = workers_for(need, self.device, len(work.ids))
        if self.chunk is None:
            most = self.federation.num_clients
            self.chunk = width_for(need, self.task.module, self.device, most, self.workers)
        self._decided = True

    def run_clients(
        self, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> Iterator[tuple[list[int], tuple[Tree, ...], Report, Row]]:
        """Train chunk after chunk, or several side by side."""

        def train(worker: Vectorised, part: slice) -> tuple[list[int], Any, Any, Any]:
            own, some = work.part(part), _rows(clients, part)
            try:
                with limited(self._threads):
                    return own.ids, *worker._train(algo, broadcast, some, own)
            except UndriftError:
                raise
            except Exception as error:
                raise worker._explain(error, algo, broadcast, some, own) from error

        chunks = self._chunks(algo, work)
        yield from in_order(train, chunks, self._hire(len(chunks)))

    def _explain(
        self,
        error: Exception,
        algo: Algorithm,
        broadcast: Broadcast,
        clients: Client,
        work: Assignment,
    ) -> UndriftError:
        """Train the same clients one at a time to find out who failed, and where."""
        plain = Reference(self.task, self.federation, self.store)
        try:
            for _ in plain.run_clients(algo, broadcast, clients, work):
                pass
        except UndriftError as named:
            return named
        return TaskError(
            f"training {len(work.ids)} clients at once failed ({error}); engine='reference', which "
            "trains one client at a time, does not fail on them"
        )

    def _hire(self, most: int) -> list[Vectorised]:
        """Give each worker a module of its own: one must not serve two passes at once."""
        while len(self._crew) < min(self.workers or 1, most):
            worker = copy.copy(self)
            worker.task = self.task.clone() if self._crew else self.task
            self._crew.append(worker)
        return self._crew

    def _chunks(self, algo: Algorithm, work: Assignment) -> list[slice]:
        self._decide(algo, work)
        count, workers = len(work.ids), self.workers or 1
        width = min(self.chunk or count, -(-count // workers))
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
        """Take all local steps; the prefix of clients that still train shrinks."""
        path = self._path(algo, broadcast, together=len(work.ids) > 1)
        carry, finished = path.start(clients), []
        for k in range(int(work.steps.max())):
            live = int((work.steps > k).sum())
            if live < len(carry.w):
                finished.append(_rows(carry, slice(live, None)))
                carry, clients = _rows(carry, slice(live)), _rows(clients, slice(live))
            batch = self._step_batch(work.info.id[:live], work.order[:live, k])
            carry = path.step(clients, carry, batch, self.step_number(k))
        return join(carry, *reversed(finished))

    def _step_batch(self, ids: Tensor, positions: Tensor) -> Batch:
        batch = self.batch(ids, positions)
        images = len(ids) == 1 and batch.x.dim() == 5 and self.device.type == "cpu"
        if not (images and is_sequence(self.task.module)):
            return batch  # a forward of its own might need `view`
        # 1.5x on a CPU: pooling and convolutions like their channels last
        return batch._replace(x=batch.x[0].contiguous(memory_format=torch.channels_last)[None])

    def _path(self, algo: Algorithm, broadcast: Broadcast, together: bool) -> Steps:
        on_cpu = self.device.type == "cpu"
        if self.in_place and on_cpu and is_plain(algo):
            return PlainSteps(self.task, algo, broadcast, together)
        return GeneralSteps(self.task, algo, broadcast)

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
        for part in self._chunks(algo, work):
            some = _rows(clients, part)
            carry = vmap(lambda c: client_start(algo, self.task, broadcast, c))(some)
            found.append(self._measure(hook, algo, broadcast, some, carry, work.part(part)))
        joined: tuple[Tree, ...] = join(*found)
        return joined

    def _measure(
        self,
        hook: str,
        algo: Algorithm,
        broadcast: Broadcast,
        clients: Client,
        carry: Carry,
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


def _check_count(name: str, value: Any) -> None:
    if value is not None:
        check_whole(name, value)


def check_vectorises(task: Task, batch: Batch) -> None:
    """Try one step for two clients at once, so that a module that cannot is named at once."""
    if any(getattr(part, "scale_grad_by_freq", False) for part in task.module.modules()):
        raise TaskError(
            "an embedding with scale_grad_by_freq=True counts padded rows too; leave it out, or "
            "use engine='reference', which does not pad"
        )
    w, buffers = task.initial()
    key = torch.zeros((), dtype=torch.int64, device=w.device)

    def loss(v: Tensor, batch: Batch, key: Tensor) -> Tensor:
        return task.mean_loss(task.forward(v, buffers, batch.x, Pass(batch.mask, key, True)), batch)

    try:
        two = tree_map(lambda v: v.expand(2, *v.shape).clone(), (w, batch, key))
        vmap(grad(loss))(*two)
    except UndriftError:
        raise
    except Exception as error:
        try:
            grad(loss)(w, batch, key)
        except Exception as alone:
            raise TaskError(f"this module cannot be trained: {alone}") from alone
        raise TaskError(
            f"this module cannot be trained for many clients at once ({error}); "
            "engine='reference' trains one client at a time"
        ) from error
    _check_padding(task, batch)


def _check_padding(task: Task, batch: Batch) -> None:
    """Refuse a module or loss that mixes examples: padding would change its results."""
    w, buffers = task.initial()
    key = torch.zeros((), dtype=torch.int64, device=w.device)

    def losses(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        out = task.forward(w, buffers, x, Pass(mask, key, True))
        return task.losses(out.value, y)[: len(batch.x)]

    with torch.no_grad():
        x, y = (torch.cat([v, v.flip(0)[:1]]) for v in (batch.x, batch.y))
        mask = torch.cat([batch.mask, batch.mask.new_zeros(1)])
        alone, padded = losses(batch.x, batch.y, batch.mask), losses(x, y, mask)
    if not torch.allclose(alone, padded, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise TaskError(
            "the examples of a batch influence each other in this module or loss, so that padding "
            "to a common length would change its results; engine='reference' does not pad"
        )


def join(*parts: Any) -> Any:
    """Put chunks of clients together again."""
    return parts[0] if len(parts) == 1 else tree_map(lambda *v: torch.cat(v), *parts)


def _rows(tree: Any, part: slice | int) -> Any:
    return tree_map(lambda v: v[part], tree)


def _take(tree: Any, index: Tensor) -> Any:
    """Reorder clients; nothing is copied when the order stays."""
    if not leaves(tree) or torch.equal(index, torch.arange(len(index), device=index.device)):
        return tree
    return tree_map(lambda v: v[index], tree)
