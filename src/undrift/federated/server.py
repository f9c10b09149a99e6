"""The server of a federation: a trainer whose clients are elsewhere."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from undrift.arguments import known_seeds
from undrift.core.algorithm import Algorithm, Server, init_server
from undrift.core.noise import Secret
from undrift.core.random import Seeds
from undrift.core.task import Task
from undrift.data import Arrival, LocalWork, Sampler
from undrift.engines.engine import Outcome
from undrift.engines.traffic import Traffic
from undrift.errors import ConfigError, EmptyRoundError
from undrift.federated.alone import Example, Rehearsal
from undrift.federated.checks import Limits
from undrift.federated.exchange import Bytes, Exchange, Patience, Refusal, RefusalLog
from undrift.federated.grid import Grid
from undrift.federated.remote import NEVER, Remote, example_sizes, record_of
from undrift.private_key import PrivateKey
from undrift.roster import Roster
from undrift.rounds import Advance, Opened
from undrift.state.checkpoint import CheckpointFolder
from undrift.state.keeper import Keeper
from undrift.state.store import ClientStateStore
from undrift.trainer import Present, Trainer, admit_anyone


class Members(NamedTuple):
    """Who takes part in a run: fixed when it begins."""

    nodes: dict[int, int]  # client -> node
    sizes: dict[int, int]  # client -> examples
    clients: int  # ids in use, those that did not come included


def new_run() -> str:
    """Name a run so that no node mistakes it for another."""
    return secrets.token_hex(16)


def _bounded(limits: Limits, algorithm: Algorithm) -> Limits:
    """Refuse, where the last word on a change has a rule that bounds it, one that is longer.

    Where a rule hides who took part, no report is measured by others: one client would decide
    which of them count, and move the sum by more than its own change.
    """
    if any(getattr(rule, "hides", False) for rule in algorithm.rules):
        limits = limits._replace(relative=math.inf)
    last = next((r for r in reversed(algorithm.rules) if r.changes == "delta"), None)
    if last is None or not getattr(last, "bounds", False):
        return limits
    bound = float(last.norm)  # type: ignore[attr-defined]
    return limits._replace(norm=bound if limits.norm is None else min(bound, limits.norm))


class Coordinator(Trainer):
    """Trains one model over a grid; data and client states stay where they are."""

    def __init__(
        self,
        task: Task,
        algorithm: Algorithm,
        grid: Grid,
        members: Members,
        example: Example,
        *,
        run: str,
        plan: str = "",
        work: LocalWork | None = None,
        sampler: Sampler | None = None,
        seed: int | Seeds = 0,
        arrival: Arrival | None = None,
        limits: Limits | None = None,
        patience: Patience | None = None,
        refusals: Refusal | None = None,
    ) -> None:
        self.seeds, self.algorithm = known_seeds(seed), algorithm
        self.task = task = task.clone()
        self.federation = record_of(members.sizes, members.clients, arrival)
        here = sorted(members.sizes)
        self.roster = Roster(self.federation, sampler, work, self.seeds, task.dtype, here)
        self.sizes = example_sizes(task, example, members.sizes, members.clients)
        rehearsal = Rehearsal(algorithm, task, example, self.sizes)
        rehearsal.check_path()
        self.store = ClientStateStore(NEVER, dtype=task.dtype)
        self.keeper = Keeper(self.store)
        exchange = Exchange(
            grid,
            members.nodes,
            run=run,
            limits=_bounded(limits or Limits(), algorithm).checked(),
            patience=(patience or Patience()).checked(),
            refusals=RefusalLog() if refusals is None else refusals,
        )
        self.engine: Remote = Remote(
            task, self.federation, self.store, exchange, rehearsal, self.sizes, plan
        )
        start = init_server(algorithm, *task.initial(), self.sizes)
        self._present = Present(start, 0, self.store.visible)
        self._check(algorithm, start)
        self.private_key = PrivateKey()
        self._ready({"engine": "remote", "state": "nodes", "run": run, "plan": plan})
        self._empty = 0  # rounds in a row that nobody took part in

    def _check(self, algorithm: Algorithm, start: Server) -> None:
        self.engine.admit(algorithm, start, self.roster.cohort(0, ordered=False))
        admit_anyone(self.engine, algorithm, start, self.roster)

    @property
    def sent(self) -> Bytes:
        """Bytes that went down and up since this server was started."""
        return self.engine.exchange.sent

    def advance(self) -> Advance:
        """Train one round; after too many in a row without a report, give up."""
        done = super().advance()
        self._empty = 0 if bool(done.rows.accepted.any()) else self._empty + 1
        most = self.engine.exchange.patience.empty_rounds
        if self._empty >= most:
            raise EmptyRoundError(
                f"{self._empty} rounds in a row, the last of them {self.rounds_done}, had fewer "
                f"than {self.engine.exchange.patience.minimum} reports; the model is as it was "
                "before them. refused.jsonl tells why; when the nodes are well, run it again"
            )
        return done

    def open_round(self, cohort: Any = None) -> Opened:
        """Choose the next round's cohort; the order of batches is made where the examples are."""
        if cohort is None and hasattr(self.roster.work, "steps_of"):
            cohort = self.roster.cohort(self.rounds_done, ordered=False).told()
        return super().open_round(cohort)

    # -- noise ---------------------------------------------------------------------------------
    def _secret(self) -> Secret:
        """Draw a key for this round alone: a round that is done again may have other reports."""
        return Secret.drawn()

    def _row_noise(self, hook: str, round: int, ids: Sequence[int]) -> None:
        """Draw nothing for clients: nodes add their own noise before anything leaves them."""

    def keep_key(self, folder: Path | str | CheckpointFolder) -> None:
        """Keep nothing: no key is used twice."""

    def _sent(self, outcome: Outcome, held: int) -> Traffic:
        # who answered differs from round to round, and so does what was sent
        self._traffic.clear()
        return super()._sent(outcome, held)

    # -- what a server of other people's data cannot do ----------------------------------------
    def client_state(self, client: int) -> dict[str, Tensor]:
        """Refuse: states stay with their owners."""
        raise ConfigError(f"the state of client {client} is on its own node, and stays there")

    def enroll(self, ids: Iterable[int]) -> None:
        """Refuse: rules would need the state of who joins."""
        raise ConfigError("who takes part is fixed when a run begins: begin a new one")

    def leave(self, ids: Iterable[int]) -> None:
        """Refuse: rules would need the state of who leaves."""
        raise ConfigError("who takes part is fixed when a run begins: begin a new one")
