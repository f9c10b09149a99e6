"""What carries messages between a server and its nodes, and one that does so within a process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol


class Ask(NamedTuple):
    """One message down: the same bytes for everybody, and some for this node alone."""

    node: int
    phase: str
    common: bytes
    own: bytes


class Answer(NamedTuple):
    """One message up, and who sent it according to the transport, not to itself."""

    node: int
    data: bytes
    failed: str = ""  # what the transport says went wrong


class Grid(Protocol):
    """Any object with these two methods carries messages."""

    def nodes(self) -> dict[int, int | None]:
        """List who is there: node -> client, None where the transport does not vouch for it."""

    def exchange(self, asks: Sequence[Ask], timeout: float) -> Iterator[Answer]:
        """Send, and give answers as they come in, for at most `timeout` seconds."""


Handler = Callable[[bytes, bytes], bytes]  # common, own -> answer


class LocalGrid:
    """Nodes within this process: each is a function, called in a thread of its own.

    >>> grid = LocalGrid({7: lambda common, own: common + own})
    >>> next(grid.exchange([Ask(7, "train", b"a", b"b")], timeout=5)).data
    b'ab'
    """

    def __init__(
        self, handlers: Mapping[int, Handler], clients: Mapping[int, int] | None = None
    ) -> None:
        self.handlers = dict(handlers)
        self.clients = {node: node for node in handlers} if clients is None else dict(clients)

    def nodes(self) -> dict[int, int | None]:
        """List who is there."""
        return {node: self.clients.get(node) for node in self.handlers}

    def exchange(self, asks: Sequence[Ask], timeout: float) -> Iterator[Answer]:
        """Call everybody at once; who is not done in time is not waited for."""
        answers: queue.Queue[Answer] = queue.Queue()
        end = time.monotonic() + timeout
        for ask in asks:
            # a daemon: one that hangs must not keep the process from ending
            threading.Thread(target=self._call, args=(ask, answers), daemon=True).start()
        for _ in asks:
            try:
                yield answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return

    def _call(self, ask: Ask, answers: queue.Queue[Answer]) -> None:
        try:
            answers.put(Answer(ask.node, self.handlers[ask.node](ask.common, ask.own)))
        except BaseException as error:
            answers.put(Answer(ask.node, b"", f"{type(error).__name__}: {error}"[:300]))
