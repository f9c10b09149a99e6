"""Wide linear layers of a cohort, remembered by what moved them instead of by their weights.

Under plain SGD from a common start the weights of a client after some steps are

    W = W0 - sum over earlier steps of lr * G^T X      X [B, in] inputs, G [B, out] gradients by y

so that, with all slots side by side (X [K*B, in], G [K*B, out], empty ones zero),

    forward    y  = x W0^T - (x X^T) lr G + b
    backward   dx = g W0   - (g G^T) lr X

and a client's own weights are neither read nor written until its last step is taken.  W0 is shared
by the clients of an experiment: its products are large ones.  Biases move in place as ever.

Under momentum, control variates, duals, pulls and weight decay a step is linear in more vectors
than the gradient (engines/linear_chain.py), and the weights are

    W = sum over j of b_j V_j + sum over earlier steps of r * G^T X

V_0 = W0, other V_j are shared by the clients of an experiment (SCAFFOLD's c) or each client's own
(c_i, a dual); none of them moves in a round.  The few numbers b and r move with every step instead.

Everything lies in buffers that keep their place and nothing is decided on the host, so a step can
be recorded and replayed.

Letters: S experiments, C clients of each, K steps, B rows of a batch, n = S * m clients that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from undrift.core.dense import add_product, multiply
from undrift.core.precision import operand_type
from undrift.kernels.problem import Lying, Terms

if TYPE_CHECKING:
    from undrift.kernels.ending import Ending, Size

# fp16 ends at 65504: products of two inputs or two gradients are kept at a fraction of their size.
SHRUNK = 2.0**-10


@dataclass(frozen=True)
class Extent:
    """How much is to be remembered, and of what."""

    experiments: int
    clients: int
    steps: int
    batch: int

    @property
    def rows(self) -> int:
        """Tell how many examples a client sees."""
        return self.steps * self.batch


class Vectors(NamedTuple):
    """How many vectors a step reads besides the gradient."""

    shared: int = 1  # of an experiment, the received model first
    own: int = 0  # of each client
    carried: int = 0  # that a step reads and moves: the model, momentum; 0: nobody counts them
    in_place: bool = True  # whether layers step on their way back where they do not remember
    inside: bool = False  # whether they take the steps of the chain there

    @property
    def passes(self) -> int:
        """Count how often a step reads or writes a client's weights where they move."""
        # Layers that step: read going forward, read and written going back.  Else the gradient is
        # written and read, too; what is shared comes from the cache.
        if self.in_place:
            return 3
        return (2 if self.inside else 4) + 2 * self.carried + self.own


PLAIN = Vectors()


@dataclass
class Moves:
    """The learning rates of all slots and where this step writes: the same for every layer."""

    rates: Tensor  # [S, C, K + 1], -lr in units of `scale`; 0 where nothing is remembered
    scale: float
    slots: Tensor  # [n], among S * C * (K + 1)
    weights: Tensor | None = None  # [S, C, shared + own], of the vectors; None: of W0 alone, 1
    taken: int | None = None  # most steps that anybody has taken, where that is known: 0 is at W0
    told: Callable[[], None] | None = None  # is called by a layer that has remembered a step
    awaited: Callable[[], None] | None = None  # is called by a layer before it reads anything


