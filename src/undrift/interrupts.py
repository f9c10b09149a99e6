"""Ctrl-C, `kill` and a closed terminal: they stop a program where nothing is torn by it.

A handler runs between two instructions of the main thread, wherever they are.  A round that is
trained and not yet written down, or half of a fleet's rounds, would be lost there.  A `Shield`
lets a signal wait until they are whole.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedAtOnce(KeyboardInterrupt):
    """Stopped before what is done was saved: Ctrl-C again, or a worker that did not end."""


class Shield:
    """Holds signals back while `torn` says so; the first one that is let through is the last.

    Whoever uses it calls `release` where nothing is torn.  After a signal has stopped the work,
    others wait until the shield is left, so that saving is not stopped too; only Ctrl-C again
    ends it at once, as `StoppedAtOnce`.  Handlers that were set before decide what a signal does;
    what has no handler is left alone, and so are threads that hear no signals.
    """

    def __init__(self, torn: Callable[[], bool]) -> None:
        self._torn, self._waiting, self._stopping = torn, list[int](), False
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._home: FrameType | None = None

    def __enter__(self) -> Shield:
        self._home = sys._getframe(1)
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if callable(before):
                    self._before[number] = before
                    signal.signal(number, self._heard)
        return self

    def __exit__(self, *error: object) -> None:
        self._torn = lambda: True  # handlers are put back all of them or, later, by nobody
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._waiting and not self._stopping:
            self._let_through()

    def release(self) -> None:
        """Stop now if somebody has asked for it meanwhile."""
        if self._waiting and not self._stopping and not self._torn():
            self._let_through()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if not self._around(frame):  # a signal has left it before handlers were put back
            self._before[number](number, frame)
            return
        if number == signal.SIGINT and (self._stopping or number in self._waiting):
            self._stopping = True
            raise StoppedAtOnce
        self._waiting.append(number)
        if not self._stopping and not self._torn():
            self._let_through()

    def _around(self, frame: FrameType | None) -> bool:
        """Whether a frame is the one that entered the shield, or was called by it."""
        while frame is not None and frame is not self._home:
            frame = frame.f_back
        return frame is not None

    def _let_through(self) -> None:
        self._stopping = True
        number = self._waiting.pop(0)
        self._before[number](number, sys._getframe())
        self._stopping = False  # its handler does not stop the program


def uninterrupted() -> Shield:
    """Let signals wait until all of this is done."""
    return Shield(lambda: True)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Start processes that hear neither Ctrl-C nor a closed terminal until they say so.

    Both go to all processes of a terminal; their parent tells them what to do.  Blocked is not
    ignored: what comes meanwhile is heard by this process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_on_signals() -> None:
    """Let `kill` and a closed terminal stop as Ctrl-C does; what is ignored stays so (`nohup`)."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt
