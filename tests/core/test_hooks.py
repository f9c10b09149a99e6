"""Algorithms that are not in the library, in at most twenty lines each, against plain loops.

They show that the hooks suffice: rFedAvg, rFedAvg+, Mime, a private block as in FedVRA-U and a
server that learns as in FedRL (spec 1.10, 1.17, 1.19, 1.20).
"""

import pytest
import torch

from core.hand import (
    COHORTS,
    DATA,
    F64,
    ROUNDS,
    SIZES,
    by_hand,
    close,
    features,
    gradient,
    plain,
    predict,
    task,
)
from undrift import EMPTY, Rule, masked_mean, number, record


# ---- (i) rFedAvg+ --------------------------------------------------------------------------------
def store(table, view):
    """Write the rows of accepted clients into a table of all clients."""
    new = torch.where(view.accepted[:, None], view.rows, table[view.ids])
    return table.index_copy(0, view.ids, new)


def others(table, client):
    """Rows of the other clients whose feature mean is known, as weights [N]."""
    ids = torch.arange(len(table), device=table.device)
    return ((ids != client.id) & ~table.isnan().any(1)).to(table.dtype)


@record
class FeaturesPlus(Rule):
    """rFedAvg+ (spec 1.19)."""

    strength: float = number(default=0.3, low=0)

    def init_server(self, w, sizes):
        return w.new_full((sizes.clients, sizes.features), torch.nan)

    def personal(self, state, client):
        known = others(state, client)
        return known @ state.nan_to_num() / known.sum().clamp(min=1)

    def penalty(self, out, view):
        mean = masked_mean(out.features, view.batch.mask)
        return self.strength * (mean - view.personal).square().sum()

    def after_round(self, view):
        return masked_mean(view.output_at(view.w).features, view.batch.mask)

    def server_after(self, state, view):
        return store(state, view)


def test_rfedavg_plus(train):
    x = task().initial()[0]
    means = torch.stack([features(x, data[0]).mean(0) for data in DATA])
    for r in range(ROUNDS):
        rest = (means.sum(0) - means) / (len(SIZES) - 1)

        def objective(y, i, b, rest=rest):
            mean = features(y, DATA[i][0][b]).mean(0)
            return plain(y, i, b) + 0.3 * (mean - rest[i]).square().sum()

        _, x = by_hand(objective, x0=x, round=r)
        for i in COHORTS[r]:
            means[i] = features(x, DATA[i][0]).mean(0)
    trainer = train(FeaturesPlus())
    close(trainer.server.w, x)
    close(trainer.server_state()["0.FeaturesPlus"], means)


# ---- (v) rFedAvg ---------------------------------------------------------------------------------
@record
class Features(Rule):
    """rFedAvg (spec 1.19): the feature mean at the own final model is sent as a row."""

    refresh = "once"  # everybody's means at the first model

    strength: float = number(default=0.3, low=0)

    def init_server(self, w, sizes):
        return w.new_full((sizes.clients, sizes.features), torch.nan)

    def personal(self, state, client):
        return others(state, client), state.nan_to_num()

    def penalty(self, out, view):
        known, means = view.personal
        gaps = (masked_mean(out.features, view.batch.mask) - means).square().sum(1)
        return self.strength * (known * gaps).sum() / known.sum().clamp(min=1)

    def review(self, view):
        return masked_mean(view.output_at(view.w).features, view.batch.mask)

    def row(self, delta, view):
        return view.review

    def server(self, update, state, view):
        return update, store(state, view)

    def after_round(self, view):
        return masked_mean(view.output_at(view.w).features, view.batch.mask)

    def server_after(self, state, view):
        return store(state, view)


