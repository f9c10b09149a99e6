"""Which clients a round has to do without, found by trying it without some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_TRIES = 64  # to take back clients that were left out beside the guilty ones


def to_leave_out(
    suspects: Sequence[int], works: Callable[[frozenset[int]], bool]
) -> frozenset[int]:
    """Find few clients without which a round works, where it does not with all of them.

    The most suspicious stand first.  Everybody, if the round works with none of them.

    >>> sorted(to_leave_out([5, 3, 8, 1, 4], lambda out: out >= {3, 4}))
    [3, 4]
    """
    low, high = 0, 1  # leaving out the first `low` is too few
    while high < len(suspects) and not works(frozenset(suspects[:high])):
        low, high = high, 2 * high
    high = min(high, len(suspects))
    while high - low > 1:
        middle = (low + high) // 2
        if works(frozenset(suspects[:middle])):
            high = middle
        else:
            low = middle
    return _taken_back(suspects[:high], works)


def _taken_back(first: Sequence[int], works: Callable[[frozenset[int]], bool]) -> frozenset[int]:
    """Take back those that were suspicious and nothing else."""
    out, groups = frozenset(first), _halves(first)
    for _ in range(MOST_TRIES):
        if not groups:
            break
        some = groups.pop(0)
        if works(out.difference(some)):
            out = out.difference(some)
        else:
            groups = [*_halves(some), *groups]
    return out


def _halves(group: Sequence[int]) -> list[Sequence[int]]:
    middle = len(group) // 2
    return [group[:middle], group[middle:]] if middle else []
