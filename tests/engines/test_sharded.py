"""Owners of shards, in this process: the same numbers whoever owns them and whoever is lost."""

import math
import os
import time

import pytest
import torch
from owned import both, everything, owners
from torch import nn

import undrift as fl
from rules.needs import built, far, world_of
from undrift.core.tree import named_leaves
from undrift.engines import Sharded, crew, member, sharded
from undrift.engines.crew import pack, unpack
from undrift.engines.sharded import checked
from undrift.errors import ClientError, ConfigError, FederationError, ServerError
from undrift.testing import check_engine
from undrift.testing.engines import standard_algorithms
from undrift.testing.world import numbers, tiny_world

__all__ = ["owners"]

TWELVE = [
    *("fedavg", "fedprox", "fednova", "fedyogi", "qfedavg"),  # stateless, one with a probe
    *("scaffold", "feddyn", "adabest", "moon", "fedvra_u"),  # with client states
    *("mime", "mimelite", "rfedavg", "rfedavg_plus", "fedrl"),  # probes, second looks, rows
]


# ---- agreement -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TWELVE)
def test_a_named_algorithm_is_the_same_in_every_engine(name):
    world, algorithm = world_of(name), built(name, lr=0.05)
    wanted = world.trainer(algorithm, engine="reference")
    results = wanted.run(3)
    for actors in (1, 2, 3) if name in ("fedavg", "rfedavg") else (2,):
        trainer = world.trainer(algorithm, engine="owners", actors=actors)
        for ours, theirs in zip(trainer.run(3), results, strict=True):
            assert ours[:3] == theirs[:3] and ours[5:7] == theirs[5:7]  # ids, floats sent
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-10)
        assert far(trainer, wanted) <= 1e-10


def test_the_contract_of_engines():
    check_engine(Sharded, actors=5)


def test_one_client_at_a_time_has_the_same_bits_with_any_number_of_owners():
    """Kernels round by the width of a batch; with one client each, nothing is left but sums."""
    world = tiny_world(sizes=(5, 9, 3, 7, 1, 6, 4, 8))
    one, *others = (everything(world, n, 3, chunk=1, workers=1) for n in (1, 2, 7))
    for other in others:
        assert all(torch.equal(a, b) for a, b in both(one, other))


def test_a_task_with_buffers_and_dropout_is_the_same():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3))
    world = tiny_world(fl.Task(net, dtype=torch.float64), sizes=(5, 9, 3, 7, 6, 4))
    trainers = [
        world.trainer(fl.scaffold(0.1), engine=engine, **options)
        for engine, options in (("reference", {}), ("owners", {"actors": 3}))
    ]
    for trainer in trainers:
        trainer.run(3)
    assert far(*trainers) <= 1e-12


def test_work_that_is_given_step_by_step_travels():
    world = tiny_world()
    batches = {(r, i): [[0]] for r in range(2) for i in range(6)}
    world = world._replace(work=fl.data.ExplicitWork(batches), sampler=fl.Everyone())
    found = [world.trainer(fl.fedavg(0.1), engine=e) for e in ("reference", "owners")]
    for trainer in found:
        trainer.run(2)
    assert far(*found) <= 1e-12


def test_clients_join_and_leave_with_their_states():
    world = tiny_world()
    algorithm = standard_algorithms()["every hook"]
    found = [world.trainer(algorithm, engine=e, enrolled=range(5)) for e in ("reference", "owners")]
    for trainer in found:
        trainer.run(2)
        trainer.leave([1, 3])
        trainer.enroll([5])
        trainer.run(1)
    assert far(*found) <= 1e-12
    assert torch.equal(
        found[0].client_state(2)["1.EveryHook.seen"], found[1].client_state(2)["1.EveryHook.seen"]
    )


def test_what_one_client_breaks_is_left_out_and_its_state_stays():
    make = torch.Generator().manual_seed(0)
    x = torch.randn(4, 4, 2, generator=make, dtype=torch.float64)
    clients = [(mine, torch.zeros(4).long()) for mine in x]
    clients[2] = (torch.full((4, 2), 1e300, dtype=torch.float64), torch.ones(4).long())
    task = fl.Task.build(lambda: nn.Linear(2, 2), seed=0, dtype=torch.float64)
    data, work = fl.Federation.of(clients), fl.Work(steps=3)
    found = [
        fl.Trainer(task, data, fl.scaffold(0.1), work=work, engine=engine, **options)
        for engine, options in (("vectorised", {}), ("owners", {"actors": 4}))
    ]
    for trainer in found:
        assert trainer.round().skipped == [2]
    assert far(*found) <= 1e-12 and found[1].store.seen == [0, 1, 3]


@fl.record
class Breaks(fl.Rule):
    """Fails for everybody."""

    def direction(self, g, view):
        raise ZeroDivisionError("deliberate")


def test_an_error_of_a_client_comes_back_as_what_it_was():
    trainer = (
        tiny_world()
        ._replace(sampler=fl.Everyone())
        .trainer(fl.Algorithm((Breaks(),)), engine="owners")
    )
    before = numbers(trainer)
    with pytest.raises(ClientError, match="client 0, stage 'direction', rule 'Breaks'"):
        trainer.round()
    assert all(torch.equal(v, before[n]) for n, v in numbers(trainer).items())


def test_an_error_of_no_kind_names_the_actor():
    with pytest.raises(FederationError, match="actor 3 failed: KeyError"):
        crew.raise_failed(3, crew.failed(KeyError("x")))


