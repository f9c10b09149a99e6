"""The words of the algebra: what a rule may see and what it may do.

Everything is written for ONE client on flat [P] vectors; engines add the client axis and the
experiment axis.  Signs: whatever moves a model is subtracted, so `delta = w0 - w`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.core.task import Batch, Output, Task, Vec
from undrift.core.tree import EMPTY, Tree, record, static


class ClientInfo(NamedTuple):
    """What the server's record says of one client; it travels with the broadcast."""

    id: Tensor  # int64
    size: Tensor  # n_i, the examples it holds
    probability: Tensor  # Prob(i in cohort)
    share: Tensor  # n_i over the examples of the whole population
    mean_size: Tensor  # mean of n_j over the population's N clients


class Lineup(NamedTuple):
    """Who takes part in a round and how long each trains, before it starts; leading axis C."""

    info: ClientInfo
    steps: Tensor
    lr: Any  # local learning rate at the start of the round
    round: int = 0
    clients: int = 0  # ids in use, whoever takes part
    algorithm: Any = None  # of which the part that checks is one

    @property
    def is_everybody(self) -> bool:
        """Whether all clients that hold examples take part, and not by chance."""
        info = self.info
        total = info.size[0].double() / info.share[0].double()
        held = info.size.double().sum() > (1 - 1e-6) * total
        return bool(held & (info.probability == 1).all())  # sync: on demand


class Sizes(NamedTuple):
    """How large a federation is, for states that depend on it."""

    clients: int  # ids in use
    examples: int  # of the largest client: rows of a state that has one per example
    features: int  # numbers in the feature layer's output; 0 if the task names none


class ClientView(NamedTuple):
    """What one client can see.  Rules read it; nobody writes it."""

    task: Task
    w0: Vec  # the model it was sent
    w: Vec  # its model now
    broadcast: Tree  # this rule's note to everybody
    personal: Tree  # this rule's note to this client alone
    mine: Tree  # this rule's client state
    probe: Tree  # this rule's own probe
    cohort: Tree  # the cohort's size-weighted mean probe, if the rule shares it
    review: Tree  # this rule's own review
    client: ClientInfo
    steps: Tensor  # local steps it takes; a neighbour may take more
    path: Tensor  # ||a_i||_1: the weight with which gradients enter delta / lr
    lr: Any  # local learning rate at the start of this round
    round: Tensor  # 0 in the first round
    cohort_size: Tensor
    batch: Batch  # the current batch; the whole data, piece by piece, in probe and begin
    grad_at: Callable[[Vec], Vec]  # gradient of the local objective (decay included), same batch
    output_at: Callable[[Vec], Output]  # forward pass, same batch; leaves buffers alone
    decay: Callable[[Vec], Vec]  # gradient of the weight decay, which is added after `direction`
    optimizer: Tree  # the local optimizer's state now
    seed: Tensor  # int64, of the run: fold it with a purpose, the round and the client's id

    @property
    def size(self) -> Tensor:
        """Examples that this client holds."""
        return self.client.size

    @property
    def lost(self) -> Vec:
        """What its own model has lost so far; `delta` may have passed through other rules."""
        return self.w0 - self.w


class ServerView(NamedTuple):
    """What one rule's server half can see after the cohort reported."""

    w: Vec  # the model that was sent
    upload: Tree  # SUM over the cohort of what this rule uploaded
    rows: Tree  # what this rule sent client by client, leading axis C
    ids: Tensor  # [C] client ids of the rows
    accepted: Tensor  # [C] bool: rows of refused clients must be left out
    count: Tensor  # type: ignore[assignment]  # clients that were accepted
    population: Tensor  # N, clients enrolled now that hold examples
    path: Tensor  # mean of ||a_i||_1 over the cohort
    lr: Any  # local learning rate at the start of this round
    round: Tensor
    everyone: Tree = EMPTY  # ClientInfo of all that hold examples, if the rule reads it
    noise: Tree = EMPTY  # float64, standard normal: as many numbers as `server_noise` asks for


