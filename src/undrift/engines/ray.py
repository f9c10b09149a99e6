"""Owners of shards as Ray actors, on one machine or many.  Ray is imported here and by
`ray_cluster`, nowhere else.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from undrift.core.task import Task
from undrift.core.tree import leaves
from undrift.data.checks import check_whole
from undrift.data.federation import Federation
from undrift.engines.crew import Brief, Crew, Failed, Lost, failed, raise_failed
from undrift.engines.member import Member, remove_scratch
from undrift.engines.ray_cluster import Each, connect, first_line, load_ray, resources, share_out
from undrift.engines.sharded import Sharded, check_options
from undrift.errors import ConfigError, FederationError
from undrift.state.store import ClientStateStore

START_SECONDS = 300.0  # for an actor to start, Ray's own processes included


class Ray(Sharded):
    """One actor per GPU by default; without any, one per machine.

    Without `address` a cluster of this machine alone is started: it listens on 127.0.0.1, and asks
    for a token.  `gpus` is per actor, a fraction shares one; `timeout` is for one answer, in
    seconds.  Other options are those of the vectorised engine that every actor has.
    """

    def __init__(
        self,
        task: Task,
        federation: Federation,
        store: ClientStateStore,
        *,
        actors: int | None = None,
        gpus: float | None = None,
        address: str | None = None,
        timeout: float | None = None,
        dashboard: bool = False,
        **options: Any,
    ) -> None:
        _check_number("gpus", gpus, 0.0)
        _check_number("timeout", timeout, 1e-9)
        if actors is not None:
            check_whole("actors", actors)
        check_options(options, type(self).__name__)
        connect(address, dashboard=dashboard)
        count, each = share_out(resources(), actors, gpus, alone=address is None)

        def hire(briefs: Sequence[Callable[[], Brief]]) -> Crew:
            return RayCrew(briefs, each, timeout)

        super().__init__(task, federation, store, actors=count, hire=hire, **options)


def _check_number(name: str, value: Any, low: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) < 1e9:
        raise ConfigError(f"{name} = {value!r} must be a number that is not below {low:g}")


# -------------------------------------------------------------------------------------- actors
class Owner:
    """What runs in an actor's process."""

    def __init__(self) -> None:
        self._member: Member | None = None

    def begin(self, brief: Brief, threads: int, device: str) -> Any:
        """Take over some shards; tells where, or what went wrong."""
        try:
            torch.set_num_threads(threads)
            self._member = Member(brief, device)
        except Exception as error:  # a constructor's error would only say that the actor died
            return failed(error)
        machine = load_ray().get_runtime_context().get_node_id()
        return {**self.ask("about", None, None), "machine": machine}

    def ask(self, what: str, common: Any, own: Any) -> Any:
        """Answer a question."""
        assert self._member is not None
        return self._member.ask(what, common, own)

    def end(self) -> None:
        """Let go of everything."""
        if self._member is not None:
            self.ask("close", None, None)
            self._member = None
            gc.collect()
            torch.cuda.empty_cache()


