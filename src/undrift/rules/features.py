"""rFedAvg: clients keep their mean features near those of the others.

Letters: N clients, d numbers in the feature layer's output.  The papers' delta_i are called
feature means here; `delta` is what a model loses.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.core.rule import ClientInfo, ClientView, Rule, ServerView, Sizes
from undrift.core.task import Output, Vec, masked_mean
from undrift.core.transfer import table
from undrift.core.tree import Tree, number, record, refuse_unused, static
from undrift.errors import ConfigError
from undrift.rules.contrast import features_of, need_features
from undrift.rules.private import FeatureNoise


class Means(NamedTuple):
    """The server's table of feature means."""

    rows: Tensor  # [N, d]
    known: Tensor  # [N] 1 where there is a row, 0 elsewhere


class SendsMeans:
    """Half of a rule whose rows are means of features, with noise if asked for."""

    noise: FeatureNoise | None

    def client_noise(self, sizes: Sizes) -> int:
        return 0 if self.noise is None else sizes.features

    def hide(self, row: Tree, noise: Tensor) -> Tree:
        return row if self.noise is None else self.noise.added(row, noise)


@record
class RFedAvg(SendsMeans, Rule):
    """rFedAvg (Wang et al. 2023, alg. 1 and eq. 5): every client gets the others' feature means.

    A mean is taken at the own final model (R18); the first ones at x_0.  `batch` examples of each
    client make it (None: all).  strength = 0: FedAvg.
    """

    refresh: ClassVar[str] = "once"

    strength: float = number(default=1e-4, low=0)
    noise: FeatureNoise | None = None
    batch: Any = static(default=None)

    def __post_init__(self) -> None:
        check_means(self)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return empty_table(self, w, sizes)

    def personal(self, state: Tree, client: ClientInfo) -> Tree:
        return others(state, client)

    def penalty(self, out: Output, view: ClientView) -> Tensor:
        known = ~view.personal.isnan().any(1)
        gaps = (batch_mean(out, view, self.noise) - view.personal.nan_to_num()).square().sum(1)
        return self.strength * (known * gaps).sum() / known.sum().clamp(min=1)

    def review(self, view: ClientView) -> Tree:
        return own_mean(view, self.noise, self.batch)

    def row(self, delta: Vec, view: ClientView) -> Tree:
        return view.review

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update, taken_in(state, view)

    def after_round(self, view: ClientView) -> Tree:
        return own_mean(view, self.noise, self.batch)

    def server_after(self, state: Tree, view: ServerView) -> Tree:
        return taken_in(state, view)


@record
class RFedAvgPlus(SendsMeans, Rule):
    """rFedAvg+ (Wang et al. 2023, alg. 2): one vector per client, means at the NEW model.

    Same gradient as rFedAvg for the same feature means.  `include_self` counts the own mean among
    the others', and `batch` examples make a mean, both as in the authors' code.  strength = 0:
    FedAvg.
    """

    strength: float = number(default=1e-4, low=0)
    noise: FeatureNoise | None = None
    include_self: bool = static(default=False)
    batch: Any = static(default=None)

    def __post_init__(self) -> None:
        check_means(self)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return empty_table(self, w, sizes)

    def personal(self, state: Tree, client: ClientInfo) -> Tree:
        at = torch.arange(len(state.known), device=state.known.device)
        weights = state.known if self.include_self else state.known * (at != client.id)
        mean = weights @ state.rows / weights.sum().clamp(min=1)
        return torch.where(weights.sum() > 0, mean, torch.full_like(mean, torch.nan))

    def penalty(self, out: Output, view: ClientView) -> Tensor:
        gap = batch_mean(out, view, self.noise) - view.personal
        # nobody else is known: no pull, least of all to 0
        return self.strength * torch.where(view.personal.isnan(), 0.0, gap).square().sum()

    def after_round(self, view: ClientView) -> Tree:
        return own_mean(view, self.noise, self.batch)

    def server_after(self, state: Tree, view: ServerView) -> Tree:
        return taken_in(state, view)


