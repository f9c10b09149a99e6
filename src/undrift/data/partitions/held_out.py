"""Examples that are not trained on: whole clients, or a share of every client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from undrift.core.random import bits, host_fold
from undrift.data.partitions.chance import key_of, shuffled
from undrift.data.partitions.protocol import Ids, Parts
from undrift.errors import ConfigError, DataError


def hold_out(parts: Sequence[Ids], fraction: float, seed: int) -> tuple[Parts, Parts]:
    """Hold out clients, round(fraction * N) of them but at least one: (training, validation).

    AdaBest tunes on held-out clients: 110 parts and a fraction of 1/11 leave 100 for training.

    >>> training, validation = hold_out([np.array([i]) for i in range(110)], 1 / 11, seed=0)
    >>> len(training), len(validation)
    (100, 10)
    """
    _check_fraction("hold_out", fraction)
    count = max(1, round(fraction * len(parts)))
    if count >= len(parts):
        raise DataError(
            f"hold_out: {count} of {len(parts)} clients held out leave none to train; lower the "
            "fraction or make more clients"
        )
    order = shuffled(len(parts), seed, "held out")
    ends = (np.sort(order[count:]), np.sort(order[:count]))
    training, validation = ([parts[i] for i in ids] for ids in ends)
    return training, validation


def per_client_test(parts: Sequence[Ids], fraction: float, seed: int) -> tuple[Parts, Parts]:
    """Set a share of every client's own examples aside: (training, test), client by client.

    A client with two examples or more has at least one in each; with one, it only trains.

    >>> training, test = per_client_test([np.arange(10), np.arange(10, 12)], 0.1, seed=0)
    >>> [len(p) for p in training], [len(p) for p in test]
    ([9, 1], [1, 1])
    """
    _check_fraction("per_client_test", fraction)
    key = key_of(seed, "client test")
    tested = [_tested(part, fraction, host_fold(key, i)) for i, part in enumerate(parts)]
    training = [part[~mask] for part, mask in zip(parts, tested, strict=True)]
    return training, [part[mask] for part, mask in zip(parts, tested, strict=True)]


def _tested(part: Ids, fraction: float, key: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    count = min(max(1, round(fraction * len(part))), len(part) - 1)
    chosen = np.zeros(len(part), dtype=bool)
    if count > 0:
        ranks = bits(key, torch.arange(len(part))).numpy()
        chosen[np.argsort(ranks, kind="stable")[:count]] = True
    return chosen


def _check_fraction(owner: str, fraction: float) -> None:
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise ConfigError(f"{owner}: fraction must lie between 0 and 1, got {fraction!r}")
