"""What a kernel is asked to do, and how its operands are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
MOST_CHANNELS = 1024
MOST_OFFSETS = 2**31 - 1  # of one client, in elements


def up_to(n: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-n // multiple) * multiple


def power(n: int, least: int = 16) -> int:
    """Round up to a power of two; a matrix unit takes no less than 16.

    >>> power(50), power(3)
    (64, 16)
    """
    return max(least, 1 << (n - 1).bit_length())


class Problem(NamedTuple):
    """A cohort's convolution with stride 1, and ReLU and pooling behind it."""

    clients: int
    batch: int
    height: int
    width: int
    inputs: int
    outputs: int
    kernel: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    bias: bool = True
    relu: bool = False
    pool: bool = False
    precision: str = "float32"
    narrow: bool = False  # the output stays in the operand type
    planes: bool = False  # a channel of a pooled output lies together, as `flatten` reads it

    @property
    def operand(self) -> torch.dtype:
        """The type of the operands."""
        return TYPES[self.precision]

    @property
    def result(self) -> torch.dtype:
        """The type of the output."""
        return self.operand if self.narrow else torch.float32

    @property
    def taps(self) -> int:
        """The size of the kernel."""
        return self.kernel[0] * self.kernel[1]

    @property
    def between(self) -> tuple[int, int]:
        """The size of the convolution's own output, before pooling."""
        return (
            self.height + 2 * self.padding[0] - self.dilation[0] * (self.kernel[0] - 1),
            self.width + 2 * self.padding[1] - self.dilation[1] * (self.kernel[1] - 1),
        )

    @property
    def output(self) -> tuple[int, int]:
        """The size of the output."""
        rows, columns = self.between
        return (rows // 2, columns // 2) if self.pool else (rows, columns)

    @property
    def operations(self) -> float:
        """Additions and multiplications of one pass."""
        pixels = self.clients * self.batch * self.between[0] * self.between[1]
        return 2.0 * pixels * self.taps * self.inputs * self.outputs

    @property
    def rows(self) -> int:
        """How many rows of weights are stored: one per output channel, and zeros."""
        return power(self.outputs) if self.outputs <= 128 else up_to(self.outputs, 128)

    @property
    def depth(self) -> int:
        """How many weights a stored row has: one per tap and input channel, and zeros."""
        return up_to(self.taps * self.inputs, 64)

    def mirrored(self, narrow: bool) -> Problem:
        """Describe the gradient by the input: the gradient, convolved with the mirrored kernel."""
        padding = [
            d * (k - 1) - p
            for d, k, p in zip(self.dilation, self.kernel, self.padding, strict=True)
        ]
        return Problem(
            self.clients, self.batch, *self.between, self.outputs, self.inputs, self.kernel,
            (padding[0], padding[1]), self.dilation, False, False, False, self.precision, narrow,
        )  # fmt: skip

    def key(self) -> str:
        """Name the problem; cohorts and batches of similar size share a name."""
        flags = [name for name in ("bias", "relu", "pool", "narrow") if getattr(self, name)]
        sizes = (
            f"{power(self.clients, 1)}x{power(self.batch, 1)} {self.height}x{self.width} "
            f"{self.inputs}->{self.outputs} {self.kernel[0]}x{self.kernel[1]}"
        )
        around = f"padding {self.padding} dilation {self.dilation}"
        return " ".join([sizes, around, self.precision, *flags])


def takes(problem: Problem) -> bool:
    """Whether the general kernels do this."""
    reach = [d * (k - 1) for d, k in zip(problem.dilation, problem.kernel, strict=True)]
    most = max(
        problem.height * problem.width * problem.inputs,
        problem.between[0] * problem.between[1] * problem.outputs,
    )
    return (
        all(p <= r for p, r in zip(problem.padding, reach, strict=True))
        and max(problem.inputs, problem.outputs) <= MOST_CHANNELS
        and min(problem.output) >= 1
        and problem.batch * most <= MOST_OFFSETS
        and problem.clients <= 65535
    )


class Thin(NamedTuple):
    """The layout of a first layer: pairs of outputs, images of 4 channels with their borders."""

    height: int
    width: int
    block: int  # output channels at a time
    blocks: int
    depth: int  # weights of a pair
    pairs: int  # in a row of y, rounded up to a power of two
    lines: int  # rows of y


def thin(problem: Problem) -> Thin | None:
    """Give the layout of a first layer, or None where the general kernels must do."""
    height, width = (
        n + 2 * p for n, p in zip((problem.height, problem.width), problem.padding, strict=True)
    )
    depth = power(problem.kernel[0] * (problem.kernel[1] + 1) * 4)
    columns = problem.between[1]
    pairs = power(columns // 2)
    fits = (
        problem.inputs <= 3
        and problem.dilation == (1, 1)
        and depth <= 256
        and pairs <= 64
        and columns >= 2
        and (problem.pool or columns % 2 == 0)
        # products without matrix units are unrolled: one as deep as this would not end
        and problem.precision != "float32"
    )
    if not fits:
        return None
    block = min(power(problem.outputs), 64)
    blocks = -(-problem.outputs // block)
    return Thin(height, width, block, blocks, depth, pairs, problem.output[0])


class Norm(NamedTuple):
    """What a BatchNorm does besides its numbers, and what follows it in the same op."""

    eps: float
    result: torch.dtype  # of the output
    relu: bool = False
    pool: bool = False  # 2x2 maximum, behind or before the ReLU
    planes: bool = False  # each channel of the output lies together; else it lies as the input


class Lying(NamedTuple):
    """A vector of each client that lies somewhere, in float32."""

    at: Tensor  # [n] addresses
    aligned: bool  # whether all are multiples of 16
    column: int = 0  # where what is looked at begins


class Terms(NamedTuple):
    """What weights are made of besides gradients."""

    shared: Tensor  # [E, shared, out, in], of n / E clients each
    weights: Tensor | None = None  # [n, shared]; None: one vector, weight 1
    own: Sequence[Tensor] = ()  # [n, out, in] each
    own_weights: Sequence[Tensor] = ()  # [n] each

    def apart(self) -> tuple[Terms, list[tuple[Tensor, Tensor]]]:
        """Give the terms with one vector of each client at most, and the others' with weights."""
        pairs = list(zip(self.own[1:], self.own_weights[1:], strict=True))
        return self._replace(own=self.own[:1], own_weights=self.own_weights[:1]), pairs

    def write(self, w: Tensor) -> None:
        """Write their sum into w [n, out, in]."""
        each = w.unflatten(0, (len(self.shared), -1))
        if self.weights is None:
            each.copy_(self.shared[:, :1].expand_as(each))
            return
        weights = self.weights.view(*each.shape[:2], -1, 1, 1)
        torch.mul(self.shared[:, None, 0], weights[:, :, 0], out=each)
        for j in range(1, self.shared.shape[1]):
            each.addcmul_(self.shared[:, None, j], weights[:, :, j])
        for vectors, weight in zip(self.own, self.own_weights, strict=True):
            w.addcmul_(vectors, weight[:, None, None])
