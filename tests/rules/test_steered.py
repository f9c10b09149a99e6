"""FedRL's server: FedAdam without actions, its direction by a library, engines and resumed runs."""

import numpy as np
import pytest
import torch
from torch import nn

import undrift as fl
from experiment.tiny import tiny
from longhand.cases import above, below
from undrift.core.tree import replace
from undrift.experiment.world import build
from undrift.rules import Policy, Steered, Steering
from undrift.rules.policy import encode_policy
from undrift.rules.steered import acted, chosen, principal, sight, standardised
from undrift.testing import check_rule
from undrift.verify.longhand.steered import first_direction

from .test_policy import layers


@pytest.fixture
def bold(tmp_path):
    """A policy whose actions are large: what goes wrong shows."""
    path = tmp_path / "bold.safetensors"
    path.write_bytes(encode_policy(layers(), Steering(), {}))
    return str(path)


def trainer(algorithm, dtype=torch.float32, **settings):
    made = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(n, 6, generator=made), torch.randint(0, 3, (n,), generator=made))
        for n in (9, 14, 20, 7, 11, 16)
    ]
    task = fl.Task.build(lambda: nn.Linear(6, 3), 3, dtype=dtype)
    plain = {"work": fl.Work(epochs=2, batch=5), "sampler": fl.Uniform(count=4), "seed": 2}
    return fl.Trainer(task, fl.Federation.of(clients), algorithm, **{**plain, **settings})


def helm(made):
    return made.server.states[-2]  # the server optimizer stands behind it and does nothing


# ---- I-34 ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_i34_without_actions_it_is_fedadam_bit_for_bit(engine, dtype, bold):
    adam = trainer(fl.fedadam(0.1, server_lr=0.05, by_size=False), dtype, engine=engine)
    still = trainer(fl.fedrl(0.1, policy="still", server_lr=0.05), dtype, engine=engine)
    acts = trainer(fl.fedrl(0.1, policy=bold, server_lr=0.05), dtype, engine=engine)
    for _ in range(4):
        results = [made.round() for made in (adam, still, acts)]
        moments = adam.server.states[0]
        pairs = [(adam.server.w, still.server.w), (moments.m, helm(still).m)]
        for one, other in [*pairs, (moments.v, helm(still).v)]:
            below("I-34", float((one - other).abs().max()), 0.0)
        assert len({r.floats_up for r in results}) == len({r.floats_down for r in results}) == 1
    above("I-34 actions", float((adam.server.w - acts.server.w).abs().max()), 1e-3)


def test_i34_holds_in_a_batch_of_experiments():
    rates = (0.05, 0.02)
    algorithms = [fl.fedrl(0.1, policy="still", server_lr=r) for r in rates]
    algorithms += [fl.fedadam(0.1, server_lr=r, by_size=False) for r in rates]
    fleet = fl.Fleet([trainer(a) for a in algorithms])
    fleet.run(3)
    w = [one.server.w for one in fleet.trainers]
    assert torch.equal(w[0], w[2]) and torch.equal(w[1], w[3]) and not torch.equal(w[0], w[1])


# ---- the direction -------------------------------------------------------------------------------
@pytest.mark.parametrize(("count", "width", "scale"), [(10, 400, 1e-6), (3, 50, 1.0), (12, 5, 1e3)])
def test_the_direction_is_a_librarys(count, width, scale):
    rows = scale * np.random.default_rng(count).standard_normal((count, width)) ** 2
    mean, direction = first_direction(rows)
    padded = torch.cat([torch.from_numpy(rows), torch.full((2, width), float("nan"))])
    axis = principal(padded, torch.arange(count + 2) < count)
    assert np.abs(axis.direction.numpy() - direction).max() < 1e-12
    assert abs(float(axis.centre) - mean @ direction) < 1e-11 * scale
    assert abs(float(axis.spread) - ((rows - mean) @ direction).std(ddof=1)) < 1e-11 * scale
    assert float(axis.direction.abs().max()) == float(axis.direction.max())
    mirrored = principal(-padded, torch.arange(count + 2) < count)  # one of both has to be turned
    assert torch.equal(mirrored.direction, axis.direction)


