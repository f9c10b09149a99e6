"""What a module must stand to be trained for many clients at once, tried before training."""

from __future__ import annotations

import logging
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch._C import _functorch
from torch.func import grad, vmap

from undrift.core.losses import shares
from undrift.core.ops import Pass
from undrift.core.task import Batch, Task
from undrift.core.tree import tree_map
from undrift.errors import TaskError, UndriftError

log = logging.getLogger("undrift")


def check_vectorises(task: Task, batch: Batch) -> None:
    """Try a step of some clients at once, so that a module that cannot is named before training."""
    if any(getattr(part, "scale_grad_by_freq", False) for part in task.module.modules()):
        raise TaskError(
            "an embedding with scale_grad_by_freq=True counts padded rows too; leave it out, or "
            "use engine='reference', which does not pad"
        )
    w, buffers = task.initial()
    key = torch.zeros((), dtype=torch.int64, device=w.device)

    def loss(v: Tensor, batch: Batch, key: Tensor) -> Tensor:
        return task.mean_loss(task.forward(v, buffers, batch.x, Pass(batch.mask, key, True)), batch)

    def told(training: bool, v: Tensor, batch: Batch, key: Tensor) -> Tensor:
        run = Pass(batch.mask, key if training else None, training)
        return torch.stack(
            shares(task.losses(task.forward(v, buffers, batch.x, run).value, batch.y))
        )

    # more clients than examples: a rule that takes one axis for the other fails here
    cohort = tree_map(lambda v: v.expand(3, *v.shape).clone(), (w, batch, key))
    cohort[0][1:] *= w.new_tensor([[0.9], [0.8]])
    try:
        with _one_by_one_is_told():
            vmap(grad(loss))(*cohort)
        with torch.no_grad():
            found = [vmap(partial(told, training))(*cohort)[1] for training in (True, False)]
    except UndriftError:
        raise
    except Exception as error:
        try:
            grad(loss)(w, batch, key)
        except Exception as alone:
            raise TaskError(f"this module cannot be trained: {alone}") from alone
        raise TaskError(
            f"this module cannot be trained for many clients at once{_place(task, error)} "
            f"({error}); "
            "engine='reference' trains one client at a time"
        ) from error
    with torch.no_grad():
        wanted = [told(training, 0.9 * w, batch, key) for training in (True, False)]
    if not all(torch.allclose(a, b, 1e-2, 1e-3, True) for a, b in zip(found, wanted, strict=True)):
        raise TaskError(
            "torch computes other losses for many clients at once than for one with this module; "
            "engine='reference' trains one client at a time"
        )
    _check_padding(task, batch)


def _place(task: Task, error: BaseException) -> str:
    """Name the innermost part of the module that an error passed."""
    names = {id(part): name for name, part in task.module.named_modules() if name}
    inner = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        part = frame.f_locals.get("self")
        inner = names.get(id(part), inner)
    return f", at {inner!r}" if inner else ""


_NO_RULE = re.compile(r"batching rule for (\S+?)\.? ")
_telling = threading.Lock()
_may_warn: Callable[[bool], None] = _functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]


class _Fallback:
    """Whether torch may say that it has no batching rule; it would at every step."""

    silent = False


@contextmanager
def _one_by_one_is_told() -> Iterator[None]:
    """Say once, by its name, which operation torch runs client after client under vmap."""
    with _telling:
        _may_warn(True)
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                yield
        finally:
            found = [_NO_RULE.search(str(w.message)) for w in seen]
            names = [*dict.fromkeys(match[1] for match in found if match)]
            _Fallback.silent |= bool(names)
            _may_warn(not _Fallback.silent)
    if names:
        log.warning(
            "torch has no batching rule for %s: clients go through it one after the other, so "
            "that training many at once is slower than it could be", ", ".join(names),
        )  # fmt: skip
    for other, match in zip(seen, found, strict=True):
        if match is None:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)


def _check_padding(task: Task, batch: Batch) -> None:
    """Refuse a module or loss that mixes examples: padding would change its results."""
    w, buffers = task.initial()
    key = torch.zeros((), dtype=torch.int64, device=w.device)

    def losses(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        out = task.forward(w, buffers, x, Pass(mask, key, True))
        return torch.stack(shares(task.losses(out.value, y)))[:, : len(batch.x)]

    with torch.no_grad():
        x, y = (torch.cat([v, v.flip(0)[:1]]) for v in (batch.x, batch.y))
        mask = torch.cat([batch.mask, batch.mask.new_zeros(1)])
        alone, padded = losses(batch.x, batch.y, batch.mask), losses(x, y, mask)
    if not torch.allclose(alone, padded, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise TaskError(
            "the examples of a batch influence each other in this module or loss, so that padding "
            "to a common length would change its results; engine='reference' does not pad"
        )