# ---- what travels --------------------------------------------------------------------------------
def sent_by(cohort, features=400, name="scaffold"):
    make = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(4, features, generator=make), torch.randint(0, 3, (4,), generator=make))
        for _ in range(128)
    ]
    trainer = fl.Trainer(
        fl.Task(nn.Linear(features, 3)),
        fl.Federation.of(clients),
        built(name),
        sampler=fl.Uniform(count=cohort),
        engine="owners",
    )
    trainer.round()
    return trainer.engine.sent


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "mime"])
def test_what_is_as_large_as_the_model_does_not_grow_with_the_cohort(name):
    small, large = sent_by(16, name=name), sent_by(128, name=name)
    assert (small.common, small.sums) == (large.common, large.sums)
    assert small.common + small.sums > 20_000
    each = (large.own + large.rows) / 128
    assert each < 200 and each == pytest.approx((small.own + small.rows) / 16, rel=0.05)


def test_bytes_of_single_clients_do_not_grow_with_the_model():
    small, large = sent_by(16, 10), sent_by(16, 1000)
    assert (small.own, small.rows) == (large.own, large.rows)


def test_a_tree_travels_bit_by_bit():
    tree = {"a": torch.tensor([0.1, math.nan]), "b": (torch.tensor(True), torch.tensor(2**60), 0.5)}
    back = unpack(pack(tree))
    assert named_leaves(back).keys() == named_leaves(tree).keys()
    assert back["a"][0] == tree["a"][0] and back["b"][1] == 2**60 and back["b"][2] == 0.5
    back["a"][0] = 1.0  # nobody else's memory
    assert tree["a"][0] != 1.0


@pytest.mark.parametrize("wrong", ["clients", "count", "finite", "slots"])
def test_a_parcel_that_does_not_add_up_is_refused(wrong, monkeypatch):
    trainer = everything(tiny_world(), label="fedavg")

    def tampered(owner, answer, asked):
        answer = unpack(answer)
        if wrong == "clients":
            answer = answer._replace(clients=answer.clients + 1)
        if wrong == "count":
            answer.sums.high.count.add_(1)
        if wrong == "finite":
            answer.sums.high.total[0][0] = math.inf
        if wrong == "slots":
            answer = answer._replace(slots=answer.slots[:-1])
        return checked(owner, pack(answer), asked)

    monkeypatch.setattr(sharded, "checked", tampered)
    before = trainer.server.w.clone()
    told = "next server would not be finite" if wrong == "finite" else "actor 0 sent a sum that is"
    with pytest.raises((FederationError, ServerError), match=told):
        trainer.round()
    assert torch.equal(trainer.server.w, before) and not trainer.rounds_done


# ---- small things --------------------------------------------------------------------------------
def test_more_owners_than_shards_are_too_many(caplog):
    trainer = everything(tiny_world(), 9)
    assert len(trainer.engine.shards) == 6
    assert "6 actors instead of 9" in caplog.text


@pytest.mark.parametrize("actors", [0, 1.5, True, "2"])
def test_a_number_of_actors_is_a_whole_number(actors):
    with pytest.raises(ConfigError, match="actors"):
        everything(tiny_world(), actors)


@pytest.mark.parametrize("engine", ["owners", "ray"])
def test_an_option_that_nobody_has_is_refused(engine):
    with pytest.raises(ConfigError, match="Did you mean 'actors'"):
        tiny_world().trainer(fl.fedavg(), engine=engine, acters=2)


def test_a_round_in_which_everybody_fails_changes_nothing_but_its_number():
    clients = [
        (torch.full((4, 2), 1e300, dtype=torch.float64), torch.ones(4).long()) for _ in range(3)
    ]
    data = fl.Federation.of(clients)
    task = fl.Task.build(lambda: nn.Linear(2, 2), seed=0, dtype=torch.float64)
    trainer = fl.Trainer(task, data, fl.scaffold(0.1), work=fl.Work(steps=3), engine="owners")
    before = trainer.server.w.clone()
    assert trainer.round().skipped == [0, 1, 2]
    assert torch.equal(trainer.server.w, before) and trainer.store.seen == []


def test_the_store_of_another_engine_is_refused():
    world = tiny_world()
    store = world.trainer(fl.fedavg()).store
    with pytest.raises(ConfigError, match="make_store"):
        Sharded(world.task, world.federation, store)


def test_rows_are_deleted_with_the_trainer_and_those_of_dead_runs_later(tmp_path, monkeypatch):
    trainer = everything(tiny_world(), rounds=1)
    folders = [one.tier.folder for one in trainer.engine.crew.members.values()]
    assert len({*folders}) == 2 and all(folder.is_dir() for folder in folders)
    del trainer
    assert not any(folder.exists() for folder in folders)
    monkeypatch.setattr(member.tempfile, "gettempdir", lambda: str(tmp_path))
    for name, age in (("old", 2 * member.STALE), ("new", 0.0)):
        folder = tmp_path / f"{member.PREFIX}{name}"
        folder.mkdir()
        (folder / "lock").touch()
        os.utime(folder / "lock", (time.time() - age, time.time() - age))
    held = member.Scratch("held")
    member.sweep(tmp_path)
    assert not (tmp_path / f"{member.PREFIX}old").exists()
    assert (tmp_path / f"{member.PREFIX}new").exists() and held.path.is_dir()
    held.remove()
    member.remove_scratch(str(tmp_path / f"{member.PREFIX}new"))
    assert not (tmp_path / f"{member.PREFIX}new").exists()
    member.remove_scratch(str(tmp_path))  # of this name nothing is ours
    member.remove_scratch("")
    assert tmp_path.is_dir()


def test_another_plan_is_not_forced_on_another_number_of_owners(caplog):
    world = tiny_world()
    plan = everything(world, 2, 1).engine.plan()
    assert set(plan["each"]) == {"0", "1"}
    other = everything(world, 3)
    other.engine.use_plan(plan)
    assert "3 actors instead of 2" in caplog.text and not other.engine.plan()["each"]
