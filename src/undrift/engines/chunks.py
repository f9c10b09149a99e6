"""How a cohort is cut, so that padding to the longest client costs little."""

from __future__ import annotations

from collections.abc import Sequence


def cut(slots: Sequence[int], width: int, most: int) -> list[slice]:
    """Cut a cohort into chunks of at most `width` clients.

    A chunk's plan is padded to its longest client.  Padded so it holds at most `most` positions,
    unless one client alone has more.

    >>> cut([1, 1, 100, 1, 1], width=4, most=10)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 5, None)]
    """
    count = len(slots)
    if not count or max(slots) * min(width, count) <= most:
        return [slice(i, min(i + width, count)) for i in range(0, count, width)]
    found, start, longest = [], 0, 0
    for c, own in enumerate(slots):
        longest = max(longest, own)
        if c > start and (c - start == width or (c - start + 1) * longest > most):
            found.append(slice(start, c))
            start, longest = c, own
    return [*found, slice(start, count)]
