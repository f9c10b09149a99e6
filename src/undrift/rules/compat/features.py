"""rFedAvg and MOON as their authors run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.core.rule import ClientView, Lineup, Rule, Sizes
from undrift.core.task import Output, Vec
from undrift.core.tree import EMPTY, Tree, number, record, static
from undrift.errors import ConfigError
from undrift.rules.contrast import Pool, check_counts, contrast, features_of, need_features
from undrift.rules.features import batch_mean, check_batch, mean_of_some


@record
class RFedAvgPlusAtStart(Rule):
    """rFedAvg+ in its code: the plain mean over ALL sampled clients, taken when a round starts.

    `batch` examples of each client make its feature mean (None: all of them): the next ones in
    every round, or those that `chosen_examples` names.
    """

    shares_probe: ClassVar[bool] = True

    strength: float = number(default=1e-4, low=0)
    batch: Any = static(default=None)

    def __post_init__(self) -> None:
        check_batch(self)

    def check(self, lineup: Lineup) -> None:
        check_chosen(self, lineup)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        need_features(self, sizes)
        return EMPTY

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return w.new_zeros(sizes.features)  # delta_i, for whoever reads it back

    def probe(self, view: ClientView) -> Tree:
        features = features_of(view.output_at(view.w0))
        return for_plain_mean(mean_of_some(features, view, self.batch), view)

    def penalty(self, out: Output, view: ClientView) -> Tensor:
        mean, per = view.cohort
        return self.strength * (batch_mean(out, view) - mean / per).square().sum()

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, own_value(view), EMPTY


class Last(NamedTuple):
    """What a client keeps."""

    model: Vec  # the one that it trained last
    mean: Tensor  # delta_i of its last round, for whoever reads it back


@record
class RFedAvgAtStart(Rule):
    """rFedAvg in its code: when a round starts, feature means of the own LAST models are exchanged.

    They go to the other sampled clients alone (the paper: to everybody), and a client that has not
    trained yet takes x_0.  `batch` as in `RFedAvgPlusAtStart`.
    """

    shares_probe: ClassVar[bool] = True

    strength: float = number(default=1e-4, low=0)
    batch: Any = static(default=None)

    def __post_init__(self) -> None:
        check_batch(self)

    def check(self, lineup: Lineup) -> None:
        check_chosen(self, lineup)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        need_features(self, sizes)
        return EMPTY

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return Last(w.clone(), w.new_zeros(sizes.features))

    def probe(self, view: ClientView) -> Tree:
        features = features_of(view.output_at(view.mine.model))
        return for_plain_mean(mean_of_some(features, view, self.batch), view)

    def penalty(self, out: Output, view: ClientView) -> Tensor:
        # the mean of squared gaps to the others has the gradient of the squared gap to their mean
        gap = (batch_mean(out, view) - mean_of_others(view)).square().sum()
        return self.strength * torch.where(view.cohort_size > 1, gap, torch.zeros_like(gap))

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, Last(view.w, own_value(view)), EMPTY


def for_plain_mean(value: Tensor, view: ClientView) -> Tree:
    """Undo the weights n_i with which a cohort's probes are averaged: divide one by the other."""
    return value / view.size, 1 / view.size


def own_value(view: ClientView) -> Tensor:
    """Give the value that went into the plain mean."""
    value, per = view.probe
    return value / per


def mean_of_others(view: ClientView) -> Tensor:
    """Give the plain mean of the other sampled clients' values."""
    (mean, per), (own, own_per) = view.cohort, view.probe
    m = view.cohort_size
    return (m * (mean / per) - own / own_per) / (m - 1).clamp(min=1)


def check_chosen(rule: Any, lineup: Lineup) -> None:
    """Refuse a round of which somebody's examples are not named, or are none of its own."""
    if not isinstance(rule.batch, tuple):
        return
    chosen = {client: at for round, client, at in rule.batch if round == lineup.round}
    place, round = f"{type(rule).__name__}.batch", lineup.round
    sizes = zip(lineup.info.id.tolist(), lineup.info.size.tolist(), strict=True)
    for client, size in sizes:
        if not chosen.get(client):
            raise ConfigError(
                f"{place} names no examples of client {client} in round {round}: give "
                f"chosen_examples({{({round}, {client}): [positions], ...}}) for all who take part"
            )
        outside = [p for p in chosen[client] if not 0 <= p < size]
        if outside:
            raise ConfigError(
                f"{place} names position {outside[0]} of client {client} in round {round}, which "
                f"holds {int(size)} examples: positions count from 0"
            )


def chosen_examples(
    positions: Mapping[tuple[int, int], Sequence[int]],
) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Name the examples whose features a client averages, by (round, client).

    >>> chosen_examples({(0, 2): [1, 0]})
    ((0, 2, (1, 0)),)
    """
    return tuple((r, i, tuple(int(p) for p in at)) for (r, i), at in sorted(positions.items()))


@record
class MoonRounds(Rule):
    """MOON's code with more than one stored model: a pool of the last ROUNDS, not participations.

    A client that was not asked is in the pool with its last model once for every round.
    """

    mu: float = number(default=1.0, low=0)
    temperature: float = number(default=0.5, low=0, ends="()")
    stored: int = static(default=2)

    def __post_init__(self) -> None:
        check_counts(self, stored=1)
        if self.stored == 1:
            raise ConfigError(
                "MoonRounds.stored = 1 (pool = 'rounds'): of one model the last round's is the "
                "last participation's, so keep at least 2, or use Moon (pool = 'participations')"
            )

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        need_features(self, sizes)
        return Pool(w.repeat(self.stored, 1), w.new_full((self.stored,), -1.0))

    def penalty(self, out: Output, view: ClientView) -> Tensor:
        back = torch.arange(1, self.stored + 1, device=view.w.device)
        rounds = view.round - back  # the pool's
        # `trained` holds the rounds in which the models were trained, -1 where x_0 stands in
        chosen = (view.mine.trained <= rounds[:, None]).to(torch.int64).argmax(1)
        known = (rounds >= 0) | (back == 1)
        models = view.mine.models[chosen]
        return self.mu * contrast(out, view, models, known, self.temperature)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        models = torch.cat([view.w[None], view.mine.models[:-1]])
        return delta, Pool(models, torch.cat([view.round[None], view.mine.trained[:-1]])), EMPTY
