"""Small problems with hand-written gradients, in numpy float64.

A world holds the clients' data and one loss. Parameters are one flat vector `w`, laid out exactly
as torch would flatten the matching `nn.Module`. `gradient` and `loss` are MEANS over the examples
they are given (C1) and never contain weight decay: whoever calls them adds it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
Batches = dict[tuple[int, int], list[Array]]


@dataclass
class World:
    """`data[i]` is client i's (x, y); a client may own zero examples."""

    data: list[tuple[Array, Array]]
    gradient: Callable[[Array, Array, Array], Array]
    loss: Callable[[Array, Array, Array], float]
    w0: Array


@dataclass
class QuadraticWorld(World):
    """Client i's loss is 0.5 (w - b_i)^T A_i (w - b_i); `matrices[i]` = A_i, `centres[i]` = b_i."""

    matrices: list[Array] = field(default_factory=list)
    centres: list[Array] = field(default_factory=list)

    def optimum(self, weights: list[float]) -> Array:
        """Return the argmin of sum_i weights[i] f_i: (sum w_i A_i) w = sum w_i A_i b_i."""
        left = np.zeros_like(self.matrices[0])
        right = np.zeros_like(self.centres[0])
        for weight, matrix, centre in zip(weights, self.matrices, self.centres, strict=True):
            left = left + weight * matrix
            right = right + weight * (matrix @ centre)
        return np.linalg.solve(left, right)


# ---- linear softmax regression: torch nn.Linear(features, classes) and cross-entropy ------------


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)  # the shift changes nothing but overflow
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _mean_cross_entropy(logits: Array, y: Array) -> float:
    return float(-_log_softmax(logits)[np.arange(len(y)), y].mean())


def _logit_gradient(logits: Array, y: Array) -> Array:
    """Return d(mean cross-entropy)/d(logits) = (softmax - onehot) / n."""
    delta = np.exp(_log_softmax(logits))
    delta[np.arange(len(y)), y] -= 1.0
    return delta / len(y)


def softmax_world(seed: int, sizes: list[int], features: int, classes: int) -> World:
    """Linear softmax regression; w = weight [classes, features] row by row, then bias."""
    rng = np.random.default_rng(seed)
    cut = classes * features

    def logits(w: Array, x: Array) -> Array:
        return x @ w[:cut].reshape(classes, features).T + w[cut:]

    def loss(w: Array, x: Array, y: Array) -> float:
        return _mean_cross_entropy(logits(w, x), y)

    def gradient(w: Array, x: Array, y: Array) -> Array:
        delta = _logit_gradient(logits(w, x), y)
        return np.concatenate([(delta.T @ x).ravel(), delta.sum(axis=0)])

    data = _labelled_data(rng, sizes, features, classes)
    return World(data, gradient, loss, 0.3 * rng.standard_normal(cut + classes))


def _labelled_data(
    rng: np.random.Generator, sizes: list[int], features: int, classes: int
) -> list[tuple[Array, Array]]:
    """Different input means and different label preferences per client: non-IID on purpose."""
    teacher = rng.standard_normal((classes, features))
    data = []
    for size in sizes:
        x = rng.standard_normal((size, features)) + rng.standard_normal(features)
        preference = 1.5 * rng.standard_normal(classes)
        scores = x @ teacher.T + preference + 0.5 * rng.standard_normal((size, classes))
        data.append((x, scores.argmax(axis=1).astype(np.int64)))
    return data


# ---- Linear - Tanh - Linear with cross-entropy ---------------------------------------------------


def mlp_world(seed: int, sizes: list[int], features: int, hidden: int, classes: int) -> World:
    """One hidden tanh layer; w = weight1 [hidden, features], bias1, weight2 [classes, hidden],
    bias2.
    """
    rng = np.random.default_rng(seed)
    end1 = hidden * features
    end2 = end1 + hidden
    end3 = end2 + classes * hidden

    def split(w: Array) -> tuple[Array, Array, Array, Array]:
        weight1 = w[:end1].reshape(hidden, features)
        weight2 = w[end2:end3].reshape(classes, hidden)
        return weight1, w[end1:end2], weight2, w[end3:]

    def loss(w: Array, x: Array, y: Array) -> float:
        weight1, bias1, weight2, bias2 = split(w)
        return _mean_cross_entropy(np.tanh(x @ weight1.T + bias1) @ weight2.T + bias2, y)

    def gradient(w: Array, x: Array, y: Array) -> Array:
        weight1, bias1, weight2, bias2 = split(w)
        z = np.tanh(x @ weight1.T + bias1)
        delta2 = _logit_gradient(z @ weight2.T + bias2, y)
        delta1 = (delta2 @ weight2) * (1.0 - z * z)  # d tanh(a)/da = 1 - tanh(a)^2
        return np.concatenate(
            [
                (delta1.T @ x).ravel(),
                delta1.sum(axis=0),
                (delta2.T @ z).ravel(),
                delta2.sum(axis=0),
            ]
        )

    data = _labelled_data(rng, sizes, features, classes)
    return World(data, gradient, loss, 0.4 * rng.standard_normal(end3 + classes))


