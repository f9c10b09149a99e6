"""Local steps of plain SGD, taken in place: the second path of the vectorised engine on a CPU.

Without client rules, momentum and clipping a step is w <- w - lr * gradient.  Then the cohort's
matrix [C, P] is moved where it lies: no gradient vector is put together, nothing is copied.
Equal to the general path within rounding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import vmap

from undrift.core.algorithm import Algorithm, Broadcast, Client
from undrift.core.linear import Descent
from undrift.core.local import Sgd
from undrift.core.ops import Pass
from undrift.core.round import Carry, client_start, step_key
from undrift.core.rule import overrides
from undrift.core.task import Batch, Buffers, Task
from undrift.core.tree import tree_map

STEP_HOOKS = ("begin", "penalty", "direction", "review")


def is_plain(algo: Algorithm) -> bool:
    """Whether every local step is w <- w - lr * (gradient + weight_decay * w)."""
    local = algo.local
    numbers = (local.lr, local.weight_decay)
    return (
        type(local) is Sgd
        and local.clip is None
        and not algo.needs_path
        and not any(isinstance(n, Tensor) for n in numbers)
        and not any(overrides(rule, hook) for rule in algo.rules for hook in STEP_HOOKS)
    )


def is_sequence(module: nn.Module) -> bool:
    """Whether a module only hands its input from one of torch's own layers to the next.

    Then each weight is read once, by its own layer, and may move during the backward pass.
    """
    parts = list(module.modules())
    own = [p for p in parts if not isinstance(p, nn.Sequential)]
    parameters = [id(p) for part in own for p in part.parameters(recurse=False)]
    calls = _calls(module)
    return (
        all(type(p) is nn.Sequential or not list(p.children()) for p in parts)
        and all(type(p).__mro__[0].__module__.startswith(("torch.nn", "undrift")) for p in parts)
        and all(p.requires_grad for p in module.parameters())
        and len(set(parameters)) == len(parameters)
        and len(set(calls)) == len(calls)
    )


def _calls(module: nn.Module) -> list[int]:
    """List the layers in the order in which a sequence calls them; a shared one shows twice."""
    if not isinstance(module, nn.Sequential):
        return [id(module)]
    return [call for part in module for call in _calls(part)]


class PlainSteps:
    """Moves the parameters of a chunk of clients, row by row of one matrix."""

    def __init__(self, task: Task, algo: Algorithm, broadcast: Broadcast, together: bool) -> None:
        self.task, self.algo, self.broadcast, self.together = task, algo, broadcast, together
        self.fused = together and is_sequence(task.module)
        self.moved = _linear_names(task.module) if self.fused else set()

    def start(self, clients: Client) -> Carry:
        """Give every client its own row of parameters."""
        begin = vmap(lambda c: client_start(self.algo, self.task, self.broadcast, c))
        carry: Carry = begin(clients)
        return carry._replace(w=carry.w.clone())

    def step(self, clients: Client, carry: Carry, batch: Batch, k: Tensor) -> Carry:
        """Take one local step; the rows of `carry.w` move."""
        lr = float(self.algo.local.lr_at(self.broadcast.round, k))
        how = Descent(lr, 1 - lr * self.algo.local.weight_decay)
        parts = self._parts(carry.w)
        keys = vmap(lambda c: step_key(self.broadcast, c, "step", k))(clients)

        def losses(parts: Any, buffers: Buffers, batch: Batch, key: Tensor) -> Any:
            run = Pass(batch.mask, key, True, descent=how if self.fused else None)
            out = self.task.forward_named(parts, buffers, batch.x, run)
            return self.task.mean_loss(out, batch), self.task.scores(out, batch), out.buffers

        loss, scores, buffers = self._map(losses, parts, (carry.buffers, batch, keys))
        loss.sum().backward()
        for name in parts.keys() - self.moved:
            _descend(parts[name].data, parts[name].grad, how)
        total = {n: carry.scores[n] + s.detach() for n, s in scores.items()}
        buffers = tree_map(lambda v: v.detach(), buffers)
        return carry._replace(buffers=buffers, loss=carry.loss + loss.detach(), scores=total)

    def _parts(self, w: Tensor) -> dict[str, Tensor]:
        """View the matrix [C, P] as named parameters [C, ...]; one client's without C."""
        rows = w if self.together else w[0]
        pieces = rows.split(self.task.sizes, -1)
        shapes = zip(self.task.names, pieces, self.task.shapes, strict=True)
        return {n: p.unflatten(-1, s).detach().requires_grad_() for n, p, s in shapes}

    def _map(self, function: Any, parts: dict[str, Tensor], rest: Any) -> Any:
        if self.together:
            return vmap(function)(parts, *rest)
        # one client: the plain call, whose kernels a CPU runs best
        made = function(parts, *tree_map(lambda v: v[0], rest))
        return tree_map(lambda v: v[None], made)


def _linear_names(module: nn.Module) -> set[str]:
    """Name the parameters that move in the backward pass."""
    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    own = [(n, k) for n, m in layers for k, _ in m.named_parameters(recurse=False)]
    return {f"{n}.{k}" if n else k for n, k in own}


def _descend(w: Tensor, g: Tensor | None, how: Descent) -> None:
    if how.keep != 1:
        w.mul_(how.keep)  # a parameter that the pass does not use decays all the same
    if g is not None:
        w.sub_(g, alpha=how.lr)


__all__ = ["PlainSteps", "is_plain", "is_sequence"]
