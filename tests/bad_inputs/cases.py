"""Every bad input that is tried: by the tests, and for docs/errors.md."""

from __future__ import annotations

from . import damage, data, folders, own_code, settings
from .case import Case

CASES: list[Case] = [*settings.CASES, *data.CASES, *folders.CASES, *damage.CASES, *own_code.CASES]