def test_one_row_has_no_direction():
    axis = principal(torch.ones(1, 4), torch.ones(1, dtype=torch.bool))
    assert not axis.direction.any() and float(axis.spread) == 0


def test_clients_rows_fit_it_in_the_first_round_and_never_again(bold):
    made = trainer(fl.fedrl(0.1, policy=bold), torch.float64, sampler=fl.Everyone())
    start = made.server.w
    made.round()
    first = helm(made).axis.direction
    plain = [trainer(fl.fedavg(0.1), torch.float64, sampler=fl.Explicit(([i],))) for i in range(6)]
    for one in plain:
        one.round()
    rows = np.array([((start - one.server.w) ** 2).numpy() for one in plain])
    assert np.abs(first.numpy() - first_direction(rows)[1]).max() < 1e-10
    made.run(2)
    assert torch.equal(helm(made).axis.direction, first)


def test_a_first_cohort_of_one_leaves_it_to_the_next(bold):
    cohorts = fl.Explicit(([2], [4], [0, 1, 3], [1, 2, 5]))
    made = trainer(fl.fedrl(0.1, policy=bold), torch.float64, sampler=cohorts)
    adam = trainer(fl.fedadam(0.1, by_size=False), torch.float64, sampler=cohorts)
    for _ in range(2):
        made.round()
        adam.round()
        assert torch.equal(made.server.w, adam.server.w) and not helm(made).axis.direction.any()
    made.round()
    first = helm(made).axis.direction
    assert first.any() and helm(made).action.any()
    made.round()
    assert torch.equal(helm(made).axis.direction, first)


def test_a_policy_that_will_never_act_is_told_when_it_is_built(caplog):
    fedrl = ("algorithm.use=fedrl", "algorithm.policy=digits")
    for more in (["sampler.count=3"], ["sampler.count=1", "algorithm.pca=rounds"]):
        build(tiny(*fedrl, *more))
    build(tiny("sampler.count=1"))
    assert not caplog.records
    build(tiny(*fedrl, "sampler.count=1"))
    (told,) = caplog.records
    assert (told.name, told.levelname) == ("undrift", "WARNING")
    assert "will never act" in told.message and "pca = 'rounds'" in told.message


def test_rounds_fit_it_after_ten_of_them_without_actions(bold):
    made = trainer(fl.fedrl(0.1, policy=bold, pca="rounds"), torch.float64)
    adam = trainer(fl.fedadam(0.1, by_size=False), torch.float64)
    squares = []
    for _ in range(10):
        before = helm(made).m
        quiet = helm(made).knobs.tolist() == [0.9, 0.99] and not helm(made).action.any()
        assert quiet and torch.equal(made.server.w, adam.server.w)
        made.round()
        adam.round()
        update = (adam.server.states[0].m - 0.9 * before) / (1 - 0.9)
        squares.append((update**2).numpy())
    direction = first_direction(np.array(squares))[1]
    assert np.abs(helm(made).axis.direction.numpy() - direction).max() < 1e-8
    assert helm(made).action.any()
    before = helm(made).axis
    made.round()
    assert torch.equal(helm(made).axis.direction, before.direction)


def test_the_state_is_standardised_by_the_rounds_so_far(bold):
    made = trainer(fl.fedrl(0.1, policy=bold), torch.float64)
    raw = []
    for r in range(5):
        before = helm(made)
        made.round()
        a1 = float(helm(made).knobs[0])
        update = (helm(made).m - a1 * before.m) / (1 - a1)
        axis = helm(made).axis
        raw.append(float(update**2 @ axis.direction - axis.centre))
        deviation = np.std(raw) if r else 1.0
        assert float(helm(made).seen.value) == pytest.approx(
            (raw[-1] - np.mean(raw)) / deviation, abs=1e-6
        )


