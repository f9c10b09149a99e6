"""Partitions whose clients all see the same labels: IID, and IID of unequal sizes."""

from __future__ import annotations

from dataclasses import field

import numpy as np

from undrift.core.tree import record, static
from undrift.data.checks import check_whole
from undrift.data.partitions.chance import (
    ALPHA,
    cut,
    even,
    key_of,
    log_gamma_draws,
    mixed,
    shares,
    shuffled,
    slices,
)
from undrift.data.partitions.labels import count_examples, find_classes
from undrift.data.partitions.protocol import Labels, Parts
from undrift.errors import DataError


@record
class Iid:
    """Shuffle and deal evenly: sizes differ by one at most, every example is dealt.

    `equal_classes` gives every client exactly as many examples of a class as every other (FedDyn's
    IID split of CIFAR-100) and drops the remainder of each class.

    >>> [len(part) for part in Iid(clients=3).split(np.arange(10) % 2, seed=0)]
    [4, 3, 3]
    """

    clients: int = static()
    equal_classes: bool = static(default=False, choices=(False, True))

    def __post_init__(self) -> None:
        check_whole("Iid.clients", self.clients)

    def split(self, labels: Labels, seed: int, keys: Labels | None = None) -> Parts:
        if self.equal_classes:
            return self._equal(labels, seed)
        total = count_examples(labels, self.clients, "Iid")
        return slices(shuffled(total, seed, "iid"), even(total, self.clients))

    def _equal(self, labels: Labels, seed: int) -> Parts:
        classes = find_classes(labels, self.clients, "Iid(equal_classes=True)")
        each = classes.counts // self.clients
        if not each.all():
            scarce = int(np.argmin(each))
            raise DataError(
                f"Iid(equal_classes=True): class {classes.names[scarce]} has "
                f"{classes.counts[scarce]} examples for {self.clients} clients, so it cannot be "
                "dealt equally; ask for fewer clients or set equal_classes=False"
            )
        rows = classes.rows(shuffled(classes.total, seed, "iid"))
        dealt = [r[: self.clients * n].reshape(-1, n) for r, n in zip(rows, each, strict=True)]
        return mixed(list(np.concatenate(dealt, axis=1)), classes.total, seed)


@record
class QuantitySkew:
    """Sizes from Dir(alpha), labels IID (Li et al. 2022, NIID-Bench: alpha = 0.5).

    Every client first gets `min_size` examples and the rest is shared out by the draw, so that no
    draw has to be thrown away; NIID-Bench draws again until the smallest client has 10.

    >>> sum(len(part) for part in QuantitySkew(clients=4).split(np.zeros(100, int), seed=0))
    100
    """

    clients: int = static()
    alpha: float = field(default=0.5, metadata=ALPHA)
    min_size: int = static(default=1)

    def __post_init__(self) -> None:
        check_whole("QuantitySkew.clients", self.clients)
        check_whole("QuantitySkew.min_size", self.min_size, low=0)

    def split(self, labels: Labels, seed: int, keys: Labels | None = None) -> Parts:
        total = count_examples(labels, min(self.clients, 1 + self.min_size), "QuantitySkew")
        check_min_size("QuantitySkew", self.min_size, self.clients, total)
        draws = log_gamma_draws(key_of(seed, "quantity"), self.alpha, (self.clients,))
        spare = total - self.clients * self.min_size
        sizes = self.min_size + cut(shares(draws), spare)
        return slices(shuffled(total, seed, "iid"), sizes)


def check_min_size(owner: str, min_size: int, clients: int, total: int) -> None:
    """Refuse when the examples cannot give every client its least number."""
    if min_size * clients > total:
        raise DataError(
            f"{owner}.min_size = {min_size} for {clients} clients needs {min_size * clients} "
            f"examples and there are {total}; lower min_size or the number of clients"
        )
