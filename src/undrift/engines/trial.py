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
    trial, errors = _Trial(task, batch), []
    for task.writes in (False, True):  # tensors of every client's own only where it takes them
        try:
            found = trial.many()
            break
        except UndriftError:
            raise
        except Exception as error:
            errors.append(error)
    else:
        trial.one()
        raise TaskError(
            f"this module cannot be trained for many clients at once{_place(task, errors[0])} "
            f"({errors[0]}); engine='reference' trains one client at a time"
        ) from errors[0]
    wanted = trial.alone()
    if not all(torch.allclose(a, b, 1e-2, 1e-3, True) for a, b in zip(found, wanted, strict=True)):
        raise TaskError(
            "torch computes other numbers for many clients at once than for one with this module; "
            "engine='reference' trains one client at a time"
        )
    _check_padding(trial)


class _Trial:
    """A step, and a look without a gradient in training and in evaluation."""

    def __init__(self, task: Task, batch: Batch) -> None:
        self.task, self.batch, (self.w, self.buffers) = task, batch, task.initial()
        self.key = torch.zeros((), dtype=torch.int64, device=self.w.device)

    def loss(self, w: Tensor, batch: Batch, key: Tensor) -> Tensor:
        """Give what a step differentiates."""
        run = Pass(batch.mask, key, True)
        return self.task.mean_loss(self.task.forward(w, self.buffers, batch.x, run), batch)

    def told(self, training: bool, w: Tensor, batch: Batch, key: Tensor) -> list[Tensor]:
        """Give what the module says of every example, and the losses."""
        run = Pass(batch.mask, key if training else None, training)
        value = self.task.forward(w, self.buffers, batch.x, run).value
        said = [value] if isinstance(value, Tensor) else []
        return [*said, *shares(self.task.losses(value, batch.y))]

    def many(self) -> list[Tensor]:
        """Take four clients at once; give what the second is told."""
        # more clients than examples: a rule that takes one axis for the other fails here
        given = (self.w, self.batch, self.key)
        cohort = tree_map(lambda v: v.expand(4, *v.shape).clone(), given)
        cohort[0][1:] *= self.w.new_tensor([[0.9], [0.8], [0.7]])
        with _one_by_one_is_told():
            vmap(grad(self.loss))(*cohort)
            with torch.no_grad():
                ways = [vmap(partial(self.told, way))(*cohort) for way in (True, False)]
                return [v[1] for told in ways for v in told]

    @torch.no_grad()
    def alone(self) -> list[Tensor]:
        """Give what the second client is told in a call of its own."""
        given = (0.9 * self.w, self.batch, self.key)
        return [v for way in (True, False) for v in self.told(way, *given)]

    def one(self) -> None:
        """Take a step of one client; one that fails alone does not fail for being many."""
        try:
            grad(self.loss)(self.w, self.batch, self.key)
        except Exception as error:
            raise TaskError(
                f"this module cannot be trained{_place(self.task, error)}: {error}"
            ) from error


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


def _check_padding(trial: _Trial) -> None:
    """Refuse a module or loss that mixes examples: padding would change its results."""
    rows = len(trial.batch.x)
    x, y = (torch.cat([v, v.flip(0)[:1]]) for v in (trial.batch.x, trial.batch.y))
    mask = torch.cat([trial.batch.mask, trial.batch.mask.new_zeros(1)])
    with torch.no_grad():
        alone = trial.told(True, trial.w, trial.batch, trial.key)
        padded = trial.told(True, trial.w, Batch(x, y, mask, mask.long()), trial.key)
    for a, b in zip(alone, padded, strict=True):
        if not torch.allclose(a, b[:rows], rtol=1e-3, atol=1e-5, equal_nan=True):
            raise TaskError(
                "the examples of a batch influence each other in this module or loss, so that "
                "padding to a common length would change its results; engine='reference' does "
                "not pad"
            )
