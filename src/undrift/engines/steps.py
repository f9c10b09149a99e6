"""Ways to take the local steps of a chunk of clients."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from undrift.core.algorithm import Client
from undrift.core.task import Batch
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
