"""The replay itself, and what is seen after every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrift.core.algorithm import Algorithm
from undrift.core.task import Task
from undrift.data import Explicit, ExplicitWork, Federation
from undrift.data.work import Batches
from undrift.errors import ConfigError
from undrift.replay.given import (
    Steps,
    algorithm_of,
    batches_of,
    count_of,
    data_of,
    rounds_of,
    whole_number,
)
from undrift.replay.start import begin, server_at, started
from undrift.replay.witness import Named, of_rules, told, watched, weighs_by_size
from undrift.rules.observe import Seen
from undrift.trainer import Trainer

Participants = Sequence[Sequence[int]]


class Moment(NamedTuple):
    """Everything after one round."""

    round: int  # 1 after the first
    server: Named  # the model that the next round starts from
    average: Named  # the mean of this round's client models, by the algorithm's own weights
    clients: dict[int, Named]  # each participant's model after its local steps
    server_state: Named  # of each rule, e.g. {"0.Scaffold": c}
    client_states: dict[int, Named]  # of each client that ever took part
    last_models: dict[int, Named]  # every client's last trained model; x_0 where there is none
    everybody: Named  # the mean of `last_models`, by the algorithm's own weights
    buffers: Named  # the server's BatchNorm statistics
    all_states: dict[int, Named]  # of every client: the `client_states` to go on from here with
    reports: dict[int, Named]  # of each participant: ||a_i||, q-FFL's F_i and h_i, where used


def replay(
    module: nn.Module,
    clients: Sequence[tuple[Any, Any]],
    algorithm: Algorithm,
    participants: Participants,
    *,
    batches: Mapping[tuple[int, int], Batches] | None = None,
    steps: Steps | None = None,
    loss: Any = "cross_entropy",
    initial: Mapping[str, Any] | None = None,
    feature: str | None = None,
    dtype: torch.dtype = torch.float64,
    engine: str = "reference",
    chances: Sequence[float] | None = None,
    server_state: Mapping[str, Any] | None = None,
    client_states: Mapping[int, Mapping[str, Any]] | None = None,
    first_round: int = 0,
) -> list[Moment]:
    """Train with explicit participants and batches; give everything after every round.

    `participants` lists the client ids of each round, in any order; a round without clients only
    counts.  `batches` gives the positions of every local step by (round, client), rounds counted
    from 0; without it every client takes `steps` steps on all its examples: a number, one by
    client, or one by (round, client).  `initial` are the first parameters by name; left out, the
    module's own.  `chances` are the clients' inclusion probabilities, for algorithms that use them.
    `server_state` and `client_states` replace first states, by the names that a `Moment` gives
    them, and `first_round` is the number of the first round, where others were played before.
    """
    if (batches is None) == (steps is None):
        raise ConfigError("replay needs either `batches` or `steps` on all examples, not both")
    first_round = whole_number("first_round", first_round)
    federation = Federation.of(data_of(clients))
    sizes = federation.sizes.tolist()
    listed = rounds_of(participants, len(sizes))
    if batches is None:
        batches = whole(listed, sizes, steps, first_round)
    trainer = Trainer(
        Task(started(module, initial, dtype), loss, feature=feature, dtype=dtype),
        federation,
        watched(algorithm_of(algorithm)),
        work=ExplicitWork(batches_of(batches)),
        sampler=Explicit(_filled(listed, sizes, first_round), chances),
        engine=engine,
        enrolled=range(len(sizes)),  # no round is planned before it is played
    )
    if not first_round:
        trainer.begin()  # else a first look would replace states that are given
    if server_state or client_states or first_round:
        begin(trainer, first_round, server_state or {}, client_states or {})
    moments, seen = [], set(client_states or {})
    for ids in listed:
        play(trainer, ids)
        seen |= set(ids)
        moments.append(_moment(trainer, ids, seen, weights_of(algorithm, sizes)))
    return moments


def play(trainer: Trainer, ids: list[int]) -> None:
    """Train one round; one without clients only counts."""
    if ids:
        trainer.round()
    else:
        after = trainer.rounds_done + 1
        trainer.put(server_at(trainer.server, after), after)


def weights_of(algorithm: Algorithm, sizes: Sequence[int]) -> Tensor:
    """Weigh all clients that hold examples: by n_i, or equally."""
    n = torch.tensor(sizes, dtype=torch.float64)
    weight = n if weighs_by_size(algorithm) else (n > 0).double()
    return weight / weight.sum()


def in_order(
    sizes: Sequence[int],
    participants: Participants,
    *,
    batch: int,
    epochs: int = 1,
    drop_last: bool = False,
) -> dict[tuple[int, int], list[list[int]]]:
    """Give the batches of a DataLoader that does not shuffle.

    >>> in_order([3], [[0]], batch=2)
    {(0, 0): [[0, 1], [2]]}
    """

    def epoch(n: int) -> list[list[int]]:
        end = n - n % batch if drop_last else n
        return [list(range(k, min(k + batch, n))) for k in range(0, end, batch)]

    pairs = [(r, i) for r, ids in enumerate(participants) for i in ids]
    return {(r, i): epoch(sizes[i]) * epochs for r, i in pairs}


def whole(
    participants: Participants, sizes: Sequence[int], steps: Steps | None, first: int
) -> dict[tuple[int, int], list[list[int]]]:
    """Give batches of all examples, as many as there are steps."""
    pairs = [(r, i) for r, ids in enumerate(participants, first) for i in ids]
    return {(r, i): [list(range(sizes[i]))] * count_of(steps, r, i, len(sizes)) for r, i in pairs}


def _filled(participants: Participants, sizes: Sequence[int], first: int) -> list[list[int]]:
    """Put the first cohort into rounds that nobody plays."""
    somebody = [next(i for i, n in enumerate(sizes) if n)]
    cohort = next((list(ids) for ids in participants if ids), somebody)
    return [cohort] * first + [list(ids) or cohort for ids in participants]


def _moment(trainer: Trainer, ids: list[int], seen: set[int], weights: Tensor) -> Moment:
    def named(w: Tensor) -> Named:
        return {n: v.clone() for n, v in trainer.task.named(w).items()}

    algorithm = trainer.algorithm
    average = next(s.average for s in trainer.server.states if isinstance(s, Seen))
    own = {i: trainer.client_state(i) for i in range(len(weights))}
    last = {i: state["1.LastModel"] for i, state in own.items()}
    everybody = weights.to(average) @ torch.stack(list(last.values()))
    buffers = trainer.task.named_buffers(trainer.server.buffers)
    return Moment(
        trainer.rounds_done,
        trainer.parameters(),
        named(average),
        {i: named(last[i]) for i in ids},
        of_rules(trainer.server_state(), algorithm),
        {i: of_rules(own[i], algorithm) for i in sorted(seen)},
        {i: named(w) for i, w in last.items()},
        named(everybody),
        {n: v.clone() for n, v in buffers.items()},
        {i: of_rules(state, algorithm) for i, state in own.items()},
        {i: told(own[i], algorithm) for i in ids},
    )
