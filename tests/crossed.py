"""Settings that are combined, and which of the combinations are slow."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def crossed(*settings: Iterable[Any], slow: bool = False) -> list[Any]:
    """Give every combination for `parametrize`; half of them are slow, or all.

    By default those are tried whose places add up to an even number: every value takes part, and of
    three settings and more every two values meet.
    """
    made = []
    for placed in product(*(enumerate(one) for one in settings)):
        late = slow or sum(place for place, _ in placed) % 2
        made.append(pytest.param(*(v for _, v in placed), marks=pytest.mark.slow if late else ()))
    return made