@pytest.mark.parametrize("pca", ["clients", "rounds"])
def test_the_state_may_be_scaled_by_what_the_direction_was_fitted_on(pca, tmp_path):
    path = tmp_path / "fit.safetensors"
    path.write_bytes(encode_policy(layers(), Steering(scale="fit"), {}))
    made = trainer(fl.fedrl(0.1, policy=str(path), pca=pca), torch.float64)
    updates = []
    for _ in range(12):
        before = helm(made)
        made.round()
        a1 = float(helm(made).knobs[0])
        updates.append(((helm(made).m - a1 * before.m) / (1 - a1)).numpy())
    axis, square = helm(made).axis, updates[-1] ** 2
    direction = axis.direction.numpy()
    if pca == "rounds":
        rows = np.array(updates[:10]) ** 2
        mean = rows.mean(0)
        wanted = (square - mean) @ direction / ((rows - mean) @ direction).std(ddof=1)
    else:
        wanted = (square @ direction - float(axis.centre)) / float(axis.spread)
    assert abs(wanted) > 0.05
    assert float(helm(made).seen.value) == pytest.approx(np.clip(wanted, -10, 10), abs=1e-4)


@pytest.mark.parametrize("kind", ["change", "offset", "value"])
def test_an_action_may_change_a_knob_move_it_from_its_start_or_be_it(kind, tmp_path):
    reach = None if kind == "value" else (0.05, 0.02)
    steering = Steering(reach=reach, action=kind)
    path = tmp_path / f"{kind}.safetensors"
    path.write_bytes(encode_policy(layers(), steering, {}))
    made = trainer(fl.fedrl(0.1, policy=str(path)), torch.float64)
    assert made.algorithm.rules[0].steering == steering
    low, high, start = np.zeros(2), np.array([0.999, 0.9999]), np.array([0.9, 0.99])
    before, seen = start, set()
    for _ in range(5):
        made.round()
        u, knobs = helm(made).action.numpy(), helm(made).knobs.numpy()
        wanted = {
            "change": before + np.array([0.05, 0.02]) * u,
            "offset": start + np.array([0.05, 0.02]) * u,
            "value": (low + high) / 2 + u * (high - low) / 2,
        }[kind]
        assert np.abs(knobs - np.clip(wanted, low, high)).max() < 1e-12
        before = knobs
        seen.add(tuple(knobs))
    assert len(seen) > 1


@pytest.mark.parametrize("kind", ["offset", "value"])
def test_nobody_acts_before_there_is_a_direction(kind, tmp_path):
    path = tmp_path / f"{kind}.safetensors"
    path.write_bytes(encode_policy(layers(), Steering(action=kind), {}))
    cohorts = fl.Explicit(([2], [0, 1, 3]))
    made = trainer(fl.fedrl(0.1, policy=str(path)), torch.float64, sampler=cohorts)
    made.round()
    assert helm(made).knobs.tolist() == [0.9, 0.99]
    made.round()
    assert helm(made).knobs.tolist() != [0.9, 0.99]


def test_by_the_run_the_first_state_is_0_and_the_second_1_or_minus_1(bold):
    """Whatever the data: one number has no deviation, two are one deviation from their mean."""
    made = trainer(fl.fedrl(0.1, policy=bold), torch.float64)
    made.round()
    assert float(helm(made).seen.value) == 0
    made.round()
    assert abs(float(helm(made).seen.value)) == pytest.approx(1, abs=1e-9)


def test_a_state_far_off_is_cut_off():
    rule = Steered(None, steering=Steering(scale="fit"))
    state = rule.init_server(torch.zeros(4), None)
    axis = state.axis._replace(direction=torch.ones(4), spread=torch.tensor(1e-3).double())
    for value, seen in ((1.0, 10.0), (-1.0, -10.0), (0.002, 2.0)):
        found = torch.tensor(value, dtype=torch.float64)
        after = standardised(rule, state.seen, found, axis)
        assert float(after.value) == pytest.approx(seen)


