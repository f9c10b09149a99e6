"""The clients' half of a round, as pure functions of one client.

Engines differ only in who calls them; `server.py` has the server's half.

    server:  write_broadcast
    client:  measure("probe")  ->  begin  ->  start  ->  step, step, ...  ->  finish
             a step is a gradient (forward, backward) and a move (elementwise)
    server:  server_round
    client:  measure("after_round")          (only where a rule asks for a second look)

`algo`, `task` and `broadcast` are shared; `client`, `carry` and `batch` belong to one client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from undrift.core import tree
from undrift.core.algorithm import Algorithm, Broadcast, Client, Report, Row
from undrift.core.local import CLIP_EPS, local_step
from undrift.core.ops import Pass
from undrift.core.rule import ClientView, Rule, overrides
from undrift.core.task import Batch, Buffers, Output, Task, Vec
from undrift.core.tree import EMPTY, Tree
from undrift.core.views import Carry, local_loss, no_batch, silent_view, step_key, views_of
from undrift.errors import ConfigError, TaskError


# ------------------------------------------------------------------------------- client half
def client_start(algo: Algorithm, task: Task, broadcast: Broadcast, client: Client) -> Carry:
    """Begin local training at the model that was received."""
    w, zero = broadcast.w, broadcast.w.new_zeros(())
    probe = w.new_zeros(1)
    impulse = (probe, algo.local.init(probe)) if algo.needs_path else EMPTY
    scores = dict.fromkeys(task.metrics, zero)
    carry = Carry(w, broadcast.buffers, algo.local.init(w), client.state, zero, scores, impulse)
    if not algo.uses("start"):
        return carry
    optimizer = carry.optimizer
    views = views_of(algo, task, broadcast, client, carry, no_batch(w), None)
    for rule, view in zip(algo.rules, views, strict=False):
        optimizer = rule.start(optimizer, view)
    return carry._replace(optimizer=optimizer)


class Found(NamedTuple):
    """What one batch says at the point where the gradient is taken."""

    point: Vec
    gradient: dict[str, Tensor]  # of the objective, by parameter
    loss: Tensor
    scores: dict[str, Tensor]
    buffers: Buffers


def client_step(
    algo: Algorithm,
    task: Task,
    broadcast: Broadcast,
    client: Client,
    carry: Carry,
    batch: Batch,
    step: Tensor,
) -> Carry:
    """Take one local step."""
    key = step_key(task, broadcast, client, "step", step)
    batch = task.augmented(batch, key)  # once: loss, penalties and directions see the same
    found = client_gradient(algo, task, broadcast, client, carry, batch, key)
    return client_move(algo, task, broadcast, client, carry, batch, key, step, found)


def client_gradient(
    algo: Algorithm,
    task: Task,
    broadcast: Broadcast,
    client: Client,
    carry: Carry,
    batch: Batch,
    key: Tensor,
) -> Found:
    """First half of a step: forward and backward."""
    views = views_of(algo, task, broadcast, client, carry, batch, key)

    def objective(out: Output) -> tuple[Tensor, Tensor]:
        loss = local_loss(algo, task, views, out, batch)
        total = loss
        for rule, view in zip(algo.rules, views, strict=False):
            total = total + rule.penalty(out, view) if overrides(rule, "penalty") else total
        return total, loss

    point = carry.w
    for rule, view in zip(algo.rules, views, strict=False):
        point = rule.look_at(point, view)
    return _differentiated(task, objective, point, carry.buffers, batch, key)


def shares_gradient(algo: Algorithm) -> bool:
    """Whether the first half of a step is the task's own: no rule takes part in it."""
    return not any(algo.uses(hook) for hook in ("look_at", "loss", "penalty"))


def task_gradient(task: Task, w: Vec, buffers: Buffers, batch: Batch, key: Tensor) -> Found:
    """First half of a step where no rule takes part in it."""

    def objective(out: Output) -> tuple[Tensor, Tensor]:
        loss = task.mean_loss(out, batch)
        return loss, loss

    return _differentiated(task, objective, w, buffers, batch, key)


