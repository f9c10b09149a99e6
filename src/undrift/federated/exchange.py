"""One exchange of a round: ask some clients, take the answers that pass, write down the others."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from undrift.errors import ConfigError, ReportRefused
from undrift.federated.checks import Accepted, Expected, Gate, Limits
from undrift.federated.grid import Ask, Grid
from undrift.federated.letters import named
from undrift.federated.wire import Form
from undrift.state import disk

log = logging.getLogger("undrift")
PAUSE = 1.0  # seconds between two looks whether a node is back
Refusal = Callable[[ReportRefused, int | None], None]


class Patience(NamedTuple):
    """How long is waited, and for how many."""

    seconds: float = 600.0  # for the answers of one exchange
    minimum: int = 1  # reports without which a round does not count
    empty_rounds: int = 3  # in a row, until the run gives up
    returning: float = 0.0  # seconds that a client whose node is gone has to come back
    at_once: int | None = None  # clients asked at a time: what the server holds in memory

    def checked(self) -> Patience:
        """Refuse what would wait for nobody, or forever."""
        for name, value in self._asdict().items():
            wanted: Any = int | float if name in ("seconds", "returning") else int
            number = isinstance(value, wanted) and not isinstance(value, bool)
            if (number and 0 < value < math.inf) or (
                name in ("at_once", "returning") and not value
            ):
                continue
            kind = "a number" if wanted is not int else "a whole number"
            raise ConfigError(f"patience.{name} = {value!r} must be {kind} above 0")
        return self


class RefusalLog:
    """What was refused, as lines of JSON in the run's folder."""

    def __init__(self, path: Path | None = None, names: Sequence[str] = ()) -> None:
        self.path, self.refused, self.names = path, list[ReportRefused](), tuple(names)

    def __call__(self, error: ReportRefused, node: int | None) -> None:
        """Write one down."""
        client = error.client
        who = "" if client is None else named(self.names, client)
        log.warning("%s", error.told(who) if who else error)
        self.refused.append(error)
        if self.path is None:
            return
        told = {"at": round(time.time(), 3), "round": error.round, "phase": error.phase}
        told |= {"client": client, "node": node, "cause": error.cause}
        told |= {"who": who} if self.names else {}
        disk.make_directory(self.path.parent)
        file = disk.open_append(self.path)
        try:
            disk.write_all(file, (json.dumps(told) + "\n").encode())
        except OSError as problem:
            raise disk.failure(
                "write", self.path, problem, "The run's rounds are safe"
            ) from problem
        finally:
            os.close(file)


class Bytes(NamedTuple):
    """What went down and up, in bytes."""

    down: int = 0
    up: int = 0


class Exchange:
    """Asks clients over a grid; knows which node is which client."""

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[int, int],
        *,
        run: str,
        limits: Limits,
        patience: Patience,
        refusals: Refusal,
    ) -> None:
        self.grid, self.nodes, self.run = grid, dict(nodes), run  # client -> node
        self.limits, self.patience, self.refusals = limits, patience, refusals
        self.sent = Bytes()

    def ask(
        self,
        phase: str,
        round: int,
        common: bytes,
        own: Mapping[int, bytes],
        form: Form,
        expected: Sequence[Expected],
        free: Sequence[bool],
    ) -> dict[int, Accepted]:
        """Send to some clients; give what came back and passed, by client."""
        clients = {e.client: e for e in expected}
        gate = Gate(phase, self.run, round, form, {}, self.limits, free)
        found, end = dict[int, Accepted](), time.monotonic() + self.patience.seconds
        last = math.inf  # until when somebody who is gone may come back
        while True:
            connected = self.connected()
            here = {self.nodes[c]: e for c, e in clients.items() if c in connected}
            gate.asked = {**gate.asked, **here}
            asks = [Ask(node, phase, common, own[e.client]) for node, e in here.items()]
            found |= self._collected(gate, asks, end - time.monotonic())
            # asked again, a client gives the same report: what was lost on the way is not its fault
            clients = {c: e for c, e in clients.items() if self._is_open(gate, c)}
            last = min(last, time.monotonic() + self.patience.returning)
            if not clients or time.monotonic() >= min(end, last):
                break
            time.sleep(PAUSE)
        for client in clients:
            self.refusals(gate.refused(client, self._missing(gate, client)), self.nodes[client])
        return found

    def _is_open(self, gate: Gate, client: int) -> bool:
        """Whether nothing that can be judged has come from a client."""
        return self.nodes.get(client) not in gate.judged

    def _missing(self, gate: Gate, client: int) -> str:
        if self.nodes.get(client) in gate.lost:
            return f"the node failed ({gate.lost[self.nodes[client]]})"
        if self.nodes.get(client) in gate.asked:
            return f"no answer within {self.patience.seconds:g} s"
        return "its node is not connected"

    def connected(self) -> set[int]:
        """Find the clients whose nodes are there; one that came back may have another number."""
        here = self.grid.nodes()
        vouched = {client: node for node, client in here.items() if client is not None}
        self.nodes = {client: vouched.get(client, node) for client, node in self.nodes.items()}
        return {client for client, node in self.nodes.items() if node in here}

    def _collected(self, gate: Gate, asks: Sequence[Ask], seconds: float) -> dict[int, Accepted]:
        found: dict[int, Accepted] = {}
        down = sum(len(a.common) + len(a.own) for a in asks)
        self.sent = Bytes(self.sent.down + down, self.sent.up)
        for answer in self.grid.exchange(asks, max(0.0, seconds)) if asks else ():
            self.sent = Bytes(self.sent.down, self.sent.up + len(answer.data))
            if answer.failed and answer.node in gate.asked:
                gate.lost[answer.node] = answer.failed
                continue
            try:
                accepted = gate.admit(answer)
            except ReportRefused as error:
                self.refusals(error, answer.node)
            else:
                found[accepted.client] = accepted
        return found
