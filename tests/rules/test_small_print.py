"""Server halves by hand, where nothing else would notice a slip."""

import torch

import undrift as fl
from undrift.core.rule import ServerView, Sizes
from undrift.core.tree import EMPTY
from undrift.rules import FedDyn, MomentumScaled
from undrift.rules.observe import Watch
from undrift.rules.server import Step
from undrift.rules.two_blocks import Ball

W = torch.tensor([3.0, -4.0, 0.5], dtype=torch.float64)
UPDATE = torch.tensor([0.5, 1.0, -2.0], dtype=torch.float64)
SIZES = Sizes(3, 5, 0)


def view(round=0.0, rows=EMPTY, accepted=(True, True, True)) -> ServerView:
    number = lambda v: torch.tensor(float(v), dtype=torch.float64)  # noqa: E731
    kept = torch.tensor(accepted)
    return ServerView(
        W, EMPTY, rows, torch.arange(3), kept, kept.sum(), number(3), number(1), 0.1, number(round)
    )


def test_a_ball_leaves_what_is_inside_and_shortens_what_is_not():
    far, _ = Ball(radius=100.0).server(UPDATE, EMPTY, view())
    torch.testing.assert_close(far, UPDATE)
    near, _ = Ball(radius=2.0).server(UPDATE, EMPTY, view())
    kept, wanted = W - near, W - UPDATE
    torch.testing.assert_close(kept, wanted * 2 / wanted.norm())


def test_a_servers_schedule_counts_rounds_and_no_steps():
    step = Step(lr=2.0, schedule=fl.InverseTime(decay=0.5, steps=1.0))
    torch.testing.assert_close(step.server(UPDATE, EMPTY, view(3))[0], 2 / 2.5 * UPDATE)


def test_feddyns_mean_takes_newcomers_in_and_lets_others_go():
    """h is the population's mean of h_i / alpha."""
    joined, left = torch.full((2, 3), 0.6).double(), torch.full((1, 3), 0.2).double()
    found = FedDyn(alpha=0.2).resize(UPDATE, 4, 5, joined, left)
    torch.testing.assert_close(found, (4 * UPDATE + 2 * 0.6 / 0.2 - 0.2 / 0.2) / 5)


def test_the_scaled_momentum_starts_at_v0():
    state = MomentumScaled(v0=0.25).init_server(W, SIZES)
    torch.testing.assert_close(state.v, torch.full_like(W, 0.25))


def test_watching_leaves_refused_clients_out():
    deltas = torch.tensor([[1.0, 0, 0], [0, 3.0, 0], [torch.nan, 9.0, 9.0]]).double()
    rows = (deltas, torch.tensor([1.0, 3.0, 100.0]).double())
    _, seen = Watch().server(UPDATE, EMPTY, view(rows=rows, accepted=(True, True, False)))
    mean = torch.tensor([0.25, 2.25, 0.0]).double()
    torch.testing.assert_close(seen.average, W - mean)
    torch.testing.assert_close(float(seen.length), 2.0)
    spread = sum(float((d - mean).norm()) for d in deltas[:2]) / 2
    torch.testing.assert_close(float(seen.spread), spread)
