"""Chains of rules whose local step is linear: a few numbers say what it does to every weight.

With SGD and momentum, control variates, duals, pulls and weight decay a step gives each weight the
same combination of what it reads at that weight's place: model, momentum, gradient, c, c_i, ...
A step of short vectors, each of which is 1 at a place of its own, shows the combination:

    moved[i, j]    how much of vector j is in vector i after the step

Wide layers that remember their steps (core/history.py) need no more than these numbers; all others
move by them where they make their gradients (core/chain.py).  Whether a chain is linear is read off
its recorded operations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from undrift.core.algorithm import Broadcast, Client
from undrift.core.chain import Chain
from undrift.core.histories import Histories, Numbers
from undrift.core.history import Vectors
from undrift.core.round import Found, shares_gradient
from undrift.core.task import Batch, Task
from undrift.core.tree import EMPTY, Tree, leaves, rebuild, structure
from undrift.core.views import Carry
from undrift.engines.fused import Fused
from undrift.engines.group import Group, NoPasses, split
from undrift.engines.linearity import alike, reach, reads, zero
from undrift.kernels.settling import fits

log = logging.getLogger("undrift")

NAME = "all"  # of the one parameter that short vectors have


class Step(NamedTuple):
    """What the second half of a local step reads, of all experiments and clients [E, C, ...]."""

    numbers: tuple[Tensor, ...]
    sent: Broadcast
    clients: Client
    held: Carry
    batch: Batch
    keys: Tensor
    k: Tensor
    found: Found


class Places(NamedTuple):
    """Where vectors stand among the leaves of what a step reads."""

    carried: tuple[int, ...]  # of a Carry, the model first
    shared: tuple[int, ...]  # of a Broadcast, the received model first
    own: tuple[int, ...]  # of a Client

    @classmethod
    def of(cls, step: Step, size: int) -> Places:
        """Find all vectors of this size."""
        held, sent, clients = (step.held, 3), (step.sent, 2), (step.clients, 3)
        return cls(*(_places(tree, dims, size) for tree, dims in (held, sent, clients)))

    @property
    def number(self) -> int:
        """Count them, and the gradient."""
        return len(self.carried) + 1 + len(self.shared) + len(self.own)


class LinearChain:
    """The second half of a step of one group whose rules are linear."""

    def __init__(self, group: Group, places: Places, needed: list[set[int]], step: Step) -> None:
        self.places, self._needed, self._group = places, needed, group
        self._short = Short(places, step)
        self._moved = group.moved(_of_one_parameter(group))
        compiled = group.compiled
        self._advance = Fused(
            self._advanced, "the numbers of a step", compiled=compiled, proven=True
        )
        self._apply = Fused(self._applied, "a local step by numbers", compiled=compiled)
        self._renew = Fused(self._renewed, "what is remembered of a step", compiled=compiled)
        self._columns = dict(zip(group.task.names, split(group.task.sizes), strict=True))
        self._histories: Histories | None = None

    @classmethod
    def find(cls, group: Group, step: Step, size: int) -> LinearChain | None:
        """Find out whether the step of a group is linear in vectors of this size."""
        if not shares_gradient(group.algo):
            return None
        places = Places.of(step, size)
        needed = _combination(group, places, step)
        if needed is None:
            return None
        # keep what is read, and the model that everybody begins at
        carried, shared = len(places.carried), len(places.shared)
        read = set().union(*needed) | {carried + 1}
        first, second = carried + 1, carried + 1 + shared
        kept = Places(
            places.carried,
            tuple(p for j, p in enumerate(places.shared, first) if j in read),
            tuple(p for j, p in enumerate(places.own, second) if j in read),
        )
        order = [j for j in range(places.number) if j in read or j < first]
        number = {j: at for at, j in enumerate(order)}
        return cls(group, kept, [{number[j] for j in one} for one in needed], step)

    @property
    def vectors(self) -> Vectors:
        """Count the vectors that a step reads."""
        carried, shared, own = map(len, self.places)
        return Vectors(shared, own, carried, in_place=False)

    @property
    def fits(self) -> bool:
        """Whether kernels that make a gradient can take the step, too."""
        return fits(*map(len, (self.places.carried, self.places.shared, self.places.own)))

    def may_remember(self, step: Step) -> bool:
        """Whether layers may remember steps: what moves begins at 0, and nobody else reads it."""
        group, size = self._group, step.held.w.shape[-1]
        if group.uses("review") or group.uses("start"):
            return False
        places = Places.of(step, size)
        return _begins_at_zero(group, places, step) and not _reads_momentum(group, places, step)

    def remember(self, histories: Histories) -> None:
        """Let wide layers remember their steps."""
        self._histories = histories

    def shared(self, sent: Broadcast) -> list[Tensor]:
        """Give the vectors that clients share, the received model first: [E, P] each."""
        held = leaves(sent)
        return [held[i] for i in self.places.shared]

    def own(self, clients: Client) -> list[Tensor]:
        """Give the vectors of clients that do not move: [E, C, P] each."""
        held = leaves(clients)
        return [held[i] for i in self.places.own]

    # -- one step ----------------------------------------------------------------------------
    def on_the_way_back(self, step: Step, scale: float) -> Chain:
        """Give the vectors of a step to layers, which move them where gradients are made."""
        # .data: weights change before other layers' backward passes, which do not read them
        vectors = [leaves(step.held)[i].data for i in self.places.carried]
        own, shared = self.own(step.clients), self.shared(step.sent)
        flat = [[v.view(-1, v.shape[-1]) for v in some] for some in (vectors, own)]
        needs = tuple(tuple(sorted(one)) for one in self._needed)
        return Chain(flat[0], shared, flat[1], needs, self._columns, scale)

    def advance(self, step: Step) -> tuple[Tensor, Tensor]:
        """Move all but vectors; give what a step does to these [carried, E, C, number], and whose.

        Gradients need not be known.
        """
        found: tuple[Tensor, Tensor] = self._advance(*self._short.of(step))
        return found

    def apply(self, moved: Tensor, live: Tensor, step: Step) -> None:
        """Move those parameters whose gradients are there."""
        columns, names = _side_by_side(self._columns, step.found.gradient)
        if not columns:
            return
        vectors = [leaves(step.held)[i] for i in self.places.carried]
        shared, own = self.shared(step.sent), self.own(step.clients)
        parts = [
            Part(
                [v[..., c] for v in vectors],
                [step.found.gradient[n].flatten(2) for n in named],
                [v[:, None, c] for v in shared],
                [v[..., c] for v in own],
            )
            for c, named in zip(columns, names, strict=True)
        ]
        self._apply(moved, live, parts)

    def renew(self, moved: Tensor, step: Step) -> None:
        """Let layers that remember go on to the next step."""
        if self._histories is not None:
            self._renew(self._histories.numbers, moved, step.k, step.clients.steps)

    def after(self, *step: Any) -> Carry:
        """Take a step of short vectors; gives what clients hold after it."""
        return self._moved(*step)

    def _advanced(
        self, numbers: Any, sent: Broadcast, clients: Client, held: Carry, batch: Batch,
        keys: Tensor, k: Tensor, found: Found,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        after = leaves(self._moved(numbers, sent, clients, held, batch, keys, k, found))
        moved = torch.stack([after[i][..., : self.places.number] for i in self.places.carried])
        for i, (old, new) in enumerate(zip(leaves(held), after, strict=True)):
            if i not in self.places.carried:
                old.copy_(new)
        return moved, k[:, None] < clients.steps

    def _renewed(self, counters: Numbers, moved: Tensor, k: Tensor, steps: Tensor) -> Tree:
        assert self._histories is not None, "told before"
        self._histories.advance(counters, moved, k, steps)
        return EMPTY

    def _applied(self, moved: Tensor, live: Tensor, parts: Sequence[Part]) -> Tree:
        for part in parts:
            gradient = torch.cat(part.gradient, -1)
            read = [*part.carried, gradient, *part.shared, *part.own]
            for i, needed in enumerate(self._needed):
                # what is not read has no part in it, not even times 0
                terms = [moved[i, ..., j, None] * read[j] for j in sorted(needed)]
                total = sum(terms[1:], terms[0]) if terms else torch.zeros_like(read[i])
                made = torch.where(live[..., None], total, part.carried[i])
                read.append(made)
            for old, new in zip(part.carried, read[-len(self._needed) :], strict=True):
                old.copy_(new)
        return EMPTY


class Part(NamedTuple):
    """Some columns of the vectors of a step."""

    carried: list[Tensor]  # [E, C, n] each
    gradient: list[Tensor]  # by parameter
    shared: list[Tensor]  # [E, 1, n] each
    own: list[Tensor]  # [E, C, n] each


class Short:
    """Vectors that are 1 at a place of their own, in the place of those that a step reads."""

    def __init__(self, places: Places, step: Step) -> None:
        lead = step.held.w.shape[:2]
        # no other axis may be as long: what is done along the vectors is known by their length
        others = {n for v in leaves(step) for n in v.shape} | {1, 2}
        # (from the forties on: rules put a few numbers side by side, too)
        self.length = next(n for n in range(40 + places.number, 10**6) if n not in others)
        self.places, self._true_length = places, step.held.w.shape[-1]
        # each in memory of its own: compiled code copies what does not begin at 16 bytes
        whole = torch.eye(self.length, dtype=step.held.w.dtype, device=step.held.w.device)
        ones = [row.clone() for row in whole[: places.number + 1]]
        wide = [row.expand(*lead, -1) for row in ones]
        carried, shared = len(places.carried), len(places.shared)
        self._carried, self._gradient = wide[:carried], wide[carried]
        first = carried + 1
        self._shared = [row.expand(lead[0], -1) for row in ones[first : first + shared]]
        self._own = wide[first + shared : places.number]
        self.all = [*self._carried, self._gradient, *self._shared, *self._own]
        self._none = torch.zeros_like(ones[0])

    def of(self, step: Step) -> Step:
        """Give a step of short vectors and everything else as it is."""
        sent, clients, held = self.ended(step.sent, step.clients, step.held)
        found = step.found._replace(point=held.w, gradient={NAME: self._gradient})
        return step._replace(held=held, sent=sent, clients=clients, found=found)

    def marks(self, inputs: Sequence[Tensor]) -> dict[int, int]:
        """Tell which of the inputs is which vector."""
        vectors = {id(v): j for j, v in enumerate(self.all)}
        return {i: vectors[id(v)] for i, v in enumerate(inputs) if id(v) in vectors}

    def ended(self, sent: Broadcast, clients: Client, held: Carry) -> tuple[Any, Any, Any]:
        """Give what the end of a round reads, likewise."""
        return (
            self._put(sent, self.places.shared, self._shared, 2),
            self._put(clients, self.places.own, self._own, 3),
            self._put(held, self.places.carried, self._carried, 3),
        )

    def _put(self, tree: Any, places: Sequence[int], vectors: Sequence[Tensor], dims: int) -> Any:
        """Exchange some leaves; others as long as vectors are 0, for nobody reads them."""
        found = leaves(tree)
        for place, vector in zip(places, vectors, strict=True):
            found[place] = vector
        for i, v in enumerate(found):
            if i not in places and v.dim() == dims and v.shape[-1] == self._true_length:
                found[i] = self._none.expand(*v.shape[:-1], -1)
        return rebuild(structure(tree), found)


def _side_by_side(
    columns: Mapping[str, slice], wanted: Iterable[str]
) -> tuple[list[slice], list[list[str]]]:
    """Put the columns of parameters that follow each other together, and name those."""
    found: list[slice] = []
    names: list[list[str]] = []
    for name in sorted(wanted, key=lambda n: columns[n].start):
        own = columns[name]
        if found and found[-1].stop == own.start:
            found[-1] = slice(found[-1].start, own.stop)
            names[-1].append(name)
        else:
            found.append(own)
            names.append([name])
    return found, names


def _places(tree: Tree, dims: int, size: int) -> tuple[int, ...]:
    """Tell which leaves are vectors of the model's size."""
    shapes = [(v.dim(), v.shape[-1] if v.dim() else 0) for v in leaves(tree)]
    return tuple(i for i, shape in enumerate(shapes) if shape == (dims, size))


