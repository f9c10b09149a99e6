"""by_key: the clients that the data come with, such as writers, users or hospitals."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from undrift.core.tree import record, static
from undrift.data.checks import check_whole
from undrift.data.partitions.chance import even, shuffled, slices
from undrift.data.partitions.labels import as_array, count_examples, group
from undrift.data.partitions.protocol import Ids, Labels, Parts
from undrift.errors import DataError


@record
class ByKey:
    """One client per natural owner (LEAF's FEMNIST writers, Sent140 users).

    Owners with fewer than `min_examples` are left out; of the others at most `max_clients` are
    taken, at "random" (rFedAvg's text) or the "largest" (its code for Sent140).  `iid_control`
    deals the same examples to as many clients evenly at random, to compare with.  Clients are in
    the order of their keys, and their examples in the order of the data.

    >>> ByKey().split(np.zeros(5), seed=0, keys=["b", "a", "b", "c", "b"])
    [array([1]), array([0, 2, 4]), array([3])]
    >>> ByKey(min_examples=2).owners(["b", "a", "b", "c", "b"], seed=0).tolist()
    ['b']
    """

    min_examples: int = static(default=1)
    max_clients: int | None = static(default=None)
    choose: str = static(default="random", choices=("random", "largest"))
    iid_control: bool = static(default=False, choices=(False, True))

    def __post_init__(self) -> None:
        check_whole("ByKey.min_examples", self.min_examples)
        if self.max_clients is not None:
            check_whole("ByKey.max_clients", self.max_clients)

    def split(self, labels: Labels, seed: int, keys: Labels | None = None) -> Parts:
        total = count_examples(labels, 1, "ByKey")
        _, codes, counts = _grouped(keys)
        if len(codes) != total:
            raise DataError(f"ByKey: {len(codes)} keys for {total} examples; give one key each")
        order = np.argsort(codes, kind="stable")
        lists = np.split(order, np.cumsum(counts)[:-1])
        parts = [lists[k] for k in self._chosen(counts, seed)]
        if not self.iid_control:
            return parts
        pool = np.concatenate(parts)
        return slices(pool[shuffled(len(pool), seed, "iid")], even(len(pool), len(parts)))

    def owners(self, keys: Labels, seed: int) -> NDArray[Any]:
        """Name the owner behind every client of `split`."""
        names, _, counts = _grouped(keys)
        return names[self._chosen(counts, seed)]

    def _chosen(self, counts: Ids, seed: int) -> Ids:
        order = shuffled(len(counts), seed, "owners")
        order = order[counts[order] >= self.min_examples]
        if not len(order):
            raise DataError(
                f"ByKey.min_examples = {self.min_examples} leaves out all {len(counts)} owners; "
                f"the largest has {counts.max()} examples"
            )
        if self.choose == "largest":
            order = order[np.argsort(-counts[order], kind="stable")]
        return np.sort(order[: self.max_clients])


def _grouped(keys: Labels | None) -> tuple[NDArray[Any], Ids, Ids]:
    if keys is None:
        raise DataError("ByKey needs to know who owns each example; pass keys=, one per example")
    values = as_array(keys, "keys")
    if values.ndim != 1 or not len(values):
        raise DataError(f"ByKey: keys have shape {list(values.shape)}; give a flat list")
    return group(values, "keys")
