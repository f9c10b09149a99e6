"""The cohort is one batch axis.

Clients are sorted by their number of steps, so that those still training are a prefix; the prefix
shrinks as clients finish.  A cohort that does not fit is trained in chunks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undrift import native
from undrift.core.algorithm import Algorithm, Broadcast, Client, Report, Row, Server
from undrift.core.noise import Known
from undrift.core.round import shares_gradient
from undrift.core.rule import Sizes
from undrift.core.task import Batch, Task
from undrift.core.tree import EMPTY, Tree, leaves, tree_map
from undrift.core.views import Carry
from undrift.data.checks import check_whole
from undrift.data.federation import Federation
from undrift.data.spool import Streamed
from undrift.data.work import Room, Work
from undrift.engines.capacity import (
    USED,
    Need,
    free_bytes,
    has_convolution,
    is_out_of_memory,
    is_small,
    keep_freed_memory,
    need_of,
    total_bytes,
    width_for,
    workers_for,
    would_fit,
)
from undrift.engines.chunks import cut
from undrift.engines.dense_steps import DenseSteps, Workspace, is_dense
from undrift.engines.device_round import DeviceRound
from undrift.engines.engine import Assignment, Engine, Outcome, mean_rows
from undrift.engines.examples import most_rows
from undrift.engines.graphs import apart
from undrift.engines.linear_steps import LinearRules, LinearSteps
from undrift.engines.native_steps import NativeSteps
from undrift.engines.native_steps import fits as loops_fit
from undrift.engines.plain import PlainSteps, is_plain, is_sequence
from undrift.engines.reference import Reference
from undrift.engines.seams import Ways, seam_for, seam_plan, use_seam_plan
from undrift.engines.steps import Steps
from undrift.engines.trial import check_vectorises
from undrift.engines.turns import Done, Shape, Turn
from undrift.engines.workers import in_order, limited
from undrift.errors import ConfigError, TaskError, UndriftError
from undrift.program.client_half import ClientHalf, few_widths
from undrift.program.compile import has_cpp_compiler
from undrift.program.programs import Programs
from undrift.state.store import ClientStateStore

log = logging.getLogger("undrift")

MOST_SLOTS = 100_000  # of one client in a round: beyond, the host makes the order of batches
# Positions that the plan of a chunk may hold, 8 bytes each, with some five copies on the way.
SLOTS = {"cpu": 2**23, "cuda": 2**26}
# Steps of a chunk that run as they were traced before code is compiled for them: by then they have
# taken about as long as compiling does, for a small model and for a large one.
WORTH_COMPILING = 2_000
WORTH_LOOKING = 200  # likewise, before somebody finds out whether rules are linear
HELD = 0.25  # of all memory that the examples of a cohort may take, where others lie in a file


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
        native: bool = True,
        graph: bool | None = None,
        compiled: bool | None = None,
        precision: str | None = None,
        ways: Ways | None = None,
    ) -> None:
        super().__init__(task, federation, store)
        self.seam = seam_for(self.task, self.device, precision, ways)
        self.task.seam = None  # what is tried below is about the module, not about kernels
        check_vectorises(task, self._first_batch())
        self.task.seam = self.seam
        _check_count("chunk", chunk)
        _check_count("workers", workers)
        _check_switches(in_place=in_place, native=native, graph=graph, compiled=compiled)
        self.in_place, self.chunk, self.workers = in_place, chunk, workers
        self.native = native  # whether loops in C may be used; once that is decided, would be
        self.graph = self.device.type == "cuda" if graph is None else graph
        # whether local steps run as machine code of torch's compiler; None: once that pays
        self.compiled, self._calls = compiled if self.device.type == "cpu" else False, 0
        self._has_run_as_one = False  # also in an earlier part of this run
        self._rounds: list[DeviceRound] = []
        self._batches: tuple[Work, Room] | None = None
        self._bytes_each: int | None = None
        self._decided = False
        self._threads: int | None = None  # of torch's own, while clients train; None: as they are
        self._crew: list[Vectorised] = []
        self._workspace, self._programs = Workspace(), Programs()  # of a worker
        self._linear_rules: dict[Algorithm, LinearRules | None] = {}  # of a worker
        self._paths: dict[bool, Steps] = {}  # of one round, by whether a chunk has several clients
        if self.device.type == "cpu":
            keep_freed_memory()

    def _first_batch(self) -> Batch:
        """Take up to three examples of whoever has some."""
        rows = self.federation.members[:3]
        mask = torch.ones(len(rows), dtype=torch.bool, device=self.device)
        return Batch(self.federation.x[rows], self.federation.y[rows], mask, mask.long())

    def plan(self) -> dict[str, Any]:
        """Give the choices that decide rounding."""
        made: dict[str, Any] = {
            "chunk": self.chunk,
            "workers": self.workers,
            "in_place": self.in_place,
            "native": self.native,
        }
        made |= {"graph": self.graph, "seam": seam_plan(self.seam)}
        made |= {"compiled": self.compiled, "calls": self._calls}
        return {**made, "decided": self._decided, "threads": self._threads}

    def use_plan(self, plan: dict[str, Any]) -> None:
        """Repeat the choices of a recorded run."""
        self.chunk, self.workers = plan["chunk"], plan["workers"]
        self.in_place, self._decided = plan["in_place"], plan["decided"]
        self.native = plan.get("native", False)  # there was a time before them
        if self.native and self._decided and not self._can_be_native():
            log.warning("the run used loops in C, which cannot be used here: bits may differ")
            self.native = False
        self._threads, self.graph = plan["threads"], plan["graph"]
        # a run that began before there were compiled steps goes on without them
        self.compiled, self._calls = plan.get("compiled", False), plan.get("calls", 0)
        if self.compiled and not has_cpp_compiler():
            log.warning("the run used compiled steps, and no compiler is here: bits may differ")
            self.compiled = False
        self._has_run_as_one = plan["graph"]
        use_seam_plan(plan["seam"])
        self._crew = []  # workers copy these choices

    def _decide(self, algo: Algorithm, work: Assignment) -> None:
        """Choose chunk and workers once, by what one client needs."""
        planned = work.plan is not None or work.order.shape[1] > 0
        if self._decided or not (planned and work.steps.any()):
            return
        need = self._need(algo, work)
        self._threads = 1 if is_small(need, self.device, len(work.ids)) else None
        if self.workers is None:
            self.workers = workers_for(need, self.device, len(work.ids))
        if self.chunk is None:
            most = self.federation.num_clients
            self.chunk = width_for(
                need, self.task.module, self.device, most, self.workers, _batch_of(work)
            )
        # a client who trains by itself, and long, has all of torch's threads; a loop has one
        alone = self.workers == 1 and self._threads is None and torch.get_num_threads() > 1
        known = is_plain(algo) or shares_gradient(algo)
        self.native = self.native and known and self._can_be_native() and not alone
        self._decided = True

    def _count(self, algo: Algorithm, work: Assignment, chunks: Sequence[slice]) -> None:
        """Compile local steps from this round on, if the calls of all rounds so far would pay.

        Calls are counted, not timed, and before anybody trains: a run gives the same bits twice.
        """
        if (self.native and is_plain(algo)) or not work.steps.any():
            return  # loops in C do it from the first round on
        before = self._calls
        self._calls += sum(int(work.steps[part].max()) for part in chunks)
        if self.compiled is None and self._calls >= WORTH_COMPILING:
            self.compiled = has_cpp_compiler()
        if any(before < worth <= self._calls for worth in (WORTH_LOOKING, WORTH_COMPILING)):
            self._crew = []  # workers copy what was decided

    def _can_be_native(self) -> bool:
        """Whether loops in C can take the local steps of plain SGD."""
        fits = self.device.type == "cpu" and self.in_place and loops_fit(self.task, self.federation)
        return fits and native.loops(self.task.dtype) is not None

    def _need(self, algo: Algorithm, work: Assignment) -> Need:
        """Tell what a local step of the client with most examples costs."""
        one = _longest(work)
        batch: Batch = _rows(self.batch(one.info.id, one.order[:, 0]), 0)
        sizes = Sizes(self.federation.num_clients, self.federation.max_size, 1)
        return need_of(algo, self.task, batch, sizes)

    def bytes_for(self, algo: Algorithm, work: Assignment) -> int:
        """Tell how much memory a cohort takes while it trains; it is counted once."""
        if not work.steps.any():
            return 0
        if self._bytes_each is None:
            self._bytes_each = self._need(algo, work).num_bytes
        return self._bytes_each * len(work.clients)

    def round(
        self, algo: Algorithm, server: Server, work: Assignment, population: int, known: Known
    ) -> tuple[Server, Outcome]:
        """Run both halves of a round; on a CUDA device as graphs, where nothing has to wait."""
        if not self._fits_graphs(algo, work):
            return super().round(algo, server, work, population, known)
        turn = self.turn(algo, server, work, population, known)
        try:
            (done,) = self._runner(algo, turn.work, known.everyone).run([turn])
        except UndriftError:
            raise
        except Exception as error:
            if self._has_run_as_one:
                raise TaskError(
                    f"this round cannot be run as one piece on the device, as rounds before it "
                    f"were ({error}); piece by piece sums are rounded in another order: go on "
                    "from the last checkpoint when the cause is mended, or begin with graph=False"
                ) from error
            log.warning("rounds cannot be run as one (%s); they run piece by piece", error)
            self.graph = False
            return super().round(algo, server, work, population, known)
        self._has_run_as_one = True
        return self.take(algo, turn, done)

    def turn(
        self, algo: Algorithm, server: Server, work: Assignment, population: int, known: Known
    ) -> Turn:
        """Prepare a round on the device."""
        self.admit(algo, server, work)
        return Turn(server, self.seated(work), self.store, population, known)

    def take(self, algo: Algorithm, turn: Turn, done: Done) -> tuple[Server, Outcome]:
        """Stage the new states of a round on the device.

        On a CPU a round that was refused is done again, without the clients that are to blame; a
        device is not waited for, so there nobody's report counts.
        """
        if self.device.type == "cpu" and not bool(done.sound):
            server, work, _, population, known = turn
            return super().round(algo, server, work, population, known)
        if done.reserved is None:
            self.store.stage(turn.work.ids, done.states)
        else:
            self.store.stage_reserved(turn.work.ids, done.reserved)
        return done.server, done.outcome

    def seated(self, work: Assignment) -> Assignment:
        """Make the order of batches on the host, unless the device makes it."""
        plan = work.plan
        there = self.graph and isinstance(plan, Work) and self._room(plan) is not None
        return work if there else work.ordered()

    def _room(self, work: Work) -> Room | None:
        """Tell what the batches of any cohort need; None if that is too much to make at once."""
        if self._batches is None or self._batches[0] is not work:
            self._batches = (work, work.room(self.federation.sizes))
        room = self._batches[1]
        return room if room.epochs * room.width <= MOST_SLOTS else None

    def _fits_graphs(self, algo: Algorithm, work: Assignment) -> bool:
        return self.graph and self._can_hold(work) and len(self._chunks(algo, work)) == 1

    def _can_hold(self, work: Assignment) -> bool:
        """Whether the examples of any cohort of this size may lie in memory.

        The limit does not depend on the memory that happens to be free, because rounds whose
        batches come from the file one by one add up in another order.
        """
        if self.is_resident:
            return True
        rows = most_rows(self.federation, len(work.ids))
        each = sum(v[:1].nbytes for v in (self.federation.x, self.federation.y))
        return rows * each <= HELD * total_bytes(self.device)

    @property
    def is_resident(self) -> bool:
        """Whether the examples are in memory."""
        return not isinstance(self.federation.x, Streamed)

    def shape(self, algo: Algorithm, work: Assignment, everyone: Tree) -> Shape:
        """Tell what a cohort needs on the device."""
        looks = any(algo.uses(hook) for hook in ("probe", "begin", "review"))
        examples = self.federation.max_size if looks else 0
        clients, steps, batch = work.order.shape
        room = Room(steps, batch, 0, 0)
        if not steps and isinstance(work.plan, Work):
            room = self._room(work.plan) or room
        return Shape(clients, room, examples, len(everyone[0]) if leaves(everyone) else 0)

    def _runner(self, algo: Algorithm, work: Assignment, everyone: Tree) -> DeviceRound:
        """Find the buffers that hold this cohort, or make some."""
        wanted = self.shape(algo, work, everyone)
        for runner in self._rounds:
            if runner.algos[0] is algo and runner.shape.holds(wanted):
                return runner
        self._rounds = [r for r in self._rounds if r.algos[0] is algo]
        plan = work.plan if isinstance(work.plan, Work) else Work()
        made = DeviceRound([self], [algo], plan, wanted, in_place=self.in_place)
        self._rounds.append(made)
        return made

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
                raise worker._explain(
                    error, algo, own,
                    lambda plain: list(plain.run_clients(algo, broadcast, some, own)),
                ) from error  # fmt: skip

        chunks = self._chunks(algo, work)
        self._count(algo, work, chunks)
        crew = self._hire(len(chunks))
        try:
            yield from in_order(train, chunks, crew)
        finally:
            for worker in crew:
                # made again in every round, as a module may have got hooks since; and nobody keeps
                # what its last step has left
                worker._paths = {}

    def _explain(
        self, error: Exception, algo: Algorithm, work: Assignment, again: Callable[[Reference], Any]
    ) -> UndriftError:
        """Take the same clients one at a time to find out who failed, and where."""
        if is_out_of_memory(error):
            need, free = self._need(algo, work), free_bytes(self.device)
            fits = int(USED * free / need.num_bytes)
            told = f"chunk = {fits} would fit"
            if not 0 < fits < len(work.ids):
                told = would_fit(need, _batch_of(work), free)
            return TaskError(f"clients at a time: {len(work.ids)} are too many for memory; {told}")
        plain = Reference(self.task, self.federation, self.store)
        try:
            again(plain)
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
            worker._workspace, worker._paths = Workspace(), {}
            worker._programs, worker._linear_rules = Programs(), {}
            self._crew.append(worker)
        return self._crew

    def _chunks(self, algo: Algorithm, work: Assignment) -> list[slice]:
        self._decide(algo, work)
        count, workers = len(work.ids), self.workers or 1
        width = min(self.chunk or count, -(-count // workers))
        return cut(work.slots().tolist(), width, SLOTS[self.device.type])

    def _train(
        self, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> tuple[tuple[Tree, ...], Report, Row]:
        """Train one chunk, those with most steps first."""
        by_steps = work.steps.argsort(descending=True, stable=True)
        back = by_steps.argsort().to(self.device)
        work = work.part(by_steps).ordered()
        clients = _take(clients, by_steps.to(self.device))
        half = self._half(algo, broadcast)
        for number, positions in self.pieces(work.sizes) if algo.uses("begin") else ():
            batch = self.batch(work.info.id, positions)
            clients = half.begin(clients, batch, self.step_number(number))
        carry = self._steps(algo, broadcast, clients, work)
        if algo.uses("review"):
            review = self._measure("review", half, clients, carry, work)
            clients = clients._replace(review=review)
        done = half.finish(clients, carry)
        done = apart((carry.w,), done)  # the next chunk may have this memory
        result: tuple[tuple[Tree, ...], Report, Row] = _take(done, back)
        return result

    def _steps(
        self, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> Carry:
        """Take all local steps; the prefix of clients that still train shrinks."""
        path = self._path(algo, broadcast, together=len(work.ids) > 1)
        if isinstance(path, ClientHalf):
            path = self._linear(algo, broadcast, clients, path) or path
        where = self.federation.rows(work.info.id, work.order)
        if isinstance(path, NativeSteps):
            return path.take_all(clients, where, work.order, work.steps)
        # by steps: what one reads lies together
        order, rows = (v.movedim(1, 0).contiguous() for v in (work.order, where))
        if isinstance(path, ClientHalf):

            def fetch(k: int, live: int) -> Batch:
                return self._step_batch(rows[k, :live], order[k, :live], None)

            return path.take_steps(clients, work.steps.tolist(), fetch)
        carry, finished = path.start(clients), []
        for k in range(int(work.steps.max())):
            live = int((work.steps > k).sum())
            if live < len(carry.w):
                finished.append(_rows(carry, slice(live, None)))
                carry, clients = _rows(carry, slice(live)), _rows(clients, slice(live))
            mine = rows[k, :live]
            over = path.room_for(mine, self.federation.x)
            batch = self._step_batch(mine, order[k, :live], over)
            carry = path.step(clients, carry, batch, self.step_number(k))
        return join(carry, *reversed(finished))

    def _step_batch(self, rows: Tensor, positions: Tensor, over: Tensor | None) -> Batch:
        batch = self.batch_of(rows, positions, over=over)
        images = len(rows) == 1 and batch.x.dim() == 5 and self.device.type == "cpu"
        module = self.task.module
        if not (images and has_convolution(module) and is_sequence(module)):
            return batch  # a forward of its own might need `view`
        if any(isinstance(part, nn.GroupNorm) for part in module.modules()):
            return batch  # it asks how its input lies, which vmap does not tell
        # 1.5x on a CPU: pooling and convolutions like their channels last
        return batch._replace(x=batch.x[0].contiguous(memory_format=torch.channels_last)[None])

    def _half(self, algo: Algorithm, broadcast: Broadcast) -> ClientHalf:
        self._programs.renew(self.task)
        return ClientHalf(self.task, algo, broadcast, self._programs, bool(self.compiled))

    def _path(self, algo: Algorithm, broadcast: Broadcast, together: bool) -> Steps | ClientHalf:
        plain = self.in_place and self.device.type == "cpu" and is_plain(algo)
        dense = plain and is_dense(self.task, self.federation.x.dim() - 1)
        if not dense and not (plain and is_sequence(self.task.module) and not self.compiled):
            return self._half(algo, broadcast)
        if together not in self._paths:
            self._paths[together] = self._plain_path(algo, broadcast, together)
        return self._paths[together]

    def _linear(
        self, algo: Algorithm, broadcast: Broadcast, clients: Client, half: ClientHalf
    ) -> LinearSteps | None:
        """Let loops in C take the steps of linear rules, once finding that out pays."""
        if not self.native or self._calls < WORTH_LOOKING or not self._can_be_native():
            return None
        if algo not in self._linear_rules:
            carry = half.start(clients)._replace(state=EMPTY)
            found = LinearRules.find(algo, self.task, broadcast, clients, carry)
            self._linear_rules = {algo: found}
        rules = self._linear_rules[algo]
        given = self.task, algo, broadcast, self._workspace, self.federation
        return None if rules is None else LinearSteps(half, rules, *given)

    def _plain_path(self, algo: Algorithm, broadcast: Broadcast, together: bool) -> Steps:
        room, data = self._workspace, self.federation
        if not is_dense(self.task, data.x.dim() - 1):
            return PlainSteps(self.task, algo, broadcast, together)
        if self.native and self._can_be_native():  # a module may have got hooks since
            return NativeSteps(self.task, algo, broadcast, room, data)
        return DenseSteps(self.task, algo, broadcast, room)

    def measure_clients(
        self, hook: str, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> tuple[Tree, ...]:
        """Evaluate a hook for a chunk of clients at a time."""
        half, found = self._half(algo, broadcast), []
        try:
            for part in self._chunks(algo, work):
                some = _rows(clients, part)
                found.append(self._measure(hook, half, some, half.start(some), work.part(part)))
        except UndriftError:
            raise
        except Exception as error:
            raise self._explain(
                error, algo, work,
                lambda plain: plain.measure_clients(hook, algo, broadcast, clients, work),
            ) from error  # fmt: skip
        joined: tuple[Tree, ...] = join(*found)
        return joined

    def _measure(
        self, hook: str, half: ClientHalf, clients: Client, carry: Carry, work: Assignment
    ) -> tuple[Tree, ...]:
        """Evaluate a hook over own data: those with most examples first, who last longest."""
        by_size = torch.arange(len(work.sizes))
        if int(work.sizes.max()) > self.piece:
            by_size = work.sizes.argsort(descending=True, stable=True)
        back = by_size.argsort().to(self.device)
        work, by_size = work.part(by_size), by_size.to(self.device)
        clients, carry = _take(clients, by_size), _take(carry, by_size)
        total: Any = None
        for number, positions in self.pieces(work.sizes):
            live = few_widths(self.left(work.sizes, number), len(positions))
            some_clients, some_carry = (_rows(tree, slice(live)) for tree in (clients, carry))
            batch = self.batch(work.info.id[:live], positions[:live])
            some = half.measure(hook, some_clients, some_carry, batch, self.step_number(number))
            total = some if total is None else tree_map(_added, total, some)
        mean: tuple[Tree, ...] = mean_rows(total, clients.info.size)
        found: tuple[Tree, ...] = _take(mean, back)
        return found


def _longest(work: Assignment) -> Assignment:
    """Take the client with most examples among those that train, and its batches."""
    trains = work.sizes * (work.steps > 0)
    return work.part(trains.argmax()[None]).ordered()


def _batch_of(work: Assignment) -> int:
    """Tell how many examples a step takes."""
    return _longest(work).order.shape[-1]


def _check_count(name: str, value: Any) -> None:
    if value is not None:
        check_whole(name, value)


def _check_switches(**switches: bool | None) -> None:
    for name, value in switches.items():
        if value not in (True, False, None):
            raise ConfigError(f"{name} is true or false, got {value!r}")


def join(*parts: Any) -> Any:
    """Put chunks of clients together again."""
    return parts[0] if len(parts) == 1 else tree_map(lambda *v: torch.cat(v), *parts)


def _added(total: Tensor, some: Tensor) -> Tensor:
    """Add to the first rows."""
    return torch.cat([total[: len(some)] + some, total[len(some) :]])


def _rows(tree: Any, part: slice | int) -> Any:
    return tree_map(lambda v: v[part], tree)


def _take(tree: Any, index: Tensor) -> Any:
    """Reorder clients; nothing is copied when the order stays."""
    if not leaves(tree) or torch.equal(index, torch.arange(len(index), device=index.device)):
        return tree
    return tree_map(lambda v: v[index], tree)
