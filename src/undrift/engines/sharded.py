"""The engine whose clients have several owners; it asks them, and adds up what they answer.

An owner has whole shards: their clients' examples and states, and an engine of its own.  Up comes
one sum per owner, whatever the size of the cohort.  When an owner is lost, another one takes its
place and the round is asked for again from its start; whoever has answered already answers the
same, so nobody counts twice.
"""

from __future__ import annotations

import logging
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from undrift.core.algorithm import (
    Algorithm,
    Broadcast,
    Client,
    Report,
    Row,
    Server,
    write_broadcast,
    write_personal,
)
from undrift.core.task import Task
from undrift.core.tree import EMPTY, Tree, leaves, tree_map
from undrift.data.checks import check_whole
from undrift.data.federation import Federation
from undrift.engines.crew import (
    Brief,
    Common,
    Crew,
    Failed,
    Hire,
    Lost,
    Parcel,
    Part,
    num_bytes,
    pack,
    raise_failed,
    unpack,
)
from undrift.engines.engine import Assignment, Engine, Outcome
from undrift.engines.member import Member
from undrift.engines.reference import Reference
from undrift.engines.shard_rows import FarRows, entries_of, written
from undrift.engines.shards import deal_shards, examples_of, interleaved, merged
from undrift.engines.sums import SHARDS
from undrift.errors import ConfigError, FederationError, unknown_name
from undrift.state.rows import NOWHERE
from undrift.state.store import ClientStateStore, Place

log = logging.getLogger("undrift")
T = TypeVar("T")

PATIENCE = 5  # times that a question is asked before it is given up


class Sent(NamedTuple):
    """Bytes between the engine and all owners together."""

    common: int = 0  # the model and the rules' notes, down to every owner
    own: int = 0  # ids, notes and records of single clients, down
    sums: int = 0  # one sum per owner, up
    rows: int = 0  # ids and rows of single clients, up

    def plus(self, other: Sent) -> Sent:
        """Add two exchanges."""
        return Sent(*(a + b for a, b in zip(self, other, strict=True)))


class Here:
    """Owners in this very process: the same answers without any cluster."""

    def __init__(
        self, briefs: Sequence[Callable[[], Brief]], device: torch.device | str = "cpu"
    ) -> None:
        self._device = device
        self.members: dict[int, Member] = {}
        for number, brief in enumerate(briefs):
            self.replace(number, brief())

    def ask(self, what: str, common: Any, own: Mapping[int, Any]) -> dict[int, Any]:
        """Ask one after the other."""
        gone = [k for k in own if k not in self.members]
        found = {
            k: self.members[k].ask(what, common, mine) for k, mine in own.items() if k not in gone
        }
        if gone:
            raise Lost(gone, "it is not there")
        return found

    def replace(self, owner: int, brief: Brief) -> None:
        """Put somebody else in the place of an owner."""
        self.members[owner] = Member(brief, self._device)

    def close(self) -> None:
        """Let everybody go."""
        for member in self.members.values():
            member.ask("close", None, None)
        self.members = {}


