"""Measure algorithms in several processes, in the order of their names."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from undrift.experiment.pool import cores
from undrift.verify.table import PROMISES, Verdict, check_names, verdict, verify


def verify_together(only: Sequence[str] = (), processes: int | None = None) -> Iterator[Verdict]:
    """Measure as `verify` does, on all cores; the slow ones are begun first."""
    wanted = check_names(only)
    count = min(processes or cores(), len(wanted))
    if count < 2:
        yield from verify(wanted)
        return
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # they start without the current folder
    # spawn: a forked torch may hang on its threads
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        count, mp_context=fresh, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        begun = {name: pool.submit(verdict, name) for name in sorted(wanted, key=_cheap)}
        for name in wanted:
            yield begun[name].result()


def _cheap(name: str) -> bool:
    return name not in PROMISES
