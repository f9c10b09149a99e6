"""Random draws that partitions share, all of them functions of a key.

Keys come from `undrift.core.random`, so a partition depends on its seed and on nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from undrift.core.random import fold, host_fold, normal, permutation, uniform
from undrift.data.checks import check_whole
from undrift.data.partitions.protocol import Floats, Ids, Parts

# Beyond these a Dirichlet draw is one class, or equal shares, to the last digit.
LEAST_ALPHA, MOST_ALPHA = 1e-6, 1e12


def within(low: float, high: float, ends: str = "[]") -> dict[str, object]:
    """Describe a static field with a declared range, for `field(metadata=...)`."""
    return {"static": True, "range": (low, high, ends)}


ALPHA = within(LEAST_ALPHA, MOST_ALPHA)


def key_of(seed: int, *words: int | str) -> int:
    """Make the key of one purpose of a partition."""
    check_whole("seed", seed, low=0)
    return host_fold(seed, "partition", *words)


def uniforms(key: int, count: int) -> Floats:
    """Draw `count` numbers on [0, 1)."""
    drawn: Floats = uniform(key, torch.arange(count)).numpy()
    return drawn


def shuffled(count: int, seed: int, purpose: str) -> Ids:
    """Put range(count) in a random order."""
    order: Ids = permutation(fold(key_of(seed, purpose)), count, count).numpy()
    return order


def mixed(parts: Sequence[Ids], total: int, seed: int) -> Parts:
    """Shuffle every client's list, for its order is the order in which examples arrive."""
    rank = shuffled(total, seed, "arrival")
    return [np.asarray(part, dtype=np.int64)[np.argsort(rank[part])] for part in parts]


def log_gamma_draws(key: int, shape: float, size: tuple[int, ...]) -> Floats:
    """Draw logarithms of Gamma(shape) variables (Marsaglia and Tsang 2000).

    Gamma(a) is Gamma(a + 1) * U^(1 / a).  In logarithms, because for a small `a` nearly all
    draws are too small for a floating-point number, and their order still matters.
    """
    count = int(np.prod(size))
    d = shape + 1 - 1 / 3
    c = 1 / np.sqrt(9 * d)
    cubes, todo = np.ones(count), np.arange(count)
    for attempt in itertools.count():  # each accepts more than 95 % of what is left
        index = torch.from_numpy(todo)
        x = normal(host_fold(key, "normal", attempt), index).numpy()
        u = uniform(host_fold(key, "accept", attempt), index).numpy()
        v = np.maximum(1 + c * x, 1e-100) ** 3
        accepted = np.log1p(-u) < 0.5 * x * x + d * (1 - v + np.log(v))
        cubes[todo[accepted]] = v[accepted]
        todo = todo[~accepted]
        if not len(todo):
            break
    boost = np.log1p(-uniforms(host_fold(key, "boost"), count)) / shape
    return (np.log(d) + np.log(cubes) + boost).reshape(size)


def shares(log_weights: Floats) -> Floats:
    """Normalise the last axis to sum 1."""
    weights = np.exp(log_weights - log_weights.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def cut(proportions: Floats, count: int) -> Ids:
    """Share out `count` things in these proportions (last axis): whole numbers of that sum."""
    ends = np.minimum((np.cumsum(proportions, axis=-1) * count).astype(np.int64), count)
    ends[..., -1] = count  # the sum of the proportions may be a little less than 1
    return np.diff(ends, prepend=0)


def slices(order: Ids, sizes: Ids) -> list[Ids]:
    """Cut an order into consecutive pieces of these sizes; what is left over is dropped."""
    ends = np.cumsum(sizes)
    return np.split(order[: ends[-1]], ends[:-1])


def even(count: int, clients: int) -> Ids:
    """Share out `count` things as evenly as possible; the first clients get one more."""
    return count // clients + (np.arange(clients) < count % clients).astype(np.int64)