def test_an_agent_may_see_its_knobs():
    rule = Steered(None, steering=Steering(("alpha2", "alpha1"), sees=("pca", "knobs")))
    state = rule.init_server(torch.zeros(4), None)
    state = state._replace(seen=state.seen._replace(value=torch.tensor(0.5).double()))
    assert sight(rule, state).tolist() == [0.5, 0.99, 0.9]
    other = Steered(None, steering=Steering(("alpha2", "alpha1"), sees=("knobs", "pca")))
    assert sight(other, state).tolist() == [0.99, 0.9, 0.5]


def test_a_round_that_overflows_is_not_looked_at(bold):
    """D * D is infinite in float32: FedAdam stops there, and so does this, without a NaN."""
    for lr in (1e19, 1e25):
        made = trainer(fl.fedrl(lr, policy=bold, pca="rounds"))
        made.run(12)
        assert torch.isfinite(made.server.w).all() and torch.isfinite(helm(made).knobs).all()
        assert torch.isfinite(helm(made).seen.value)


# ---- knobs ---------------------------------------------------------------------------------------
def test_knobs_stay_in_their_ranges_and_move_by_their_reach():
    steering = Steering(("alpha1", "alpha2", "server_lr"), (0.1, 0.05, 0.5))
    rule = Steered(None, 0.1, steering=steering)
    w = torch.zeros(4, dtype=torch.float64)
    state = rule.init_server(w, None)
    one = torch.ones((), dtype=torch.float64)
    state = state._replace(waiting=(torch.ones_like(w), one), seen=state.seen._replace(rounds=one))
    moved, after = acted(rule, w, state, torch.tensor([-1.0, -0.5, 1.0]).double())
    assert after.knobs.tolist() == pytest.approx([0.8, 0.965, 0.5])
    step = 0.1 * 10**0.5 * 0.2 / (0.035**0.5 + 1e-3)
    assert moved.tolist() == pytest.approx([-step] * 4)
    again, same = acted(rule, moved, after, torch.ones(3).double())
    assert torch.equal(again, moved) and torch.equal(same.knobs, after.knobs)  # nothing waits
    for _ in range(30):
        state = after._replace(waiting=(torch.ones_like(w), one))
        moved, after = acted(rule, moved, state, torch.tensor([9.0, 9.0, -9.0]).double())
    assert after.knobs.tolist() == pytest.approx([0.999, 0.9999, -1.0])


def test_steered_from_outside_is_steered_from_inside(bold):
    inside = trainer(fl.fedrl(0.1, policy=bold))
    policy = Policy(bold)
    outside = trainer(
        replace(inside.algorithm, rules=(Steered(None, steering=policy.agent.steering),))
    )
    rule = outside.algorithm.rules[0]
    actor = [(w.double(), b.double()) for w, b in policy.agent.layers]
    for _ in range(4):
        inside.round()
        outside.round()
        server = outside.server
        state = server.states[0]
        w, state = acted(rule, server.w, state, chosen(actor, sight(rule, state)))
        outside.put(server._replace(w=w, states=(state, *server.states[1:])))
        assert torch.equal(w, inside.server.w)
        assert torch.equal(state.knobs, helm(inside).knobs)


# ---- ordinary ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("client", "pca"), [("sgd", "clients"), ("prox", "clients"), ("scaf", "rounds")]
)
def test_both_engines_and_a_batch_give_the_same_run(client, pca, bold):
    algorithm = fl.fedrl(0.1, policy=bold, client=client, pca=pca, server_lr=0.05)
    rounds = 4 if pca == "clients" else 11
    ends = []
    for engine in ("reference", "vectorised"):
        made = trainer(algorithm, torch.float64, engine=engine)
        made.run(rounds)
        ends.append(made)
    fleet = fl.Fleet([trainer(algorithm, torch.float64, seed=s) for s in (2, 5)])
    fleet.run(rounds)
    ends.append(fleet.trainers[0])
    for other in ends[1:]:
        assert (ends[0].server.w - other.server.w).abs().max() < 1e-11
        assert (helm(ends[0]).knobs - helm(other).knobs).abs().max() < 1e-10


