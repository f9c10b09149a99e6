"""What acts between rounds by what it has seen: smaller local steps where nothing improves."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from undrift.core.rule import ClientView, Rule, ServerView, Sizes
from undrift.core.task import Vec
from undrift.core.tree import Tree, number, record
from undrift.rules.adabest import Plateau, watched


@record
class PlateauSteps(Rule):
    """Scales local steps by 0.9 when ||update|| has not fallen by 1 % for `patience` rounds.

    ||update|| is what reaches this rule: put it before rules that change it.  After a fall it waits
    as long again.  The plateau is the server's state, so that a resumed run goes on with it.
    """

    may_be_infinite: ClassVar[tuple[str, ...]] = ("best",)  # before anything is seen

    patience: float = number(default=10.0, low=1)

    @property
    def linear(self) -> bool:
        return False  # what divides by K lr would have to know the factor

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        zero = w.new_zeros(())
        return Plateau(zero + math.inf, zero, zero, zero + 1)

    def broadcast(self, state: Tree) -> Tree:
        return state.factor

    def direction(self, g: Vec, view: ClientView) -> Vec:
        return view.broadcast * g

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        return update, watched(state, torch.linalg.vector_norm(update), self.patience)
