"""Every bad input that is tried: by the tests, and for docs/errors.md."""

from __future__ import annotations

from . import damage, data, folders, own_code, papers, settings
from .case import Case

CASES: list[Case] = [
    *settings.CASES,
    *data.CASES,
    *folders.CASES,
    *papers.CASES,
    *damage.CASES,
    *own_code.CASES,
]