def _of_one_parameter(group: Group) -> Task:
    """Give a task that refuses to be run, with one parameter."""
    task = NoPasses.of(group.task)
    task.names = (NAME,)
    return task


def _begins_at_zero(group: Group, places: Places, step: Step) -> bool:
    """Whether all that moves besides the model is 0 when a round begins, and not by chance."""
    made = recorded(group.start, (step.sent, step.clients))
    if made is None:
        return False
    found = zero(made.graph)
    return all(found[i] for i in places.carried[1:])


def _combination(group: Group, places: Places, step: Step) -> list[set[int]] | None:
    """Tell of what each vector is made after a step; None if it is no combination of vectors."""
    short = Short(places, step)
    given = short.of(step)
    inputs = leaves(given)
    marks = short.marks(inputs)
    made = recorded(group.moved(_of_one_parameter(group)), given, [v.clone() for v in inputs])
    if made is None:
        return None
    found = reach(made.graph, marks, short.length)
    after = [found[i] for i in places.carried]
    rest = [of for i, of in enumerate(found) if i not in places.carried]
    if any(of is None for of in after) or any(of != set() for of in rest):
        return None
    # what a rule does to short vectors must be what it does to those of the true length
    whole = recorded(group.moved(NoPasses.of(group.task)), at_length(group.task, step))
    lengths = (short.length, step.held.w.shape[-1])
    if whole is None or not alike(made, whole, lengths):
        return None
    return [of for of in after if of is not None]


