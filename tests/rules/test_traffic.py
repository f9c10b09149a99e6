"""I-47: what every algorithm sends, in floats, counted from what is really there."""

import pytest

import undrift as fl
from rules.needs import built, world_for
from undrift.testing import tiny_task, tiny_world


def tiny(name: str) -> fl.Trainer:
    world = tiny_world()
    chosen = world_for(name, world.sampler, world.work)
    return fl.Trainer(world.task, world.federation, built(name, lr=0.05), **chosen)


P, D, C = tiny_task().size, 5, 4  # parameters, features, clients of a cohort
N6 = 6

# per client and round: (vectors, further numbers) down, then up; scalars count as they are
SENT = {
    "fedavg": ((1, 0), (1, 1)),  # n_i, or the weight that follows from it
    "fedprox": ((1, 0), (1, 1)),
    "fedavgm": ((1, 0), (1, 1)),
    "fedadam": ((1, 0), (1, 1)),
    "fednova": ((1, 0), (1, 2)),  # ||a_i||_1 too
    "scaffold": ((2, 0), (2, 1)),
    "scaffold_m": ((2, 0), (1, 1)),
    "slowmo": ((1, 0), (1, 1)),
    "fedamsgrad": ((1, 0), (1, 1)),
    "feddyn": ((1, 0), (1, 1)),
    "fedadmm": ((1, 0), (1, 1)),
    "fedpd": ((1, 0), (1, 1)),
    "vrlsgd": ((1, 0), (1, 1)),
    "adabest": ((1, 0), (1, 1)),
    "moon": ((1, 0), (1, 1)),
    "fedvra": ((1, 0), (1, 1)),  # a_i
    "fedvra_u": ((1, 0), (1, 1)),
    "fedadc": ((2, 0), (1, 1)),
    "feddc": ((2, 0), (2, 1)),
    "mimelite": ((2, 0), (2, 2)),
    "mime": ((3, 0), (2, 1)),
    "qfedavg": ((1, 0), (1, 1)),  # h_i
    "qfedsgd": ((1, 0), (1, 1)),
    "rfedavg": ((1, (N6 - 1) * D), (1, D + 1)),
}


@pytest.mark.parametrize("name", SENT)
def test_i47_what_is_sent(name):
    result = tiny(name).run(2)[1]
    (down, more_down), (up, more_up) = SENT[name]
    assert result.floats_down == len(result.ids) * (down * P + more_down)
    assert result.floats_up == len(result.ids) * (up * P + more_up)


def test_i47_adabest_sends_sizes_where_it_needs_them():
    world = tiny_world()
    result = world.trainer(fl.adabest(0.05, unbalanced=True)).round()
    assert result.floats_down == C * (P + 1) and result.floats_up == C * (P + 2)


@pytest.mark.parametrize("same", [True, False])
def test_i47_rfedavg_plus_sends_the_model_once_to_those_who_stay(same):
    world = tiny_world()
    cohorts = [[0, 1, 2, 3]] * 3 if same else [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    sampler = fl.Explicit(cohorts)
    run = fl.Trainer(world.task, world.federation, fl.rfedavg_plus(0.05), sampler=sampler)
    first, second, _ = run.run(3)
    clients = len(cohorts[0])
    assert first.floats_down == N6 * P + clients * (D + P)  # everybody looks at x_0 first
    assert second.floats_down == clients * (P + D if same else 2 * P + D)
    assert second.floats_up == clients * (P + D + 1)


def test_local_momentum_sends_one_vector_more():
    result = tiny_world().trainer(fl.comfed(local_momentum="mimelite")).round()
    assert result.floats_down == C * 2 * P and result.floats_up == C * (P + 1 + 2)