def _differentiated(
    task: Task,
    objective: Callable[[Output], tuple[Tensor, Tensor]],
    point: Vec,
    buffers: Buffers,
    batch: Batch,
    key: Tensor,
) -> Found:
    """Differentiate an objective of (what is minimised, what is told) by named parameters."""

    def scaled(parts: dict[str, Tensor]) -> tuple[Tensor, Any]:
        out = task.forward_named(parts, buffers, batch.x, Pass(batch.mask, key, True))
        total, loss = objective(out)
        return total * task.loss_scale if task.loss_scale != 1 else total, (
            loss,
            task.scores(out, batch),
            out.buffers,
        )

    scale = task.loss_scale
    gradient, (_, told) = grad_and_value(scaled, has_aux=True)(task.named(point))
    if scale != 1:
        gradient = {name: g / scale for name, g in gradient.items()}
    return Found(point, gradient, *told)


def client_move(
    algo: Algorithm,
    task: Task,
    broadcast: Broadcast,
    client: Client,
    carry: Carry,
    batch: Batch,
    key: Tensor,
    step: Tensor,
    found: Found,
) -> Carry:
    """Second half of a step: the rules' directions and the local optimizer, elementwise."""
    views = views_of(algo, task, broadcast, client, carry, batch, key)
    g = _as_vector(task, found.gradient)
    for rule, view in zip(algo.rules, views, strict=False):
        g = rule.direction(g, view)
    lr = algo.local.lr_at(broadcast.round, step)
    w, optimizer = local_step(algo.local, carry.w, g, carry.optimizer, lr, at=found.point)
    for rule, view in zip(algo.rules, views, strict=False):
        w = rule.after_step(w, view)
    scores = {n: carry.scores[n] + s for n, s in found.scores.items()}
    impulse = _impulse_step(algo, views, carry, lr)
    loss = carry.loss + found.loss
    return Carry(w, found.buffers, optimizer, carry.state, loss, scores, impulse)


def client_finish(
    algo: Algorithm, task: Task, broadcast: Broadcast, client: Client, carry: Carry
) -> tuple[tuple[Tree, ...], Report, Row]:
    """Close local training: (next client state, what is summed, what is not).

    Where `row.accepted` is False the engine leaves the other two out.
    """
    delta, uploads, states, notes = broadcast.w - carry.w, [], [], []
    *views, view = views_of(algo, task, broadcast, client, carry, no_batch(broadcast.w), None)
    length = torch.linalg.vector_norm(delta)
    for rule, mine in zip(algo.rules, views, strict=True):
        notes.append(rule.row(delta, mine))
        delta, state, upload = rule.finish(delta, mine)
        states.append(state)
        uploads.append(upload)
    weight = algo.aggregate.weight(view)
    buffers = (weight * carry.buffers.floats, weight)
    report = Report(
        algo.aggregate.lift(delta, view),
        tuple(uploads),
        buffers,
        view.path,
        torch.ones_like(weight),
    )
    # the server may square what it gets: a change whose square overflows counts as not finite
    accepted = all_finite((report, states, notes)) & torch.isfinite(length * length)
    accepted = accepted & (client.steps > 0)
    mean = client.steps.clamp(min=1)
    scores = {n: s / mean for n, s in carry.scores.items()}
    row = Row(
        tuple(notes),
        carry.buffers.counters,
        accepted,
        client.steps,
        carry.loss / mean,
        scores,
        length,
    )
    return tuple(states), report, row


def client_begin(
    algo: Algorithm, task: Task, broadcast: Broadcast, client: Client, batch: Batch, piece: Tensor
) -> Client:
    """Let rules prepare their state on one piece of the client's own data."""
    carry = client_start(algo, task, broadcast, client)
    key = step_key(task, broadcast, client, "begin", piece)
    views = views_of(algo, task, broadcast, client, carry, batch, key)
    state = tuple(r.begin(v) for r, v in zip(algo.rules, views, strict=False))
    # a neighbour may have more pieces: one without examples changes nothing
    return client._replace(state=tree.where(batch.mask.any(), state, client.state))


def measure(
    hook: str,
    algo: Algorithm,
    task: Task,
    broadcast: Broadcast,
    client: Client,
    carry: Carry,
    batch: Batch,
    piece: Tensor,
    gradient: dict[str, Tensor] | None = None,
) -> tuple[Tree, ...]:
    """Evaluate `probe`, `review` or `after_round` on one piece of the client's own data.

    The result is multiplied by the number of examples in the piece, so that pieces add; divide
    the sum by n_i (`mean_over_data`) to get the mean over the client's data.  The local
    objective's gradient at the received model may be known.
    """
    key = step_key(task, broadcast, client, hook, piece)
    views = views_of(algo, task, broadcast, client, carry, batch, key)
    if gradient is not None:
        grad_at = _known_gradient(algo, task, broadcast.w, gradient)
        views = [view._replace(grad_at=grad_at) for view in views]
    parts = algo.parts if hook == "probe" else algo.rules
    seen = [
        getattr(p, hook)(v) if overrides(p, hook) else EMPTY
        for p, v in zip(parts, views, strict=False)
    ]
    values = [EMPTY if value is None else value for value in seen]
    count = batch.mask.sum().to(broadcast.w.dtype)
    return tuple(
        tree.tree_map(lambda v: torch.where(count > 0, v * count, torch.zeros_like(v)), value)
        for value in values
    )


