"""Which configuration of a kernel is fastest here, found out once per device and problem.

Every candidate is compared with torch on poisoned memory before its time counts: a compiler may
well turn a legal configuration into one that writes zeros.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from undrift.kernels import interpreted
from undrift.kernels.memory import everything, recall, remember

log = logging.getLogger("undrift")

Configuration = dict[str, Any]

chosen: dict[str, Configuration] = {}  # by kernel, problem and device
timings: dict[str, list[Timing]] = {}  # of all candidates, the fastest first

_hurried: list[bool] = []
_crowds: list[int] = []

SMALL = 3e8  # operations that are over before a launch is: not worth a choice
TOLERANCE = {"float32": 1e-5, "tf32": 2e-3, "fp16": 2e-3, "bf16": 1e-2}
REPEATS = 7
NEAR = 2.0  # times larger or smaller, where what is best for one problem is for the other


class Cohort(Protocol):
    """A problem of some clients."""

    @property
    def clients(self) -> int:
        """How many."""

    def _replace(self, *, clients: int) -> Self: ...


P = TypeVar("P", bound=Cohort)


class Timing(NamedTuple):
    """How a candidate did."""

    milliseconds: float  # infinite if it failed or was wrong
    error: float  # against torch; NaN if it did not run
    configuration: Configuration


class Launch(NamedTuple):
    """A program and what it is called with."""

    program: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self) -> None:
        """Put it on the current stream."""
        self.program[self.grid](*self.arguments, **self.constants)

    def compile(self) -> None:
        """Compile it without running it."""
        self.program.warmup(*self.arguments, grid=self.grid, **self.constants)


class Trial(NamedTuple):
    """A kernel on random inputs, to be timed and compared."""

    candidates: Sequence[Configuration]
    launches: Callable[[Configuration], Sequence[Launch]]
    outputs: Sequence[Tensor]
    error: Callable[[], float]  # relative, of what lies in the outputs
    precision: str
    prepare: Callable[[], object] = lambda: None  # puts back what a launch changes


def on_device(tensor: Tensor) -> Any:
    """Make a tensor's device the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def configuration(
    name: str, problem: Any, device: torch.device, candidates: Sequence[Configuration],
    trial: Callable[[], Trial],
) -> Configuration:  # fmt: skip
    """Give the configuration to use, after a trial if there has been none.

    While a CUDA graph is captured nothing can be tried: the first candidate serves.
    """
    full = full_key(name, problem.key(), device)
    if full in chosen:
        return chosen[full]
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return candidates[0]
    found = recall(full)
    if found is not None and found in candidates:  # else never tried, or the list has changed
        chosen[full] = found
        return found
    if _hurried:
        return _hurried_choice(full, trial)
    made = trial()
    found = _neighbours(full, made)
    if found is None:
        found = _found(full, made, problem.operations < SMALL)
        remember(full, found)
    chosen[full] = found
    return found


def _neighbours(key: str, trial: Trial) -> Configuration | None:
    """Take what is best for a problem of nearly this size, if it is right here too.

    A trial takes seconds, and cohorts have many sizes.
    """
    known = {**everything(), **chosen}
    near = [(apart, other) for other in known if (apart := _apart(key, other)) <= NEAR]
    for _, other in sorted(near)[:3]:
        alike = known[other]
        if alike in trial.candidates and _try(trial, alike, timed=False).milliseconds < float(
            "inf"
        ):
            log.debug("%s: as for %s", key, other)
            return dict(alike)
    return None


def _apart(one: str, other: str) -> float:
    """Tell how many times larger one of two problems is, in clients or rows; else infinitely."""
    if _kind(one) != _kind(other):
        return float("inf")
    pairs = zip(_sizes(one), _sizes(other), strict=True)
    return max(max(a, b) / min(a, b) for a, b in pairs)


def _sizes(key: str) -> list[int]:
    """Read clients and rows from a key like "linear: 64x50 9->4 bf16, a card"."""
    found = re.match(r".*?: (\d+)x(\d+) ", key)
    return [int(n) for n in found.groups()] if found else [1, 1]


