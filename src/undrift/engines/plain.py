"""Local steps of plain SGD, taken in place: the second path of the vectorised engine on a CPU.

Without client rules, momentum and clipping a step is w <- w - lr * gradient.  Then the cohort's
matrix [C, P] is moved where it lies: no gradient vector is put together, nothing is copied.
Equal to the general path within rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from undrift.core.algorithm import Algorithm, Broadcast, Client
from undrift.core.blocks import moving
from undrift.core.histories import Histories
from undrift.core.linear import Descent, take_step
from undrift.core.local import Sgd
from undrift.core.ops import Pass
from undrift.core.round import client_start
from undrift.core.rule import overrides
from undrift.core.task import Batch, Buffers, Task
from undrift.core.tree import EMPTY, tree_map, where_rows
from undrift.core.views import Carry, step_key
from undrift.core.watching import WATCHERS
from undrift.data.spool import Rows
from undrift.engines.head import Head, Tally

STEP_HOOKS = (
    *("begin", "start", "look_at", "loss", "penalty", "direction", "after_step", "review"),
)


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


# Layers that read nothing but their input and their own weights, once.
LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.GroupNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.Dropout, nn.Dropout1d, nn.Dropout2d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus),
    *(nn.LogSoftmax, nn.Flatten, nn.Unflatten, nn.Identity, nn.Sequential),
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_sequence(module: nn.Module) -> bool:
    """Whether a module only hands its input from one of `LAYERS` to the next.

    Then each weight is read once, by its own layer, and may move during the backward pass.
    """
    calls = _calls(module)
    parameters = [id(p) for part in module.modules() for p in part.parameters(recurse=False)]
    return (
        all(_is_plain_layer(part) for part in module.modules())
        and all(p.requires_grad for p in module.parameters())
        and len(set(parameters)) == len(parameters)
        and len(set(calls)) == len(calls)
    )


def _is_plain_layer(part: nn.Module) -> bool:
    kind = getattr(part, "kind", type(part))  # prepared layers remember their class
    hooked = any(h not in WATCHERS for hooks in HOOKS for h in getattr(part, hooks).values())
    changed = "forward" in vars(part) or getattr(part, "inplace", False)
    return kind in LAYERS and not hooked and not changed


def _calls(module: nn.Module) -> list[int]:
    """List the layers in the order in which a sequence calls them; a shared one shows twice."""
    if not isinstance(module, nn.Sequential):
        return [id(module)]
    return [call for part in module for call in _calls(part)]


class PlainSteps:
    """Moves the parameters of a chunk of clients, row by row of one matrix."""

    def __init__(
        self,
        task: Task,
        algo: Algorithm,
        broadcast: Broadcast,
        together: bool,
        head: Head | None = None,
    ) -> None:
        self.task, self.algo, self.broadcast, self.together = task, algo, broadcast, together
        self.head = head
        self.fused = together and is_sequence(task.module)
        # with a seam convolutions take their step while going back, too
        names = _linear_names if task.seam is None else moving
        self.moved = names(task.module) if self.fused else set()

    def start(self, clients: Client) -> Carry:
        """Give every client its own row of parameters."""
        carry = self.begun(clients)
        return carry._replace(w=carry.w.clone())

    def room_for(self, rows: Tensor, x: Rows) -> Tensor | None:
        """Give none: what a layer keeps of a batch is its own affair."""
        return None

    def begun(self, clients: Client) -> Carry:
        """Bring everybody to the received model, which all still share."""
        # no rule takes part in it: but for states, everybody begins alike
        carry = client_start(self.algo, self.task, self.broadcast, clients)
        count, alike = len(clients.steps), carry._replace(state=EMPTY)
        spread: Carry = tree_map(lambda v: v.expand(count, *v.shape), alike)
        return spread._replace(state=carry.state)

    def step(self, clients: Client, carry: Carry, batch: Batch, k: Tensor) -> Carry:
        """Take one local step; the rows of `carry.w` move."""
        lr = float(self.algo.local.lr_at(self.broadcast.round, k))
        how = Descent(lr, 1 - lr * self.algo.local.weight_decay)
        keys = vmap(lambda c: step_key(self.task, self.broadcast, c, "step", k))(clients)
        loss, scores, buffers = self._moved(carry, batch, keys, how)
        total = {n: carry.scores[n] + s for n, s in scores.items()}
        return carry._replace(buffers=buffers, loss=carry.loss + loss, scores=total)

    def step_in_place(
        self,
        carry: Carry,
        batch: Batch,
        keys: Tensor,
        lr: Tensor,
        live: Tensor,
        histories: Histories | None = None,
    ) -> None:
        """Take one local step of the clients that are `live`; all of `carry` moves in place.

        The learning rate is a client's own: 0 where it stands still.  Layers with a history stay
        where they are until it ends.
        """
        decay = self.algo.local.weight_decay
        how = Descent(lr, 1 - lr * decay if decay else 1.0, histories)
        tally = Tally(live, carry.loss, carry.scores)
        *_, buffers = self._moved(carry, batch, keys, how, tally)
        for old, new in zip(carry.buffers, where_rows(live, buffers, carry.buffers), strict=True):
            old.copy_(new)

    def _moved(
        self, carry: Carry, batch: Batch, keys: Tensor, how: Descent, tally: Tally | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Buffers]:
        """Move the rows of `carry.w`; gives what the batch said, and adds it to a tally."""
        parts = self._parts(carry.w)
        batch = self._augmented(batch, keys)
        if self.task.loss_scale != 1:
            how = how._replace(lr=how.lr / self.task.loss_scale)  # gradients come scaled
        rest = (carry.buffers, batch, keys)
        if self.fused and self.head is not None:
            grads, said = self.head.gradients(parts, *rest, how, tally)
            grads = {n: grads[n] for n in grads.keys() - self.moved}
        else:
            gradients = self._fused_gradients if self.fused else self._gradients
            grads, said = gradients(parts, rest, how)
            if tally is not None:
                tally.add(*said[:2])
        for name, g in grads.items():
            take_step(parts[name].detach(), g, how)
        seen: tuple[Tensor, dict[str, Tensor], Buffers] = said
        return seen

    def _augmented(self, batch: Batch, keys: Tensor) -> Batch:
        if self.task.augment is None:
            return batch
        if self.together:
            return vmap(self.task.augmented)(batch, keys)
        one = self.task.augmented(*tree_map(lambda v: v[0], (batch, keys)))
        return tree_map(lambda v: v[None], one)

    def _losses(self, how: Descent | None) -> Callable[..., Any]:
        def losses(parts: Any, buffers: Buffers, batch: Batch, key: Tensor) -> Any:
            run = Pass(batch.mask, key, True, descent=how)
            out = self.task.forward_named(parts, buffers, batch.x, run)
            loss = self.task.mean_loss(out, batch)
            return loss * scale, (loss, self.task.scores(out, batch), out.buffers)

        scale = self.task.loss_scale
        return losses

    def _gradients(self, parts: dict[str, Tensor], rest: Any, how: Descent) -> Any:
        """Differentiate by named parameters: no flat gradient is put together."""
        one = grad(self._losses(None), has_aux=True)
        if self.together:
            return vmap(one)(parts, *rest)
        # one client: the plain call, whose kernels a CPU runs best
        grads, aux = one(parts, *tree_map(lambda v: v[0], rest))
        return grads, tree_map(lambda v: v[None], aux)

    def _fused_gradients(self, parts: dict[str, Tensor], rest: Any, how: Descent) -> Any:
        """Let linear layers move while going back; the others' gradients come out."""
        leaves = {n: p.detach().requires_grad_() for n, p in parts.items()}
        with torch.enable_grad():
            losses, aux = vmap(self._losses(how))(leaves, *rest)
            losses.sum().backward()
        others = {n: leaves[n].grad for n in leaves.keys() - self.moved}
        return others, tree_map(lambda v: v.detach(), aux)

    def _parts(self, w: Tensor) -> dict[str, Tensor]:
        """View the matrix [C, P] as named parameters [C, ...]; one client's without C."""
        return self.task.named(w) if self.together else self.task.named(w[0])


def _linear_names(module: nn.Module) -> set[str]:
    """Name the parameters that move in the backward pass."""
    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    own = [(n, k) for n, m in layers for k, _ in m.named_parameters(recurse=False)]
    return {f"{n}.{k}" if n else k for n, k in own}


__all__ = ["PlainSteps", "is_plain", "is_sequence"]