def _known_gradient(
    algo: Algorithm, task: Task, at: Vec, gradient: dict[str, Tensor]
) -> Callable[[Vec], Vec]:
    """Stand in for `grad_at` where one gradient is known."""

    def grad_at(v: Vec) -> Vec:
        if v is not at:
            raise TaskError("the gradient is known at the received model alone")
        return _as_vector(task, gradient) + algo.local.decay(v)

    return grad_at


def _as_vector(task: Task, gradient: dict[str, Tensor]) -> Vec:
    return torch.cat([gradient[name].reshape(-1) for name in task.names])


def mean_over_data(summed: Tree, size: Tensor) -> Tree:
    """Turn a sum over pieces into the mean over the client's data."""
    return tree.tree_map(lambda v: v / size, summed)


def all_finite(value: Tree) -> Tensor:
    """Whether every number in a tree is finite, as one tensor."""
    floats = [v for v in tree.leaves(value) if isinstance(v, Tensor) and v.is_floating_point()]
    # A sum is finite only if its terms are (and if they are below 1e30).  What has one shape is
    # added first: whoever compiles it then reads what they are made of once.
    alike: dict[torch.Size, Tensor] = {}
    for v in floats:
        alike[v.shape] = alike[v.shape] + v if v.shape in alike else v
    return torch.isfinite(torch.stack([v.sum() for v in alike.values()]).sum())


def finite_rows(rows: Tree) -> Tensor:
    """Whether each client's numbers [C, ...] are finite, and so are their squares: [C]."""
    flat = torch.cat([v.reshape(len(v), -1) for v in tree.leaves(rows)], 1)
    return torch.isfinite(flat.square().sum(1))


def _impulse_step(algo: Algorithm, views: list[ClientView], carry: Carry, lr: Any) -> Tree:
    """Run the same chain, states zero, on one scalar whose gradient is 1.

    What it has moved, over lr, is ||a_i||_1 for any chain of rules and any linear optimizer.
    """
    if not algo.needs_path:
        return EMPTY
    scalar, optimizer = carry.impulse
    g = torch.ones_like(scalar)
    shown = [
        (rule, silent_view(view, scalar)) for rule, view in zip(algo.rules, views, strict=False)
    ]
    for rule, view in shown:
        g = rule.counted(g, view)
    # clipping is left out: it has no coefficients; weight decay belongs to the gradient
    plain = tree.replace(algo.local, clip=None, clip_eps=CLIP_EPS, weight_decay=0.0)
    scalar, optimizer = local_step(plain, scalar, g, optimizer, lr)
    for rule, view in shown:
        scalar = rule.after_step(scalar, view)
    return scalar, optimizer


def check_path(
    algo: Algorithm, task: Task, broadcast: Broadcast, client: Client, batch: Batch
) -> None:
    """Refuse a chain whose gradients have no single weight ||a||_1, before any training.

    A gradient of ones goes through the chain, states zero: it must come out constant.
    """
    key = step_key(task, broadcast, client, "step", torch.zeros_like(broadcast.round))
    carry = client_start(algo, task, broadcast, client)
    views = views_of(algo, task, broadcast, client, carry, batch, key)
    g = torch.ones_like(broadcast.w)
    for rule, view in zip(algo.rules, views, strict=False):
        try:
            g = rule.counted(g, silent_view(view, torch.zeros_like(g)))
            small = rule.counted(g[:1], silent_view(view, torch.zeros_like(g[:1])))
        except Exception as error:
            raise _no_path(rule, f"fails on a model of one parameter ({error})") from error
        if g.shape != broadcast.w.shape or small.shape != (1,) or not bool((g == g[0]).all()):
            raise _no_path(rule, "treats parameters differently")


def _no_path(rule: Rule, why: str) -> ConfigError:
    return ConfigError(
        f"{type(rule).__name__}.direction {why}, so ||a||_1 is no single number: leave out what "
        "divides by it (Nova, Scaffold option II, SCAFFOLD/m)"
    )