class History:
    """One layer.  A client has K slots and a spare one, where it writes while it stands still.

    The spare slot is never read, so a client without a step adds nothing, whatever it computed.
    """

    def __init__(
        self,
        layer: nn.Linear,
        first: int,
        precision: str,
        extent: Extent,
        moves: Moves,
        vectors: Vectors = PLAIN,
    ) -> None:
        kind, device = operand_type(precision, layer.weight.dtype), moves.rates.device
        sizes = (extent.experiments, extent.clients, extent.steps + 1, extent.batch)
        self.precision, self.kind, self.extent, self.moves = precision, kind, extent, moves
        self.columns = slice(first, first + layer.weight.numel())  # of the cohort's matrix

        def room(*lead: int) -> Tensor:
            return torch.zeros((*lead, *layer.weight.shape), dtype=kind, device=device)

        self.shared = room(extent.experiments, vectors.shared)
        self.own = [room(*sizes[:2]) for _ in range(vectors.own)]
        self.x = torch.zeros((*sizes, layer.in_features), dtype=kind, device=device)
        self.g = torch.zeros((*sizes, layer.out_features), dtype=kind, device=device)
        # by vector of clients: where it lies that is still to be narrowed
        self._lying: list[Lying | None] = [None] * vectors.own
        self.used: bool | None = None  # whether it remembers: known after the first step

    def takes(self, x: Tensor) -> bool:
        """Whether x [n, rows, in] is a step's batch; a layer may be applied to more rows.

        The answer is the same in every step.
        """
        self.used = x.shape[1] == self.extent.batch
        return self.used

    def take_in(self, own: Sequence[Tensor | Lying], *, on_the_way: bool = False) -> None:
        """Narrow the vectors of clients, [S, C, P] each.

        `on_the_way`: those that lie elsewhere when they are first read, in the step after the
        first one.
        """
        self._lying = [None] * len(self.own)
        for j, (held, vector) in enumerate(zip(self.own, own, strict=True)):
            if isinstance(vector, Lying):
                there, room = vector._replace(column=self.columns.start), held.flatten(0, 1)
                if on_the_way and self._problem(self.extent.batch, room) is not None:
                    self._lying[j] = there
                    continue
                from undrift.kernels import moving

                moving.narrow(there, room)
                continue
            # row by row, in one launch: each lies together
            mine, rows = held.flatten(0, 1), self.of(vector.flatten(0, 1))
            torch._foreach_copy_(list(mine.unbind()), list(rows.unbind()))

    def clear(self, spoiled: Tensor) -> None:
        """Forget all gradients and, where there may be some that are not finite, inputs.

        Rates of 0 would do for all that is finite.
        """
        self.g.zero_()
        if self.kind.itemsize > 2 or self.x.nbytes % 4 or not _has_kernels(self.x.device):
            self.x.zero_()
            return
        from undrift.kernels import moving

        moving.clear(self.x, spoiled)

    def of(self, vectors: Tensor) -> Tensor:
        """View this layer's weights in vectors [..., P]."""
        return vectors[..., self.columns].unflatten(-1, self.shared.shape[2:])

    def forward(self, x: Tensor, b: Tensor | None, result: torch.dtype) -> tuple[Tensor, Tensor]:
        """Apply the layer to x [n, B, in]; gives y and x in the operand type."""
        if self.moves.awaited is not None:
            self.moves.awaited()
        operand = x.to(self.kind)
        y = self._by_shared(operand)
        for part, held in self._parts(len(x), self.moves.taken):
            for j, weight in enumerate(held.own_weights):
                lying = self._lying[j] if self.moves.taken == 1 else None
                found = self._overlap(operand[part], held.own[j], lying)
                y[part].addcmul_(found, weight[:, None, None])
            overlap = self._overlap(operand[part], held.x)
            self._add(y[part], self._weighted(overlap, held.rates), held.g)
        if b is None:
            return y.to(result), operand
        return torch.add(y, b[:, None], out=torch.empty_like(y, dtype=result)), operand

    def backward(self, g: Tensor, x: Tensor, result: torch.dtype | None) -> Tensor | None:
        """Remember a step: inputs x in the operand type, gradient g [n, B, out].

        Gives the gradient by x in the type `result`, or none.
        """
        g, back = g.to(self.kind), None
        if result is not None:
            # A narrow result takes the other products on top of the rounded first one: its own
            # rounding once more, for half of the memory traffic.
            back = self._back_by_shared(g, result)
            for part, held in self._parts(len(g), self.moves.taken):
                for vectors, weight in zip(held.own, held.own_weights, strict=True):
                    rows = torch.empty_like(g[part])
                    torch.mul(g[part], weight[:, None, None], out=rows)
                    self._add_inputs(back[part], rows, vectors, 1.0)
                overlap = multiply(g[part], held.g.transpose(1, 2), self.precision)
                weighted = self._weighted(overlap, held.rates)
                self._add_inputs(back[part], weighted, held.x, self.moves.scale)
        _write(self.x, x, self.moves.slots)  # last: the weights above are those before the step
        _write(self.g, g, self.moves.slots)
        if self.moves.told is not None:
            self.moves.told()
        return back

    def finish(
        self, w: Tensor, start: Tensor, more: Sequence[Tensor] = (), own: Sequence[Tensor] = ()
    ) -> None:
        """Write the weights into the cohort's matrix w [S * C, P], from the models start [S, P].

        What is there is not read.  A layer that does not remember has moved by itself.
        """
        if self.used is False:
            return
        whole, each = self.of(w), len(w) // len(start)
        first = torch.stack([self.of(v) for v in (start, *more)], 1) if more else None
        for part, held in self._parts(len(w)):
            some = slice(part.start // each, -(-part.stop // each))
            theirs = self.of(start)[some, None] if first is None else first[some]
            wide = [self.of(v.flatten(0, 1))[part] for v in own]
            terms = Terms(theirs, held.weights, wide, held.own_weights)
            self._rebuild(whole[part], terms, self._slopes(held), held.x, self._unit)

    def end(self) -> LayerEnd:
        """Take what moved everybody's weights, for the end of a round."""
        count = self.extent.experiments * self.extent.clients
        ((_, held),) = self._parts(count)
        return LayerEnd(self, self._slopes(held), held.x, self._ending_problem(count))

    def concludes(self, size: Size) -> bool:
        """Whether the end of a round is done by kernels here, for so many vectors.

        On a CPU it is not, and there for comparison.
        """
        problem = self._ending_problem(self.extent.experiments * self.extent.clients)
        if problem is None:
            return self.x.device.type == "cpu"
        from undrift.kernels import closing as kernels

        return kernels.takes(problem, size)

    @property
    def closes_by_kernels(self) -> bool:
        """Whether kernels do the end of a round here, if they take it at all."""
        return self._ending_problem(1) is not None

    def _ending_problem(self, count: int) -> Any:
        """Describe the end of a round to the kernel, or give None where it does not run."""
        if self.kind.itemsize != 2 or not _has_kernels(self.x.device):
            return None
        from undrift.kernels import linear

        sizes = (count, self.extent.rows, self.x.shape[-1], self.g.shape[-1])
        problem = linear.LinearProblem(*sizes, self.precision)
        return problem if linear.rebuilds(problem) else None

    @property
    def _unit(self) -> float:
        """Tell what `_slopes` are in units of."""
        return self.moves.scale * SHRUNK

    def _slopes(self, held: _Held) -> Tensor:
        """Give the gradients of all steps [n, K*B, out], as they are weighted."""
        # no longer shrunk: most rates are then 1, and gradients what they were
        rates, slots = held.rates / SHRUNK, (self.extent.steps, self.extent.batch)
        g = torch.empty_like(held.g)
        torch.mul(held.g.unflatten(1, slots), rates[..., None, None], out=g.unflatten(1, slots))
        return g

    def _rebuild(self, w: Tensor, terms: Terms, g: Tensor, x: Tensor, scale: float) -> None:
        """Write all terms + scale * g^T x into w [n, out, in]."""
        if self.kind != torch.float64 and _has_kernels(w.device):
            from undrift.kernels import linear

            sizes = (len(w), x.shape[1], x.shape[2], g.shape[2])
            problem = linear.LinearProblem(*sizes, self.precision)
            if linear.rebuilds(problem):
                first, others = terms.apart()  # the kernel adds one vector of each client
                linear.rebuild(problem, g, x, first, w, scale)
                for vectors, weight in others:
                    w.addcmul_(vectors, weight[:, None, None])
                return
        terms.write(w)
        add_product(w, g.transpose(1, 2), x, scale, self.precision)

    def _weights(self, count: int) -> Tensor | None:
        """Give so many clients' weights of the vectors that are shared, [n, shared].

        None: W0 alone.
        """
        if self.moves.weights is None or self.moves.taken == 0:
            return None
        width = count // self.extent.experiments
        return self.moves.weights[:, :width, : self.shared.shape[1]].flatten(0, 1)

    def _by_shared(self, a: Tensor) -> Tensor:
        """Multiply everybody's rows [n, B, in] by what their experiment shares, as weighted."""
        weights = self._weights(len(a))
        if weights is None:
            return self._by_start(a, self.shared[:, 0].transpose(1, 2))
        found = self._by_start(a, self.shared.flatten(1, 2).transpose(1, 2))
        each = found.unflatten(2, self.shared.shape[1:3])
        y = each[:, :, 0] * weights[:, :1, None]
        for j in range(1, weights.shape[1]):
            y.addcmul_(each[:, :, j], weights[:, j, None, None])
        return y

    def _back_by_shared(self, g: Tensor, result: torch.dtype) -> Tensor:
        """Multiply everybody's gradients [n, B, out] likewise."""
        weights = self._weights(len(g))
        if weights is None:
            return self._by_start(g, self.shared[:, 0], result)
        rows = g.new_empty((*g.shape[:2], weights.shape[1], g.shape[2]))
        torch.mul(g[:, :, None], weights[:, None, :, None], out=rows)
        return self._by_start(rows.flatten(2), self.shared.flatten(1, 2), result)

    def _by_start(self, a: Tensor, w0: Tensor, result: torch.dtype | None = None) -> Tensor:
        """Multiply everybody's rows by a matrix of their experiment."""
        rows = a.reshape(len(w0), -1, a.shape[2])
        return multiply(rows, w0, self.precision, result).view(*a.shape[:2], -1)

    def _overlap(self, rows: Tensor, held: Tensor, lying: Lying | None = None) -> Tensor:
        """Multiply rows [n, B, in] by all inputs [n, K*B, in] that are held.

        Where they still lie elsewhere, they are narrowed on the way.
        """
        problem = self._problem(rows.shape[1], held)
        if problem is None:
            return multiply(rows, held.transpose(1, 2), self.precision)
        from undrift.kernels import linear

        assert lying is None or len(lying.at) == len(held), "of everybody at once"
        return linear.forward(problem, rows, held, None, torch.float32, lying=lying)

    def _add_inputs(self, y: Tensor, weighted: Tensor, held: Tensor, scale: float) -> None:
        """Add rows [n, K*B, in] that are held to y [n, B, in], by weights [n, B, K*B]."""
        problem = self._problem(y.shape[1], held)
        if problem is None or not y.is_contiguous():
            add_product(y, weighted, held, scale, self.precision)
            return
        from undrift.kernels import linear

        linear.add_rows(problem, weighted, held, y, scale)

    def _problem(self, rows: int, held: Tensor) -> Any:
        """Describe a product of so many rows of everybody to the kernels, or give None.

        Torch's products do badly at these shapes: few rows and long sums.
        """
        if self.kind == torch.float64 or not _has_kernels(held.device):
            return None
        from undrift.kernels import linear

        count, slots, inputs = held.shape
        problem = linear.LinearProblem(count, rows, inputs, slots, self.precision)
        return problem if linear.takes(problem, held) else None

    def _add(self, y: Tensor, weighted: Tensor, held: Tensor) -> None:
        add_product(y, weighted, held, self.moves.scale, self.precision)

    def _weighted(self, overlap: Tensor, rates: Tensor) -> Tensor:
        """Multiply [n, B, K*B] by every slot's rate; the result is an operand."""
        made = torch.empty_like(overlap, dtype=self.kind)
        slots = (rates.shape[1], self.extent.batch)
        by_slot = overlap.unflatten(2, slots)
        torch.mul(by_slot, rates[:, None, :, None], out=made.unflatten(2, slots))
        return made

    def _parts(self, count: int, taken: int | None = None) -> Iterator[tuple[slice, _Held]]:
        """View what some clients remember, in one piece where their memory is.

        Of so many steps; after none there is nothing to view.
        """
        width, steps = count // self.extent.experiments, self.extent.steps
        if taken is not None:
            steps = min(steps, up_to_power(taken))
        if not steps:
            return
        x, g = (t[:, :width, :steps].flatten(2, 3) for t in (self.x, self.g))
        rates, own = self.moves.rates[:, :width, :steps], [v[:, :width] for v in self.own]
        shown = None if self.moves.weights is None else self.moves.weights[:, :width]
        if self.extent.experiments == 1 or width == self.extent.clients:
            flat = [t.flatten(0, 1) for t in (x, g, rates, *own)]
            weights = None if shown is None else shown.flatten(0, 1)
            yield slice(0, count), self._held(flat, weights)
            return
        for e in range(self.extent.experiments):
            part, one = slice(e * width, (e + 1) * width), [t[e] for t in (x, g, rates, *own)]
            yield part, self._held(one, None if shown is None else shown[e])

    def _held(self, tensors: list[Tensor], weights: Tensor | None) -> _Held:
        x, g, rates, *own = tensors
        if weights is None:
            return _Held(x, g, rates, None, [], [])
        shared = self.shared.shape[1]
        return _Held(x, g, rates, weights[:, :shared], own, list(weights[:, shared:].unbind(1)))


class LayerEnd(NamedTuple):
    """A layer at the end of a round: weights have moved by g^T x."""

    layer: History
    g: Tensor  # [n, K*B, out], in units of the layer's
    x: Tensor  # [n, K*B, in]
    problem: Any  # for the kernels, where they run

    def close(self, ending: Ending) -> Tensor:
        """Write clients' states and sums over them; gives sums over each one's weights."""
        if self.problem is None:
            return self._of(ending).close(self._moved(ending))
        from undrift.kernels import closing as kernels

        return kernels.close(self.problem, self.g, self.x, self._of(ending), self.layer._unit)

    def _of(self, ending: Ending) -> Ending:
        return ending.of(self.layer.of, self.layer.columns.start)

    def _moved(self, ending: Ending) -> Tensor:
        moved = multiply(self.g.transpose(1, 2), self.x, self.layer.precision) * self.layer._unit
        return moved.unflatten(0, ending.taken.shape)


class _Held(NamedTuple):
    x: Tensor  # [n, K*B, in]
    g: Tensor  # [n, K*B, out]
    rates: Tensor  # [n, K]
    weights: Tensor | None  # [n, shared]
    own: list[Tensor]  # [n, out, in] each
    own_weights: list[Tensor]  # [n] each


def _write(held: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write rows [n, B, ...] into their slots of held [S, C, K + 1, B, ...]."""
    target, source = held.view(-1, held.shape[3] * held.shape[4]), rows.reshape(len(rows), -1)
    packed = 8 // source.element_size()
    even = source.shape[1] % packed == 0 and source.storage_offset() % packed == 0
    if even and source.is_contiguous():
        # one index is looked up per element: let elements be large
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.index_copy_(0, slots, source)


def up_to_power(count: int) -> int:
    """Round up to a power of 2: kernels are made and tuned for every size that they see.

    >>> [up_to_power(n) for n in (0, 1, 2, 3, 5)]
    [0, 1, 2, 4, 8]
    """
    return 1 << (count - 1).bit_length() if count else 0


def _has_kernels(device: torch.device) -> bool:
    from undrift import kernels

    return kernels.available(device)
