"""Partitions that sort by label: similarity, shards, and a fixed number of classes per client."""

from __future__ import annotations

from dataclasses import field

import numpy as np
import torch

from undrift.core.random import fold, permutation
from undrift.core.tree import record, static
from undrift.data.checks import check_whole
from undrift.data.partitions.chance import even, key_of, mixed, shuffled, slices, within
from undrift.data.partitions.labels import find_classes
from undrift.data.partitions.protocol import Ids, Labels, Parts
from undrift.errors import DataError


@record
class Similarity:
    """A share `s` of the data IID, the rest sorted by label (SCAFFOLD, rFedAvg).

    Client i gets the i-th of N equal slices of both; what does not divide by N is dropped.  Split
    the test labels by the same record for per-client test sets: as slices follow the sorted
    classes, client i is tested on the classes it trains on.

    >>> labels = np.arange(100) % 10
    >>> [np.unique(labels[p]).tolist() for p in Similarity(5, s=0.0).split(labels, seed=0)]
    [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    """

    clients: int = static()
    s: float = field(metadata=within(0, 1))

    def __post_init__(self) -> None:
        check_whole("Similarity.clients", self.clients)

    def split(self, labels: Labels, seed: int, keys: Labels | None = None) -> Parts:
        classes = find_classes(labels, self.clients, "Similarity")
        order = shuffled(classes.total, seed, "examples")
        pool = round(self.s * classes.total)
        rest = order[pool:][np.argsort(classes.codes[order[pool:]], kind="stable")]
        if pool < self.clients and len(rest) < self.clients:
            raise DataError(
                f"Similarity(clients={self.clients}, s={self.s}): neither the {pool} IID examples "
                f"nor the {len(rest)} sorted ones give each client one; ask for fewer clients, or "
                "take s = 0 or 1"
            )
        halves = [self._slices(order[:pool]), self._slices(rest)]
        return mixed(list(np.concatenate(halves, axis=1)), classes.total, seed)

    def _slices(self, order: Ids) -> Ids:
        size = len(order) // self.clients
        return order[: size * self.clients].reshape(self.clients, size)


@record
class Shards:
    """FedAvg's pathological split (McMahan et al. 2017): sort by label, cut, deal the pieces.

    clients * shards_per_client pieces, whose sizes differ by one at most: every example is dealt.

    >>> [len(part) for part in Shards(5).split(np.arange(100) % 10, seed=0)]
    [20, 20, 20, 20, 20]
    """

    clients: int = static()
    shards_per_client: int = static(default=2)

    def __post_init__(self) -> None:
        check_whole("Shards.clients", self.clients)
        check_whole("Shards.shards_per_client", self.shards_per_client)

    def split(self, labels: Labels, seed: int, keys: Labels | None = None) -> Parts:
        classes = find_classes(labels, self.clients, "Shards")
        count = self.clients * self.shards_per_client
        if count > classes.total:
            raise DataError(
                f"Shards(clients={self.clients}, shards_per_client={self.shards_per_client}) needs "
                f"{count} examples for shards of one, and there are {classes.total}; lower either"
            )
        by_class = np.concatenate(classes.rows(shuffled(classes.total, seed, "examples")))
        shards = slices(by_class, even(classes.total, count))
        dealt = shuffled(count, seed, "shards").reshape(self.clients, -1)
        return mixed([np.concatenate([shards[s] for s in d]) for d in dealt], classes.total, seed)


@record
class LabelSubset:
    """NIID-Bench's "#C = k" (Li et al. 2022): every client owns k classes and shares them evenly.

    Client i owns class i mod C and k - 1 others at random.  A class that nobody owns is not dealt,
    which happens only when there are fewer clients than classes.

    >>> labels = np.arange(100) % 10
    >>> [len(np.unique(labels[p])) for p in LabelSubset(10, 3).split(labels, seed=0)][:4]
    [3, 3, 3, 3]
    """

    clients: int = static()
    classes_per_client: int = static(default=2)

    def __post_init__(self) -> None:
        check_whole("LabelSubset.clients", self.clients)
        check_whole("LabelSubset.classes_per_client", self.classes_per_client)

    def split(self, labels: Labels, seed: int, keys: Labels | None = None) -> Parts:
        classes = find_classes(labels, self.clients, "LabelSubset")
        owned = self._owned(len(classes.counts), seed)
        rows = classes.rows(shuffled(classes.total, seed, "examples"))
        pieces: list[list[Ids]] = [[] for _ in range(self.clients)]
        for c, examples in enumerate(rows):
            owners = np.flatnonzero((owned == c).any(axis=1))
            shared = np.array_split(examples, max(len(owners), 1))
            for i, piece in zip(owners, shared, strict=False):  # none for a class without owners
                pieces[i].append(piece)
        parts = mixed([np.concatenate(own) for own in pieces], classes.total, seed)
        self._check_nobody_empty(parts, owned, classes.names)
        return parts

    def _owned(self, num_classes: int, seed: int) -> Ids:
        """Choose the classes of each client: [N, k]."""
        if self.classes_per_client > num_classes:
            raise DataError(
                f"LabelSubset.classes_per_client = {self.classes_per_client} but the labels hold "
                f"{num_classes} classes; ask for {num_classes} at most"
            )
        first = np.arange(self.clients) % num_classes
        client = torch.arange(self.clients)
        # a random order of the other C - 1 classes, counted on from the client's first one
        keys, others = fold(key_of(seed, "classes"), client), num_classes - 1
        steps = permutation(keys, torch.full_like(client, others), others).numpy()
        steps = 1 + steps[:, : self.classes_per_client - 1]
        return np.concatenate([first[:, None], (first[:, None] + steps) % num_classes], axis=1)

    def _check_nobody_empty(self, parts: Parts, owned: Ids, names: np.ndarray) -> None:
        for i, part in enumerate(parts):
            if not len(part):
                raise DataError(
                    f"LabelSubset: client {i} is left empty, for its classes "
                    f"{names[owned[i]].tolist()} have fewer examples than owners; ask for fewer "
                    "clients or more classes per client"
                )
