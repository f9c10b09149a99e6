"""Chunks of clients side by side on a CPU.

One thread per core, each with one thread of torch's own, uses the cores far better than torch's
threads inside every small operation (benchmarks/cohort.py --plans shows it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

import torch

J = TypeVar("J")
T = TypeVar("T")
W = TypeVar("W")


@contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """Let torch use so many threads of its own for a while; None changes nothing."""
    before = torch.get_num_threads()
    if threads is None or threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_order(run: Callable[[W, J], T], jobs: Sequence[J], workers: Sequence[W]) -> Iterator[T]:
    """Run jobs on idle workers; give the results in the order of the jobs.

    At most one finished result per worker waits, so that memory stays bounded.
    """
    if len(workers) == 1 or len(jobs) == 1:
        yield from (run(workers[0], job) for job in jobs)
        return
    threads = torch.get_num_threads()
    idle: SimpleQueue[W] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def task(job: J) -> T:
        worker = idle.get()
        try:
            return run(worker, job)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(len(workers), initializer=torch.set_num_threads, initargs=(1,))
    waiting: deque[Future[T]] = deque()
    try:
        for job in jobs:
            if len(waiting) >= 2 * len(workers):
                yield waiting.popleft().result()
            waiting.append(pool.submit(task, job))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)  # the workers' setting is also the default of new threads
