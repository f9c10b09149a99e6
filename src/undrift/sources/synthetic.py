"""Made-up clients that differ by two numbers: in their true models and in their inputs.

FedProx (Li et al. 2020, section 5.1): client k has y = argmax softmax(W_k x + b_k) with W_k and
b_k around u_k ~ N(0, alpha), and x ~ N(v_k, Sigma) with v_k around B_k ~ N(0, beta),
Sigma_jj = j^-1.2.  As in its code, alpha and beta are standard deviations and sizes are
50 + a log-normal number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undrift.core.random import fold, normal, permutation
from undrift.errors import ConfigError
from undrift.guarded.limits import check
from undrift.models.settings import number, whole
from undrift.sources.examples import Examples, Info

Sizes = int | Sequence[int] | None
LARGEST = 100_000  # of a log-normal size: one in ten thousand clients would be larger


class Maker(NamedTuple):
    """How clients are made."""

    alpha: float
    beta: float
    features: int
    outputs: int
    iid: bool
    seed: int

    def draw(self, count: int, *words: int | str) -> Tensor:
        """Draw standard normal numbers for a purpose."""
        return normal(fold(self.seed, "synthetic", *words), torch.arange(count))

    def model(self, client: int) -> tuple[Tensor, Tensor]:
        """Draw the true model of a client: [features, outputs] and [outputs]."""
        owner = -1 if self.iid else client
        u = 0.0 if self.iid else self.alpha * self.draw(1, "u", client)
        w = u + self.draw(self.features * self.outputs, "W", owner)
        return w.view(self.features, self.outputs), u + self.draw(self.outputs, "b", owner)

    def inputs(self, client: int, size: int) -> Tensor:
        """Draw the inputs of a client: [size, features]."""
        spread = torch.arange(1, self.features + 1, dtype=torch.float64) ** -0.6
        x = self.draw(size * self.features, "x", client).view(size, self.features) * spread
        if self.iid:
            return x
        shift = self.beta * self.draw(1, "B", client) + self.draw(self.features, "v", client)
        return x + shift


def synthetic(
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 30,
    sizes: Sizes = None,
    features: int = 60,
    classes: int = 10,
    iid: bool = False,
    test_share: float = 0.1,
    seed: int = 0,
) -> Examples:
    """Make FedProx's classification problem; `sizes` is a number, a list, or log-normal."""
    maker = _maker(alpha, beta, features, whole("classes", classes, 2), iid, seed)
    made = []
    for k, size in enumerate(_sizes(maker, clients, sizes)):
        x, (w, b) = maker.inputs(k, size), maker.model(k)
        made.append((x, (x @ w + b).argmax(1)))
    return _deal(made, "synthetic", classes, test_share, seed)


def synthetic_regression(
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 30,
    sizes: Sizes = None,
    features: int = 10,
    noise: float = 0.1,
    iid: bool = False,
    test_share: float = 0.1,
    seed: int = 0,
) -> Examples:
    """Make the same clients with y = w_k x + b_k + noise: least squares has a closed form."""
    maker = _maker(alpha, beta, features, 1, iid, seed)
    number("noise", noise, 0, math.inf)
    made = []
    for k, size in enumerate(_sizes(maker, clients, sizes)):
        x, (w, b) = maker.inputs(k, size), maker.model(k)
        error = noise * maker.draw(size, "noise", k).view(size, 1)
        made.append((x, (x @ w + b + error).float()))
    return _deal(made, "synthetic-regression", 0, test_share, seed)


def _maker(alpha: float, beta: float, features: int, outputs: int, iid: bool, seed: int) -> Maker:
    number("alpha", alpha, 0, math.inf)
    number("beta", beta, 0, math.inf)
    return Maker(alpha, beta, whole("features", features), outputs, iid, whole("seed", seed, 0))


def _sizes(maker: Maker, clients: int, sizes: Sizes) -> list[int]:
    """Give every client's size; examples that no memory holds are refused before they are made."""
    least = sizes if isinstance(sizes, int) else 1
    _check_count(whole("clients", clients) * least * maker.features)
    found = _each_size(maker, clients, sizes)
    _check_count(sum(found) * maker.features)
    return found


def _check_count(count: int) -> None:
    check("table_values", "numbers of the examples that synthetic makes", count)


def _each_size(maker: Maker, clients: int, sizes: Sizes) -> list[int]:
    if sizes is None:
        drawn = 4 + 2 * maker.draw(whole("clients", clients), "sizes")
        return [50 + int(n) for n in drawn.exp().clamp(max=LARGEST)]
    if isinstance(sizes, int):
        return [whole("sizes", sizes)] * whole("clients", clients)
    listed = [whole("sizes", size) for size in sizes]
    if len(listed) != clients:
        raise ConfigError(f"sizes lists {len(listed)} clients but clients = {clients}")
    return listed


def _deal(
    made: list[tuple[Tensor, Tensor]], source: str, classes: int, test_share: float, seed: int
) -> Examples:
    """Hold a share of every client's examples out for testing; a client keeps at least one."""
    number("test_share", test_share, 0, 1)
    owners = torch.cat([torch.full((len(x),), k) for k, (x, _) in enumerate(made)])
    held = torch.cat([_held_out(len(x), k, test_share, seed) for k, (x, _) in enumerate(made)])
    x = torch.cat([x for x, _ in made]).float()
    y = torch.cat([y for _, y in made])
    info = Info(source, "generated")
    return Examples(
        *(x[~held], y[~held], x[held], y[held], classes, info),
        train_clients=owners[~held],
        test_clients=owners[held],
    )


def _held_out(size: int, client: int, share: float, seed: int) -> Tensor:
    order = permutation(fold(seed, "held out", client)[None], size, size)[0]
    return order >= size - min(int(share * size), size - 1)
