"""Clients that crash, hang and are killed: the round goes on with the rest."""

import random
import time

import pytest
import torch

import undrift as fl
from federated.forks import ForkGrid
from federated.silos import FIRST, Silos, distance
from federated.test_hostile import Wire
from undrift.errors import CheckpointError, ConfigError, EmptyRoundError, FederationError
from undrift.federated.checks import Limits
from undrift.federated.enrol import Door, Record, again, enrol, read_record, write_record
from undrift.federated.exchange import Patience
from undrift.testing.world import tiny_world

SECONDS, HANGING = 4.0, {3, 12}  # rounds in which somebody hangs: each costs all of the patience


def plan_of_failures(rounds):
    """Two of six clients fail in every round, each in a way of its own."""
    draw, plan = random.Random(5), []
    for round in range(rounds):
        who, ways = draw.sample(range(6), 2), ["raise", "exit", "kill", "half"]
        fates = dict(zip(who, draw.sample(ways, 2), strict=True))
        if round in HANGING:
            fates[who[0]] = "hang"
        plan.append(fates)
    return plan


@pytest.mark.reliability
@pytest.mark.parametrize("name", [pytest.param("scaffold", marks=pytest.mark.slow), "mime"])
def test_a_third_of_the_clients_fails_in_every_round(name, tmp_path):
    world = tiny_world()._replace(sampler=fl.Everyone())
    algorithm, rounds = fl.catalogue()[name].build(lr=0.05), 20 if name == "scaffold" else 4
    silos, plan = Silos(world, algorithm, tmp_path), plan_of_failures(rounds)
    handlers = {client: node.answer for client, node in silos.nodes.items()}
    now = [0]
    grid = ForkGrid(handlers, lambda client, phase: plan[now[0]].get(client, ""))
    server = silos.server(grid=grid, patience=Patience(seconds=SECONDS))
    for round, fates in enumerate(plan):
        now[0], started = round, time.monotonic()
        assert server.round().skipped == sorted(fates)
        if round in HANGING:
            assert time.monotonic() - started < SECONDS + 1 + 1  # one second to start and to sum
    silos = Silos(world, algorithm, tmp_path / "calm")

    def alive(phase, answer):
        return [] if answer.node - FIRST in plan[calm.rounds_done] else [answer]

    calm = silos.server(grid=Wire(silos.grid, alive))
    calm.run(rounds)
    assert distance(server, calm) == 0


def test_a_report_that_got_lost_does_not_change_the_clients_state(tmp_path):
    """SCAFFOLD's c_i moves only with a report that was counted."""
    world = tiny_world()._replace(sampler=fl.Everyone())
    algorithm = fl.scaffold(lr=0.05)
    silos = Silos(world, algorithm, tmp_path)
    lost = [(0, 2), (1, 4), (2, 2)]

    def losing(phase, answer):
        return [] if (server.rounds_done, answer.node - FIRST) in lost else [answer]

    server = silos.server(grid=Wire(silos.grid, losing))
    server.run(4)
    trainer = world.trainer(algorithm, engine="reference")
    inner = trainer.engine.run_clients

    def skipping(algo, broadcast, clients, work):
        for ids, states, reports, rows in inner(algo, broadcast, clients, work):
            if (trainer.rounds_done, ids[0]) in lost:
                rows = rows._replace(accepted=torch.zeros_like(rows.accepted))
            yield ids, states, reports, rows

    trainer.engine.run_clients = skipping
    trainer.run(4)
    assert distance(server, trainer) <= 1e-10


def test_when_all_fail_the_model_stays_and_the_run_ends_with_a_clear_error(tmp_path):
    silos = Silos(tiny_world(), fl.fedavg(lr=0.05), tmp_path)
    server = silos.server(grid=Wire(silos.grid, lambda phase, a: []), patience=Patience(5.0))
    before = server.server.w.clone()
    assert [len(r.skipped) for r in server.run(2)] == [4, 4]
    with pytest.raises(EmptyRoundError, match="3 rounds in a row"):
        server.round()
    assert torch.equal(server.server.w, before)


def test_fewer_reports_than_the_minimum_do_not_count(tmp_path):
    world = tiny_world()._replace(sampler=fl.Everyone())
    silos = Silos(world, fl.scaffold(lr=0.05), tmp_path)
    few = Wire(silos.grid, lambda phase, a: [a] if a.node < FIRST + 3 else [])
    server = silos.server(grid=few, patience=Patience(5.0, minimum=4))
    before = server.server.w.clone()
    assert len(server.round().skipped) == 6
    assert torch.equal(server.server.w, before)
    assert set(server.engine._bases(range(6)).values()) == {""}  # and nobody's state moved


def test_nobody_hears_of_the_data_when_a_client_fails(tmp_path):
    silos = Silos(tiny_world(), fl.fedavg(lr=0.05), tmp_path)

    def leaking(*_):
        raise ValueError("patient 4711 has label 3")

    for node in silos.nodes.values():
        node.engine.trained = leaking
    silos.server().round()
    causes = {error.cause for error in silos.refusals.refused}
    assert causes == {"the node failed (ValueError)"}