# ---- linear regression ---------------------------------------------------------------------------


def regression_world(seed: int, sizes: list[int], features: int) -> World:
    """nn.Linear(features, 1) and the mean of (prediction - y)^2; y has shape [n, 1]."""
    rng = np.random.default_rng(seed)

    def residual(w: Array, x: Array, y: Array) -> Array:
        return x @ w[:features] + w[features] - y[:, 0]

    def loss(w: Array, x: Array, y: Array) -> float:
        return float(np.mean(residual(w, x, y) ** 2))

    def gradient(w: Array, x: Array, y: Array) -> Array:
        error = residual(w, x, y)
        scale = 2.0 / len(x)
        return np.concatenate([scale * (x.T @ error), [scale * error.sum()]])

    data = []
    for size in sizes:
        # Every client has its own true line, so the local optima disagree.
        line = rng.standard_normal(features)
        x = 0.7 * rng.standard_normal((size, features)) + 0.3 * rng.standard_normal(features)
        y = x @ line + rng.standard_normal() + 0.1 * rng.standard_normal(size)
        data.append((x, y.reshape(-1, 1)))
    return World(data, gradient, loss, 0.3 * rng.standard_normal(features + 1))


# ---- quadratics ----------------------------------------------------------------------------------


def quadratic_world(
    seed: int, clients: int, dim: int, sizes: list[int] | None = None
) -> QuadraticWorld:
    """Strongly convex quadratics with eigenvalues in [0.5, 2]; an example IS its client's number.

    `sizes` repeats the one example of a client, which changes its weight n_i and nothing else.
    """
    rng = np.random.default_rng(seed)
    matrices, centres = [], []
    for _ in range(clients):
        basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
        eigenvalues = rng.uniform(0.5, 2.0, size=dim)
        matrices.append(basis @ np.diag(eigenvalues) @ basis.T)
        centres.append(rng.standard_normal(dim))

    def gradient(w: Array, x: Array, y: Array) -> Array:
        total = np.zeros_like(w)
        for i in x[:, 0].astype(int):
            total = total + matrices[i] @ (w - centres[i])
        return total / len(x)

    def loss(w: Array, x: Array, y: Array) -> float:
        total = 0.0
        for i in x[:, 0].astype(int):
            total += 0.5 * (w - centres[i]) @ matrices[i] @ (w - centres[i])
        return float(total / len(x))

    counts = sizes if sizes is not None else [1] * clients
    data = [(np.full((n, 1), float(i)), np.zeros((n, 1))) for i, n in enumerate(counts)]
    return QuadraticWorld(data, gradient, loss, rng.standard_normal(dim), matrices, centres)


# ---- explicit batch orders -----------------------------------------------------------------------


def epoch_batches(
    world: World,
    participants: list[list[int]],
    batch_size: int,
    epochs: int | dict[int, int] = 1,
    seed: int = 0,
) -> Batches:
    """Shuffled epochs with the last, partial batch kept: unequal n_i gives unequal K_i.

    The stream depends on (seed, round, client) only, never on who else takes part.
    """
    batches: Batches = {}
    for r, sampled in enumerate(participants):
        for i in sampled:
            rng = np.random.default_rng([seed, r, i])
            size = len(world.data[i][0])
            steps: list[Array] = []
            for _ in range(epochs if isinstance(epochs, int) else epochs[i]):
                order = rng.permutation(size)
                steps += [order[at : at + batch_size] for at in range(0, size, batch_size)]
            batches[r, i] = steps
    return batches


def step_batches(
    world: World,
    participants: list[list[int]],
    steps: int | dict[int, int],
    batch_size: int | None = None,
    seed: int = 0,
) -> Batches:
    """Give a fixed number of steps: random batches, or all local data if batch_size is None."""
    batches: Batches = {}
    for r, sampled in enumerate(participants):
        for i in sampled:
            rng = np.random.default_rng([seed, r, i])
            size = len(world.data[i][0])
            count = steps if isinstance(steps, int) else steps[i]
            if batch_size is None:
                batches[r, i] = [np.arange(size) for _ in range(count)]
            else:
                take = min(batch_size, size)
                batches[r, i] = [rng.permutation(size)[:take] for _ in range(count)]
    return batches


def sample_participants(seed: int, clients: int, per_round: int, rounds: int) -> list[list[int]]:
    """Draw `per_round` different clients for every round."""
    rng = np.random.default_rng(seed)
    return [sorted(int(i) for i in rng.permutation(clients)[:per_round]) for _ in range(rounds)]