def test_rfedavg(train):
    x = task().initial()[0]
    means = torch.stack([features(x, data[0]).mean(0) for data in DATA])
    for r in range(ROUNDS):

        def objective(y, i, b, means=means):
            mine = features(y, DATA[i][0][b]).mean(0)
            gaps = [(mine - m).square().sum() for j, m in enumerate(means) if j != i]
            return plain(y, i, b) + 0.3 / len(gaps) * sum(gaps)

        models, x = by_hand(objective, x0=x, round=r)
        means = means.clone()
        for i, y in models.items():
            means[i] = features(y, DATA[i][0]).mean(0)
    trainer = train(Features())
    close(trainer.server.w, x)
    close(trainer.server_state()["0.Features"], means)


# ---- (ii) Mime with momentum ---------------------------------------------------------------------
@record
class Mime(Rule):
    """Mime with SGD and momentum (spec 1.10); decay, added last, is part of the gradient."""

    shares_probe = True

    beta: float = number(default=0.6, low=0, high=1)

    def init_server(self, w, sizes):
        return torch.zeros_like(w)  # m

    def broadcast(self, state):
        return state

    def probe(self, view):
        return view.grad_at(view.w0)

    def direction(self, g, view):
        decay = view.decay(view.w)
        g = g + decay - view.grad_at(view.w0) + view.cohort
        return (1 - self.beta) * g + self.beta * view.broadcast - decay

    def finish(self, delta, view):
        return delta, EMPTY, (view.size * view.probe, view.size)

    def server(self, update, state, view):
        c = view.upload[0] / view.upload[1]
        return update, (1 - self.beta) * c + self.beta * state


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_mime(train, decay):
    x, m = task().initial()[0], torch.zeros(11, dtype=F64)

    def objective(y, i, b):
        return plain(y, i, b) + decay / 2 * y.square().sum()

    for r in range(ROUNDS):
        each = {i: gradient(lambda v, i=i: objective(v, i, slice(None)), x) for i in COHORTS[r]}
        c = sum(SIZES[i] * g for i, g in each.items()) / sum(SIZES[i] for i in each)

        def direction(g, y, i, b, x=x, c=c, m=m):
            g = g - gradient(lambda v: objective(v, i, b), x) + c
            return 0.4 * g + 0.6 * m

        _, x = by_hand(objective, direction=direction, x0=x, round=r)
        m = 0.4 * c + 0.6 * m
    trainer = train(Mime(), weight_decay=decay)
    close(trainer.server.w, x)
    close(trainer.server_state()["0.Mime"], m)


# ---- (iii) a private block with one row per example, as in FedVRA-U ------------------------------
def read_rows(table, index):
    """Rows of these examples; padding reads row 0 and must be masked."""
    return table[index.clamp(min=0)]


def write_rows(table, index, rows):
    """Write rows of real examples; padding goes to a spare row that is thrown away."""
    spare = torch.cat([table, table[:1]])
    at = torch.where(index < 0, len(table), index)
    return spare.index_copy(0, at, rows)[:-1]


@record
class PrivateOffsets(Rule):
    """f_i(y, z) = mean (prediction + z_e - target)^2 + t z_e^2; z moves first, at the model x."""

    rate: float = number(default=0.2, low=0)
    t: float = number(default=0.5, low=0)
    pull: float = number(default=0.3, low=0)

    def init_client(self, w, sizes):
        return w.new_zeros(sizes.examples, 1)

    def begin(self, view):
        z = read_rows(view.mine, view.batch.index)
        residual = view.output_at(view.w0).value + z - view.batch.y
        return write_rows(view.mine, view.batch.index, z - self.rate * 2 * (residual + self.t * z))

    def penalty(self, out, view):
        z = read_rows(view.mine, view.batch.index)
        cross = z.square() + 2 * z * (out.value - view.batch.y)
        return masked_mean(cross, view.batch.mask).sum()

    def direction(self, g, view):
        return g + self.pull * (view.w - view.w0)


