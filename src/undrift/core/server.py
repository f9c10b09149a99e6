"""The server's half of a round, as pure functions.  `round.py` has the clients' half."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from undrift.core import tree
from undrift.core.algorithm import Algorithm, Report, Row, Server
from undrift.core.noise import Known, hidden
from undrift.core.rule import Rule, ServerView
from undrift.core.task import Buffers
from undrift.core.tree import EMPTY, Tree
from undrift.errors import ServerError, UndriftError

NOTHING_KNOWN = Known()


def server_round(
    algo: Algorithm,
    server: Server,
    report: Report,
    rows: Row,
    ids: Tensor,
    population: int | Tensor,
    known: Known = NOTHING_KNOWN,
) -> Server:
    """Turn the SUM of the cohort's reports into the next server; `rows` has a leading axis C.

    In a simulation the clients' noise is added here, before any rule sees their rows.
    """
    rows = rows._replace(notes=hidden(algo, rows.notes, known.rows))
    report = tree.tree_map(lambda v: v.to(server.w.dtype) if v.is_floating_point() else v, report)
    update = algo.aggregate.finish(report.total)
    view = _server_view(algo, server, report, rows, ids, population)._replace(
        everyone=known.everyone
    )
    states = []
    for i, (rule, state) in enumerate(zip(algo.chain, server.states, strict=True)):
        own = view._replace(upload=_at(report.uploads, i), rows=_at(rows.notes, i))
        own = own._replace(noise=_at(known.noise, i))
        try:
            update, state = rule.server(update, state, own)
        except Exception as error:
            raise _server_failed(rule, error) from error
        states.append(state)
    buffers = _next_buffers(server.buffers, report, rows)
    moved = Server(server.w - update, buffers, tuple(states), server.round + 1)
    # nobody reported: the model stays, the round counts
    return tree.where(report.count > 0, moved, server._replace(round=server.round + 1))


def checked_round(
    algo: Algorithm,
    server: Server,
    report: Report,
    rows: Row,
    ids: Tensor,
    population: int | Tensor,
    known: Known = NOTHING_KNOWN,
) -> tuple[Server, Tensor]:
    """Run the server's half where nothing waits for its result; tell whether it is finite.

    If it is not, nobody's report counts: the server stays as it was, and the round counts.
    """
    after = server_round(algo, server, report, rows, ids, population, known)
    sound = is_finite(algo, after) | (report.count == 0)
    return tree.where(sound, after, server._replace(round=server.round + 1)), sound


def is_finite(algo: Algorithm, server: Server) -> Tensor:
    """Whether every number of the server is finite, as one tensor."""
    parts = [_sound(v, endless).all() for _, v, endless in _numbers(algo, server)]
    return torch.stack(parts).all()


def not_finite(algo: Algorithm, server: Server) -> list[str]:
    """Name the parts of the server that hold a number that is not finite."""
    return [
        name for name, v, endless in _numbers(algo, server) if not bool(_sound(v, endless).all())
    ]


def _sound(values: Tensor, endless: bool) -> Tensor:
    return ~torch.isnan(values) if endless else torch.isfinite(values)


def _numbers(algo: Algorithm, server: Server) -> Iterator[tuple[str, Tensor, bool]]:
    """List the floats of the server: their name, they, and whether they may be infinite."""
    yield "model", server.w, False
    yield "buffers", server.buffers.floats, False
    for rule, state in zip(algo.chain, server.states, strict=True):
        for name, leaf in tree.named_leaves(state).items():
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                whole = f"{type(rule).__name__}.{name}" if name else type(rule).__name__
                yield whole, leaf, name.split(".")[-1] in rule.may_be_infinite


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
