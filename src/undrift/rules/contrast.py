"""MOON: the own features shall be nearer to the received model's than to the own last model's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from undrift.core.rule import ClientView, Rule, Sizes
from undrift.core.task import Output, Vec, masked_mean
from undrift.core.tree import EMPTY, Tree, number, record, static
from undrift.errors import ConfigError


class Pool(NamedTuple):
    """A client's last models, the newest first."""

    models: Tensor  # [k, P]
    trained: Tensor  # how many of them it has trained


@record
class Moon(Rule):
    """MOON (Li, He & Song 2021, eq. 3); features are those of the task's feature layer.

    `stored` is the number of own models kept as negatives; at first x_0 stands in for them, so
    that the first round is FedAvg's.  mu = 0: FedAvg.
    """

    mu: float = number(default=1.0, low=0)
    temperature: float = number(default=0.5, low=0, ends="()")
    stored: int = static(default=1)

    def __post_init__(self) -> None:
        check_counts(self, stored=1)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        need_features(self, sizes)
        return Pool(w.repeat(self.stored, 1), w.new_zeros(()))

    def penalty(self, out: Output, view: ClientView) -> Tensor:
        known = torch.arange(self.stored, device=view.w.device) < view.mine.trained.clamp(min=1)
        return self.mu * contrast(out, view, view.mine.models, known, self.temperature)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        models = torch.cat([view.w[None], view.mine.models[:-1]])
        return delta, Pool(models, (view.mine.trained + 1).clamp(max=self.stored)), EMPTY


def contrast(out: Output, view: ClientView, models: Tensor, known: Tensor, t: float) -> Tensor:
    """Cross-entropy of the received model's features against the known ones' of `models` [k, P]."""
    mine = features_of(out)
    others = [features_of(view.output_at(w)) for w in (view.w0, *models)]
    likeness = torch.stack([F.cosine_similarity(mine, z, dim=1) for z in others], 1) / t
    counted = torch.cat([known.new_ones(1), known])
    likeness = torch.where(counted, likeness, torch.full_like(likeness, -torch.inf))
    return masked_mean(torch.logsumexp(likeness, 1) - likeness[:, 0], view.batch.mask)


def features_of(out: Output) -> Tensor:
    """Give what the feature layer noted, one flat row per example."""
    features: Tensor = out.features.flatten(1)  # type: ignore[union-attr]
    return features


def check_counts(owner: Any, **least: int) -> None:
    """Refuse settings that are no whole numbers, or too small."""
    for name, low in least.items():
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            place = f"{type(owner).__name__}.{name}"
            raise ConfigError(f"{place} = {value!r} must be a whole number of at least {low}")


def need_features(rule: Rule, sizes: Sizes) -> None:
    """Refuse a task that names no feature layer."""
    if not sizes.features:
        raise ConfigError(
            f"{type(rule).__name__} compares features, but the task names no feature layer: give "
            "Task(..., feature='name of a layer')"
        )
