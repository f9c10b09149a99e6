"""Noise on feature means.

An example's features are clipped to norm C0 before they are averaged over the client's n_i
examples, so that exchanging one example moves the mean by at most 2 C0 / n_i; the noise has the
standard deviation sigma C0 / L (rFedAvg, section V), L the batch size of the paper's training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.core.random import fold, normal
from undrift.core.rule import ClientView
from undrift.core.task import masked_mean
from undrift.core.tree import number, record


@record
class FeatureNoise:
    """Gaussian noise on a client's feature mean: sigma C0 / L.

    Features are clipped to C0 wherever a mean of them is taken: also in the own batch, which is
    pulled towards the others' means.
    """

    sigma: float = number(default=1.0, low=0)
    clip: float = number(default=1.0, low=0, ends="()")  # C0
    batch: float = number(default=32.0, low=1)  # L

    def clipped(self, features: Tensor) -> Tensor:
        """Shorten every example's features to norm C0."""
        norms = torch.linalg.vector_norm(features, dim=1, keepdim=True)
        # never above it: rounding must not give back what the division took away
        return features * (self.clip / norms.clamp(min=1e-12) * (1 - 1e-6)).clamp(max=1.0)


def noisy_mean(features: Tensor, view: ClientView, noise: FeatureNoise, purpose: str) -> Tensor:
    """Average clipped features over a piece of the own data; the first piece brings the noise."""
    key = fold(view.seed, purpose, view.round.long(), view.client.id)
    drawn = normal(key, torch.arange(features.shape[1], device=features.device))
    # pieces are averaged by their sizes, and the noise comes with one of them only
    first = (view.batch.index == 0).any().to(features.dtype)
    once = first * view.size / view.batch.mask.sum().clamp(min=1)
    scale = once * noise.sigma * noise.clip / noise.batch
    return masked_mean(noise.clipped(features), view.batch.mask) + scale * drawn.to(features.dtype)
