"""Who owns which clients, and sums that do not depend on who owns them.

A virtual shard is all clients of one id mod 64; owners have whole shards.  Letters: N clients, C
clients of a cohort, n member entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from undrift.core.tree import Tree, leaves, rebuild, structure, tree_map
from undrift.data.federation import Federation
from undrift.data.spool import Streamed
from undrift.engines.sums import SHARDS, OrderedSum, unpacked


def deal_shards(sizes: Tensor, owners: int) -> list[list[int]]:
    """Deal the shards that hold examples to at most so many owners, the largest shard first.

    >>> deal_shards(torch.tensor([5, 1, 1, 4]), 2)
    [[0, 2], [1, 3]]
    """
    held = torch.zeros(SHARDS, dtype=torch.int64)
    held.index_add_(0, torch.arange(len(sizes)) % SHARDS, sizes.cpu().long())
    used = sorted(held.nonzero().flatten().tolist(), key=lambda s: (-int(held[s]), s))
    dealt: list[list[int]] = [[] for _ in range(min(owners, len(used)))]
    loads = [0] * len(dealt)
    for shard in used:
        owner = loads.index(min(loads))
        dealt[owner].append(shard)
        loads[owner] += int(held[shard])
    return [sorted(shards) for shards in dealt]


def examples_of(federation: Federation, shards: Sequence[int]) -> Federation:
    """Make the federation as the owner of some shards sees it: all others hold nothing."""
    numbers = torch.arange(federation.num_clients)
    mine = torch.isin(numbers % SHARDS, torch.tensor(list(shards)))
    sizes = torch.where(mine, federation.sizes, 0)
    owned = mine.repeat_interleave(federation.sizes).to(federation.members.device)
    members, x, y = federation.members[owned], federation.x, federation.y
    if not isinstance(x, Streamed) and not isinstance(y, Streamed):
        rows, members = members.unique(return_inverse=True)
        x, y = x.index_select(0, rows), y.index_select(0, rows)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(members.device)
    return replace(federation, x=x, y=y, members=members, offsets=offsets, sizes=sizes)


class Sums(NamedTuple):
    """A sum in twice the precision of float64: what `low` holds is missing in `high`."""

    high: Tree
    low: Tree


class ShardSum(OrderedSum):
    """Adds clients within a shard as every engine does, and shards with what rounding lost.

    So the total of several owners is the same, whoever owns which shards.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lost: list[Tensor] = []

    def _add_shard(self, held: list[Tensor]) -> None:
        if not self._lost:
            self._lost = [torch.zeros_like(v) for v in self._closed]
        for total, lost, value in zip(self._closed, self._lost, held, strict=True):
            lost += _add(total, value.double())

    def sums(self) -> Sums:
        """Give both parts of the sum."""
        self._close()
        lost = self._lost or [torch.zeros_like(v) for v in self._closed]
        like, shape = leaves(self._like), structure(self._like)
        return Sums(*(rebuild(shape, unpacked(part, like)) for part in (self._closed, lost)))


def _add(total: Tensor, value: Tensor) -> Tensor:
    """Add in place; gives what rounding lost (Knuth's two-sum)."""
    before = total.clone()
    total += value
    part = total - before
    return (before - (total - part)) + (value - part)


def merged(parts: Sequence[Sums]) -> Tree:
    """Add the sums of several owners, in float64."""
    high, low = (leaves(tree_map(torch.clone, half)) for half in parts[0])
    for part in parts[1:]:
        for total, lost, more, rest in zip(
            high, low, leaves(part.high), leaves(part.low), strict=True
        ):
            lost += _add(total, more) + rest
    return rebuild(structure(parts[0].high), [a + b for a, b in zip(high, low, strict=True)])


def interleaved(parts: Sequence[Tree], places: Sequence[Tensor]) -> Tree:
    """Put rows of several owners together; `places` says where in the cohort each one's belong."""
    back = torch.cat(list(places)).argsort()
    return tree_map(lambda *v: torch.cat(v)[back], *parts)