@record
class RFedAvgPlusAll(RFedAvgPlus):
    """rFedAvg+ as printed: after every round everybody, sampled or not, looks at the new model."""

    refresh: ClassVar[str] = "all"


def check_means(rule: Any) -> None:
    """Refuse means of some examples under noise, which is accounted for means over all."""
    check_batch(rule)
    if rule.noise is not None:
        why = "noise is accounted for means over all own examples"
        refuse_unused(type(rule), why, batch=rule.batch)


def check_batch(rule: Any) -> None:
    """Refuse a `batch` that is no number of examples, none, or examples by round and client."""
    batch = rule.batch
    if batch is None or isinstance(batch, tuple):
        return
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ConfigError(
            f"{type(rule).__name__}.batch = {batch!r} must be a whole number of examples of at "
            "least 1, or None for all"
        )


def empty_table(rule: Rule, w: Vec, sizes: Sizes) -> Means:
    """Start with nothing known."""
    need_features(rule, sizes)
    return Means(w.new_zeros(sizes.clients, sizes.features), w.new_zeros(sizes.clients))


def others(table: Means, client: ClientInfo) -> Tensor:
    """Give the other clients' feature means, [N - 1, d]; NaN where one is not known."""
    at = torch.arange(len(table.known) - 1, device=table.known.device)
    at = at + (at >= client.id)
    rows = table.rows[at]
    return torch.where(table.known[at][:, None] > 0, rows, torch.full_like(rows, torch.nan))


def taken_in(table: Means, view: ServerView) -> Means:
    """Write the rows of accepted clients into the table."""
    # a cohort may be padded with a client who takes part: its rows must all say the same
    accepted = (view.ids[:, None] == view.ids) & view.accepted
    some, which = accepted.any(1), accepted.to(torch.int8).argmax(1)
    rows = torch.where(some[:, None], view.rows[which], table.rows[view.ids])
    known = torch.where(some, torch.ones_like(rows[:, 0]), table.known[view.ids])
    return Means(*(t.index_copy(0, view.ids, v) for t, v in zip(table, (rows, known), strict=True)))


def batch_mean(out: Output, view: ClientView, noise: FeatureNoise | None = None) -> Tensor:
    """Average the features of the batch: the estimate that a local step has.

    Where means are sent with noise they are of clipped features; so is this one, or clients with
    the same data would pull at each other.
    """
    features = features_of(out)
    features = features if noise is None else noise.clipped(features)
    return masked_mean(features, view.batch.mask)


def own_mean(view: ClientView, noise: FeatureNoise | None, batch: Any = None) -> Tensor:
    """Average the features of own data at the model `view.w`; `hide` adds noise, if asked for."""
    features = features_of(view.output_at(view.w))
    features = features if noise is None else noise.clipped(features)
    return mean_of_some(features, view, batch)


def mean_of_some(features: Tensor, view: ClientView, batch: Any) -> Tensor:
    """Average a piece's features so that the mean over all pieces is that over `batch` examples.

    None takes all; a number that many, the next ones in every round; a tuple of (round, client,
    positions) those.
    """
    at, n = view.batch.index, view.size
    if batch is None:
        return masked_mean(features, view.batch.mask)
    if isinstance(batch, int):
        chosen = torch.remainder(at.to(n.dtype) - batch * view.round, n) < batch
        weight = chosen.to(n.dtype) * n / n.clamp(max=batch)
    else:
        weight = named_weights(batch, view)
    return masked_mean(features * weight[:, None], view.batch.mask)


def named_weights(named: Any, view: ClientView) -> Tensor:
    """Weigh a piece's examples by how often they are named for this round and client."""
    weight = torch.zeros_like(view.batch.index, dtype=view.size.dtype)
    for round, client, positions in named:
        own = (view.round == round) & (view.client.id == client)
        listed = table(tuple(positions), torch.int64, weight.device)
        count = (view.batch.index[:, None] == listed).sum(1).to(weight.dtype)
        weight = weight + own * count * view.size / len(positions)
    return weight
