"""What a rule may rely on, whoever runs it."""

import pytest
import torch

from core.hand import COHORTS, LR, ORDERS, trained
from undrift import Algorithm, HeavyBall, Nova, Rule, Scaffold, Sgd, masked_mean, record
from undrift.errors import ConfigError


# ---- looking at the own data ---------------------------------------------------------------------
@record
class CountsPieces(Rule):
    def init_client(self, w, sizes):
        return w.new_zeros(())

    def begin(self, view):
        return view.mine + 1


def test_begin_is_called_once_per_piece_of_the_own_data(train):
    trainer = train(CountsPieces())
    assert float(trainer.client_state(3)["0.CountsPieces"]) == 2  # one example, two rounds


@record
class OwnMean(Rule):
    """Average as anybody would: sum over the mask, divided by its count."""

    def probe(self, view):
        m = view.batch.mask.to(view.w.dtype)
        return (m @ view.output_at(view.w).features) / m.sum()

    def row(self, delta, view):
        return view.probe

    def init_server(self, w, sizes):
        return w.new_zeros(sizes.features)

    def server(self, update, state, view):
        return update, view.rows.sum(0)


def test_a_mean_over_nothing_does_no_harm(train):
    assert train(OwnMean()).server_state()["0.OwnMean"].isfinite().all()


@record
class OneNumber(Rule):
    def after_round(self, view):
        return masked_mean(view.output_at(view.w).value[:, 0], view.batch.mask)


def test_after_round_may_return_one_number(train):
    train(OneNumber())


@record
class Looks(Rule):
    """Count the rows that after_round brings."""

    def init_server(self, w, sizes):
        return w.new_zeros(())

    def after_round(self, view):
        return torch.ones_like(view.lr * view.w[0])

    def server_after(self, state, view):
        return state + view.rows.sum()


@record
class LooksOnce(Looks):
    refresh = "once"


@record
class LooksAtAll(Looks):
    refresh = "all"


@pytest.mark.parametrize(("rule", "rows"), [(Looks(), 15), (LooksOnce(), 4), (LooksAtAll(), 20)])
def test_who_answers_after_a_round(rule, rows):
    trainer = trained(Algorithm((rule,)))  # 4 clients; cohorts of 3, 2, 3 and 3
    assert float(trainer.server.states[0]) == rows


# ---- ||a||_1: the chain is shown a model of one parameter ----------------------------------------
@record
class TupleProbe(Rule):
    """Keep the parts of a probe apart: two vectors and a number."""

    shares_probe = True

    def probe(self, view):
        g = view.grad_at(view.w0)
        return g, {"twice": 2 * g, "loss": g.square().sum()}

    def direction(self, g, view):
        mean, _ = view.cohort
        mine, more = view.probe
        return 0.5 * (g + mean - mine) + 0.1 * (more["twice"] - 2 * mine)


@record
class SaysPath(Rule):
    """Send ||a_i||_1 and the number of steps."""

    needs_path = True

    def init_server(self, w, sizes):
        return w.new_zeros(2)

    def finish(self, delta, view):
        return delta, view.mine, torch.stack([view.path, view.steps])

    def server(self, update, state, view):
        return update, state + view.upload


def test_the_path_follows_directions_that_use_a_tree_of_probes(train):
    trainer = train(TupleProbe(), SaysPath(), aggregate=Nova())
    path, steps = trainer.server_state()["1.SaysPath"].tolist()
    assert steps == sum(len(ORDERS[r, i]) for r, ids in enumerate(COHORTS) for i in ids)
    assert path == pytest.approx(0.5 * steps, rel=1e-12)


@record
class HeadOnly(Rule):
    """Train the last layer alone."""

    def direction(self, g, view):
        return g * view.task.slice("1.*").to(g.dtype)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm((HeadOnly(),), Sgd(lr=LR), Nova()),
        Algorithm((HeadOnly(), Scaffold()), HeavyBall(lr=LR)),
    ],
    ids=["Nova", "Scaffold II"],
)
def test_a_direction_that_treats_parameters_differently_has_no_path(engine, algorithm):
    with pytest.raises(ConfigError, match=r"HeadOnly\.direction treats parameters differently"):
        trained(algorithm, engine=engine)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_without_a_path_it_may(engine):
    trainer = trained(Algorithm((HeadOnly(),)), engine=engine)
    moved = trainer.server.w != trainer.task.initial()[0]
    assert torch.equal(moved, trainer.task.slice("1.*"))
