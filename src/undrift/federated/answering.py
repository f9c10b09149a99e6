"""What every node does with a request: read it, check whom it is for, answer, and never fail."""

from __future__ import annotations

import logging

from undrift.core.tree import EMPTY
from undrift.errors import FederationError, UndriftError
from undrift.federated.letters import ANYBODY, LONG, Down, DownOwn, Up, read_words, words
from undrift.federated.wire import SLACK, Malformed, pack, words_of
from undrift.guarded.limits import limit

log = logging.getLogger("undrift")


class Answering:
    """A node: one client, and the experiment it takes part in."""

    def __init__(self, client: int, plan: str) -> None:
        self.client, self.plan = client, plan

    @property
    def size(self) -> int:
        """Count the examples that this client will ever use."""
        raise TypeError(f"{type(self).__name__} must define size")

    def made(self, down: Down, mine: DownOwn, common: bytes, own: bytes, up: Up) -> bytes:
        """Answer a request that is for this node."""
        raise TypeError(f"{type(self).__name__} must define made")

    def knows(self, plan: str) -> bool:
        """Whether a plan is this node's."""
        return plan == self.plan

    def answer(self, common: bytes, own: bytes) -> bytes:
        """Answer one request; what goes wrong is an answer too, without a word about the data."""
        try:
            down, mine = _read(common, own)
        except UndriftError as error:
            log.error("client %d cannot read a request: %s", self.client, error)
            return pack(EMPTY, words(Up("hello", "", 0, self.client, f"unreadable: {error}"[:300])))
        up = Up(mine.phase, mine.run, mine.round, self.client)
        try:
            self._check(down, mine)
            if mine.phase == "hello":
                return pack(EMPTY, words(up._replace(size=self.size)))
            return self.made(down, mine, common, own, up)
        except Exception as error:
            where = f"client {self.client}, round {mine.round}, {mine.phase}"
            if isinstance(error, UndriftError):
                log.error("%s: %s", where, error)  # it says all there is to say
            else:
                log.exception("%s", where)
            # other errors may quote examples: their text stays here
            told = str(error) if isinstance(error, FederationError) else type(error).__name__
            return pack(EMPTY, words(up._replace(failed=told[:300] or "failed")))

    def _check(self, down: Down, mine: DownOwn) -> None:
        asked_who = mine.phase == "hello" and mine.client == ANYBODY
        if mine.client != self.client and not asked_who:
            raise FederationError(f"this node is client {self.client}, not {mine.client}")
        if not self.knows(down.plan):
            raise FederationError(
                f"this node's experiment is {self.plan[:12]!r}, the server's {down.plan[:12]!r}: "
                "install the same files on both sides"
            )


def _read(common: bytes, own: bytes) -> tuple[Down, DownOwn]:
    mine: DownOwn = read_words(DownOwn, words_of(own))
    most = limit("letter_bytes") if mine.phase in LONG else 64 * SLACK
    down: Down = read_words(Down, words_of(common, most))
    if down[:3] != mine[:3]:
        raise Malformed(f"two halves that do not belong together: {down[:3]} and {mine[:3]}")
    return down, mine


def cannot_start(own: bytes, error: Exception) -> bytes:
    """Answer for a node that could not be made: what kind of error, and nothing it says."""
    mine: DownOwn = read_words(DownOwn, words_of(own))
    told = f"it cannot start: {type(error).__name__}; its own log says more"
    return pack(EMPTY, words(Up(mine.phase, mine.run, mine.round, mine.client, told)))
