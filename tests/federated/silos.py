"""Nodes within this process, each with its own examples and its own folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from undrift.core.algorithm import Algorithm
from undrift.core.tree import named_leaves
from undrift.data import Federation
from undrift.federated.alone import Example
from undrift.federated.exchange import Patience, RefusalLog
from undrift.federated.grid import LocalGrid
from undrift.federated.node import Node
from undrift.federated.server import Coordinator, Members, new_run
from undrift.testing.world import World

FIRST = 1000  # node numbers are not client numbers


def own_part(world: World, client: int) -> Federation:
    """Give a client's examples alone; nobody else's are within reach."""
    return Federation.of([world.federation.client(client)], arrival=world.federation.arrival)


def make_node(world: World, algorithm: Algorithm, client: int, folder: Path) -> Node:
    part = own_part(world, client)
    return Node(client, world.task, part, algorithm, world.work, folder / f"client-{client}")


class Silos:
    """A federation of nodes and the wire between them."""

    def __init__(self, world: World, algorithm: Algorithm, folder: Path) -> None:
        self.world, self.algorithm, self.folder = world, algorithm, folder
        count = world.federation.num_clients
        self.nodes = {i: make_node(world, algorithm, i, folder) for i in range(count)}
        self.run = new_run()
        self.grid = LocalGrid(
            {FIRST + i: n.answer for i, n in self.nodes.items()}, {FIRST + i: i for i in self.nodes}
        )
        self.refusals = RefusalLog(folder / "refused.jsonl")
        self.members = Members(
            {i: FIRST + i for i in self.nodes}, {i: n.size for i, n in self.nodes.items()}, count
        )

    def restart(self, client: int) -> None:
        """A new process in the place of an old one: only its folder is left."""
        node = make_node(self.world, self.algorithm, client, self.folder)
        self.nodes[client] = node
        self.grid.handlers[FIRST + client] = node.answer

    def server(self, **more: Any) -> Coordinator:
        world = self.world
        options: dict[str, Any] = {"patience": Patience(seconds=30), "grid": self.grid, **more}
        return Coordinator(
            world.task,
            self.algorithm,
            options.pop("grid"),
            self.members,
            Example.of(own_part(world, 0)),
            run=self.run,
            work=world.work,
            sampler=world.sampler,
            arrival=world.federation.arrival,
            refusals=self.refusals,
            **options,
        )


def server_numbers(trainer: Any) -> dict[str, torch.Tensor]:
    return named_leaves(trainer.server)


def distance(found: Any, wanted: Any) -> float:
    """The largest difference of any number of two servers."""
    ours, theirs = server_numbers(found), server_numbers(wanted)
    assert ours.keys() == theirs.keys()
    gaps = [(ours[n] - theirs[n]).abs().max() for n in theirs if theirs[n].numel()]
    return float(torch.stack([g.double() for g in gaps]).max())
