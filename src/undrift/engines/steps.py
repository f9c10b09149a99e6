"""Ways to take the local steps of a chunk of clients."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.func import vmap

from undrift.core.algorithm import Algorithm, Broadcast, Client
from undrift.core.round import client_start, client_step
from undrift.core.task import Batch, Task
from undrift.core.tree import tree_map
from undrift.core.views import Carry
from undrift.data.spool import Rows


class Steps(Protocol):
    """One way to take the local steps of a chunk of clients."""

    def start(self, clients: Client) -> Carry:
        """Begin local training."""

    def room_for(self, rows: Tensor, x: Rows) -> Tensor | None:
        """Give memory for the examples of a step, if they may lie where earlier ones did."""

    def step(self, clients: Client, carry: Carry, batch: Batch, k: Tensor) -> Carry:
        """Take one local step."""


class GeneralSteps:
    """The core functions under vmap: any chain of rules, any local optimizer."""

    def __init__(self, task: Task, algo: Algorithm, broadcast: Broadcast) -> None:
        self.shared = (algo, task, broadcast)

    def start(self, clients: Client) -> Carry:
        """Begin local training."""
        begun: Carry = vmap(lambda c: client_start(*self.shared, c))(clients)
        return begun

    def room_for(self, rows: Tensor, x: Rows) -> Tensor | None:
        """Give none: rules may keep a batch."""
        return None

    def step(self, clients: Client, carry: Carry, batch: Batch, k: Tensor) -> Carry:
        """Take one local step."""

        def one(client: Client, carry: Carry, batch: Batch) -> Carry:
            return client_step(*self.shared, client, carry, batch, k)

        if len(carry.w) > 1:
            moved: Carry = vmap(one)(clients, carry, batch)
            return moved
        # a single client: the plain call is faster
        alone = one(*tree_map(lambda v: v[0], (clients, carry, batch)))
        return tree_map(lambda v: v[None], alone)
