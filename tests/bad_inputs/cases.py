"""Every bad input that is tried: by the tests, and for docs/errors.md."""

from __future__ import annotations

from . import agents, damage, data, deployed, folders, own_code, papers, settings, using
from .case import Case

CASES: list[Case] = [
    *settings.CASES,
    *data.CASES,
    *folders.CASES,
    *using.CASES,
    *papers.CASES,
    *agents.CASES,
    *deployed.CASES,
    *damage.CASES,
    *own_code.CASES,
]
