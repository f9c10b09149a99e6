"""What gradients do where they are made: the arguments of programs/step.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from undrift.kernels import interpreted

Rate = float | Tensor  # of everybody, or one per client
Rates = tuple[Rate, Rate]  # the learning rate, and how much of the weights is kept
MOST_CARRIED = MOST_SHARED = MOST_OWN = 2


class ChainStep(NamedTuple):
    """A layer's step under a linear chain of rules.  C clients of E experiments.

    Every vector is a view that begins where the layer's weights do, [C, n] or [E, n].
    """

    more: Sequence[Tensor]  # what moves besides the weights: one vector at most
    shared: Sequence[Tensor]
    own: Sequence[Tensor]
    table: Tensor  # [carried, C, number], of what each vector that moves is made
    live: Tensor  # [C], who moves
    needs: tuple[tuple[int, ...], ...]  # which numbers of the table count
    scale: float  # what gradients are multiplied by first
    behind: int  # the bias begins so many numbers behind the weights


class Mixed(NamedTuple):
    """Steps of clients who stand side by side, each some under a chain of their own."""

    sections: Sequence[tuple[slice, ChainStep]]


One = Rates | ChainStep | None  # None: gradients are stored
Step = One | Mixed


def sections(step: Step) -> Sequence[tuple[slice, Any]]:
    """Tell which clients take which step; of a mixture, each has a chain of its own."""
    return step.sections if isinstance(step, Mixed) else [(slice(None), step)]


def fits(carried: int, shared: int, own: int) -> bool:
    """Whether the programs have room for so many vectors."""
    return carried <= MOST_CARRIED and shared <= MOST_SHARED and own <= MOST_OWN


def arguments(step: One, w: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """Give the arguments that name memory, those that are numbers, and the constants."""
    if not isinstance(step, ChainStep):
        lr, keep = step or (0.0, 1.0)
        flags = dict(
            MOVE=int(step is not None), RATES=isinstance(lr, Tensor),
            KEEPS=isinstance(keep, Tensor), CARRIED=0, SHARED=0, OWN=0, NEEDS=0,
        )  # fmt: skip
        return (lr, keep, *[w] * 7), (1,) + (0,) * 8, flags
    vectors = [
        *_as_many(step.more, w, MOST_CARRIED - 1), *_as_many(step.shared, w, MOST_SHARED),
        *_as_many(step.own, w, MOST_OWN),
    ]  # fmt: skip
    each = step.table.shape[1] // (len(step.shared[0]) if step.shared else step.table.shape[1])
    numbers = (each, step.behind, *step.table.stride()[:2], *(v.stride(0) for v in vectors))
    flags = dict(
        MOVE=2, RATES=False, KEEPS=False, CARRIED=1 + len(step.more), SHARED=len(step.shared),
        OWN=len(step.own),
        NEEDS=sum(1 << (8 * i + t) for i, needs in enumerate(step.needs) for t in needs),
    )  # fmt: skip
    return (step.scale, 1.0, *vectors, step.table, step.live), numbers, flags


def take(step: One, w: Tensor, gradient: Tensor) -> None:
    """Move w [C, n], whose clients may lie apart, by its gradient [C, n]."""
    from undrift.kernels.interpreter import mend
    from undrift.kernels.programs import step as programs
    from undrift.kernels.tuner import Launch, on_device

    if interpreted():
        mend()
    gradient = gradient.contiguous()
    memory, numbers, flags = arguments(step, w)
    size, block = w.shape[1], 1024
    with on_device(w):
        given = (gradient, w, *memory, size, w.stride(0), *numbers)
        grid = (len(w), -(-size // block))  # the first axis has no limit to speak of
        Launch(programs.take, grid, given, dict(BLOCK=block, num_warps=4, **flags)).run()


def _as_many(vectors: Sequence[Tensor], none: Tensor, count: int) -> list[Tensor]:
    """Give as many tensors as a program takes; it looks at those that there are."""
    return [*vectors, *[none] * count][:count]
