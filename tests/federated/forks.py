"""Nodes as processes: one is forked for every message, as Flower starts one."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from federated.silos import FIRST
from undrift.federated.grid import Answer, Ask

Fate = Callable[[int, str], str]  # client, phase -> "", "raise", "exit", "kill", "hang", "half"


def _ready(pipes: Iterable[int], seconds: float) -> list[int]:
    """Wait for some of them; `select` does not where a process has more than 1024 files open."""
    poll = select.poll()
    for pipe in pipes:
        poll.register(pipe, select.POLLIN)
    return [pipe for pipe, _ in poll.poll(1000 * seconds)]


class ForkGrid:
    """Carries messages to processes of our own; whoever hangs is killed when time is up."""

    def __init__(self, handlers: dict[int, Callable[[bytes, bytes], bytes]], fate: Fate) -> None:
        self.handlers, self.fate = handlers, fate

    def nodes(self) -> dict[int, int | None]:
        return {FIRST + client: client for client in self.handlers}

    def exchange(self, asks: Sequence[Ask], timeout: float) -> Iterator[Answer]:
        end = time.monotonic() + timeout
        running = dict(self._forked(ask) for ask in asks)
        said = dict.fromkeys(running, b"")
        try:
            while running and time.monotonic() < end:
                for pipe in _ready(running, max(0.0, end - time.monotonic())):
                    piece = os.read(pipe, 1 << 20)
                    said[pipe] += piece
                    if not piece:
                        yield self._ended(pipe, *running.pop(pipe), said[pipe])
        finally:
            for pipe, (_, pid) in running.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                os.close(pipe)

    def _forked(self, ask: Ask) -> tuple[int, tuple[int, int]]:
        client = ask.node - FIRST
        fate = self.fate(client, ask.phase)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            return reading, (ask.node, pid)
        try:
            self._live(client, ask, fate, writing)
        finally:
            os._exit(1)

    def _live(self, client: int, ask: Ask, fate: str, writing: int) -> None:
        if fate == "raise":
            raise SystemExit  # stderr of the tests stays quiet
        if fate == "exit":
            os._exit(3)
        if fate == "hang":
            time.sleep(60)
        answer = self.handlers[client](ask.common, ask.own)
        if fate == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(answer[: len(answer) // 2] if fate == "half" else answer)
        os._exit(0)

    def _ended(self, pipe: int, node: int, pid: int, said: bytes) -> Answer:
        os.close(pipe)
        _, status = os.waitpid(pid, 0)
        return Answer(node, said, "" if said else f"its process ended ({status})")
