"""What a module must stand to be trained for many clients at once, tried before training."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vmap

from undrift.core.losses import shares
from undrift.core.ops import Pass
from undrift.core.task import Batch, Task
from undrift.core.tree import tree_map
from undrift.errors import TaskError, UndriftError


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
