"""The server's half of a round, as pure functions.  `round.py` has the clients' half."""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.core import tree
from undrift.core.algorithm import Algorithm, Report, Row, Server
from undrift.core.rule import Rule, ServerView
from undrift.core.task import Buffers
from undrift.core.tree import EMPTY, Tree
from undrift.errors import ServerError, UndriftError


def server_round(
    algo: Algorithm,
    server: Server,
    report: Report,
    rows: Row,
    ids: Tensor,
    population: int | Tensor,
    everyone: Tree = EMPTY,
) -> Server:
    """Turn the SUM of the cohort's reports into the next server; `rows` has a leading axis C.

    `everyone` is what the record says of all clients, where a rule reads it.
    """
    report = tree.tree_map(lambda v: v.to(server.w.dtype) if v.is_floating_point() else v, report)
    update = algo.aggregate.finish(report.total)
    view = _server_view(algo, server, report, rows, ids, population)._replace(everyone=everyone)
    states = []
    for i, (rule, state) in enumerate(zip(algo.chain, server.states, strict=True)):
        own = view._replace(upload=_at(report.uploads, i), rows=_at(rows.notes, i))
        try:
            update, state = rule.server(update, state, own)
        except Exception as error:
            raise _server_failed(rule, error) from error
        states.append(state)
    buffers = _next_buffers(server.buffers, report, rows)
    moved = Server(server.w - update, buffers, tuple(states), server.round + 1)
    # nobody reported: the model stays, the round counts
    return tree.where(report.count > 0, moved, server._replace(round=server.round + 1))


def _server_failed(rule: Rule, error: Exception) -> UndriftError:
    if isinstance(error, UndriftError):
        return error
    what = f"stage 'server', rule {type(rule).__name__!r}"
    return ServerError(f"{what}: {type(error).__name__}: {error}")


def server_after(
    algo: Algorithm,
    server: Server,
    measured: tuple[Tree, ...],
    ids: Tensor,
    accepted: Tensor,
    population: int,
    only: frozenset[int],
) -> Server:
    """Let the rules at places `only` take in what `after_round` measured, leading axis C."""
    zero = torch.zeros_like(server.round)
    view = ServerView(
        server.w, EMPTY, EMPTY, ids, accepted, accepted.sum(), zero + population, zero, zero,
        server.round,
    )  # fmt: skip
    states = [
        rule.server_after(state, view._replace(rows=measured[i])) if i in only else state
        for i, (rule, state) in enumerate(zip(algo.chain, server.states, strict=True))
    ]
    return server._replace(states=tuple(states))


def _server_view(
    algo: Algorithm,
    server: Server,
    report: Report,
    rows: Row,
    ids: Tensor,
    population: int | Tensor,
) -> ServerView:
    zero = torch.zeros_like(server.round)
    lr = algo.local.lr_at(server.round, zero)
    path = report.path / report.count.clamp(min=1)
    return ServerView(
        server.w,
        EMPTY,
        EMPTY,
        ids,
        rows.accepted,
        report.count,
        zero + population,
        path,
        lr,
        server.round,
    )


def _next_buffers(old: Buffers, report: Report, rows: Row) -> Buffers:
    """Running statistics by the weights of the parameters; of counters the largest (C6)."""
    weighted, weight = report.buffers
    seen = torch.where(rows.accepted[:, None], rows.counters, torch.zeros_like(rows.counters))
    counters = torch.cat([seen, old.counters[None]]).amax(0)
    return Buffers(weighted / weight, counters)


def _at(trees: tuple[Tree, ...], i: int) -> Tree:
    return trees[i] if i < len(trees) else EMPTY
