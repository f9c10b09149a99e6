"""dirichlet_class: every class is shared out by a Dirichlet draw over the clients."""

from __future__ import annotations

from dataclasses import field

import numpy as np

from undrift.core.tree import record, static
from undrift.data.checks import check_whole
from undrift.data.partitions.chance import (
    ALPHA,
    cut,
    key_of,
    log_gamma_draws,
    mixed,
    shares,
    shuffled,
    slices,
)
from undrift.data.partitions.even import check_min_size
from undrift.data.partitions.labels import Classes, find_classes
from undrift.data.partitions.protocol import Ids, Labels, Parts
from undrift.errors import DataError

# A split that one draw in fifty allows is then missed once in 400 seeds; large tables get fewer
# draws, for a refusal should come within seconds.
MOST_TRIES, LEAST_TRIES, CELLS = 300, 30, 10_000_000
BLOCK = 20_000  # cells drawn at once: small tables are quicker together


@record
class DirichletClass:
    """NIID-Bench's split (Li et al. 2022; FedNova, ComFed): sizes and labels are both skewed.

    Class after class is shared out by p ~ Dir(alpha) over the clients; with `balance`, clients that
    already hold n / N examples get nothing more.  The whole is drawn again until every client has
    `min_size` examples, at most 300 times; 0 allows empty clients.

    >>> sorted(len(p) for p in DirichletClass(3, alpha=1.0).split(np.arange(90) % 3, seed=0))
    [14, 25, 51]
    """

    clients: int = static()
    alpha: float = field(metadata=ALPHA)
    min_size: int = static(default=10)
    balance: bool = static(default=True, choices=(False, True))

    def __post_init__(self) -> None:
        check_whole("DirichletClass.clients", self.clients)
        check_whole("DirichletClass.min_size", self.min_size, low=0)

    def split(self, labels: Labels, seed: int, keys: Labels | None = None) -> Parts:
        classes = find_classes(labels, min(self.clients, 1 + self.min_size), "DirichletClass")
        check_min_size("DirichletClass", self.min_size, self.clients, classes.total)
        return self._dealt(classes, self._draw(classes, *self._accepted(classes, seed))[-1], seed)

    def split_like(self, labels: Labels, others: Labels, seed: int) -> Parts:
        """Deal other examples, such as a test set, by the shares that `labels` are dealt by."""
        classes = find_classes(labels, min(self.clients, 1 + self.min_size), "DirichletClass")
        more = find_classes(others, 1, "DirichletClass")
        if len(more.counts) != len(classes.counts):
            raise DataError("DirichletClass: the other examples do not have the same classes")
        table = self._draw(classes, *self._accepted(classes, seed))[-1]
        rows = [cut(row / row.sum(), int(n)) for row, n in zip(table, more.counts, strict=True)]
        return self._dealt(more, np.stack(rows), seed)

    def _dealt(self, classes: Classes, table: Ids, seed: int) -> Parts:
        rows = classes.rows(shuffled(classes.total, seed, "examples"))
        pieces = [slices(r, sizes) for r, sizes in zip(rows, table, strict=True)]
        parts = [np.concatenate(own) for own in zip(*pieces, strict=True)]
        return mixed(parts, classes.total, seed)

    def _accepted(self, classes: Classes, seed: int) -> tuple[int, int]:
        """Draw tables [C, N] until one will do: its key, and how many are drawn up to it."""
        cells = self.clients * len(classes.counts)
        tries, block = max(LEAST_TRIES, min(MOST_TRIES, CELLS // cells)), max(1, BLOCK // cells)
        best = 0
        for start in range(0, tries, block):
            key = key_of(seed, "shares", start)
            smallest = self._draw(classes, key, min(block, tries - start)).sum(axis=1).min(axis=1)
            good = np.flatnonzero(smallest >= self.min_size)
            if len(good):
                return key, int(good[0]) + 1
            best = max(best, int(smallest.max()))
        raise DataError(
            f"DirichletClass(clients={self.clients}, alpha={self.alpha}): in {tries} draws the "
            f"smallest client never had min_size = {self.min_size} of the {classes.total} "
            f"examples, at best {best}. Lower min_size, raise alpha, ask for fewer clients, or use "
            "dirichlet_client, which fixes the sizes"
        )

    def _draw(self, classes: Classes, key: int, count: int) -> Ids:
        """Draw `count` tables at once: [count, C, N]."""
        draws = log_gamma_draws(key, self.alpha, (count, len(classes.counts), self.clients))
        tables = np.empty(draws.shape, dtype=np.int64)
        held = np.zeros((count, self.clients), dtype=np.int64)
        for c, examples in enumerate(classes.counts):
            if self.balance:  # never closes all clients: less than n examples are dealt so far
                draws[:, c][held * self.clients >= classes.total] = -np.inf
            tables[:, c] = cut(shares(draws[:, c]), int(examples))
            held += tables[:, c]
        return tables