def test_private_rows(train):
    x = task().initial()[0]
    z = [torch.zeros(n, 1, dtype=F64) for n in SIZES]
    for r in range(ROUNDS):
        for i in COHORTS[r]:
            residual = predict(x, DATA[i][0]) + z[i] - DATA[i][1]
            z[i] = z[i] - 0.2 * 2 * (residual + 0.5 * z[i])

        def objective(y, i, b):
            return (predict(y, DATA[i][0][b]) + z[i][b] - DATA[i][1][b]).square().mean()

        def direction(g, y, i, b, x=x):
            return g + 0.3 * (y - x)

        _, x = by_hand(objective, direction=direction, x0=x, round=r)
    trainer = train(PrivateOffsets())
    close(trainer.server.w, x)
    for i, n in enumerate(SIZES):
        rows = trainer.client_state(i)["0.PrivateOffsets"]
        close(rows[:n], z[i])
        assert not rows[n:].any()


# ---- (iv) a server that learns, as in FedRL ------------------------------------------------------
def first_component(rows, real):
    """(centre, first right singular vector) of the real rows; its largest entry is positive."""
    count = real.sum()
    rows = torch.where(real[:, None], rows, 0.0)
    centre = rows.sum(0) / count
    axis = torch.linalg.svd(torch.where(real[:, None], rows - centre, 0.0))[2][0]
    return centre, axis * axis.gather(0, axis.abs().argmax()[None]).sign()


@record
class Learner(Rule):
    """A principal component of round 0's D_i*D_i steers the server's Adam (spec 1.20)."""

    gain: float = number(default=5.0)
    lr: float = number(default=0.1, low=0)

    def init_server(self, w, sizes):
        alpha = w.new_tensor([0.9, 0.99])
        zero = torch.zeros_like(w)
        return {"m": zero, "v": zero, "centre": zero, "axis": zero, "alpha": alpha}

    def row(self, delta, view):
        return torch.where(view.round == 0, delta * delta, 0.0)

    def server(self, update, state, view):
        fitted = first_component(view.rows, view.accepted)
        pairs = zip(fitted, (state["centre"], state["axis"]), strict=True)
        centre, axis = (torch.where(view.round == 0, a, b) for a, b in pairs)
        s = axis @ (update * update - centre)
        alpha = (state["alpha"] + 0.1 * torch.tanh(self.gain * s)).clamp(0, 0.999)
        m = alpha[0] * state["m"] + (1 - alpha[0]) * update
        v = alpha[1] * state["v"] + (1 - alpha[1]) * update * update
        new = {"m": m, "v": v, "centre": centre, "axis": axis, "alpha": alpha}
        return self.lr * m / (v.sqrt() + 1e-3), new


def test_learning_server(train):
    x = task().initial()[0]
    m, v = torch.zeros(11, dtype=F64), torch.zeros(11, dtype=F64)
    alpha = torch.tensor([0.9, 0.99], dtype=F64)
    for r in range(ROUNDS):
        models, mean = by_hand(plain, weights=1.0, x0=x, round=r)
        d = mean - x
        if r == 0:
            rows = torch.stack([(y - x).square() for y in models.values()])
            centre = rows.mean(0)
            values, vectors = torch.linalg.eigh((rows - centre).T @ (rows - centre))
            axis = vectors[:, values.argmax()]
            axis = axis * axis[axis.abs().argmax()].sign()
        s = axis @ (d * d - centre)
        alpha = (alpha + 0.1 * torch.tanh(5.0 * s)).clamp(0, 0.999)
        m = alpha[0] * m + (1 - alpha[0]) * d
        v = alpha[1] * v + (1 - alpha[1]) * d * d
        x = x + 0.1 * m / (v.sqrt() + 1e-3)
    trainer = train(Learner(), by_size=False)
    torch.testing.assert_close(trainer.server.w, x, rtol=0, atol=1e-10)
    assert (alpha - torch.tensor([0.9, 0.99])).abs().max() > 1e-3  # it did steer