def at_length(task: Task, step: Step) -> Step:
    """Give a step with a gradient of the true length, all of it in the first parameter."""
    first, *others = task.names
    gradient = dict.fromkeys(others, step.held.w[..., :0]) | {first: step.held.w}
    return step._replace(found=step.found._replace(gradient=gradient))


def _reads_momentum(group: Group, places: Places, step: Step) -> bool:
    """Whether the end of a round asks for more of what moved than the model."""
    ended = (step.sent, step.clients, step.held)
    carried = leaves(step.held)
    momentum = {id(carried[i]) for i in places.carried[1:]}
    marked = {i for i, v in enumerate(leaves(ended)) if id(v) in momentum}
    made = recorded(group.finished, ended)
    return made is None or reads(made.graph, marked)


def recorded(
    function: Callable[..., Any], trees: Any, inputs: list[Tensor] | None = None
) -> fx.GraphModule | None:
    """Record a function of trees; None if that cannot be.  Without inputs nothing is computed."""
    shape = structure(trees)
    if inputs is None:
        with FakeTensorMode(allow_fallback_kernels=True, allow_non_fake_inputs=True):
            inputs = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in leaves(trees)]

    def flat(*values: Tensor) -> list[Tensor]:
        return leaves(function(*rebuild(shape, values)))

    try:
        return make_fx(flat)(*inputs)
    except Exception as error:  # any of the tracer's or of a rule's: it will run as it is
        log.info("weights move in every step: their rules cannot be recorded (%s)", error)
        return None
