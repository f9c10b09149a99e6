"""The server's side of a run over tables: what was agreed, who has it, who gets the model."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from undrift.errors import ChangedExperiment, CheckpointError, DataError, FederationError
from undrift.experiment.blueprint import PREPARATION
from undrift.experiment.folder import RunFolder
from undrift.federated.enrol import Record
from undrift.federated.exchange import Exchange, RefusalLog
from undrift.federated.grid import Grid
from undrift.federated.letters import named
from undrift.federated.preparing import Preparing
from undrift.federated.project import Project
from undrift.guarded.limits import Unreadable
from undrift.guarded.text import read_json
from undrift.state import disk
from undrift.tabular import Preparation
from undrift.tabular.holders import Asked
from undrift.using import exported
from undrift.using.card import card_of
from undrift.using.runs import read_run

log = logging.getLogger("undrift")
HANDED = "handed.json"  # who has the last model
SECONDS = 60.0  # that a node has to take what it missed before


class Tables:
    """Agrees on a preparation with the members of a run, and sees that all have it."""

    def __init__(
        self, project: Project, grid: Grid, folder: Path, record: Record, refusals: RefusalLog
    ) -> None:
        assert project.asked is not None, "silos hold tables"
        self.project, self.folder, self.record = project, folder, record
        self.asked: Asked = project.asked
        self.refusals, self._looked = refusals, 0
        self.exchange = Exchange(
            grid, record.members.nodes, run=record.run, limits=project.limits,
            patience=project.patience, refusals=refusals,
        )  # fmt: skip
        self.preparing = Preparing(self.exchange, project.plan, project.clients)
        self.wanting: set[int] = set(record.members.sizes)  # who may not have the preparation

    # -- before the first round ----------------------------------------------------------------
    def agree(self) -> tuple[Record, Preparation]:
        """Ask everybody for sums; give the members whose sums count, and what was made of them."""
        members, least = self.record.members, self.project.patience.minimum
        made, sizes = self.preparing.agree(self.asked, members.sizes)
        if len(sizes) < least:
            raise FederationError(
                f"{len(sizes)} of {len(members.sizes)} clients told of their tables, at least "
                f"{least} are needed: look into refused.jsonl and the nodes' logs"
            )
        RunFolder(self.folder).keep({PREPARATION: made.to_json()})
        self.record = self.record._replace(members=members._replace(sizes=sizes))
        self.wanting = set(sizes)
        return self.record, made

    def remember(self) -> Preparation:
        """Read what was agreed on before the server was stopped."""
        path = self.folder / PREPARATION
        try:
            made = Preparation.from_json(read_json(path))
        except (OSError, Unreadable, DataError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): restore it from a copy, or begin a new run"
            ) from error
        if made.schema != self.asked.schema:
            raise ChangedExperiment(
                f"{path} is of other columns than [columns] has now: choose another folder"
            )
        return made

    def hand_out(self, made: Preparation) -> None:
        """Give everybody the preparation, who had it before, too: nodes lose folders."""
        sizes = self.record.members.sizes
        self.wanting -= self.preparing.hand_out(made, {c: sizes[c] for c in sorted(self.wanting)})
        self._looked = len(self.refusals.refused)

    # -- between rounds ------------------------------------------------------------------------
    def renew(self, made: Preparation) -> None:
        """Give the preparation again to those whose last report is missing, if they are there."""
        missing = {e.client for e in self.refusals.refused[self._looked :] if e.client is not None}
        self._looked = len(self.refusals.refused)
        self.wanting |= missing & set(self.record.members.sizes)
        here = self.wanting & self.exchange.connected()
        if not here:
            return
        patience = self.exchange.patience
        brief = patience._replace(seconds=min(SECONDS, patience.seconds), returning=0.0)
        self.exchange.patience = brief
        sizes = self.record.members.sizes
        self.wanting -= self.preparing.hand_out(made, {c: sizes[c] for c in sorted(here)})
        self.exchange.patience = patience
        self._looked = len(self.refusals.refused)

    # -- after the last round ------------------------------------------------------------------
    def hand_out_model(self) -> None:
        """Give every node that is there the model; to be gone is no failure of the run."""
        has = _read_handed(self.folder / HANDED)
        wanted = set(self.record.members.sizes) - has
        here = wanted & self.exchange.connected()
        if here:
            package = read_run(self.folder, trust=True)
            data, rounds = exported.encode(package, card_of(package)), package.about["rounds"]
            has |= self.preparing.hand_out_model(data, rounds, here)
            told = json.dumps({"clients": sorted(has)}).encode()
            disk.write_atomically(self.folder / HANDED, [told])
        gone = sorted(wanted - has)
        if gone:
            names = ", ".join(named(self.project.names, client) for client in gone)
            log.warning("the model is not on these nodes yet: %s; the same command sends it", names)


def _read_handed(path: Path) -> set[int]:
    try:
        return {int(client) for client in read_json(path)["clients"]}
    except (OSError, Unreadable, KeyError, TypeError, ValueError):
        return set()  # whoever has it gets it again