@record
class Rule:
    """One mechanism: a client half and a server half, both pure.  Override what you need."""

    needs_path: ClassVar[bool] = False  # reads view.path: the local optimizer must be linear
    shares_probe: ClassVar[bool] = False  # reads view.cohort: costs a second exchange
    refresh: ClassVar[str] = "cohort"  # who answers after_round: "cohort", "all", "once" at first
    observes: ClassVar[bool] = False  # measures and changes nothing: what it sends is not counted
    rows_known: ClassVar[bool] = False  # rows follow from the deltas: they are not counted either
    exact_path: ClassVar[bool] = False  # wants ||a_i||_1 itself: clipping is refused
    in_turn: ClassVar[bool] = False  # serves clients in the order of their ids: numbers matter
    reads_everyone: ClassVar[bool] = False  # reads ServerView.everyone
    claims: ClassVar[tuple[str, ...]] = ()  # what only one rule of an algorithm may do
    reads: ClassVar[str] = ""  # "deltas" or "steps": the update must be a mean of these
    changes: ClassVar[str] = ""  # "delta": sends something else; "update": its server half does
    may_be_infinite: ClassVar[tuple[str, ...]] = ()  # numbers of the server's state, by last name

    @property
    def linear(self) -> bool:
        """Whether its direction is linear in the gradient, without which ||a||_1 is not defined."""
        return True

    def check(self, lineup: Lineup) -> None:
        """Refuse, by a ConfigError, a cohort that this rule cannot work with."""

    def caution(self, lineup: Lineup) -> str:
        """Say what may go wrong with such a cohort, once before training; empty: nothing."""
        return ""

    def check_beside(self, algorithm: Any) -> None:
        """Refuse, by a ConfigError, other parts that this rule cannot stand beside."""

    # -- client half ------------------------------------------------------------------------
    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        """State that a client keeps between rounds; may hold one row per example."""
        return EMPTY

    def probe(self, view: ClientView) -> Tree:
        """Look at the received model on `view.batch`; the mean over all own data is kept."""
        return EMPTY

    def begin(self, view: ClientView) -> Tree:
        """Prepare the state before the local steps; folded over the pieces of the own data."""
        return view.mine

    def start(self, optimizer: Tree, view: ClientView) -> Tree:
        """Choose the local optimizer's state before the first step (C3: a new one)."""
        return optimizer

    def look_at(self, w: Vec, view: ClientView) -> Vec:
        """Choose where the gradient of a local step is taken; the step starts at `view.w`."""
        return w

    def loss(self, loss: Tensor, out: Output, view: ClientView) -> Tensor:
        """Put another local objective in the place of the task's loss."""
        return loss

    def penalty(self, out: Output, view: ClientView) -> Tensor | float:
        """Add to the loss of a local step."""
        return 0.0

    def direction(self, g: Vec, view: ClientView) -> Vec:
        """Transform the gradient of a local step."""
        return g

    def counted(self, g: Vec, view: ClientView) -> Vec:
        """Give what `direction` makes of ||a_i||_1's impulse, where that is something else.

        The impulse is a gradient of 1 on a blank model; `g` is 1 and what rules before added.
        """
        return self.direction(g, view)

    def after_step(self, w: Vec, view: ClientView) -> Vec:
        """Move the model once more after the optimizer's step, which started at `view.w`."""
        return w

    def review(self, view: ClientView) -> Tree:
        """Look at the own final model on `view.batch`; the mean over all own data is kept."""
        return EMPTY

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        """Give (delta to aggregate, next client state, upload); uploads are summed."""
        return delta, view.mine, EMPTY

    def sent(self, upload: Tree) -> Tree:
        """Give what a client really has to send for its upload; the rest the server knows."""
        return upload

    def sent_delta(self, delta: Vec) -> Tree:
        """Give what a client really has to send for its delta: of a compressed one, its parts.

        Their shapes and types count, not their values: k numbers and k positions, or int8.
        """
        return delta

    def row(self, delta: Vec, view: ClientView) -> Tree:
        """Give something small that reaches the server client by client."""
        return EMPTY

    def after_round(self, view: ClientView) -> Tree:
        """Look at the NEW model (`view.w`) on `view.batch`; the mean reaches the server."""
        return EMPTY

    def client_noise(self, sizes: Sizes) -> int:
        """Count the secret standard normal numbers that `hide` adds to a client's row."""
        return 0

    def hide(self, row: Tree, noise: Tensor) -> Tree:
        """Add noise to what leaves the client as a row, of `row` or of `after_round`."""
        return row

    # -- server half ------------------------------------------------------------------------
    def server_noise(self, parameters: int) -> int:
        """Count the secret standard normal numbers that `server` finds in `view.noise`."""
        return 0

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        """State that the server keeps."""
        return EMPTY

    def resize(self, state: Tree, before: int, after: int, joined: Tree, left: Tree) -> Tree:
        """Adapt the server state when N clients that hold examples become others.

        The states of those that join or leave have a leading axis.
        """
        return state

    def broadcast(self, state: Tree) -> Tree:
        """Choose what every client may see of the server state."""
        return EMPTY

    def personal(self, state: Tree, client: ClientInfo) -> Tree:
        """Choose what one client may see of the server state."""
        return EMPTY

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        """Transform the update; the last rule's output is subtracted from the model."""
        return update, state

    def server_after(self, state: Tree, view: ServerView) -> Tree:
        """Take in what `after_round` measured (`view.rows`)."""
        return state


