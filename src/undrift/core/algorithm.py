"""An algorithm is a sentence: rules · local optimizer · aggregate · server optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.local import Sgd
from undrift.core.rule import Aggregate, ClientInfo, Mean, Rule, Sizes, overrides
from undrift.core.task import Buffers, Vec
from undrift.core.together import check_together
from undrift.core.tree import EMPTY, Tree, part, record
from undrift.errors import ConfigError, unknown_name

REFRESH = ("cohort", "all", "once")  # who answers a rule's after_round


@record
class Algorithm:
    """Client rules, a local optimizer, an aggregate, a server optimizer.  Itself a tree.

    >>> from undrift.rules import Prox, Adaptive
    >>> Algorithm((Prox(mu=0.1),), server=Adaptive("yogi", lr=0.01)).rules[0].mu
    0.1
    """

    rules: tuple[Rule, ...] = ()
    local: Sgd = part(default_factory=Sgd)
    aggregate: Aggregate = part(default_factory=Mean)
    server: Rule = part(default_factory=Rule)

    def __post_init__(self) -> None:
        if not isinstance(self.rules, tuple) or not all(isinstance(r, Rule) for r in self.rules):
            raise ConfigError(f"Algorithm.rules must be a tuple of rules, got {self.rules!r}")
        _expect("local", self.local, Sgd, "a local optimizer such as Sgd(lr=0.1)")
        _expect("aggregate", self.aggregate, Aggregate, "an aggregate such as Mean()")
        _expect("server", self.server, Rule, "a server optimizer such as Step()")
        for rule in self.rules:
            if rule.refresh not in REFRESH:
                raise unknown_name("refresh", rule.refresh, list(REFRESH), type(rule).__name__)
        check_together(self)

    @property
    def chain(self) -> tuple[Rule, ...]:
        """Every rule with a server half, in the order in which it acts."""
        return (*self.rules, self.server)

    @property
    def parts(self) -> tuple[Rule | Aggregate, ...]:
        """Everything that may probe: the rules, then the aggregate."""
        return (*self.rules, self.aggregate)

    @property
    def everything(self) -> tuple[Rule | Aggregate, ...]:
        """All parts that act in a round: the rules, the aggregate, the server optimizer."""
        return (*self.rules, self.aggregate, self.server)

    @property
    def needs_path(self) -> bool:
        """Whether some part reads ||a_i||_1."""
        return any(p.needs_path for p in self.everything)

    def uses(self, hook: str) -> bool:
        """Whether some part has this hook."""
        parts = self.parts if hook == "probe" else self.rules
        return any(overrides(p, hook) for p in parts)


def _expect(field: str, value: Any, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"Algorithm.{field} must be {example}, got {value!r}")


class Server(NamedTuple):
    """The whole server: what a checkpoint keeps of it."""

    w: Vec
    buffers: Buffers
    states: tuple[Tree, ...]  # one per rule of the chain
    round: Tensor  # rounds completed, in the dtype of w


class Broadcast(NamedTuple):
    """Everything that goes down to every client."""

    w: Vec
    buffers: Buffers
    notes: tuple[Tree, ...]  # one per rule
    cohort: tuple[Tree, ...]  # mean probes, one per rule and one for the aggregate
    round: Tensor  # 0 in the first round
    cohort_size: Tensor
    seed: Tensor  # int64: dropout is a hash of it


class Client(NamedTuple):
    """Everything of one client in a round; an engine gives it a leading axis."""

    info: ClientInfo
    notes: tuple[Tree, ...]  # the per-client part of the broadcast, one per rule
    state: tuple[Tree, ...]
    probe: tuple[Tree, ...]  # one per rule and one for the aggregate
    review: tuple[Tree, ...]
    steps: Tensor


class Report(NamedTuple):
    """Everything of a client that is summed.  Reports add."""

    total: Tree  # what the aggregate lifted
    uploads: tuple[Tree, ...]
    buffers: tuple[Tensor, Tensor]  # (weighted running statistics, weight)
    path: Tensor
    count: Tensor  # type: ignore[assignment]


class Row(NamedTuple):
    """What reaches the server client by client: small."""

    notes: tuple[Tree, ...]  # one per rule
    counters: Tensor  # BatchNorm's counters, of which the largest counts
    accepted: Tensor  # bool: everything this client computed is finite
    steps: Tensor
    loss: Tensor  # mean training loss over its local steps
    scores: dict[str, Tensor]  # the same for each metric
    length: Tensor  # ||delta||


def init_server(algo: Algorithm, w: Vec, buffers: Buffers, sizes: Sizes) -> Server:
    """Start the server at model `w`."""
    states = tuple(rule.init_server(w, sizes) for rule in algo.chain)
    return Server(w, buffers, states, w.new_zeros(()))


def init_client(algo: Algorithm, w: Vec, sizes: Sizes) -> tuple[Tree, ...]:
    """Give the state of a client that has never taken part."""
    return tuple(rule.init_client(w, sizes) for rule in algo.rules)


def resize_server(
    algo: Algorithm, server: Server, before: int, after: int, joined: Tree, left: Tree
) -> Server:
    """Let every rule adapt to a changed population; `joined` and `left` hold client states."""
    nothing = (EMPTY,)  # the server optimizer has no client state
    parts = zip(algo.chain, server.states, (*joined, *nothing), (*left, *nothing), strict=True)
    states = tuple(r.resize(s, before, after, new, old) for r, s, new, old in parts)
    return server._replace(states=states)


def write_broadcast(
    algo: Algorithm, server: Server, cohort_size: int | Tensor, seed: int | Tensor
) -> Broadcast:
    """Write what goes down to every client of the cohort."""
    notes = tuple(r.broadcast(s) for r, s in zip(algo.rules, server.states, strict=False))
    nothing = tuple(() for _ in algo.parts)
    size = torch.zeros_like(server.round) + cohort_size
    key = seed
    if not isinstance(key, Tensor):
        # full, not tensor: a copy from the host would make it wait for the device
        key = torch.full((), key, dtype=torch.int64, device=server.w.device)
    return Broadcast(server.w, server.buffers, notes, nothing, server.round, size, key)


def write_personal(algo: Algorithm, server: Server, info: ClientInfo) -> tuple[Tree, ...]:
    """Write what goes down to one client alone."""
    pairs = zip(algo.rules, server.states, strict=False)
    return tuple(rule.personal(state, info) for rule, state in pairs)
