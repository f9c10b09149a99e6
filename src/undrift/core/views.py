"""What each rule is shown of one client, and the blank copy that ||a||_1 is measured with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from undrift.core import tree
from undrift.core.algorithm import Algorithm, Broadcast, Client
from undrift.core.ops import Pass
from undrift.core.random import fold
from undrift.core.rule import ClientView
from undrift.core.task import Batch, Buffers, Output, Task, Vec
from undrift.core.tree import EMPTY, Tree


class Carry(NamedTuple):
    """What changes from one local step to the next."""

    w: Vec
    buffers: Buffers
    optimizer: Tree
    state: tuple[Tree, ...]  # the rules' client state after `begin`
    loss: Tensor  # summed over the steps taken
    scores: dict[str, Tensor]
    impulse: tuple[Vec, Tree]  # a scalar model and its optimizer, for ||a||_1; EMPTY if unused


def views_of(
    algo: Algorithm,
    task: Task,
    broadcast: Broadcast,
    client: Client,
    carry: Carry,
    batch: Batch,
    key: Tensor | None,
) -> list[ClientView]:
    """Give each rule, and last the aggregate, its own view of the client."""
    views: list[ClientView] = []
    base = _common_view(algo, task, broadcast, client, carry, batch, key)
    own = zip(
        broadcast.notes,
        client.notes,
        carry.state,
        client.probe,
        broadcast.cohort,
        client.review,
        strict=False,
    )
    for note, letter, state, probe, cohort, review in own:
        views.append(
            base._replace(
                broadcast=note,
                personal=letter,
                mine=state,
                probe=probe,
                cohort=cohort,
                review=review,
            )
        )
    return [*views, base._replace(probe=client.probe[-1], cohort=broadcast.cohort[-1])]


def _common_view(
    algo: Algorithm,
    task: Task,
    broadcast: Broadcast,
    client: Client,
    carry: Carry,
    batch: Batch,
    key: Tensor | None,
) -> ClientView:
    """Show what no rule owns."""

    def output_at(v: Vec) -> Output:
        return task.forward(v, carry.buffers, batch.x, Pass(batch.mask, key, True))

    def grad_at(v: Vec) -> Vec:
        # made anew: views that held the list they stand in would be a cycle, and a round's vectors
        # would stay in memory until Python looks for cycles
        views = views_of(algo, task, broadcast, client, carry, batch, key)

        def loss(u: Vec) -> Tensor:
            return local_loss(algo, task, views, output_at(u), batch)

        return grad(loss)(v) + algo.local.decay(v)

    lr = algo.local.lr_at(broadcast.round, torch.zeros_like(broadcast.round))
    path = -carry.impulse[0].sum() / lr if algo.needs_path else client.steps
    return ClientView(
        task, broadcast.w, carry.w, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, client.info,
        client.steps, path, lr, broadcast.round, broadcast.cohort_size, batch, grad_at, output_at,
        algo.local.decay, carry.optimizer, broadcast.seed,
    )  # fmt: skip


def local_loss(
    algo: Algorithm, task: Task, views: list[ClientView], out: Output, batch: Batch
) -> Tensor:
    """Give the local objective on a batch: the task's loss, unless a rule has another."""
    loss = task.mean_loss(out, batch)
    for rule, view in zip(algo.rules, views, strict=False):
        loss = rule.loss(loss, out, view)
    return loss


def step_key(
    task: Task, broadcast: Broadcast, client: Client, purpose: str, step: Tensor
) -> Tensor:
    """Key the randomness of one forward pass (dropout, augmentation)."""
    if not task.draws:
        return broadcast.seed  # nobody will ask: a fifth of a small model's step is saved
    return key_of(broadcast.seed, broadcast.round, client.info.id, purpose, step)


def key_of(seed: Tensor, round: Tensor, who: Tensor, purpose: str, step: Tensor) -> Tensor:
    """Key the passes of clients `who` at some steps; tensors broadcast."""
    return fold(seed, purpose, round.long(), who, step.long())


def no_batch(w: Vec) -> Batch:
    """Stand in where a rule has no batch to look at."""
    empty = w.new_zeros(0)
    return Batch(empty, empty, empty.bool(), empty.long())


def silent_view(view: ClientView, w: Vec) -> ClientView:
    """Show a rule a model `w`, perhaps of one parameter, with every state, note and probe zero."""

    def silent(value: Tree) -> Tree:
        return tree.tree_map(lambda v: _silent_leaf(v, view.w, w), value)

    return view._replace(
        w0=torch.zeros_like(w),
        w=w,
        grad_at=torch.zeros_like,
        output_at=lambda v: view.output_at(view.w0),
        decay=torch.zeros_like,
        broadcast=silent(view.broadcast),
        personal=silent(view.personal),
        mine=silent(view.mine),
        probe=silent(view.probe),
        cohort=silent(view.cohort),
        review=silent(view.review),
        optimizer=silent(view.optimizer),
    )


def _silent_leaf(value: Any, model: Vec, w: Vec) -> Any:
    if not isinstance(value, Tensor):
        return 0.0 * value
    return torch.zeros_like(w if value.shape == model.shape else value)
