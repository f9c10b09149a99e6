"""dirichlet_client: exact sizes, and a label distribution of its own for every client.

The definition (Acar et al. 2021, FedDyn's code): while quotas are open, pick a client at random
among those with an open quota, draw a class from the client's prior among the classes that are
left, take the next example of that class.  Two observations make it fast without changing it:

* The order of clients is known before any class is drawn.  Let every client ring at the times of
  its own Poisson process of rate 1, until its quota is full: as such processes have no memory, the
  next to ring is always uniform among the clients that are still open.
* A draw matters only if its class has run out by then; then it is thrown away and drawn again,
  which is what renormalising the prior means.  So all draws are made at once, and each time a class
  runs out only its later draws are repeated: C times at most.

Letters: N clients, C classes, n examples, T = sum of quotas, t the place of a draw in the order.
"""

from __future__ import annotations

from dataclasses import field

import numpy as np
import torch

from undrift.core.random import normal, uniform
from undrift.core.tree import record, static
from undrift.data.checks import check_whole
from undrift.data.partitions.chance import (
    ALPHA,
    key_of,
    log_gamma_draws,
    mixed,
    shares,
    shuffled,
    uniforms,
    within,
)
from undrift.data.partitions.labels import find_classes
from undrift.data.partitions.protocol import Floats, Ids, Labels, Parts

CHUNK = 4_000_000  # numbers of a table of class shares held at once


@record
class DirichletClient:
    """FedDyn's split (Acar et al. 2021; AdaBest, FedDC, FedVRA): exact sizes, priors ~ Dir(alpha).

    Every client gets floor(n / N) examples and n mod N are dropped; with `sigma` (0.3 in FedDyn and
    AdaBest) sizes are log-normal, at least 1, and every example is dealt; the first client also
    gets what truncation leaves over, as in FedDyn's code: about N / 2 examples.  A client whose
    classes have all run out draws from what is left.

    >>> [len(part) for part in DirichletClient(3, alpha=0.1).split(np.arange(10) % 2, seed=0)]
    [3, 3, 3]
    """

    clients: int = static()
    alpha: float = field(metadata=ALPHA)
    sigma: float | None = field(default=None, metadata=within(0, 100))

    def __post_init__(self) -> None:
        check_whole("DirichletClient.clients", self.clients)

    def split(self, labels: Labels, seed: int, keys: Labels | None = None) -> Parts:
        classes = find_classes(labels, self.clients, "DirichletClient")
        quotas = self._quotas(classes.total, seed)
        size = (self.clients, len(classes.counts))
        prior = shares(log_gamma_draws(key_of(seed, "prior"), self.alpha, size))
        ringing = _ringing(quotas, seed)
        drawn = _draw_classes(prior, ringing, classes.counts, seed)
        # The t-th draw of a class takes the t-th example of its shuffled list.
        rows = classes.rows(shuffled(classes.total, seed, "examples"))
        taken = np.empty(len(ringing), dtype=np.int64)
        for c, examples in enumerate(rows):
            places = np.flatnonzero(drawn == c)
            taken[places] = examples[: len(places)]
        by_client = taken[np.argsort(ringing, kind="stable")]
        return mixed(np.split(by_client, np.cumsum(quotas)[:-1]), classes.total, seed)

    def _quotas(self, total: int, seed: int) -> Ids:
        if self.sigma is None:
            return np.full(self.clients, total // self.clients, dtype=np.int64)
        drawn = normal(key_of(seed, "sizes"), torch.arange(self.clients)).numpy()
        sizes = (shares(self.sigma * drawn) * total).astype(np.int64)
        sizes[0] += total - sizes.sum()
        return _nobody_empty(sizes)


def _nobody_empty(sizes: Ids) -> Ids:
    # FedDyn's code may leave clients empty; here the largest ones give an example each.
    empty = int((sizes == 0).sum())
    sizes = np.maximum(sizes, 1)
    for i in np.argsort(-sizes, kind="stable"):
        given = min(empty, sizes[i] - 1)
        sizes[i] -= given
        empty -= given
    return sizes


def _ringing(quotas: Ids, seed: int) -> Ids:
    """Tell which client draws at each place of the order: [T]."""
    gaps = -np.log1p(-uniforms(key_of(seed, "order"), int(quotas.sum())))
    times = np.cumsum(gaps)
    starts = np.cumsum(quotas) - quotas
    times -= np.repeat(times[starts] - gaps[starts], quotas)
    return np.repeat(np.arange(len(quotas)), quotas)[np.argsort(times, kind="stable")]


def _draw_classes(prior: Floats, ringing: Ids, counts: Ids, seed: int) -> Ids:
    """Draw a class at every place, from the client's prior [N, C] among the classes left: [T]."""
    prior, end = prior.copy(), len(ringing)
    drawn = _choose(prior, ringing, counts, uniforms(key_of(seed, "class", 0), end))
    places = [np.flatnonzero(drawn == c) for c in range(len(counts))]
    over = np.array([_over(p, n, end) for p, n in zip(places, counts, strict=True)])
    for attempt in range(1, len(counts) + 1):
        gone = int(np.argmin(over))  # the class that is first asked for one example too many
        if over[gone] == end:
            break
        left = counts - np.bincount(drawn[: over[gone]], minlength=len(counts))
        again = places[gone][counts[gone] :]
        places[gone], over[gone] = places[gone][: counts[gone]], end
        prior[:, gone] = 0.0
        u = uniform(key_of(seed, "class", attempt), torch.from_numpy(again)).numpy()
        drawn[again] = _choose(prior, ringing[again], left, u)
        for c in np.unique(drawn[again]):
            places[c] = np.sort(np.concatenate([places[c], again[drawn[again] == c]]))
            over[c] = _over(places[c], counts[c], end)
    return drawn


def _over(places: Ids, count: int, end: int) -> int:
    """Find the place at which a class is asked for more than it has; `end` for never."""
    return int(places[count]) if len(places) > count else end


def _choose(prior: Floats, clients: Ids, left: Ids, u: Floats) -> Ids:
    """Draw a class for each of `clients` from its prior, or from `left` where no mass remains."""
    step = max(1, CHUNK // prior.shape[1])
    chosen = [np.zeros(0, dtype=np.int64)]
    for i in range(0, len(clients), step):
        heaped = np.cumsum(prior[clients[i : i + step]], axis=1)
        heaped[heaped[:, -1] < np.finfo(float).tiny] = np.cumsum(left)
        # The first class whose heap exceeds the draw, hence never one without mass.
        chosen.append((heaped <= u[i : i + step, None] * heaped[:, -1:]).sum(axis=1))
    return np.concatenate(chosen)
