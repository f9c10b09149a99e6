"""A node that holds a table: it answers questions by sums, and trains on what was agreed.

Rows never leave it.  It adds up what a question asks for, keeps the preparation that the server
makes of everybody's sums, and turns its own rows into examples by it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch

from undrift.core.tree import EMPTY
from undrift.errors import DataError, FederationError
from undrift.federated.answering import Answering
from undrift.federated.letters import Down, DownOwn, Up, words
from undrift.federated.node import Node
from undrift.federated.shelf import Shelf, mark_of
from undrift.federated.wire import Form, pack, unpack
from undrift.guarded.limits import check
from undrift.guarded.text import parse_json
from undrift.tabular import Frame, Preparation, Question, Schema, answer
from undrift.tabular.sums import ASKED, series_names
from undrift.using import exported

log = logging.getLogger("undrift")
ANOTHER = "this node holds another preparation of this run: begin a new run, in another folder"


class TableNode(Answering):
    """One client whose examples are rows of a table of its own."""

    def __init__(
        self,
        client: int,
        rows: Callable[[], Frame],
        schema: Schema,
        least: int,
        folder: Path | str,
        trains: Callable[[Preparation, Frame], Node],
        plan: str = "",
    ) -> None:
        super().__init__(client, plan)
        self._rows, self.schema, self.least = rows, schema, least
        self.folder, self._trains = Path(folder), trains
        self._node: tuple[str, Node] | None = None  # of a run, since its preparation is known

    @cached_property
    def frame(self) -> Frame:
        """Give the rows that this client trains on; they are read when they are first needed."""
        return self._rows()

    @property
    def size(self) -> int:
        """Count the examples that this client will ever use."""
        return len(self.frame)

    def made(self, down: Down, mine: DownOwn, common: bytes, own: bytes, up: Up) -> bytes:
        """Answer a request that is for this node."""
        known = {"sums": self._sums, "prepare": self._prepare, "model": self._model}
        if mine.phase in known:
            return pack(EMPTY, words(known[mine.phase](down, common, up)))
        _, _, mark = down.plan.partition(":")
        if mark != mark_of(written(self.preparation(mine.run))):
            raise FederationError(ANOTHER)
        return self._trained(mine.run).answer(common, own)

    def knows(self, plan: str) -> bool:
        """Whether a plan is this node's; in rounds it names the preparation, too."""
        return plan.partition(":")[0] == self.plan

    # -- before the first round ----------------------------------------------------------------
    def _sums(self, down: Down, common: bytes, up: Up) -> Up:
        question = _asked(down)
        if question.least < self.least:
            raise FederationError(
                f"asked to name levels that {question.least} rows have; the experiment says "
                f"{self.least}"
            )
        if not set(question.given) <= set(series_names(self.schema)):
            raise FederationError("asked about columns that the experiment does not have")
        number = ASKED.index(question.asks) + 1
        log.info("client %d adds up %d rows: question %d", self.client, self.size, number)
        return up._replace(told=answer(question, self.schema, self.frame).to_json())

    def _prepare(self, down: Down, common: bytes, up: Up) -> Up:
        try:
            found = Preparation.from_json(down.told)
        except DataError as error:
            raise FederationError(f"sent no preparation: {error}") from error
        if found.schema != self.schema:
            raise FederationError("sent a preparation of other columns than the experiment has")
        shelf, data = Shelf(self.folder, down.run), written(found)
        before = shelf.note("preparation")
        if before is not None and before != data:
            raise FederationError(ANOTHER)
        found.encode(self.frame, torch.arange(min(2, self.size)).numpy())  # it fits, or says why
        if before is None:
            shelf.keep_note("preparation", data)
        return up._replace(size=self.size)

    # -- rounds --------------------------------------------------------------------------------
    def preparation(self, run: str) -> Preparation:
        """Read what was agreed in a run."""
        data = Shelf(self.folder, run).note("preparation")
        if data is None:
            raise FederationError("the preparation of this run is not on this node yet")
        return Preparation.from_json(parse_json(data))

    def _trained(self, run: str) -> Node:
        if self._node is None or self._node[0] != run:
            self._node = run, self._trains(self.preparation(run), self.frame)
        return self._node[1]

    # -- after the last round ------------------------------------------------------------------
    def _model(self, down: Down, common: bytes, up: Up) -> Up:
        length = down.told.get("bytes")
        if type(length) is not int or length < 0:
            raise FederationError("sent a model without its length")
        check("weights_bytes", "bytes of a model", length)
        form = Form({"file": torch.empty(length, dtype=torch.uint8)})
        data = unpack(common, form)[1]["file"].numpy().tobytes()
        found = exported.decode(data, "the model that was sent")
        agreed = self.preparation(down.run)
        if found.preparation is None or found.preparation.to_json() != agreed.to_json():
            raise FederationError("sent a model of another preparation than this run's")
        place = Shelf(self.folder, down.run).keep_file("model.safetensors", data)
        log.info("client %d keeps the model: undrift predict %s ROWS.csv", self.client, place)
        return up


def _asked(down: Down) -> Question:
    try:
        return Question.from_json(down.told)
    except DataError as error:
        raise FederationError(f"sent no question: {error}") from error


def written(preparation: Preparation) -> bytes:
    """Write a preparation, always the same."""
    return json.dumps(preparation.to_json(), sort_keys=True).encode()
