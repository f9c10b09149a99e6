"""dominant_class: equal sizes, a fixed share of each client's examples from one class.

Letters: N clients, C classes, n examples, q examples per client, d of them from its own class.
"""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

import numpy as np

from undrift.core.tree import record, static
from undrift.data.checks import check_whole
from undrift.data.partitions.chance import mixed, shuffled, within
from undrift.data.partitions.labels import Classes, find_classes
from undrift.data.partitions.protocol import Ids, Labels, Parts
from undrift.errors import DataError


class Size(NamedTuple):
    """How many examples every client gets."""

    own: int  # from its dominant class
    other: int  # from all others


@record
class DominantClass:
    """FedRL's split: a share `fraction` of each client from class i mod C, the rest from others.

    All clients have `size` examples, by default as many as the classes allow; what is left is
    dropped.  The paper's heterogeneity is 0.2 (low), 0.5 (medium) and 0.8 (high).

    >>> labels = np.arange(1000) % 10
    >>> part = DominantClass(10, fraction=0.8).split(labels, seed=0)[3]
    >>> len(part), int((labels[part] == 3).sum())
    (100, 80)
    """

    clients: int = static()
    fraction: float = field(metadata=within(0, 1, "(]"))
    size: int | None = static(default=None)

    def __post_init__(self) -> None:
        check_whole("DominantClass.clients", self.clients)
        if self.size is not None:
            check_whole("DominantClass.size", self.size)

    def split(self, labels: Labels, seed: int, keys: Labels | None = None) -> Parts:
        classes = find_classes(labels, self.clients, "DominantClass")
        size = self._parts_of(self._choose_size(classes))
        rows = classes.rows(shuffled(classes.total, seed, "examples"))
        own_class = np.arange(self.clients) % len(rows)
        # client i is number i // C of those that its class dominates
        starts = np.arange(self.clients) // len(rows) * size.own
        own = [rows[c][s : s + size.own] for c, s in zip(own_class, starts, strict=True)]
        used = np.bincount(own_class, minlength=len(rows)) * size.own
        pool = np.concatenate([r[k:] for r, k in zip(rows, used, strict=True)])
        pool = pool[shuffled(len(pool), seed, "others")]
        others = _deal_others(pool, classes.codes[pool], own_class, size.other, seed)
        parts = [np.concatenate(pair) for pair in zip(own, others, strict=True)]
        return mixed(parts, classes.total, seed)

    def _parts_of(self, size: int) -> Size:
        own = int(np.floor(self.fraction * size + 0.5))
        return Size(own, size - own)

    def _fits(self, size: int, classes: Classes, owners: Ids) -> bool:
        own, other = self._parts_of(size)
        needed = owners * own  # of each class, by those it dominates
        # Clients of class c draw their others from outside c, where other clients have needs too.
        outside = classes.total - classes.counts - (needed.sum() - needed)
        enough = size * self.clients <= classes.total and (needed <= classes.counts).all()
        return bool(enough and (owners * other <= outside).all())

    def _choose_size(self, classes: Classes) -> int:
        owners = np.bincount(
            np.arange(self.clients) % len(classes.counts), minlength=len(classes.counts)
        )
        fair = classes.total // self.clients
        low, high = 0, fair  # `own` and `other` both grow with the size, so bisection is exact
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(middle, classes, owners) else (low, middle - 1)
        wanted = self.size if self.size is not None else (fair + 1) // 2
        if wanted > low:
            raise DataError(self._why_not(classes, owners, low, fair))
        return low if self.size is None else self.size

    def _why_not(self, classes: Classes, owners: Ids, most: int, fair: int) -> str:
        scarce = int(np.argmin(classes.counts / np.maximum(owners, 1)))
        request = f"DominantClass(clients={self.clients}, fraction={self.fraction}, "
        if len(classes.counts) == 1:
            return f"{request}size={self.size}): the labels hold one class, so none can dominate"
        return (
            f"{request}size={self.size}): the classes allow {most} examples per client, where "
            f"equal shares of {classes.total} were {fair}; class {classes.names[scarce]} is the "
            f"scarcest, with {classes.counts[scarce]} examples for the {owners[scarce]} clients it "
            f"dominates. Lower fraction, change clients, or accept less with size={max(most, 1)}"
        )


def _deal_others(pool: Ids, codes: Ids, own_class: Ids, each: int, seed: int) -> Ids:
    """Deal `each` examples of a shuffled pool to every client, none of its own class: [N, each].

    Dealt blindly, then every example of the own class is exchanged for a random one that suits
    both sides.  As many as needed exist: else all examples of other classes would already lie with
    the clients of this class and not fill them, which `_fits` has ruled out.
    """
    holder = np.full(len(pool), -1)  # the dominant class of who holds it, -1 for nobody
    holder[: len(own_class) * each] = np.repeat(own_class, each)
    for c in np.unique(own_class):
        wrong = np.flatnonzero((holder == c) & (codes == c))
        suits = np.flatnonzero((holder != c) & (codes != c))
        chosen = suits[shuffled(len(suits), seed, f"exchange {c}")[: len(wrong)]]
        for values in (pool, codes):
            values[wrong], values[chosen] = values[chosen], values[wrong]
    return pool[: len(own_class) * each].reshape(len(own_class), each)
