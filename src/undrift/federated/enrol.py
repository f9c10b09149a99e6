"""Who takes part: nodes that are there, whose key or word says which client they are."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import NamedTuple

from undrift.core.tree import EMPTY
from undrift.errors import CheckpointError, ConfigError, FederationError, ReportRefused
from undrift.federated.checks import Expected, Gate, Limits
from undrift.federated.exchange import Refusal
from undrift.federated.grid import Ask, Grid
from undrift.federated.letters import ANYBODY, FRESH, Down, DownOwn, named, words
from undrift.federated.server import Members
from undrift.federated.wire import Form, pack
from undrift.guarded.text import read_json
from undrift.state import disk

log = logging.getLogger("undrift")
PAUSE = 1.0  # seconds between two looks at who is there


class Door(NamedTuple):
    """Who may come in, and how long the door stands open."""

    clients: int  # ids in use
    minimum: int  # without which a run does not begin
    seconds: float = 300.0  # for all of them to come
    wanted: frozenset[int] = frozenset()  # nobody else is waited for; empty: all of them
    trust: bool = False  # take a node's own word for which client it is: a try-out
    names: tuple[str, ...] = ()  # of the clients, where they have any


def enrol(
    grid: Grid, door: Door, run: str, plan: str, limits: Limits, refusals: Refusal
) -> Members:
    """Ask who comes which client it is and what it holds, until all are there or time is up."""
    found, nodes, known = dict[int, int](), dict[int, int](), set[int]()
    refusals = Once(refusals)  # who is refused is asked again every second
    end = time.monotonic() + door.seconds
    while True:
        here = {n: c for n, c in grid.nodes().items() if n not in known}
        for node, client, size in _greeted(grid, door, here, run, plan, limits, refusals):
            known.add(node)
            if client in nodes:
                told = f"{named(door.names, client)} is node {nodes[client]} already"
                refusals(ReportRefused(client, 0, "hello", told), node)
                continue
            nodes[client], found[client] = node, size
            log.info("%s is here with %d examples", named(door.names, client), size)
        waited_for = door.wanted or range(door.clients)
        if found.keys() >= set(waited_for) or time.monotonic() > end:
            break
        time.sleep(PAUSE)
    if len(found) < door.minimum:
        raise FederationError(
            f"{len(found)} of {door.clients} clients came within {door.seconds:g} s, at least "
            f"{door.minimum} are needed: start their nodes, and look into refused.jsonl"
        )
    return Members(nodes, found, door.clients)


class Once:
    """Hands a refusal on, unless the same was said of the same node before."""

    def __init__(self, refusals: Refusal) -> None:
        self._refusals, self._told = refusals, set[tuple[int | None, str]]()

    def __call__(self, error: ReportRefused, node: int | None) -> None:
        """Hand it on the first time."""
        if (node, str(error)) not in self._told:
            self._told.add((node, str(error)))
            self._refusals(error, node)


def _greeted(
    grid: Grid,
    door: Door,
    here: dict[int, int | None],
    run: str,
    plan: str,
    limits: Limits,
    refusals: Refusal,
) -> list[tuple[int, int, int]]:
    """Greet nodes; give (node, client, examples) of those that answer as they should."""
    asked = {n: Expected(ANYBODY if c is None else c) for n, c in here.items()}
    if not door.trust:
        asked = {n: e for n, e in asked.items() if e.client != ANYBODY}
    gate = Gate("hello", run, 0, Form(EMPTY), asked, limits)
    common = pack(EMPTY, words(Down("hello", run, 0, plan, door.clients, 0)))
    asks = [
        Ask(n, "hello", common, pack(EMPTY, words(DownOwn("hello", run, 0, e.client, FRESH))))
        for n, e in asked.items()
    ]
    found = []
    for answer in grid.exchange(asks, min(60.0, door.seconds)) if asks else ():
        try:
            one = gate.admit(answer)
            if not 0 <= one.client < door.clients:
                raise gate.refused(one.client, f"clients are numbered 0 to {door.clients - 1}")
        except ReportRefused as error:
            refusals(error, answer.node)
        else:
            found.append((answer.node, one.client, one.words.size))
    return found


# ---------------------------------------------------------------------------------- on the disk
class Record(NamedTuple):
    """What the server keeps of a run's members, beside its checkpoints."""

    run: str
    members: Members


def write_record(path: Path, record: Record) -> None:
    """Write who takes part, before the first round."""
    sizes = {str(c): n for c, n in sorted(record.members.sizes.items())}
    nodes = {str(c): str(n) for c, n in sorted(record.members.nodes.items())}
    told = {"run": record.run, "clients": record.members.clients, "sizes": sizes, "nodes": nodes}
    disk.make_directory(path.parent)
    disk.write_atomically(path, [(json.dumps(told, indent=1) + "\n").encode()])


def read_record(path: Path) -> Record | None:
    """Read who takes part in a run that goes on; None before it has begun."""
    if not path.is_file():
        return None
    try:
        told = read_json(path)
        sizes = {int(c): int(n) for c, n in told["sizes"].items()}
        nodes = {int(c): int(n) for c, n in told["nodes"].items()}
        return Record(str(told["run"]), Members(nodes, sizes, int(told["clients"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): restore it from a copy") from error


def again(grid: Grid, door: Door, record: Record, plan: str, refusals: Refusal) -> Members:
    """Find the nodes of a run that goes on; whoever is not there yet is left out until it is."""
    before = record.members
    if before.clients != door.clients:
        raise ConfigError(
            f"this run was begun with {before.clients} clients, not {door.clients}: "
            "choose another folder"
        )
    limits = Limits()
    door = door._replace(minimum=1, wanted=frozenset(before.sizes))
    now = enrol(grid, door, record.run, plan, limits, refusals)
    nodes = dict(before.nodes)
    for client, node in now.nodes.items():
        if client not in before.sizes:
            told = "it was not there when the run began"
            refusals(ReportRefused(client, 0, "hello", told), node)
        elif now.sizes[client] != before.sizes[client]:
            told = f"{now.sizes[client]} examples, {before.sizes[client]} when the run began"
            refusals(ReportRefused(client, 0, "hello", told), node)
        else:
            nodes[client] = node
    return Members(nodes, before.sizes, before.clients)
