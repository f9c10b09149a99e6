"""Networks for tables: rows of numbers in which some columns are one-hot blocks.

Shapes.  B rows, I inputs, W outputs of a map.  `blocks` counts the inputs of each column in order.

Here are LayerNorms and no BatchNorm.  A BatchNorm normalises by the rows of a batch and keeps
running statistics.  Sites have different rows, and a small site has batches of one, so the sites
would train different functions, and the averaged statistics would fit none of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from undrift.errors import ConfigError
from undrift.models.layers import mlp, sequence
from undrift.models.settings import number, whole

PLAIN = 2  # inputs of a column up to which they go on as they are: a number, a flag, an indicator
WIDEST = 50  # an embedding whose width nobody chose


def logistic(inputs: int, classes: int = 2) -> nn.Sequential:
    """Make logistic regression: one linear layer; with one class, linear regression."""
    return mlp(inputs, (), classes)


def tabular_mlp(
    inputs: int,
    classes: int = 2,
    blocks: Sequence[int] | None = None,
    hidden: Sequence[int] = (64, 32),
    embedding: int | str = "auto",
    dropout: float = 0.0,
) -> nn.Sequential:
    """Make a multi-layer perceptron whose one-hot blocks are embedded first.

    `embedding` is the width of each embedding; "auto" takes half the levels, at most 50.
    """
    columns, rate = _columns(inputs, blocks, embedding), number("dropout", dropout, 0.0, 1.0)
    if isinstance(hidden, str) or not isinstance(hidden, Sequence) or not hidden:
        raise ConfigError(f"hidden = {hidden!r}: give a list of widths, e.g. [64, 32]")
    layers: dict[str, nn.Module] = {"columns": columns.simplest()}
    width = columns.outputs
    for i, units in enumerate(hidden, start=1):
        layers[f"fc{i}"] = nn.Linear(width, whole("hidden", units))
        # the feature is what the last layer would read without dropout, as in the other networks
        layers["feature" if i == len(hidden) else f"relu{i}"] = nn.ReLU()
        layers |= {f"dropout{i}": nn.Dropout(rate)} if rate else {}
        width = units
    return sequence(**layers, head=nn.Linear(width, whole("classes", classes)))


def tabular_resnet(
    inputs: int,
    classes: int = 2,
    blocks: Sequence[int] | None = None,
    width: int = 64,
    depth: int = 2,
    dropout: float = 0.0,
    embedding: int | str = "auto",
) -> nn.Sequential:
    """Make a residual network for tables after Gorishniy et al. (2021), with LayerNorm."""
    columns, rate = _columns(inputs, blocks, embedding), number("dropout", dropout, 0.0, 1.0)
    wide = whole("width", width)
    residuals = {f"block{i + 1}": Residual(wide, rate) for i in range(whole("depth", depth))}
    return sequence(
        columns=columns.simplest(),
        enter=nn.Linear(columns.outputs, wide),
        **residuals,
        norm=nn.LayerNorm(wide),
        feature=nn.ReLU(),
        head=nn.Linear(wide, whole("classes", classes)),
    )


class LevelMap(nn.Linear):
    """Maps a one-hot block to a vector: its weight holds one column for each level.

    A row of zeros, which names no level, becomes zeros.
    """

    def __init__(self, levels: int, width: int) -> None:
        super().__init__(levels, width, bias=False)


class Columns(nn.Module):
    """Embeds each one-hot block by a map of its own; other inputs go on as they are."""

    def __init__(self, blocks: Sequence[int], widths: Sequence[int]) -> None:
        super().__init__()
        self.sizes, levels = _runs(blocks)
        self.outputs = sum(widths)
        chosen = [w for b, w in zip(blocks, widths, strict=True) if b > PLAIN]
        self.maps = nn.ModuleList(LevelMap(n, w) for n, w in zip(levels, chosen, strict=True))

    def simplest(self) -> nn.Module:
        """Give a layer of torch's own where nothing is embedded: engines run those fastest."""
        return self if len(self.maps) else nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        """Give the inputs of the next layer, [B, I] -> [B, W]."""
        rows, maps = x.flatten(1), iter(self.maps)
        parts = rows.split([size for size, _ in self.sizes], 1)
        pairs = zip(parts, self.sizes, strict=True)
        return torch.cat([next(maps)(part) if mapped else part for part, (_, mapped) in pairs], 1)


class Residual(nn.Module):
    """Adds to its input two linear layers of it, normalised: x + fc2(relu(fc1(norm(x))))."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, width)
        self.relu = nn.ReLU()
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.fc2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Give the sum, [B, W]."""
        moved: Tensor = x + self.fc2(self.drop(self.relu(self.fc1(self.norm(x)))))
        return moved


def _runs(blocks: Sequence[int]) -> tuple[list[tuple[int, bool]], list[int]]:
    """Join neighbours that go on as they are; also give the sizes of the blocks that do not.

    >>> _runs([1, 1, 4, 2, 1])
    ([(2, False), (4, True), (3, False)], [4])
    """
    runs: list[tuple[int, bool]] = []
    for size in blocks:
        if size <= PLAIN and runs and not runs[-1][1]:
            runs[-1] = (runs[-1][0] + size, False)
        else:
            runs.append((size, size > PLAIN))
    return runs, [size for size, mapped in runs if mapped]


def _columns(inputs: int, blocks: Sequence[int] | None, embedding: int | str) -> Columns:
    inputs = whole("inputs", inputs)
    sizes = [1] * inputs if blocks is None else [whole("blocks", size) for size in blocks]
    if sum(sizes) != inputs:
        raise ConfigError(
            f"blocks = {list(sizes)} are {sum(sizes)} inputs, but inputs = {inputs}: give one "
            "number per column, as many inputs as it has"
        )
    chosen = None if embedding == "auto" else whole("embedding", embedding)
    widths = [chosen or min(WIDEST, (n + 1) // 2) if n > PLAIN else n for n in sizes]
    return Columns(sizes, widths)
