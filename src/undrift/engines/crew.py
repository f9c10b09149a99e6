"""Owners of shards as somebody who is asked and answers: the only thing an engine knows of them.

What travels is trees of arrays; `pack` and `unpack` are the way in and out.  A question has a part
for everybody and a part for each; the same question asked twice has the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from undrift import errors
from undrift.core.algorithm import Algorithm, Broadcast
from undrift.core.rule import ClientInfo
from undrift.core.task import Task
from undrift.core.tree import Tree, leaves, tree_map
from undrift.data.federation import Federation
from undrift.data.work import LocalWork
from undrift.engines.shards import Sums
from undrift.errors import FederationError, UndriftError


class Brief(NamedTuple):
    """What an owner is told once."""

    number: int
    task: Task
    federation: Federation  # its own clients' examples, nobody else's
    template: Tree  # the state of a client that was never seen
    folder: Path | None  # of the rows that checkpoints refer to; None: a place of its own
    name: str  # of that place
    num_slots: int
    options: Mapping[str, Any]  # of its engine
    plan: Mapping[str, Any] | None  # choices to repeat


class Common(NamedTuple):
    """The part of a question that goes to everybody."""

    key: tuple[str, int, int]  # run, round, number of the question: equal keys, equal answers
    algo: Algorithm
    broadcast: Broadcast
    plan: LocalWork | None
    seed: int


class Part(NamedTuple):
    """The part of a question that is about the clients of one owner."""

    clients: Tensor  # [C] ids in summing order
    info: ClientInfo
    notes: tuple[Tree, ...]
    order: Tensor  # [C, K, B], without steps where the owner makes it
    steps: Tensor
    sizes: Tensor
    slots: Tensor  # which version of its row counts; -1: it has none
    fingerprints: Tensor


class Probed(NamedTuple):
    """What an owner's clients see in the model they received: sums by size, and of the sizes."""

    sums: tuple[tuple[Sums, Tensor], ...]  # one per part of the algorithm; () where nothing is read


class Parcel(NamedTuple):
    """What an owner's clients send up: one sum for all of them, and what is small."""

    sums: Sums  # of the reports of those that were accepted
    clients: Tensor  # [C] who was asked; `rows.accepted` tells who was refused
    rows: Tree  # leading axis C
    slots: Tensor  # where the new states of those that were accepted are
    fingerprints: Tensor
    plan: dict[str, Any]  # the choices that decided rounding


class Lost(Exception):
    """Some owners are gone, with or without an answer."""

    def __init__(self, owners: Sequence[int], why: str) -> None:
        super().__init__(f"{_listed(owners)}: {why}")
        self.owners = list(owners)


def _listed(owners: Sequence[int]) -> str:
    return f"actor{'s' if len(owners) > 1 else ''} {', '.join(map(str, owners))}"


class Crew(Protocol):
    """The owners of all shards."""

    def ask(self, what: str, common: Any, own: Mapping[int, Any]) -> dict[int, Any]:
        """Ask owners, all at once; raises `Lost` if some are gone, once the others are done."""

    def replace(self, owner: int, brief: Brief) -> None:
        """Put somebody else in the place of an owner."""

    def close(self) -> None:
        """Let everybody go."""


Hire = Callable[[Sequence[Callable[[], Brief]]], Crew]


def pack(tree: Any) -> Any:
    """Make arrays of the tensors of a tree."""
    return tree_map(lambda v: v.detach().cpu().numpy() if isinstance(v, Tensor) else v, tree)


def unpack(tree: Any, device: torch.device | None = None) -> Any:
    """Undo `pack`: tensors that nobody else writes, on a device."""

    def made(value: Any) -> Any:
        if not isinstance(value, np.ndarray | np.generic):
            return value
        return torch.from_numpy(np.array(value)).to(device or "cpu")

    return tree_map(made, tree)


def num_bytes(tree: Any) -> int:
    """Count the bytes of the arrays of a packed tree."""
    return sum(v.nbytes for v in leaves(tree) if isinstance(v, np.ndarray | np.generic))


class Failed(NamedTuple):
    """An answer that is an error: its kind and its words."""

    kind: str
    words: str


def failed(error: Exception) -> Failed:
    """Write an error down; some kinds cannot travel as they are."""
    if isinstance(error, UndriftError):
        return Failed(type(error).__name__, str(error))
    return Failed("", f"{type(error).__name__}: {error}")


def raise_failed(owner: int, answer: Failed) -> None:
    """Raise an owner's error here, as what it was there."""
    kind = getattr(errors, answer.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, UndriftError)):
        raise FederationError(f"actor {owner} failed: {answer.words}")
    made = kind.__new__(kind)
    Exception.__init__(made, answer.words)
    raise made
