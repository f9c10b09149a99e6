"""A node: one client with its own examples, its state on its own disk.

`answer` is a function of what it is asked and of what lies on the disk, so that a process may be
started for every message, killed at any moment, and asked twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from undrift.core.algorithm import Algorithm, Broadcast, Client, init_client
from undrift.core.noise import Secret, hidden, row_noise
from undrift.core.rule import ClientInfo, Sizes
from undrift.core.task import Task
from undrift.core.tree import EMPTY, Tree, tree_map
from undrift.data import Federation, LocalWork
from undrift.engines.engine import Assignment
from undrift.errors import FederationError
from undrift.federated.alone import (
    Alone,
    Example,
    Own,
    Rehearsal,
    client_of,
    shared_only,
    without_telling,
)
from undrift.federated.answering import Answering
from undrift.federated.letters import FRESH, Down, DownOwn, Up, words
from undrift.federated.shelf import Shelf, mark_of
from undrift.federated.wire import Form, pack, unpack

log = logging.getLogger("undrift")


class Asked:
    """One request, read and checked."""

    def __init__(self, node: Node, down: Down, own_words: DownOwn, common: bytes, own: bytes):
        self.down, self.words = down, own_words
        sizes = Sizes(down.clients, 2, down.features)
        self.rehearsed = forms = Rehearsal(node.algorithm, node.task, node.example, sizes)
        self.sizes = sizes._replace(examples=node.size)
        self.broadcast: Broadcast = unpack(common, forms.down(down.phase))[1]
        self.own: Own = unpack(own, forms.down_own())[1]
        w, _ = node.task.initial()
        self.fresh = init_client(node.algorithm, w, self.sizes)
        self.mark = mark_of(common + own)
        self.shelf = Shelf(node.folder, down.run)
        nothing = tuple(EMPTY for _ in node.algorithm.parts)
        self.plain = self.broadcast._replace(cohort=nothing)
        self.seen = mark_of(pack(self.plain, {"base": self.words.base}))

    def state(self) -> Tree:
        """Give the client's state, as the server's last counted report left it."""
        if self.words.base == FRESH:
            return self.fresh
        return self.shelf.state(self.words.base, Form(self.fresh))


class Node(Answering):
    """One client of a federation: its examples, its folder, and the experiment it takes part in."""

    def __init__(
        self,
        client: int,
        task: Task,
        federation: Federation,
        algorithm: Algorithm,
        work: LocalWork,
        folder: Path | str,
        plan: str = "",
    ) -> None:
        super().__init__(client, plan)
        self.algorithm, self.work = algorithm, work
        # its own copy: a module that another thread is differentiating cannot be used
        self.task, self.folder = task.clone(), Path(folder)
        self.engine = Alone(self.task, federation.to(dtype=task.dtype))
        self.example = Example.of(self.engine.federation)
        self.task.check(self.engine.federation.x[:2], self.engine.federation.y[:2])

    @property
    def size(self) -> int:
        """Count the examples that this client will ever use."""
        return int(self.engine.federation.sizes[0])

    def made(self, down: Down, mine: DownOwn, common: bytes, own: bytes, up: Up) -> bytes:
        """Answer a phase of a round; what was answered before is given again."""
        phase = self._phase(mine.phase)
        asked = Asked(self, down, mine, common, own)
        known = asked.shelf.answer(mine.phase, asked.mark)
        if known is not None:
            return known
        made = phase(asked, up)
        asked.shelf.keep_answer(mine.phase, asked.mark, made)
        return made

    def _phase(self, name: str) -> Callable[[Asked, Up], bytes]:
        known = {"probe": self._probe, "train": self._train, "look": self._look}
        if name not in known:
            raise FederationError(f"{name!r} is asked of nodes with a table; this one has none")
        return known[name]

    # -- phases ------------------------------------------------------------------------------
    def _probe(self, asked: Asked, up: Up) -> bytes:
        client, work = self._client(asked)
        probes = self.engine.probed(self.algorithm, asked.broadcast, client, work)
        asked.shelf.keep_probe(asked.seen, probes)
        return pack(shared_only(self.algorithm, probes), words(up))

    def _look(self, asked: Asked, up: Up) -> bytes:
        client, work = self._client(asked)
        seen = self.engine.looked(self.algorithm, asked.broadcast, client, work)
        return pack(self._hidden(asked, "after_round", seen), words(up))

    def _train(self, asked: Asked, up: Up) -> bytes:
        client, work = self._client(asked)
        if self.algorithm.uses("probe"):
            client = client._replace(probe=self._own_probe(asked, client, work))
        state, report, row = self.engine.trained(self.algorithm, asked.broadcast, client, work)
        row = row._replace(notes=self._hidden(asked, "row", row.notes))
        made = pack((report, without_telling(self.algorithm, row)), words(up))
        # the state first: an answer that was given must never be without it
        asked.shelf.keep_state(asked.words.round, mark_of(made), state, asked.words.base)
        return made

    def _hidden(self, asked: Asked, hook: str, rows: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """Add noise to rows before they leave, of a key that is drawn for this answer and dropped.

        A server that asks again gets the answer that was kept; if it asks about anything else, the
        noise is another one, so that the difference of two answers tells nothing more.
        """
        algo, who, device = self.algorithm, [self.client], self.engine.device
        noise = row_noise(algo, asked.sizes, Secret.drawn(), hook, asked.words.round, who, device)
        found = hidden(algo, tree_map(lambda v: v[None], rows), noise)
        alone: tuple[Tree, ...] = tree_map(lambda v: v[0], found)
        return alone

    def _own_probe(self, asked: Asked, client: Client, work: Assignment) -> Tree:
        form = Form(tree_map(lambda v: v[0], asked.rehearsed.client.probe))
        probes = asked.shelf.probe(asked.seen, form)
        if probes is None:
            probes = self.engine.probed(self.algorithm, asked.plain, client, work)
        return tree_map(lambda v: v[None], probes)

    # -- what is asked -----------------------------------------------------------------------
    def _client(self, asked: Asked) -> tuple[Client, Assignment]:
        """Put together what the client has and what it is to do, checked against what it holds."""
        info, round = asked.own.info, asked.words.round
        held = self.engine.federation.available(round)
        if int(info.size) != int(held[0]) or int(info.id) != self.client:
            raise FederationError(
                f"the server's record says client {int(info.id)} with {int(info.size)} examples; "
                f"this is client {self.client} with {int(held[0])}: begin a new run"
            )
        if int(asked.broadcast.round) not in (round, round + 1):
            raise FederationError(f"asked in round {round} about {int(asked.broadcast.round)}")
        work = self._assignment(asked, held)
        if int(asked.own.steps) not in (0, int(work.steps[0])):
            raise FederationError(
                f"asked for {int(asked.own.steps)} steps, the experiment says {int(work.steps[0])}"
            )
        own = asked.own._replace(steps=work.steps[0] * (asked.own.steps > 0))
        return client_of(self.algorithm, own, asked.state()), work

    def _assignment(self, asked: Asked, held: torch.Tensor) -> Assignment:
        clients = torch.tensor([self.client], dtype=torch.int64)
        seed, round = int(asked.broadcast.seed), asked.words.round
        order, steps = self.work.plan(seed, round, clients, held, self.engine.device)
        infos = ClientInfo(*(v[None] for v in asked.own.info))
        return Assignment(clients, infos, order, steps, held, seed, round)
