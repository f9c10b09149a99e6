"""The driver: population, results, evaluation, and what it refuses."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

import undrift as fl
from undrift.data import Cohort
from undrift.errors import ConfigError, DataError, EmptyRoundError
from undrift.testing import tiny_task, tiny_world


def _trainer(algorithm=None, **options):
    world = tiny_world()
    made = {"work": world.work, "sampler": world.sampler, **options}
    algorithm = fl.fedavg(lr=0.1) if algorithm is None else algorithm
    return fl.Trainer(world.task, world.federation, algorithm, **made)


def fedavg_in_twelve_lines():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    clients = [(torch.randn(20, 8), torch.randint(0, 3, (20,))) for _ in range(10)]
    trainer = fl.Trainer(
        fl.Task(net),
        fl.Federation.of(clients),
        fl.fedavg(lr=0.1),
        work=fl.Work(epochs=2, batch=10),
        sampler=fl.Uniform(fraction=0.5),
    )
    results = trainer.run(5)
    return trainer.model(), results


def test_fedavg_takes_at_most_twelve_lines():
    torch.manual_seed(0)
    model, results = fedavg_in_twelve_lines()
    assert isinstance(model, nn.Sequential) and model(torch.zeros(2, 8)).shape == (2, 3)
    assert [r.round for r in results] == [1, 2, 3, 4, 5]
    assert results[-1].loss < results[0].loss
    assert len(inspect.getsource(fedavg_in_twelve_lines).splitlines()) - 1 <= 12


def test_one_client_one_step_is_gradient_descent():
    world = tiny_world(sizes=[6])
    trainer = fl.Trainer(
        world.task, world.federation, fl.fedavg(lr=0.1), work=fl.Work(steps=1, batch=None)
    )
    trainer.round()
    net = world.task.module_with(*world.task.initial()).double()
    x, y = world.federation.client(0)
    nn.functional.cross_entropy(net(x), y).backward()
    wanted = torch.cat([(p - 0.1 * p.grad).detach().reshape(-1) for p in net.parameters()])
    start = world.task.initial()[0]
    assert (wanted - start).norm() > 1e-3
    # the plain module went through float32
    torch.testing.assert_close(trainer.server.w, wanted, rtol=0, atol=1e-7)


# ---- population ----------------------------------------------------------------------------------
def _mean_c(trainer):
    return sum(trainer.client_state(i)["0.Scaffold"] for i in trainer.enrolled) / len(
        trainer.enrolled
    )


def test_the_servers_c_stays_the_mean_while_newcomers_join():
    trainer = _trainer(fl.scaffold(lr=0.1), enrolled=[0, 1, 3], sampler=fl.Uniform(count=2))
    trainer.run(3)
    torch.testing.assert_close(trainer.server_state()["0.Scaffold"], _mean_c(trainer))
    trainer.enroll([4, 5])
    assert not trainer.client_state(4)["0.Scaffold"].any()
    torch.testing.assert_close(trainer.server_state()["0.Scaffold"], _mean_c(trainer))
    trainer.run(3)
    assert trainer.server_state()["0.Scaffold"].abs().max() > 1e-3
    torch.testing.assert_close(trainer.server_state()["0.Scaffold"], _mean_c(trainer))


def test_the_servers_c_stays_the_mean_when_a_client_leaves_and_returns():
    trainer = _trainer(fl.scaffold(lr=0.1), sampler=fl.Everyone())
    trainer.run(2)
    before = trainer.server_state()["0.Scaffold"]
    trainer.leave([0, 3])
    torch.testing.assert_close(trainer.server_state()["0.Scaffold"], _mean_c(trainer))
    assert (trainer.server_state()["0.Scaffold"] - before).abs().max() > 1e-3
    trainer.enroll([3, 0])
    torch.testing.assert_close(trainer.server_state()["0.Scaffold"], before)


def test_who_left_is_not_asked_and_keeps_its_state():
    trainer = _trainer(fl.scaffold(lr=0.1), sampler=fl.Everyone())
    trainer.run(1)
    kept = trainer.client_state(2)["0.Scaffold"]
    trainer.leave([2])
    assert 2 not in trainer.round().ids
    torch.testing.assert_close(trainer.client_state(2)["0.Scaffold"], kept, rtol=0, atol=0)
    trainer.enroll([2])
    assert 2 in trainer.round().ids


def test_the_last_one_cannot_leave():
    trainer = _trainer(enrolled=[1], sampler=fl.Everyone())
    with pytest.raises(ConfigError, match="nobody is enrolled"):
        trainer.leave([1])
    assert trainer.enrolled == [1]
    assert trainer.round().ids == [1]


def test_empty_clients_are_never_asked():
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    nothing = (x[:0], y[:0])
    federation = fl.Federation.of([nothing, (x, y), nothing, (x, y), nothing])
    task = tiny_task(torch.float32)
    asked = fl.Trainer(task, federation, fl.fedavg()).run(2)
    assert [r.ids for r in asked] == [[1, 3], [1, 3]]
    only = fl.Trainer(task, federation, fl.fedavg(), enrolled=[0, 2])
    with pytest.raises(EmptyRoundError, match="no enrolled client has an example"):
        only.round()


def test_examples_that_have_arrived_enter_the_weights():
    """Client 0 has 2 of 20, client 1 has 1 of 10 (first = 0.1); later all of them."""
    x = torch.zeros(20, 1)
    clients = [(x, torch.ones(20, 1)), (x[:10], -torch.ones(10, 1))]
    federation = fl.Federation.of(clients, arrival=fl.Arrival(rounds=1, first=0.1))
    task = fl.Task(nn.Linear(1, 1), "mse", dtype=torch.float64)
    work = fl.Work(steps=1, batch=None)
    trainer = fl.Trainer(task, federation, fl.fedavg(lr=0.5), work=work)
    seen = [trainer.roster.cohort(r).info for r in (0, 1)]
    trainer.round()
    # lr 0.5 on (b - y)^2 jumps to the target: the new bias is the weighted mean of 1 and -1
    assert float(trainer.parameters()["bias"]) == pytest.approx((2 - 1) / 3)
    assert [s.size.tolist() for s in seen] == [[2, 1], [20, 10]]
    assert [s.mean_size.tolist() for s in seen] == [[1.5, 1.5], [15, 15]]


@pytest.mark.parametrize(
    ("sampler", "alone"),
    [
        (fl.Uniform(count=1), True),
        (fl.Uniform(fraction=0.1), True),
        (fl.Uniform(count=2), False),
        (fl.Bernoulli(0.02), False),
        (fl.Sequential(1), True),
        (fl.Sequential(2), False),
        (fl.Weighted(count=1), True),
        (fl.Weighted(count=2), False),
        (fl.Explicit([[0], [3]]), True),
        (fl.Explicit([[0], [3, 1]], chances=[0.1] * 8), False),  # whatever they say
        (fl.Everyone(), False),
    ],
    ids=repr,
)
def test_whether_two_clients_ever_meet(sampler, alone):
    assert _trainer(sampler=sampler).roster.always_alone() == alone


def test_who_is_enrolled_alone_stays_alone():
    trainer = _trainer(sampler=fl.Everyone(), enrolled=[2])
    assert trainer.roster.always_alone()
    trainer.enroll([3])
    assert not trainer.roster.always_alone()


def test_a_sampler_of_somebody_else_may_not_tell_who_meets():
    class First:
        def sample(self, seed, round, population):
            return Cohort(population.ids[:1], np.ones(1))

    assert not _trainer(sampler=First()).roster.always_alone()


# ---- results -------------------------------------------------------------------------------------
def test_traffic_of_fedavg_and_scaffold():
    size = tiny_task().size
    plain, more = (_trainer(a).round() for a in (fl.fedavg(), fl.scaffold()))
    assert plain.floats_down == 4 * size
    assert plain.floats_up == 4 * (size + 1)  # the weight travels too
    assert more.floats_down == 8 * size
    assert more.floats_up == 4 * (2 * size + 1)


def test_traffic_of_a_shared_probe():
    @fl.record
    class Shared(fl.Rule):
        shares_probe = True

        def probe(self, view):
            return view.grad_at(view.w0)

        def direction(self, g, view):
            return view.cohort

    size = tiny_task().size
    result = _trainer(fl.Algorithm((Shared(),))).round()
    assert result.floats_down == 4 * 2 * size
    assert result.floats_up == 4 * (2 * size + 1)


def test_evaluate_is_the_mean_over_examples():
    trainer = _trainer()
    trainer.run(2)
    x, y = trainer.federation.x, trainer.federation.y
    found = trainer.evaluate(x.float(), y, batch=7)
    with torch.no_grad():
        value = trainer.model().double()(x)
    loss = float(nn.functional.cross_entropy(value, y))
    assert found["loss"] == pytest.approx(loss, abs=1e-6)
    assert found["accuracy"] == pytest.approx(float((value.argmax(1) == y).double().mean()))


def test_evaluate_refuses_nothing():
    with pytest.raises(DataError, match="0 and 0"):
        _trainer().evaluate(torch.zeros(0, 4), torch.zeros(0))
    with pytest.raises(DataError, match="2 and 1"):
        _trainer().evaluate(torch.zeros(2, 4), torch.zeros(1))
    with pytest.raises(DataError, match=r"fails on these examples, inputs \[3\] and targets \[\]:"):
        _trainer().evaluate(torch.zeros(2, 3), torch.zeros(2).long())
    with pytest.raises(DataError, match=r"fails on these examples.*99"):
        _trainer().evaluate(torch.zeros(2, 4), torch.full((2,), 99))


def test_a_path_for_states_that_are_in_memory_is_refused(tmp_path):
    for place in ("device", "host"):
        with pytest.raises(ConfigError, match=f"state = '{place}' keeps no file"):
            _trainer(state=place, state_path=tmp_path / "rows")


def test_states_are_read_back_by_rule():
    trainer = _trainer(fl.Algorithm((fl.Prox(), fl.Scaffold()), server=fl.Adaptive("yogi")))
    trainer.round()
    assert {"1.Scaffold", "2.Adaptive.m", "2.Adaptive.v"} <= trainer.server_state().keys()
    assert set(trainer.client_state(0)) == {"1.Scaffold"}


@pytest.mark.parametrize("engine", ["vectorised", "reference"])
def test_a_client_with_a_broken_update_is_skipped(engine):
    @fl.record
    class Breaks(fl.Rule):
        def init_client(self, w, sizes):
            return w.new_zeros(())

        def begin(self, view):
            return view.mine + 1

        def direction(self, g, view):
            return torch.where(view.client.id == 1, torch.nan, g)

    trainer = _trainer(fl.Algorithm((Breaks(),)), engine=engine, sampler=fl.Everyone())
    result = trainer.round()
    assert result.skipped == [1]
    assert trainer.server.w.isfinite().all()
    assert float(trainer.client_state(1)["0.Breaks"]) == 0  # as it was before the round
    assert float(trainer.client_state(0)["0.Breaks"]) == 1


def test_a_failed_first_round_leaves_the_trainer_as_it_was(monkeypatch):
    @fl.record
    class Looks(fl.Rule):
        def init_server(self, w, sizes):
            return w.new_zeros(1)

        def after_round(self, view):
            return view.w[:1] * 0 + 1

        def server_after(self, state, view):
            return state + view.rows.sum()

    trainer = _trainer(fl.Algorithm((Looks(),)))
    with monkeypatch.context() as patch:
        patch.setattr(trainer.engine, "train", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.round()
    assert float(trainer.server_state()["0.Looks"]) == 0
    trainer.round()
    assert float(trainer.server_state()["0.Looks"]) == 6 + 4  # everybody before, the cohort after


# ---- what it refuses -----------------------------------------------------------------------------
def test_an_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'vectorised'"):
        _trainer(engine="vectorized")


def test_nobody_enrolled_is_refused():
    with pytest.raises(ConfigError, match="nobody is enrolled"):
        _trainer(enrolled=[])


@pytest.mark.parametrize("ids", [[0, 6], [-1]])
def test_an_id_out_of_range_is_refused(ids):
    with pytest.raises(DataError, match=r"no client (6|-1): ids run from 0 to 5"):
        _trainer(enrolled=ids)
    with pytest.raises(DataError, match="ids run from 0 to 5"):
        _trainer(enrolled=[0]).enroll(ids)


@pytest.mark.parametrize("chunk", [0, -1, 1.5, True])
def test_a_bad_chunk_is_refused(chunk):
    with pytest.raises(ConfigError, match="chunk must be a whole number"):
        _trainer(chunk=chunk)


def test_batches_are_needed_for_the_cohort_alone():
    work = fl.ExplicitWork({(0, 1): [[0]], (0, 3): [[0]]})
    trainer = _trainer(work=work, sampler=fl.Explicit([[1, 3]]))
    assert trainer.round().ids == [1, 3]