CLIENT_HALF = (
    *("init_client", "probe", "begin", "start", "look_at", "loss", "penalty", "direction"),
    *("after_step", "review", "finish", "row", "after_round"),
)


def overrides(part: Rule | Aggregate, hook: str) -> bool:
    """Tell whether a rule or an aggregate has a hook of its own."""
    base = Rule if isinstance(part, Rule) else Aggregate
    return getattr(type(part), hook) is not getattr(base, hook, None)


def serves_only(rule: Rule) -> bool:
    """Tell whether a rule has no client half."""
    return not any(overrides(rule, hook) for hook in CLIENT_HALF)


class Aggregate:
    """Lift each client's delta to something summable; the engine sums; finish the sum."""

    needs_path: ClassVar[bool] = False
    exact_path: ClassVar[bool] = False  # wants ||a_i||_1 itself: clipping is refused
    shares_probe: ClassVar[bool] = False
    means: ClassVar[tuple[str, ...]] = ()  # of what its update is a mean: "deltas", "steps"

    def check(self, lineup: Lineup) -> None:
        """Refuse, by a ConfigError, a cohort that this aggregate cannot work with."""

    def probe(self, view: ClientView) -> Tree:
        """As a rule's probe; read it from `view.probe` in `lift`."""
        return EMPTY

    def weight(self, view: ClientView) -> Tensor:
        """Weigh this client where something is averaged (BatchNorm's buffers always are)."""
        return view.size

    def lift(self, delta: Vec, view: ClientView) -> Tree:
        """Turn one client's delta into a tree that may be added."""
        raise TypeError(f"{type(self).__name__} must define lift")

    def finish(self, total: Tree) -> Vec:
        """Turn the sum of the lifted trees into the update."""
        raise TypeError(f"{type(self).__name__} must define finish")


@record
class Mean(Aggregate):
    """FedAvg (McMahan et al. 2017): the mean of the deltas, weighted by n_i or uniformly."""

    means: ClassVar[tuple[str, ...]] = ("deltas", "steps")

    by_size: bool = static(default=True)

    def weight(self, view: ClientView) -> Tensor:
        return view.size if self.by_size else torch.ones_like(view.size)

    def lift(self, delta: Vec, view: ClientView) -> Tree:
        weight = self.weight(view)
        return weight * delta, weight

    def finish(self, total: Tree) -> Vec:
        weighted, weight = total
        update: Vec = weighted / weight
        return update
