"""What a replay adds to an algorithm's rules: they look, and change nothing."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.core.algorithm import Algorithm
from undrift.core.rule import Aggregate, ClientView, Rule, Sizes
from undrift.core.task import Vec
from undrift.core.tree import EMPTY, Tree, part, record, replace
from undrift.rules.fair import QFair
from undrift.rules.observe import LastModel, Watch

Named = dict[str, Tensor]


class Told(NamedTuple):
    """What a client worked out on the way to its report."""

    a: Tensor  # ||a_i||
    f: Tensor  # F_i, the loss at the received model
    h: Tensor  # h_i of q-FFL


@record
class Witness(Rule):
    """Keeps ||a_i|| of every client.  Last of the rules: its delta is what the aggregate takes."""

    observes: ClassVar[bool] = True

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return Told(*(w.new_zeros(()) for _ in Told._fields))

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, Told(view.path, *self.fairness(delta, view)), EMPTY

    def fairness(self, delta: Vec, view: ClientView) -> tuple[Tensor, Tensor]:
        """Give F_i and h_i, where there are any."""
        return view.path * 0, view.path * 0


@record
class FairWitness(Witness):
    """Keeps F_i and h_i of q-FFL, too."""

    aggregate: Aggregate = part(default_factory=QFair)

    def probe(self, view: ClientView) -> Tree:
        return self.aggregate.probe(view)

    def fairness(self, delta: Vec, view: ClientView) -> tuple[Tensor, Tensor]:
        return view.probe, self.aggregate.lift(delta, view)[1]


def watched(algorithm: Algorithm) -> Algorithm:
    """Add the rules that keep the clients' models, first in the chain, and their reports, last."""
    aggregate = algorithm.aggregate
    last = FairWitness(aggregate) if isinstance(aggregate, QFair) else Witness()
    first = (Watch(weighs_by_size(algorithm)), LastModel())
    return replace(algorithm, rules=(*first, *algorithm.rules, last))


def weighs_by_size(algorithm: Algorithm) -> bool:
    """Whether client models are averaged by n_i, as the algorithm's own aggregate does."""
    aggregate = algorithm.aggregate
    return bool(getattr(aggregate, "by_size", not isinstance(aggregate, QFair)))


def own_names(states: Named, algorithm: Algorithm) -> dict[str, str]:
    """Name the states of a watched algorithm's own rules, counted from 0: {own name: name}."""
    last = len(algorithm.rules) - 1
    found = {}
    for name in states:
        place, _, rest = name.partition(".")
        i = int(place)
        if i not in (0, 1, last):
            found[f"{i - 2 - (i > last)}.{rest}"] = name
    return found


def of_rules(states: Named, algorithm: Algorithm) -> Named:
    """Leave out the states of the watching rules."""
    return {own: states[name].clone() for own, name in own_names(states, algorithm).items()}


def told(states: Named, algorithm: Algorithm) -> Named:
    """Give what a client's witness has noted, as far as the algorithm makes use of it."""
    last = algorithm.rules[-1]
    place = f"{len(algorithm.rules) - 1}.{type(last).__name__}"
    found = {"norm(a_i)": states[f"{place}.a"].clone()} if algorithm.needs_path else {}
    if isinstance(last, FairWitness):
        found |= {"F_i": states[f"{place}.f"].clone(), "h_i": states[f"{place}.h"].clone()}
    return found