class Sharded(Engine):
    """Asks the owners of shards; `hire` makes the crew, by default in this process."""

    def __init__(
        self,
        task: Task,
        federation: Federation,
        store: ClientStateStore,
        *,
        actors: int = 2,
        hire: Hire = Here,
        **options: Any,
    ) -> None:
        super().__init__(task, federation, store)
        check_whole("actors", actors)
        check_options(options, type(self).__name__)
        if not isinstance(store.tier, FarRows):
            raise ConfigError(f"{type(self).__name__} needs the store that its make_store makes")
        self.rows = store.tier
        me = weakref.ref(self)  # no circle: owners are let go with the last reference
        self.rows.ask = lambda *question: _there(me)._ask_rows(*question)
        self.shards = deal_shards(federation.sizes, actors)
        if len(self.shards) < actors:
            used = f"{len(self.shards)} shards (client id mod {SHARDS}) hold examples"
            log.warning("%d actors instead of %d: %s", len(self.shards), actors, used)
        self._owner_of = {s: k for k, shards in enumerate(self.shards) for s in shards}
        self._options, self._run, self._questions = options, uuid.uuid4().hex, 0
        self._plans: dict[int, dict[str, Any]] = {}
        self._told: dict[str, Any] = {}  # what a new owner has to be told about its rows
        self.sent = Sent()  # since this engine was made
        self.replaced: list[int] = []  # owners that were lost, in order
        briefs = [lambda k=k: self._brief(k) for k in range(len(self.shards))]
        self.crew: Crew = hire(briefs)
        self.close = weakref.finalize(self, self.crew.close)

    @classmethod
    def make_store(
        cls,
        template: Tree,
        *,
        dtype: torch.dtype,
        device: torch.device,
        place: Place,
        path: Path | None,
    ) -> ClientStateStore:
        """Make a store that holds no row itself; with `place="file"`, `path` becomes a folder."""
        if place not in ("device", "host", "file"):
            raise ConfigError(f"state = {place!r} is not one of 'device', 'host', 'file'")
        if place == "file" and path is None:
            raise ConfigError("state = 'file' needs `state_path`, the folder that holds the rows")
        folder = Path(path).absolute() if place == "file" and path is not None else None
        return ClientStateStore(
            template, dtype=dtype, device=device, tier=lambda fresh: FarRows(fresh, folder)
        )

    def _brief(self, owner: int) -> Brief:
        plan, name = self._plans.get(owner), f"{self._run}-{owner}"
        examples = examples_of(self.federation.to("cpu"), self.shards[owner])
        template = tree_map(lambda v: v.cpu(), self.store.template)
        task, rows = self.task.to("cpu"), self.rows
        return Brief(
            owner, task, examples, template, rows.folder, name, rows.num_slots, self._options, plan
        )

    # -- what is asked before and between rounds -----------------------------------------------
    def plan(self) -> dict[str, Any]:
        """Give the choices that decide rounding, owner by owner."""
        return {"actors": len(self.shards), "each": {str(k): p for k, p in self._plans.items()}}

    def use_plan(self, plan: dict[str, Any]) -> None:
        """Repeat the choices of a recorded run, if it had as many owners."""
        if plan["actors"] != len(self.shards):
            was, now = plan["actors"], len(self.shards)
            log.warning("%d actors instead of %d: numbers agree, bits may not", now, was)
            return
        self._plans = {int(k): p for k, p in plan["each"].items()}
        if self._plans:
            self._redone(lambda: self._ask("use_plan", None, dict(self._plans)))

    def check(
        self, algo: Algorithm, server: Server, work: Assignment, first: Assignment | None = None
    ) -> None:
        """Refuse what cannot work; one client is tried here."""
        Reference(self.task, self.federation, self.store).check(algo, server, work, first)

    # -- the phases of a round -----------------------------------------------------------------
    def train(self, algo: Algorithm, server: Server, work: Assignment) -> Outcome:
        """Let owners train their parts of the cohort; states are staged, not yet visible."""
        key = self._new_key(work.round)
        return self._redone(lambda: self._train(key, algo, server, work))

    def after(self, algo: Algorithm, server: Server, work: Assignment) -> tuple[Tree, ...]:
        """Let clients look at the new model: one row per client and rule."""
        key = self._new_key(work.round)

        def look() -> tuple[Tree, ...]:
            places, _, common, own = self._question(key, algo, server, work)
            answers = self._ask("look", common, own)
            self._count(common, own, 0, answers)
            found = [unpack(answers[k], self.device) for k in places]
            rows: tuple[Tree, ...] = interleaved(found, list(places.values()))
            return rows

        return self._redone(look)

    def _train(
        self, key: tuple[str, int, int], algo: Algorithm, server: Server, work: Assignment
    ) -> Outcome:
        places, notes, common, own = self._question(key, algo, server, work)
        broadcast = write_broadcast(algo, server, len(work.ids), work.seed)
        probes: tuple[Tree, ...] = tuple(EMPTY for _ in algo.parts)
        if algo.uses("probe") and any(part.shares_probe for part in algo.parts):
            broadcast = broadcast._replace(cohort=self._mean_probe(broadcast, common, own))
            common = common._replace(broadcast=pack(broadcast))
            # as many as there are, for whoever counts what is sent; none of them is here
            count = len(work.ids)
            probes = tree_map(lambda v: v.expand(count, *v.shape), broadcast.cohort)
        answers = self._ask("train", common, own)
        parcels = {k: checked(k, answer, own[k]) for k, answer in answers.items()}
        sums = [num_bytes(parcel.sums) for parcel in answers.values()]
        self._count(common, own, sum(sums), answers)
        for parcel in parcels.values():
            ok = parcel.rows.accepted.tolist()
            ids = [i for i, good in zip(parcel.clients.tolist(), ok, strict=True) if good]
            entries = entries_of(parcel.slots, parcel.fingerprints)
            kept = [(i, e) for i, e in zip(ids, entries, strict=True) if e.place >= 0]
            self.store.stage_written([i for i, _ in kept], [e for _, e in kept])
        self._plans |= {k: parcel.plan for k, parcel in parcels.items()}
        total: Report = merged([parcels[k].sums for k in places])
        rows: Row = interleaved([parcels[k].rows for k in places], list(places.values()))
        report, rows = tree_map(lambda v: v.to(self.device), (total, rows))
        clients = Client(work.info, notes, EMPTY, probes, probes[:-1], rows.steps)
        return Outcome(report, rows, broadcast, clients)

    def _mean_probe(
        self, broadcast: Broadcast, common: Common, own: Mapping[int, Part]
    ) -> tuple[Tree, ...]:
        """Average what the cohort sees in the model, by size."""
        answers = self._ask("probe", common, own)
        self._count(common, own, sum(map(num_bytes, answers.values())), {})
        found = [unpack(answer).sums for answer in answers.values()]
        dtype, means = broadcast.w.dtype, []
        for each in zip(*found, strict=True):
            sums = [one for one, _ in each]
            if not leaves(sums[0]):
                means.append(EMPTY)
                continue
            weight = torch.stack([size for _, size in each]).sum()
            mean = tree_map(lambda v, n=weight: (v / n).to(self.device, dtype), merged(sums))
            means.append(mean)
        return tuple(means)

    def _question(
        self, key: tuple[str, int, int], algo: Algorithm, server: Server, work: Assignment
    ) -> tuple[dict[int, Tensor], tuple[Tree, ...], Common, dict[int, Part]]:
        """Write what goes to everybody and to each owner; tell whose clients stand where."""
        broadcast = write_broadcast(algo, server, len(work.ids), work.seed)
        notes = torch.func.vmap(lambda info: write_personal(algo, server, info))(work.info)
        plan = work.plan if not work.order.shape[1] else None
        common = Common(key, algo, pack(broadcast), plan, work.seed)
        places = self._places(work.ids)
        own = {k: self._part(work, notes, at) for k, at in places.items()}
        return places, notes, common, own

    def _places(self, ids: Sequence[int]) -> dict[int, Tensor]:
        """Tell where in a list of clients those of each owner stand."""
        found: dict[int, list[int]] = {}
        for c, client in enumerate(ids):
            found.setdefault(self._owner_of.get(client % SHARDS, 0), []).append(c)
        return {k: torch.tensor(found[k]) for k in sorted(found)}

    def _part(self, work: Assignment, notes: tuple[Tree, ...], at: Tensor) -> Part:
        part, visible = work.part(at), self.store.visible
        there = at.to(self.device)
        mine = tree_map(lambda v: v[there], notes)
        entries = [visible.get(client, NOWHERE) for client in part.ids]
        slots, marks = written(entries).values()
        told = Part(part.clients, part.info, mine, part.order, part.steps, part.sizes, slots, marks)
        packed: Part = pack(told)
        return packed

    # -- questions -----------------------------------------------------------------------------
    def _new_key(self, round: int) -> tuple[str, int, int]:
        self._questions += 1
        return self._run, round, self._questions

    def _ask(self, what: str, common: Any, own: Mapping[int, Any]) -> dict[int, Any]:
        answers = self.crew.ask(what, common, own)
        for owner, answer in answers.items():
            if isinstance(answer, Failed):
                raise_failed(owner, answer)
        return answers

    def _redone(self, question: Callable[[], T]) -> T:
        """Ask; as long as owners are lost on the way, replace them and ask again."""
        for _ in range(PATIENCE):
            try:
                return question()
            except Lost as lost:  # nothing is staged before everybody has answered
                reason = str(lost)
                log.warning("%s; another takes its place and the question is asked again", lost)
                self._replace(lost.owners)
        raise FederationError(
            f"{reason}, {PATIENCE} times in a row: is there enough memory for so many actors? "
            "The trainer is as it was before this round"
        )

    def _replace(self, owners: Sequence[int]) -> None:
        try:
            for owner in owners:
                self.replaced.append(owner)
                self.crew.replace(owner, self._brief(owner))
            for what, common in self._told.items():
                self._ask(what, common, {k: {} for k in owners})
        except Lost as lost:  # the next question finds out
            log.warning("%s, again", lost)

    def _ask_rows(
        self, what: str, ids: list[int], values: Mapping[str, Any]
    ) -> list[tuple[Tensor, Any]]:
        """Ask the owners of these clients about their rows; without ids, ask everybody."""
        common = {n: pack(v) for n, v in values.items() if n not in ("rows", *ENTRIES)}
        if what in ("claim", "retain", "template"):
            self._told[what] = common
        own: dict[int, Any] = {k: {} for k in range(len(self.shards))}
        places = self._places(ids)
        if ids:
            numbers = torch.tensor(ids, dtype=torch.int64)
            each = {n: v for n, v in values.items() if n in ("rows", *ENTRIES)}
            own = {
                k: pack({"ids": numbers[at], **{n: v[at] for n, v in each.items()}})
                for k, at in places.items()
            }
        answers = self._redone(lambda: self._ask(what, common, own))
        nowhere = torch.zeros(0, dtype=torch.int64)
        return [(places.get(k, nowhere), unpack(answer)) for k, answer in answers.items()]

    def _count(self, common: Common, own: Mapping[int, Part], sums: int, answers: Any) -> None:
        rows = sum(num_bytes(answer) for answer in answers.values()) if answers else 0
        down = num_bytes(common.broadcast) * len(own), sum(map(num_bytes, own.values()))
        self.sent = self.sent.plus(Sent(*down, sums, rows - sums if answers else 0))


ENTRIES = ("slots", "fingerprints")
OPTIONS = ["chunk", "workers", "in_place", "graph", "compiled", "precision"]  # of an owner's engine


def check_options(options: Mapping[str, Any], place: str) -> None:
    """Refuse an option that no owner's engine has, before anybody is hired."""
    for name in options:
        if name not in OPTIONS:
            raise unknown_name("option", name, ["actors", *OPTIONS], place)


def _there(engine: weakref.ref[Sharded]) -> Sharded:
    found = engine()
    assert found is not None, "a trainer holds its engine as long as its store"
    return found


def checked(owner: int, answer: Any, asked: Part) -> Parcel:
    """Unpack a parcel that is about the clients that were asked, and adds up."""
    parcel: Parcel = unpack(answer)
    count = int(parcel.rows.accepted.sum())
    same = torch.equal(parcel.clients, torch.as_tensor(asked.clients))
    counted = float(parcel.sums.high.count) == count == len(parcel.slots)
    if not (same and counted):  # a sum may be infinite: then the round is done without the guilty
        raise FederationError(
            f"actor {owner} sent a sum that is not one of the {len(asked.clients)} clients that it "
            f"was asked for ({count} accepted): run the experiment again with one actor to see why"
        )
    return parcel
