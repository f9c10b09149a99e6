"""Noise on feature means, and what it is worth.

An example's features are clipped to norm C0 before they are averaged over the client's n_i
examples, so that one example moves the mean by at most C0 / n_i; the noise has the standard
deviation sigma C0 / L (rFedAvg, section V), L the batch size of the paper's training.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undrift.core.random import fold, normal
from undrift.core.rule import ClientView
from undrift.core.task import masked_mean
from undrift.core.tree import number, record
from undrift.errors import ConfigError, MissingExtra


@record
class FeatureNoise:
    """Gaussian noise on a client's feature mean: sigma C0 / L."""

    sigma: float = number(default=1.0, low=0)
    clip: float = number(default=1.0, low=0, ends="()")  # C0
    batch: float = number(default=32.0, low=1)  # L


def noisy_mean(features: Tensor, view: ClientView, noise: FeatureNoise, purpose: str) -> Tensor:
    """Average clipped features over a piece of the own data; the first piece brings the noise."""
    norms = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    clipped = features * (noise.clip / norms.clamp(min=1e-12)).clamp(max=1.0)
    key = fold(view.seed, purpose, view.round.long(), view.client.id)
    drawn = normal(key, torch.arange(features.shape[1], device=features.device))
    # pieces are averaged by their sizes, and the noise comes with one of them only
    first = (view.batch.index == 0).any().to(features.dtype)
    once = first * view.size / view.batch.mask.sum().clamp(min=1)
    scale = once * noise.sigma * noise.clip / noise.batch
    return masked_mean(clipped, view.batch.mask) + scale * drawn.to(features.dtype)


class Spent(NamedTuple):
    """What the releases of one client's feature means cost."""

    epsilon: float
    delta: float

    def __str__(self) -> str:
        return (
            f"epsilon = {self.epsilon:.4g} at delta = {self.delta:g} for one example, feature "
            "means alone: the model updates of the same client are not covered"
        )


def spent_on_features(
    noise: FeatureNoise, size: int, releases: int, *, delta: float = 1e-5
) -> Spent:
    """Account for a client of `size` examples that sent its feature mean `releases` times.

    Example level, adding or removing one, the client's size being public.  The noise multiplier
    is sigma n_i / L: small clients are hidden less.  It covers the feature means alone, NOT the
    model updates.
    """
    if size < 1 or releases < 1 or not 0 < delta < 1 or float(noise.sigma) <= 0:
        raise ConfigError(
            f"spent_on_features(sigma={noise.sigma}, size={size}, releases={releases}, "
            f"delta={delta}): sizes and releases count from 1, delta lies in (0, 1), sigma above 0"
        )
    try:
        from dp_accounting import dp_event, rdp
    except ImportError as error:
        raise MissingExtra(
            "accounting needs dp-accounting: pip install 'undrift[privacy]'"
        ) from error
    multiplier = float(noise.sigma) * size / float(noise.batch)
    event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(multiplier), releases)
    accountant = rdp.RdpAccountant()
    accountant.compose(event)
    return Spent(float(accountant.get_epsilon(delta)), delta)
