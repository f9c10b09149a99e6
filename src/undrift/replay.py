"""Replay an algorithm from outside: everything given explicitly, everything read back by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrift.core.algorithm import Algorithm
from undrift.core.rule import Mean
from undrift.core.task import Task
from undrift.core.tree import replace
from undrift.data import Explicit, ExplicitWork, Federation, LocalWork, Work
from undrift.data.work import Batches
from undrift.errors import ConfigError
from undrift.rules.observe import LastModel, Seen, Watch
from undrift.trainer import Trainer

Named = dict[str, Tensor]


class Moment(NamedTuple):
    """Everything after one round."""

    round: int  # 1 after the first
    server: Named  # the model that the next round starts from
    average: Named  # the mean of this round's client models, by the algorithm's own weights
    clients: dict[int, Named]  # each participant's model after its local steps
    server_state: Named  # of each rule, e.g. {"0.Scaffold": c}
    client_states: dict[int, Named]  # of each client that ever took part


def replay(
    module: nn.Module,
    clients: Sequence[tuple[Any, Any]],
    algorithm: Algorithm,
    participants: Sequence[Sequence[int]],
    *,
    batches: Mapping[tuple[int, int], Batches] | None = None,
    steps: int | None = None,
    loss: Any = "cross_entropy",
    initial: Mapping[str, Tensor] | None = None,
    feature: str | None = None,
    dtype: torch.dtype = torch.float64,
    engine: str = "reference",
    chances: Sequence[float] | None = None,
) -> list[Moment]:
    """Train with explicit participants and batches; give everything after every round.

    `participants` lists the client ids of each round.  `batches` gives the positions of every local
    step by (round, client), rounds counted from 0; without it every client takes `steps` steps on
    all its examples.  `initial` are the first parameters by name; left out, the module's own.
    `chances` are the clients' inclusion probabilities, for algorithms that use them.
    """
    if (batches is None) == (steps is None):
        raise ConfigError("replay needs either `batches` or `steps` on all examples, not both")
    work: LocalWork = Work(steps=steps, batch=None) if batches is None else ExplicitWork(batches)
    task = Task(_started(module, initial), loss, feature=feature, dtype=dtype)
    sampler = Explicit(participants, chances)
    federation = Federation.of([(_double(x), y) for x, y in clients])
    trainer = Trainer(
        task, federation, watched(algorithm), work=work, sampler=sampler, engine=engine
    )
    moments, seen = [], set[int]()
    for ids in participants:
        trainer.round()
        seen |= set(ids)
        moments.append(_moment(trainer, list(ids), seen))
    return moments


def watched(algorithm: Algorithm) -> Algorithm:
    """Add the rules that keep the clients' models, first in the chain."""
    return replace(
        algorithm, rules=(Watch(weighs_by_size(algorithm)), LastModel(), *algorithm.rules)
    )


def weighs_by_size(algorithm: Algorithm) -> bool:
    """Whether client models are averaged by n_i, as the algorithm's own aggregate does."""
    aggregate = algorithm.aggregate
    return aggregate.by_size if isinstance(aggregate, Mean) else True


def _started(module: nn.Module, initial: Mapping[str, Tensor] | None) -> nn.Module:
    if initial is not None:
        try:
            module.load_state_dict(dict(initial), strict=True)
        except RuntimeError as error:
            raise ConfigError(f"`initial` does not fit the module: {error}") from error
    return module


def _double(x: Any) -> Tensor:
    made = torch.as_tensor(x)
    return made.double() if made.is_floating_point() else made


def _moment(trainer: Trainer, ids: list[int], seen: set[int]) -> Moment:
    average = next(s.average for s in trainer.server.states if isinstance(s, Seen))
    own = {i: trainer.client_state(i) for i in sorted(seen)}
    return Moment(
        trainer.rounds_done,
        trainer.parameters(),
        _named(trainer, average),
        {i: _named(trainer, own[i]["1.LastModel"]) for i in ids},
        _of_rules(trainer.server_state()),
        {i: _of_rules(state) for i, state in own.items()},
    )


def _named(trainer: Trainer, w: Tensor) -> Named:
    return {n: v.clone() for n, v in trainer.task.named(w).items()}


def _of_rules(states: Named) -> Named:
    """Leave out the two watching rules and count from the algorithm's own first rule."""
    parts = [(*name.partition("."), value) for name, value in states.items()]
    return {f"{int(place) - 2}.{rest}": v for place, _, rest, v in parts if int(place) >= 2}