@pytest.mark.parametrize("pca", ["clients", "rounds"])
def test_a_resumed_run_repeats_its_bits(pca, bold, tmp_path):
    algorithm = fl.fedrl(0.1, policy=bold, pca=pca)
    rounds, parts = (4, (1,)) if pca == "clients" else (12, (9,))
    whole = trainer(algorithm)
    whole.run(rounds)
    for part in parts:
        begun, later = trainer(algorithm), trainer(algorithm)
        begun.run(part)
        begun.save(tmp_path / str(part))
        assert later.load(tmp_path / str(part))
        later.run(rounds - part)
        assert torch.equal(whole.server.w, later.server.w)
        assert torch.equal(helm(whole).knobs, helm(later).knobs)


def test_another_policy_is_another_experiment(bold, tmp_path):
    made = trainer(fl.fedrl(0.1, policy=bold))
    made.round()
    made.save(tmp_path / "kept")
    with pytest.raises(fl.UndriftError, match="digest"):
        trainer(fl.fedrl(0.1, policy="still")).load(tmp_path / "kept")


def test_a_round_of_nobody_changes_nothing(bold):
    federation = [(torch.full((4, 6), float("inf")), torch.zeros(4, dtype=torch.long))]
    with pytest.raises(fl.UndriftError):
        fl.Trainer(
            fl.Task(nn.Linear(6, 3)), fl.Federation.of(federation), fl.fedrl(0.1, policy=bold)
        )
    made = trainer(fl.fedrl(1e30, policy=bold))
    before = made.server
    made.round()
    after = made.server
    assert torch.equal(before.w, after.w) and torch.equal(helm(made).knobs, before.states[0].knobs)


def test_the_graph_path_gives_the_same_run(bold):
    algorithm = fl.fedrl(0.1, policy=bold)
    plain, pieces = (trainer(algorithm, torch.float64, graph=g) for g in (False, True))
    plain.run(3)
    pieces.run(3)
    assert (plain.server.w - pieces.server.w).abs().max() < 1e-12


def test_it_keeps_every_promise_of_a_rule(bold):
    check_rule(Steered(Policy(bold), 0.05), rounds=2)


# ---- between rounds ------------------------------------------------------------------------------
def test_steps_shrink_on_a_plateau_and_a_resumed_run_goes_on_with_it(tmp_path):
    check_rule(fl.PlateauSteps(2), rounds=2)
    algorithm = fl.Algorithm((fl.PlateauSteps(3),), fl.sgd(0.0))  # nothing moves: a plateau
    made = trainer(algorithm)
    factors = []
    for _ in range(10):
        made.round()
        factors.append(round(float(made.server.states[0].factor), 6))
    # a first value, three without progress; three of rest, the first of them a first value again
    assert factors == [1, 1, 1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.81]
    moving = fl.Algorithm((fl.PlateauSteps(2),), fl.sgd(0.5))
    whole, later = trainer(moving), trainer(moving)
    whole.run(5)
    whole.save(tmp_path)
    whole.run(5)
    assert later.load(tmp_path)
    later.run(5)
    assert torch.equal(whole.server.w, later.server.w)
    assert float(whole.server.states[0].factor) < 1


def test_smaller_steps_are_those_of_smaller_rates():
    watching = trainer(fl.Algorithm((fl.PlateauSteps(2),), fl.sgd(0.5)))
    factors = []
    for _ in range(8):
        factors.append(float(watching.server.states[0].factor))
        watching.round()
    assert 0 < factors[-1] < 1
    listed = trainer(fl.Algorithm((), fl.sgd(0.5, schedule=fl.Listed(rounds=factors))))
    listed.run(8)
    assert torch.allclose(watching.server.w, listed.server.w, rtol=0, atol=1e-6)
