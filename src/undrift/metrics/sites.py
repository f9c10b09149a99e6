"""Metrics of each site, and how unequal sites fare.

A site where a metric is not defined, e.g. one class only, is counted and not averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undrift.metrics.metric import Metric
from undrift.metrics.named import lower_is_better


class Sites(NamedTuple):
    """Whose each example is, and the clients' names."""

    owner: Tensor  # [n] the client of each example, -1 for nobody's
    names: tuple[str, ...]  # of every client


class SiteRow(NamedTuple):
    """One site: how many examples it is judged on, and every metric; None where undefined."""

    client: int
    examples: int
    values: dict[str, float | None]


def by_site(
    metrics: Sequence[Metric], scores: Tensor, targets: Tensor, owner: Tensor
) -> list[SiteRow]:
    """Judge each client that has an example, in the order of clients."""
    order = owner.argsort(stable=True)
    order = order[owner[order] >= 0]
    clients, counts = owner[order].unique_consecutive(return_counts=True)
    rows = zip(clients.tolist(), order.split(counts.tolist()), strict=True)
    return [
        SiteRow(c, len(at), {m.name: m(scores[at], targets[at]) for m in metrics}) for c, at in rows
    ]


def unequal(name: str, values: Sequence[float | None]) -> dict[str, float | int | None]:
    """Give mean, deviation, worst site and worst tenth of a metric, and where it is undefined.

    >>> unequal("auc", [0.9, 0.7, None])["client_auc_worst"]
    0.7
    """
    known = torch.tensor([v for v in values if v is not None], dtype=torch.float64)
    undefined = len(values) - len(known)
    count = {f"client_{name}_undefined": undefined} if undefined else {}
    parts = ("mean", "std", "worst", "worst10")
    if not len(known):
        return {**{f"client_{name}_{part}": None for part in parts}, **count}
    worst_first = known.sort(descending=lower_is_better(name)).values
    tenth = worst_first[: max(1, round(0.1 * len(known)))]
    told = (known.mean(), known.std(correction=0), worst_first[0], tenth.mean())
    found = {
        f"client_{n}": _plain(v) for n, v in zip([f"{name}_{p}" for p in parts], told, strict=True)
    }
    return {**found, **count}


def _plain(value: Tensor) -> float | None:
    found = float(value)
    return found if math.isfinite(found) else None


def worst_first(rows: Sequence[SiteRow], name: str) -> list[SiteRow]:
    """Sort sites by a metric, the worst first; where it is undefined comes last."""
    sign = -1.0 if lower_is_better(name) else 1.0

    def key(row: SiteRow) -> tuple[bool, float]:
        value = row.values.get(name)
        return (value is None, 0.0 if value is None else sign * value)

    return sorted(rows, key=key)