class RayCrew:
    """Asks actors; one that is lost is never restarted by Ray, only replaced by us."""

    def __init__(
        self, briefs: Sequence[Callable[[], Brief]], each: Each, timeout: float | None
    ) -> None:
        self._ray, self._each, self._timeout = load_ray(), each, timeout
        self._actors: dict[int, Any] = {}
        self.about: dict[int, dict[str, Any]] = {}  # process, machine, device of each
        self._open = True
        atexit.register(_close, weakref.ref(self))  # before Ray's own end, which comes later
        try:
            self._begin_all(briefs)
        except BaseException:
            self.close()
            raise

    def _begin_all(self, briefs: Sequence[Callable[[], Brief]]) -> None:
        idle = _take_idle(self._ray, self._each)
        for number in range(len(briefs)):
            self._actors[number] = idle.pop() if idle else self._new_actor()
        _idle.extend((self._each, actor) for actor in idle)
        begun = {number: self._begin(number, brief()) for number, brief in enumerate(briefs)}
        try:
            for number, answer in begun.items():
                self._wait_for(number, answer)
        except Lost as lost:
            raise FederationError(f"{lost}: is there enough memory for so many?") from lost

    def _new_actor(self, machine: str | None = None) -> Any:
        """Make an actor, on a certain machine where rows are to be found again."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        each, there = self._each, NodeAffinitySchedulingStrategy
        placed = "SPREAD" if machine is None else there(machine, soft=False)
        kind = self._ray.remote(
            max_restarts=0,
            max_task_retries=0,
            num_cpus=each.cpus,
            num_gpus=each.gpus,
            scheduling_strategy=placed,
        )(Owner)
        return kind.remote()

    def _begin(self, owner: int, brief: Brief) -> Any:
        device = "cuda" if self._each.gpus else "cpu"
        return self._actors[owner].begin.remote(brief, self._each.threads, device)

    def _wait_for(self, owner: int, answer: Any) -> None:
        errors = self._ray.exceptions
        try:
            about = self._ray.get(answer, timeout=START_SECONDS)
        except errors.GetTimeoutError as error:
            free = self._ray.available_resources()
            told = f"{free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs"
            raise FederationError(
                f"actor {owner} did not start within {START_SECONDS:g} s: it asks for "
                f"{self._each.cpus:g} CPUs and {self._each.gpus:g} GPUs, {told} are free"
            ) from error
        except errors.ActorUnschedulableError as error:
            raise FederationError(
                f"the machine of actor {owner} is gone, and the states of its clients with it: "
                "resume from the last checkpoint"
            ) from error
        except errors.RayError as error:
            raise Lost([owner], f"it cannot start ({first_line(error)})") from error
        if isinstance(about, Failed):
            raise_failed(owner, about)
        self.about[owner] = about

    def ask(self, what: str, common: Any, own: Mapping[int, Any]) -> dict[int, Any]:
        """Ask everybody at once, and wait for all."""
        sent = self._ray.put(common)
        asked = {k: self._actors[k].ask.remote(what, sent, mine) for k, mine in own.items()}
        until = None if self._timeout is None else time.monotonic() + self._timeout
        found: dict[int, Any] = {}
        lost: dict[int, str] = {}
        for owner, answer in asked.items():
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                found[owner] = self._ray.get(answer, timeout=left)
            except self._ray.exceptions.GetTimeoutError:
                lost[owner] = f"no answer within {self._timeout:g} s"
            except self._ray.exceptions.RayTaskError as error:
                raise FederationError(f"actor {owner} failed: {first_line(error)}") from error
            except self._ray.exceptions.RayError as error:
                lost[owner] = first_line(error)
        if lost:
            raise Lost(list(lost), next(iter(lost.values())))
        return found

    def replace(self, owner: int, brief: Brief) -> None:
        """Put another actor in the place of one, where the rows of its clients are."""
        _end(self._ray, self._actors[owner])
        machine = self.about[owner]["machine"] if leaves(brief.template) else None
        self._actors[owner] = self._new_actor(machine)
        self._wait_for(owner, self._begin(owner, brief))

    def close(self) -> None:
        """Let all actors delete what they kept for this run; then they are free for another."""
        if not self._open:
            return
        self._open = False
        if not self._ray.is_initialized():  # Ray would start a new cluster to be asked anything
            for told in self.about.values():
                remove_scratch(told["folder"])
            return
        said = {owner: actor.end.remote() for owner, actor in self._actors.items()}
        for owner, answer in said.items():
            try:
                self._ray.get(answer, timeout=10)
                _idle.append((self._each, self._actors[owner]))
            except Exception:  # whatever it is: nobody needs this actor any more
                _end(self._ray, self._actors[owner])
                remove_scratch(self.about.get(owner, {}).get("folder", ""))


_idle: list[tuple[Each, Any]] = []  # actors whose engine is gone: another run starts sooner


def _take_idle(ray: Any, each: Each) -> list[Any]:
    """Take idle actors of the right kind; the others make room."""
    taken, others = list[Any](), list[Any]()
    while _idle:
        kind, actor = _idle.pop()
        (taken if kind == each else others).append(actor)
    for actor in others:
        _end(ray, actor)
    return [actor for actor in taken if _is_alive(ray, actor)]


def _is_alive(ray: Any, actor: Any) -> bool:
    try:
        ray.get(actor.end.remote(), timeout=10)
    except Exception:  # of another cluster, or dead
        return False
    return True


def _end(ray: Any, actor: Any) -> None:
    with contextlib.suppress(Exception):  # it may be gone already
        ray.kill(actor, no_restart=True)


def _close(crew: Any) -> None:
    made = crew()
    if made is not None:
        made.close()
