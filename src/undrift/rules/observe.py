"""Rules that look and change nothing: what metrics need to know of the clients' own models."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.core.rule import ClientView, Rule, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.together import around
from undrift.core.tree import EMPTY, Tree, record, static
from undrift.errors import ConfigError


class Seen(NamedTuple):
    """What was seen of the last cohort."""

    average: Vec  # mean of the clients' final models
    length: Tensor  # mean of ||y_i - w||
    spread: Tensor  # mean of ||y_i - average||


@record
class Watch(Rule):
    """Averages the cohort's final models y_i and measures how far they spread.

    It must stand first among the rules, where deltas are still the clients' own.  Every delta
    of the cohort reaches the server for it, one by one: for simulation.
    """

    observes: ClassVar[bool] = True

    by_size: bool = static(default=True)

    def check_beside(self, algorithm: Any) -> None:
        before = [r for r in around(self, algorithm)[0] if not r.observes]
        if before:
            name = type(before[0]).__name__
            raise ConfigError(
                f"Watch stands behind {name}, which may change what it sees: put it first"
            )

    def row(self, delta: Vec, view: ClientView) -> Tree:
        return delta, view.size

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return Seen(w, w.new_zeros(()), w.new_zeros(()))

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        deltas, size = view.rows
        kept = view.accepted.to(deltas.dtype)
        # a refused client may have sent anything: select, do not multiply
        deltas = torch.where(view.accepted[:, None], deltas, torch.zeros_like(deltas))
        weight = kept * size if self.by_size else kept
        mean = weight / weight.sum() @ deltas
        each = kept / kept.sum()
        length = each @ torch.linalg.vector_norm(deltas, dim=1)
        spread = each @ torch.linalg.vector_norm(deltas - mean, dim=1)
        return update, Seen(view.w - mean, length, spread)


@record
class LastModel(Rule):
    """Every client keeps the last model that it trained: the mean of all is FedDyn's `all`."""

    observes: ClassVar[bool] = True

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return w.clone()

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, view.w, EMPTY