def _found(key: str, trial: Trial, small: bool) -> Configuration:
    if small:
        return first_right(key, trial)
    compile_all([trial])
    return tune(key, trial)


@contextmanager
def in_a_hurry() -> Iterator[None]:
    """Take what is right without looking for what is fastest: for what runs seldom."""
    _hurried.append(True)
    try:
        yield
    finally:
        _hurried.pop()


@contextmanager
def in_a_crowd(size: int) -> Iterator[None]:
    """Choose for a device on which so many calls like these run at once."""
    _crowds.append(size)
    try:
        yield
    finally:
        _crowds.pop()


def as_tuned(problem: P) -> P:
    """Give the problem to choose a configuration for: all clients that share the device.

    A small cohort alone needs many small programs to fill it; in a crowd they cost more.
    """
    if not _crowds:
        return problem
    return problem._replace(clients=problem.clients * _crowds[-1])


def _hurried_choice(key: str, trial: Callable[[], Trial]) -> Configuration:
    """Prefer what serves a problem that differs in its numbers of clients and rows alone."""
    own = f"{key}, in a hurry"
    if own not in chosen:
        made = trial()
        like = [c for other, c in chosen.items() if _kind(other) == _kind(key)]
        first = [c for c in like if c in made.candidates]
        chosen[own] = first_right(key, made._replace(candidates=[*first, *made.candidates]))
    return chosen[own]


def _kind(key: str) -> tuple[str, str]:
    """Leave out clients and rows; numbers of two bytes are all the same to a kernel."""
    name, _, rest = key.partition(": ")
    return name, rest.partition(" ")[2].replace("fp16", "bf16")


def first_right(key: str, trial: Trial) -> Configuration:
    """Give the first candidate that works and is right."""
    for candidate in trial.candidates:
        if _try(trial, candidate, timed=False).milliseconds < float("inf"):
            return candidate
    raise _nothing_works(key)


def _nothing_works(key: str) -> RuntimeError:
    return RuntimeError(f"no configuration of the kernel works here: {key}")


def full_key(name: str, key: str, device: torch.device) -> str:
    """Name a kernel, its problem and the device."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}: {key}, {card}"


def compile_all(trials: Iterable[Trial]) -> None:
    """Compile all candidates side by side; those that cannot be compiled fail later, by name."""
    if interpreted():
        return
    import triton

    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for trial in trials:
            for candidate in trial.candidates:
                for launch in trial.launches(candidate):
                    launch.compile()


def tune(key: str, trial: Trial) -> Configuration:
    """Time the candidates that are right, and give the fastest."""
    found = sorted((_try(trial, c) for c in trial.candidates), key=lambda t: t.milliseconds)
    timings[key] = found
    for timing in found:
        if timing.milliseconds == float("inf"):
            log.debug("%s: %s failed (error %.1e)", key, timing.configuration, timing.error)
    best = found[0]
    if best.milliseconds == float("inf"):
        raise _nothing_works(key)
    log.debug("%s: %s, %.3f ms", key, best.configuration, best.milliseconds)
    return best.configuration


def _try(trial: Trial, candidate: Configuration, timed: bool = True) -> Timing:
    error = float("nan")
    try:
        launches = trial.launches(candidate)
        for output in trial.outputs:
            output.fill_(float("nan") if output.is_floating_point() else 77)
        trial.prepare()
        for launch in launches:
            launch.run()
        error = trial.error()
        if not error < TOLERANCE[trial.precision]:
            return Timing(float("inf"), error, candidate)
        return Timing(_time(launches) if timed else 0.0, error, candidate)
    except Exception as trouble:  # whatever a compiler or a driver may raise
        log.debug("%s failed: %s", candidate, str(trouble)[:200])
        return Timing(float("inf"), error, candidate)


def _time(launches: Sequence[Launch]) -> float:
    if not torch.cuda.is_available():
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(4_000_000)  # the host runs ahead, so that short kernels show no gaps
    begin.record()
    for _ in range(REPEATS):
        for launch in launches:
            launch.run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS
