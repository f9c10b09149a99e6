"""Checks for engines, and the algorithms that find out one that forgets something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from undrift.core.algorithm import Algorithm
from undrift.core.local import HeavyBall, Sgd
from undrift.core.rule import ClientInfo, ClientView, Mean, Rule, ServerView, Sizes
from undrift.core.task import Output, Vec, masked_mean
from undrift.core.tree import Tree, record
from undrift.engines import ENGINES, Engine
from undrift.rules import Adaptive, Nova, Prox, Scaffold, ScaffoldGradient, ScaffoldM
from undrift.testing.compare import TOLERANCE, difference
from undrift.testing.errors import EngineError
from undrift.testing.world import run, tiny_world


def check_engine(engine: str | type[Engine], *, rounds: int = 3, **options: Any) -> None:
    """Raise `EngineError` unless an engine agrees with the reference engine to 1e-12.

    >>> check_engine("vectorised", rounds=1, chunk=2)
    """
    world = tiny_world()
    with _registered(engine) as name:
        for label, algorithm in standard_algorithms().items():
            wanted = run(world, algorithm, rounds, engine="reference")
            try:
                found = run(world, algorithm, rounds, engine=name, **options)
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                raise EngineError(f"engine {name!r} fails on {label}: {told}") from error
            where = difference(found, wanted, TOLERANCE)
            if where:
                raise EngineError(f"engine {name!r}, {label}: {where} of the reference engine")


def standard_algorithms() -> dict[str, Algorithm]:
    """List algorithms that together use every hook and every kind of part."""
    sgd, ball = Sgd(lr=0.1, weight_decay=1e-3), HeavyBall(lr=0.05, momentum=0.5)
    return {
        "fedavg": Algorithm(local=Sgd(lr=0.1)),
        "prox, clipped": Algorithm((Prox(0.1),), Sgd(lr=0.1, clip=0.5)),
        "scaffold II": Algorithm((Scaffold(),), sgd, Mean(by_size=False)),
        "scaffold I, yogi": Algorithm((ScaffoldGradient(),), sgd, server=Adaptive("yogi")),
        "scaffold/m": Algorithm((ScaffoldM(),), ball),
        "nova": Algorithm((Prox(0.1),), ball, Nova()),
        "every hook": Algorithm((Prox(0.1), EveryHook()), ball),
    }


@contextmanager
def _registered(engine: str | type[Engine]) -> Iterator[str]:
    """Give an engine class a name for a while."""
    if isinstance(engine, str):
        yield engine
        return
    name = f"{engine.__module__}.{engine.__qualname__}"
    ENGINES[name] = engine
    try:
        yield name
    finally:
        del ENGINES[name]


@record
class EveryHook(Rule):
    """Use every hook once, so that an engine that forgets one is found out."""

    shares_probe = True

    strength: float = 0.05

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        seen = w.new_zeros(sizes.examples)
        return {"h": torch.zeros_like(w), "begun": w.new_zeros(()), "seen": seen}

    def probe(self, view: ClientView) -> Tree:
        return view.grad_at(view.w0)

    def begin(self, view: ClientView) -> Tree:
        at = torch.arange(len(view.mine["seen"]), device=view.w.device)
        here = (at[:, None] == view.batch.index).any(1)
        count = view.batch.mask.sum().to(view.w.dtype)
        begun = view.mine["begun"] + count
        return {**view.mine, "begun": begun, "seen": view.mine["seen"] + here.to(view.w.dtype)}

    def penalty(self, out: Output, view: ClientView) -> Tensor | float:
        mean = masked_mean(out.value.flatten(1), view.batch.mask)
        pull: Tensor = self.strength * (mean - view.personal).square().sum()
        return pull

    def direction(self, g: Vec, view: ClientView) -> Vec:
        extra: Vec = view.cohort - view.probe + view.mine["h"] + view.broadcast
        return g + self.strength * extra

    def review(self, view: ClientView) -> Tree:
        squares = view.output_at(view.w).value.flatten(1).square().mean(1)
        return masked_mean(squares, view.batch.mask)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, {**view.mine, "h": 0.5 * view.mine["h"] + delta}, view.review

    def row(self, delta: Vec, view: ClientView) -> Tree:
        return view.mine["seen"].sum()

    def after_round(self, view: ClientView) -> Tree:
        means = view.output_at(view.w).value.flatten(1).mean(1, keepdim=True)
        return masked_mean(means, view.batch.mask)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        table = w.new_zeros(sizes.clients, 1)
        return {"m": torch.zeros_like(w), "table": table, "sum": w.new_zeros(())}

    def resize(self, state: Tree, before: int, after: int, joined: Tree, left: Tree) -> Tree:
        moved = joined["h"].sum(0) - left["h"].sum(0)
        return {**state, "m": state["m"] * (before / after) + moved / after}

    def broadcast(self, state: Tree) -> Tree:
        return state["m"]

    def personal(self, state: Tree, client: ClientInfo) -> Tree:
        return state["table"][client.id]

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        rows = torch.where(view.accepted, view.rows, 0.0).sum()
        m = 0.5 * state["m"] + update
        return update, {**state, "m": m, "sum": state["sum"] + view.upload + rows}

    def server_after(self, state: Tree, view: ServerView) -> Tree:
        new = torch.where(view.accepted[:, None], view.rows, state["table"][view.ids])
        return {**state, "table": state["table"].index_copy(0, view.ids, new)}
