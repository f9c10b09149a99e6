"""Two blocks: a model that is shared, and rows z that never leave a client, one per example.

f_i(y, z) is the mean over the client's examples of what an objective says of each.  In a round, z
takes its steps at the model that was sent; then the model is trained as usual, z fixed.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import grad

from undrift.core.algorithm import Algorithm
from undrift.core.rule import ClientView, Rule, ServerView, Sizes
from undrift.core.task import Output, Vec, masked_mean
from undrift.core.together import around, moves
from undrift.core.tree import Tree, number, part, record, replace, static
from undrift.errors import ConfigError
from undrift.rules.contrast import check_counts


class Objective(Protocol):
    """Any record with these three methods is a two-block objective."""

    def rows(self, w: Vec, sizes: Sizes) -> Tensor:
        """Give the first z, one row for each of `sizes.examples`."""

    def values(self, out: Output, z: Tensor, view: ClientView) -> Tensor:
        """Judge the examples of `view.batch`, [B]; their mean over own data is f_i."""

    def project(self, z: Tensor) -> Tensor:
        """Bring rows back into the set Z_i."""


@record
class TwoBlocks(Rule):
    """The private block of FedVRA-U (Wang et al. 2023, alg. 2); the other rules train the model."""

    objective: Any = part(default_factory=lambda: PseudoLabels())
    rate: float = number(default=1.0, low=0)  # eta_z
    steps: int = static(default=5)  # Q_z

    def __post_init__(self) -> None:
        check_counts(self, steps=0)

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return self.objective.rows(w, sizes)  # z_i

    def begin(self, view: ClientView) -> Tree:
        out, z = view.output_at(view.w0), read_rows(view.mine, view.batch.index)

        def total(rows: Tensor) -> Tensor:
            values = self.objective.values(out, rows, view)
            return torch.where(view.batch.mask, values, torch.zeros_like(values)).sum() / view.size

        for _ in range(self.steps):
            z = self.objective.project(z - self.rate * grad(total)(z))
        return write_rows(view.mine, view.batch.index, z)

    def loss(self, loss: Tensor, out: Output, view: ClientView) -> Tensor:
        z = read_rows(view.mine, view.batch.index)
        return masked_mean(self.objective.values(out, z, view), view.batch.mask)


def two_blocks(
    algorithm: Algorithm, objective: Any = None, *, rate: float = 1.0, steps: int = 5
) -> Algorithm:
    """Train a two-block problem with any algorithm: FedAvg, FedProx, SCAFFOLD, FedDyn, ..."""
    chosen = PseudoLabels() if objective is None else objective
    return replace(algorithm, rules=(TwoBlocks(chosen, rate, steps), *algorithm.rules))


def read_rows(table: Tensor, index: Tensor) -> Tensor:
    """Take the rows of a batch; padding reads row 0 and is masked later."""
    return table[index.clamp(min=0)]


def write_rows(table: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Write the rows of real examples; padding goes to a spare row that is thrown away."""
    spare = torch.cat([table, table[:1]])
    return spare.index_copy(0, torch.where(index < 0, len(table), index), rows)[:-1]


@record
class Ball(Rule):
    """Keep the model in a ball around 0 (the set X of FedVRA-U); it stands last among the rules."""

    radius: float = number(default=1.0, low=0, ends="()")

    def check_beside(self, algorithm: Any) -> None:
        moving = [type(r).__name__ for r in around(self, algorithm)[1] if moves(r)]
        if moving:
            raise ConfigError(f"{moving[0]} would take the model out of Ball: put Ball last")

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        x = view.w - update
        norm = torch.linalg.vector_norm(x).clamp(min=1e-30)
        return view.w - x * (self.radius / norm).clamp(max=1.0), state


# --------------------------------------------------------------------------------- objectives
def simplex(z: Tensor) -> Tensor:
    """Project rows on the probability simplex, by sorting (Duchi et al. 2008).

    >>> simplex(torch.tensor([[2.0, 0.0], [0.2, 0.4]]))
    tensor([[1.0000, 0.0000],
            [0.4000, 0.6000]])
    """
    ordered = z.sort(dim=1, descending=True).values
    excess = ordered.cumsum(1) - 1
    place = torch.arange(1, z.shape[1] + 1, dtype=z.dtype, device=z.device)
    last = (ordered * place > excess).sum(1, keepdim=True)
    level = excess.gather(1, last - 1) / last
    return (z - level).clamp(min=0)


def entropy(z: Tensor) -> Tensor:
    """Entropy of rows; 1e-8 stands for 0, where its slope is infinite."""
    return -(z * z.clamp(min=1e-8).log()).sum(1)


def uniform_rows(w: Vec, sizes: Sizes, width: int) -> Tensor:
    """Start with every row in the middle of the simplex."""
    return w.new_full((sizes.examples, width), 1 / width)


@record
class PseudoLabels:
    """Semi-supervised: z_e is a soft label of an example that has none.

    f_i = mean over labelled of CE + weight * mean over the others of (sum_c z_c (-log p_c) -
    temperature * entropy(z)).  One example in `every` has a label, by its place among the client's
    own; the others' are never read.
    """

    weight: float = number(default=1.0, low=0)
    temperature: float = number(default=0.5, low=0)
    classes: int = static(default=10)
    every: int = static(default=10)

    def __post_init__(self) -> None:
        check_counts(self, classes=2, every=1)

    def rows(self, w: Vec, sizes: Sizes) -> Tensor:
        """Give uniform labels."""
        return uniform_rows(w, sizes, self.classes)

    def values(self, out: Output, z: Tensor, view: ClientView) -> Tensor:
        """Judge examples; each kind is weighted by n over how many there are of it."""
        check_width(out, z, "PseudoLabels.classes")
        log_p, n = out.value.log_softmax(1), view.size
        labelled = torch.ceil(n / self.every)
        has_label = view.batch.index % self.every == 0
        known = -log_p.gather(1, view.batch.y.long()[:, None].clamp(min=0))[:, 0]
        guessed = -(z * log_p).sum(1) - self.temperature * entropy(z)
        guessed = self.weight * guessed / (n - labelled).clamp(min=1)
        return n * torch.where(has_label, known / labelled, guessed)

    def project(self, z: Tensor) -> Tensor:
        """Keep rows on the probability simplex."""
        return simplex(z)


@record
class Clusters:
    """Clustering: the module gives squared distances to shared centres, z_e says to which one.

    f_i = mean of sum_c z_c distance_c - temperature * entropy(z).  Targets are never read.
    """

    temperature: float = number(default=0.1, low=0)
    groups: int = static(default=3)

    def __post_init__(self) -> None:
        check_counts(self, groups=2)

    def rows(self, w: Vec, sizes: Sizes) -> Tensor:
        """Give equal parts in all groups."""
        return uniform_rows(w, sizes, self.groups)

    def values(self, out: Output, z: Tensor, view: ClientView) -> Tensor:
        """Judge examples."""
        check_width(out, z, "Clusters.groups")
        return (z * out.value).sum(1) - self.temperature * entropy(z)

    def project(self, z: Tensor) -> Tensor:
        """Keep rows on the probability simplex."""
        return simplex(z)


def check_width(out: Output, z: Tensor, name: str) -> None:
    """Refuse a private block that is not as wide as the module's output."""
    if out.value.shape != z.shape:
        raise ConfigError(
            f"{name} = {z.shape[1]}, but the module gives {tuple(out.value.shape[1:])} per example"
        )
