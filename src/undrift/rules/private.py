"""Noise on feature means.

An example's features are clipped to norm C0 before they are averaged over the client's n_i
examples, so that exchanging one example moves the mean by at most 2 C0 / n_i; the noise has the
standard deviation sigma C0 / L (rFedAvg, section V), L the batch size of the paper's training.
"""

from __future__ import annotations

import torch
from torch import Tensor

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

    def added(self, mean: Tensor, drawn: Tensor) -> Tensor:
        """Add noise to a mean of clipped features, in float64: rounding shall tell nothing."""
        scale = self.sigma * self.clip / self.batch
        return (mean.double() + scale * drawn).to(mean.dtype)
