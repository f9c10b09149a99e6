"""Data sets whose clients are people: which of them are taken, and what each is tested on."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.data.partitions import per_client_test
from undrift.errors import DataError, unknown_name
from undrift.models.settings import number, whole

WAYS = ("random", "largest")
Rank = tuple[int, str]


class User(NamedTuple):
    """One person's examples."""

    name: str
    x: NDArray[Any]  # [n, ...]
    y: NDArray[np.int64]  # [n]

    def take(self, rows: NDArray[Any] | slice) -> User:
        """Keep some of the examples."""
        return User(self.name, self.x[rows], self.y[rows])


class Sides(NamedTuple):
    """The same people twice: what they train and what they are tested on."""

    train: list[User]
    test: list[User]


class Choice(NamedTuple):
    """Which people take part: at most `most` of those with `least` examples or more.

    At "random" a name's luck depends on the seed and the name alone; "largest" takes those with
    most examples.  So one pass over the files is enough, and few people are in memory at a time.
    """

    most: int | None
    how: str
    least: int
    seed: int

    def users(self, users: Iterable[User]) -> list[User]:
        """Choose among people, who are put in the order of their names."""
        some: Iterable[User] = (user for user in users if len(user.y) >= self.least)
        if self.most is not None:
            some = heapq.nsmallest(self.most, some, lambda u: self._rank(u.name, len(u.y)))
        return sorted(some, key=lambda user: user.name)

    def names(self, counts: Mapping[str, int]) -> set[str]:
        """Choose among names with so many examples each."""
        some = [name for name, count in counts.items() if count >= self.least]
        if self.most is None:
            return set(some)
        return set(heapq.nsmallest(self.most, some, lambda name: self._rank(name, counts[name])))

    def _rank(self, name: str, count: int) -> Rank:
        if self.how == "largest":
            return -count, name
        # not by `fold`, which remembers every text: names may be a million
        text = f"users {self.seed} {name}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()), name


def check_choice(
    source: str, noun: str, count: int | None, least: int, seed: int, how: str = "random"
) -> Choice:
    """Check the settings by which people are chosen; `noun` is what the source calls them."""
    if count is not None:
        whole(noun, count)
    if how not in WAYS:
        raise unknown_name("way to choose", how, list(WAYS), f"sources.{source}")
    whole("min_examples", least)
    return Choice(count, how, least, whole("seed", seed, 0))


def check_share(share: float) -> float:
    """Check the share of each person's examples that is held out."""
    return number("test_share", share, 0, 1)


def hold_out(users: Sequence[User], share: float, seed: int) -> Sides:
    """Hold a share of everybody's own examples out; who has only one only trains."""
    everything = [np.arange(len(user.y)) for user in users]
    if not share:
        return Sides(list(users), [user.take(slice(0)) for user in users])
    train, test = per_client_test(everything, share, seed)
    return Sides(
        [user.take(rows) for user, rows in zip(users, train, strict=True)],
        [user.take(rows) for user, rows in zip(users, test, strict=True)],
    )


def hold_out_later(users: Sequence[User], share: float, gap: int) -> Sides:
    """Hold the last share of everybody's examples out, and leave `gap` out before it.

    For windows over a text: with a gap of their length, no test window holds a character that was
    trained on.  Who has too few for both only trains.
    """
    train, test = [], []
    for user in users:
        first, then = _cuts(len(user.y), share, gap)
        train.append(user.take(slice(first)))
        test.append(user.take(slice(then, None)))
    return Sides(train, test)


def _cuts(total: int, share: float, gap: int) -> tuple[int, int]:
    usable = total - gap
    if not share or usable < 2:
        return total, total
    tested = min(max(1, math.floor(share * usable)), usable - 1)
    return usable - tested, total - tested


def check_some(users: Sequence[User], choice: Choice, source: str, place: object) -> None:
    """Refuse files that leave nobody to train."""
    if not users:
        raise DataError(
            f"{source}: nobody in {place} has {choice.least} examples or more: lower min_examples "
            f"(now {choice.least}), or put the complete files there"
        )


def owners(users: Sequence[User]) -> Tensor:
    """Tell whose each example is, by the person's place in the list."""
    sizes = torch.tensor([len(user.y) for user in users])
    return torch.repeat_interleave(torch.arange(len(users)), sizes)


def targets(users: Sequence[User]) -> Tensor:
    """Put everybody's targets one after the other."""
    return torch.from_numpy(np.concatenate([user.y for user in users]))