def test_a_private_client_tells_nothing_beside_its_report(tmp_path):
    from undrift.core.local import Sgd
    from undrift.core.rule import Mean
    from undrift.rules.bounded import Private

    rule = Private(norm=0.1, noise=0.0, cohort=6.0)
    algorithm = fl.Algorithm((rule,), Sgd(lr=0.1), Mean(by_size=False))
    world = tiny_world()._replace(sampler=fl.Everyone())
    server = Silos(world, algorithm, tmp_path).server()
    result = server.round()
    assert (result.loss, result.skipped) == (0.0, []) and set(result.scores.values()) == {0.0}
    trainer = world.trainer(algorithm, engine="reference")
    trainer.run(1)
    assert distance(server, trainer) <= 1e-10
    wide = fl.Algorithm((Private(norm=9.0, noise=0.0, cohort=6.0),), Sgd(lr=0.1), Mean(False))
    silos = Silos(world, wide, tmp_path / "wide")  # clients that do not keep to the bound
    silos.algorithm = algorithm
    assert len(silos.server().round().skipped) == 6
    assert "at most 0.1" in silos.refusals.refused[0].cause


def test_who_takes_part_is_fixed_and_states_stay_where_they_are(tmp_path):
    server = Silos(tiny_world(), fl.scaffold(lr=0.05), tmp_path).server()
    for refused in (lambda: server.enroll([1]), lambda: server.leave([1])):
        with pytest.raises(ConfigError, match="fixed when a run begins"):
            refused()
    with pytest.raises(ConfigError, match="on its own node"):
        server.client_state(2)


def test_a_node_refuses_what_does_not_fit_it(tmp_path):
    silos = Silos(tiny_world()._replace(sampler=fl.Everyone()), fl.fedavg(lr=0.05), tmp_path)
    server = silos.server()
    silos.nodes[0].plan = "another experiment"
    handlers = silos.grid.handlers
    handlers[FIRST + 1] = silos.nodes[2].answer  # a wire that was laid wrongly
    server.round()
    causes = {e.client: e.cause for e in silos.refusals.refused}
    assert "install the same files" in causes[0]
    assert "this node is client 2, not 1" in causes[1]
    assert set(causes) == {0, 1}


# ---- who is there --------------------------------------------------------------------------------
def test_a_node_that_is_gone_is_not_waited_for_and_is_welcome_back(tmp_path):
    world = tiny_world()._replace(sampler=fl.Everyone())
    silos = Silos(world, fl.scaffold(lr=0.05), tmp_path)
    server = silos.server()
    handler = silos.grid.handlers.pop(FIRST + 3)
    started = time.monotonic()
    assert server.round().skipped == [3] and time.monotonic() - started < 10
    assert "not connected" in silos.refusals.refused[0].cause
    silos.grid.handlers[55] = handler  # the same key under another number
    silos.grid.clients = {**silos.grid.clients, 55: 3}
    assert server.round().skipped == []


def test_a_client_whose_node_comes_back_in_time_is_asked_again(tmp_path):
    """Killed in the middle of its work, it gives after its restart what it would have given."""
    world = tiny_world()._replace(sampler=fl.Everyone())
    silos = Silos(world, fl.scaffold(lr=0.05), tmp_path)
    dying = [2]

    def killed(common, own):
        dying[0] -= 1
        if not dying[0]:
            raise SystemExit
        return silos.nodes[1].answer(common, own)

    silos.grid.handlers[FIRST + 1] = killed
    server = silos.server(patience=Patience(30.0, returning=20.0))
    assert [r.skipped for r in server.run(3)] == [[], [], []] and not silos.refusals.refused
    trainer = world.trainer(fl.scaffold(lr=0.05), engine="reference")
    trainer.run(3)
    assert distance(server, trainer) <= 1e-10


def test_a_run_begins_with_those_who_come_and_waits_for_nobody_else_later(tmp_path):
    silos = Silos(tiny_world(), fl.fedavg(lr=0.05), tmp_path)
    del silos.grid.handlers[FIRST + 5]
    door = Door(6, minimum=3, seconds=1.5)
    members = enrol(silos.grid, door, silos.run, "", Limits(), silos.refusals)
    assert sorted(members.sizes) == [0, 1, 2, 3, 4]
    record, started = Record(silos.run, members), time.monotonic()
    write_record(tmp_path / "members.json", record)
    assert read_record(tmp_path / "members.json") == record
    silos.restart(5)  # it comes too late
    patient = door._replace(seconds=60.0)
    found = again(silos.grid, patient, record, "", silos.refusals)
    assert time.monotonic() - started < 20 and sorted(found.sizes) == [0, 1, 2, 3, 4]
    assert "not there when the run began" in silos.refusals.refused[-1].cause


def test_too_few_nodes_do_not_begin(tmp_path):
    silos = Silos(tiny_world(), fl.fedavg(lr=0.05), tmp_path)
    silos.grid.handlers = {FIRST: silos.grid.handlers[FIRST]}
    with pytest.raises(FederationError, match=r"1 of 6 clients came within 0\.5 s"):
        enrol(silos.grid, Door(6, 2, 0.5), silos.run, "", Limits(), silos.refusals)


def test_without_keys_a_nodes_own_word_counts_only_if_that_is_allowed(tmp_path):
    silos = Silos(tiny_world(), fl.fedavg(lr=0.05), tmp_path)
    silos.grid.clients = {}  # the transport vouches for nobody
    with pytest.raises(FederationError, match="0 of 6"):
        enrol(silos.grid, Door(6, 1, 0.5), silos.run, "", Limits(), silos.refusals)
    silos.grid.handlers[7] = silos.nodes[2].answer  # two say that they are client 2
    trusting = Door(6, 6, 5.0, trust=True)
    members = enrol(silos.grid, trusting, silos.run, "", Limits(), silos.refusals)
    assert sorted(members.sizes) == list(range(6))
    assert "client 2 is node" in silos.refusals.refused[-1].cause


def test_a_damaged_record_is_noticed(tmp_path):
    (tmp_path / "members.json").write_text('{"run": 1}')
    with pytest.raises(CheckpointError, match=r"members\.json is damaged"):
        read_record(tmp_path / "members.json")
