"""All local steps of linear rules for stacks of linear layers in one call, by loops in C.

SGD with momentum, control variates, duals, pulls: a step makes of each number a combination of what
stands at its place (linear_chain.py).  The combinations of all steps are found beforehand, with
short vectors; then a client's steps are one loop, as they are for plain SGD (native_steps.py).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from undrift.core.algorithm import Algorithm, Broadcast, Client
from undrift.core.round import Found, shares_gradient
from undrift.core.task import Batch, Task
from undrift.core.tree import EMPTY, Tree, leaves, rebuild, structure, tree_map
from undrift.core.views import Carry
from undrift.engines.group import Group, NoPasses
from undrift.engines.linear_chain import LinearChain, Short, Step, at_length, recorded
from undrift.engines.linearity import reads
from undrift.engines.native_steps import NativeSteps
from undrift.program.client_half import ClientHalf
from undrift.program.programs import Programs

MOST_MOVING, MOST_HELD = 4, 8  # of dense.c


class _Chain(ctypes.Structure):
    """`struct chain` of dense.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("moving", "held")),
        *((name, ctypes.c_void_p) for name in ("rows", "shares")),
    )


class LinearRules:
    """The rules of an algorithm, whose steps are linear."""

    def __init__(self, chain: LinearChain) -> None:
        self.chain, self._programs = chain, Programs()
        self._shorts: dict[int, Short] = {}  # by number of clients

    @classmethod
    def find(
        cls, algo: Algorithm, task: Task, broadcast: Broadcast, clients: Client, carry: Carry
    ) -> LinearRules | None:
        """Find out whether the rules of an algorithm are linear, and few enough vectors."""
        if not shares_gradient(algo):
            return None
        group, step = Group([algo], task, carry.w.device), step_of(broadcast, clients, carry, 0)
        chain = LinearChain.find(group, step, task.size)
        if chain is None:
            return None
        moving, shared, own = map(len, chain.places)
        few = moving <= MOST_MOVING and moving + shared + own <= MOST_HELD
        return cls(chain) if few and not _asks_for_examples(group, step) else None

    def shares(
        self, broadcast: Broadcast, clients: Client, carry: Carry, steps: int, compiled: bool
    ) -> tuple[Tensor, Carry]:
        """Tell what steps make of vectors, [C, K, moving, 1 + held]; and take them but for those.

        Gives what clients hold afterwards, with vectors as they were.
        """
        step = step_of(broadcast, clients, carry, 0)
        count, carried = len(carry.w), self.chain.places.carried
        if count not in self._shorts:
            self._shorts[count] = Short(self.chain.places, step)
        step = self._shorts[count].of(step)
        given, shape = leaves(step), structure(step)
        numbered = rebuild(shape, list(range(len(given))))
        held, found, program = leaves(numbered.held), [], None
        for k in range(steps):
            given[numbered.k] = step.k + k
            if program is None:
                function = self.chain.after
                program = self._programs.find("step", function, shape, given, compiled)
            after = program.run(given)
            moved = torch.stack([after[i] for i in carried])
            found.append(moved[..., : self.chain.places.number])
            for i, at in enumerate(held):
                if i not in carried:
                    given[at] = after[i]
        ended = [v[0] for v in map(given.__getitem__, held)]
        for i in carried:
            ended[i] = leaves(carry)[i]
        told = torch.stack(found)[:, :, 0].permute(2, 0, 1, 3)  # from [K, moving, C, number]
        moving = len(self.chain.places.carried)
        first = [moving, *range(moving)]  # the gradient's
        order = [*first, *range(moving + 1, self.chain.places.number)]
        return told[..., order].contiguous(), rebuild(structure(carry), ended)


class LinearSteps(NativeSteps):
    """Takes all steps of a chunk of clients at once; the task `fits`, the rules are linear."""

    def __init__(self, half: ClientHalf, rules: LinearRules, *given: Any) -> None:
        super().__init__(*given)
        self._half, self._rules = half, rules

    def take_all(self, clients: Client, rows: Tensor, order: Tensor, steps: Tensor) -> Carry:
        """Take so many steps of each client: rows and positions of examples [C, K, B]."""
        begun = self._half.start(clients)
        state = begun.state
        carry = tree_map(lambda v: v.contiguous(), begun._replace(state=EMPTY))
        chain = self._rules.chain
        shares, after = self._rules.shares(
            self.broadcast, clients, carry, int(steps.max()), self._half.compiled
        )
        moving = [leaves(carry)[i].clone() for i in chain.places.carried]
        sent, own = tree_map(lambda v: v[None], (self.broadcast, clients))
        fixed = [v[0].contiguous().expand(len(steps), -1) for v in chain.shared(sent)]
        fixed += [v[0].contiguous() for v in chain.own(own)]
        places = torch.tensor(
            [[v[c].data_ptr() for v in (*moving, *fixed)] for c in range(len(steps))]
        )
        chains = [
            _Chain(len(moving), places.shape[1], rows_c.data_ptr(), share.data_ptr())
            for rows_c, share in zip(places, shares, strict=True)
        ]
        done = leaves(after)
        for i, vector in zip(chain.places.carried, moving, strict=True):
            done[i] = vector
        carry = rebuild(structure(after), done)._replace(state=state)
        return self._trained(carry, rows, order, steps, chains)


def step_of(broadcast: Broadcast, clients: Client, carry: Carry, k: int) -> Step:
    """Give the second half of a step, before anything is known of its examples."""
    sent, mine, held = tree_map(lambda v: v[None], (broadcast, clients, carry))
    nothing = torch.zeros_like(held.loss)
    scores = tree_map(torch.zeros_like, held.scores)
    found = Found(held.w, {}, nothing, scores, held.buffers)
    keys, number = torch.zeros_like(nothing, dtype=torch.int64), nothing.new_full((1,), float(k))
    mask = torch.ones(*nothing.shape, 1, dtype=torch.bool)
    batch = Batch(nothing[..., None], nothing[..., None], mask, mask.long())
    return Step((), sent, mine, held, batch, keys, number, found)


def _asks_for_examples(group: Group, step: Step) -> bool:
    """Whether anything but the sums of losses and scores depends on a batch, or is drawn."""
    trees = at_length(group.task, step)
    at = {id(v) for v in leaves((step.batch, step.keys, step.found.loss, step.found.scores))}
    marked = {i for i, v in enumerate(leaves(trees)) if id(v) in at}

    def rest(*given: Any) -> Tree:
        after = group.moved(NoPasses.of(group.task))(*given)
        return after._replace(loss=EMPTY, scores=EMPTY)

    made = recorded(rest, trees)
    return made is None or reads(made.graph, marked)
