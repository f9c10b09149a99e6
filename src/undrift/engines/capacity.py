"""How many clients to train at a time: what fits, and on a CPU what pays."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from undrift.core.algorithm import Algorithm, init_client
from undrift.core.ops import Pass
from undrift.core.rule import Sizes
from undrift.core.task import Batch, Task
from undrift.core.tree import size_in_floats
from undrift.data.spool import free_memory
from undrift.engines.dense_steps import is_dense
from undrift.engines.plain import is_plain

log = logging.getLogger("undrift")

# Measured by benchmarks/cohort.py --plans: below this much work in a batch's forward pass, calling
# one client after the other costs more than grouped convolutions lose.
ALONE = 4e7
SIDE_BY_SIDE = 2e8  # operations in the cohort's forward pass from which a second thread pays
# Bytes of one vector per client, all clients at a time together, above which a CPU loses: malloc
# gives larger pieces back to the system when they are freed, so that every temporary of every step
# costs its page faults again (a stateful round: 1.4 times as long with 90k parameters, 1.8 with 1M
# parameters).
KEPT = 2e7
# Bytes of the weights of all clients at a time that a CPU keeps in its caches from one step to the
# next, where layers step in place: on an AMD EPYC rounds of dense networks took 1.2 times less with
# 200k parameters than with 24 at once, 1.3 times less with 1M; of 90k, 8 to 16 were as good.
CACHED = 4.5e6
# The largest piece that glibc takes for one that comes and goes: see `keep_freed_memory`.
LARGEST = 31 * 2**20
USED = 0.7  # of what is free
COPIES = 6  # vectors [P] per client in a local step: model, gradient, correction and temporaries


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was no memory: on a CPU torch has no name for that."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


class Need(NamedTuple):
    """What one client's local step costs."""

    operations: float  # of the forward pass over one batch
    num_bytes: int  # memory while training
    pays: float = math.inf  # clients at a time, from which on a CPU more are slower
    example_bytes: float = 0.0  # of it, for every example of a batch


def need_of(algo: Algorithm, task: Task, batch: Batch, sizes: Sizes) -> Need:
    """Run one client's batch forward and count, as torch multiplies."""
    task = task.plain()
    w, buffers = task.initial()
    key = torch.zeros((), dtype=torch.int64, device=w.device)

    def loss() -> None:
        run = Pass(batch.mask, key, True)
        task.mean_loss(task.forward(w.requires_grad_(), buffers, batch.x, run), batch)

    operations, held = _counted(loss) or _guessed(loss, 2.0 * w.numel() * len(batch.x))
    states = (algo.local.init(w), init_client(algo, w, sizes))
    vectors = COPIES * w.numel() + 3 * size_in_floats(states)
    data = batch.x.numel() * batch.x.element_size()
    fixed, moving = vectors * w.element_size(), 2 * held + 2 * data
    pays = _pays(algo, task, w, batch)
    return Need(operations, fixed + moving, pays, moving / max(1, len(batch.x)))


def _counted(loss: Callable[[], None]) -> tuple[float, int] | None:
    """Count the operations of a forward pass, and the bytes that it keeps for the way back.

    None for a module that calls torch.func itself, which takes no hooks.
    """
    held: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        held[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    try:
        with FlopCounterMode(display=False) as counter, saved_tensors_hooks(note, lambda v: v):
            loss()
    except RuntimeError:
        return None
    return float(counter.get_total_flops()), sum(held.values())


def _guessed(loss: Callable[[], None], operations: float) -> tuple[float, int]:
    """Take every result for kept."""
    with _Results() as results:
        loss()
    return operations, results.bytes


class _Results(TorchDispatchMode):
    """Counts the bytes of all results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = found if isinstance(found, tuple | list) else (found,)
        self.bytes += sum(t.nbytes for t in given if isinstance(t, Tensor))
        return found


def _pays(algo: Algorithm, task: Task, w: Tensor, batch: Batch) -> float:
    """Tell from how many clients at a time on more are slower on a CPU."""
    each = w.numel() * w.element_size()
    if w.device.type != "cpu":
        return math.inf
    if not is_plain(algo):
        return max(1.0, KEPT // each)
    # one matrix is moved in place; elsewhere than in dense networks a call costs more than it saves
    return max(2.0, CACHED // each) if is_dense(task, batch.x.dim() - 1) else math.inf


@cache
def keep_freed_memory() -> None:
    """Let the C library keep what is freed, up to 60 MB, for whoever asks next.

    glibc gives freed memory back to the system, and takes it again page by page, until it has seen
    a piece as large come and go.  This one is never touched.  Other libraries do not mind.
    """
    torch.empty(LARGEST, dtype=torch.uint8)


def is_small(need: Need, device: torch.device, cohort: int) -> bool:
    """Whether a step is so little work that a second thread costs more than it brings."""
    return device.type == "cpu" and need.operations * cohort <= SIDE_BY_SIDE


def workers_for(need: Need, device: torch.device, cohort: int) -> int:
    """Choose how many chunks to train side by side: as many as torch may use threads."""
    if device.type != "cpu" or is_small(need, device, cohort):
        return 1
    return min(torch.get_num_threads(), cohort)


def width_for(
    need: Need, module: nn.Module, device: torch.device, most: int, workers: int = 1,
    batch: int = 1,
) -> int | None:  # fmt: skip
    """Choose how many clients to train at a time; None is everybody.

    `most` is the largest cohort there can be, `batch` what a step sees.
    """
    if device.type == "cpu" and need.operations > ALONE and has_convolution(module):
        return 1
    free = free_bytes(device)
    fits = max(1, int(free * USED / need.num_bytes / workers))
    if need.num_bytes > free:
        log.warning("%s", would_fit(need, batch, free))
    if min(fits, need.pays) >= most:
        return None
    if need.pays <= fits:
        return int(need.pays)
    log.info(
        "a client needs %.0f MB to train: at most %d at a time (`chunk` sets another number)",
        need.num_bytes / 1e6,
        fits,
    )
    return fits


def would_fit(need: Need, batch: int, free: int) -> str:
    """Say what a client with batches of so many examples takes, what there is, and what would fit.

    >>> would_fit(Need(0.0, 9_000_000, example_bytes=80_000.0), 100, 5_000_000)
    'training one client takes about 9 MB, 5 MB are free: batches of 31 examples would fit'
    """
    fixed = need.num_bytes - batch * need.example_bytes
    least = int((USED * free - fixed) // need.example_bytes) if need.example_bytes else 0
    told = f"training one client takes about {_amount(need.num_bytes)}, {_amount(free)} are free: "
    if least >= 1:
        return told + f"batches of {least} example{'s' * (least > 1)} would fit"
    return told + f"its model and states alone take {_amount(fixed)}, so take a smaller model"


def _amount(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def has_convolution(module: nn.Module) -> bool:
    """Whether batching clients turns something into a grouped convolution."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return any(isinstance(part, kinds) for part in module.modules())


def total_bytes(device: torch.device) -> int:
    """Tell how much memory a device has, free or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: torch.device) -> int:
    """Tell how much memory is free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_memory()
