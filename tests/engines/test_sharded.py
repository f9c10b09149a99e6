"""Owners of shards, in this process: the same numbers whoever owns them and whoever is lost."""

import logging
import math
import os
import time

import pytest
import torch
from torch import nn

import undrift as fl
from rules.needs import built, world_for
from undrift.core.tree import named_leaves
from undrift.engines import ENGINES, Sharded, crew, member, sharded
from undrift.engines.crew import Lost, pack, unpack
from undrift.engines.sharded import Here, checked
from undrift.errors import ClientError, ConfigError, CorruptCheckpoint, FederationError
from undrift.testing import check_engine
from undrift.testing.compare import distance
from undrift.testing.engines import standard_algorithms
from undrift.testing.world import numbers, tiny_world

TWELVE = [
    *("fedavg", "fedprox", "fednova", "fedyogi", "qfedavg"),  # stateless, one with a probe
    *("scaffold", "feddyn", "adabest", "moon", "fedvra_u"),  # with client states
    *("mime", "mimelite", "rfedavg", "rfedavg_plus", "fedrl"),  # probes, second looks, rows
]


@pytest.fixture(autouse=True)
def owners(monkeypatch):
    monkeypatch.setitem(ENGINES, "owners", Sharded)
    monkeypatch.setattr(logging.getLogger("undrift"), "propagate", True)


def world_of(name):
    world = tiny_world(sizes=(5, 9, 3, 7, 1, 6, 4, 8))
    return world._replace(**world_for(name, world.sampler, world.work))


def far(found, wanted):
    ours, theirs = numbers(found), numbers(wanted)
    assert ours.keys() == theirs.keys()
    return distance(list(ours.values()), list(theirs.values()))


def everything(world, actors=2, rounds=0, label="every hook", **options):
    trainer = world.trainer(standard_algorithms()[label], engine="owners", actors=actors, **options)
    trainer.run(rounds)
    return trainer


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


def both(one, other):
    ours, theirs = numbers(one), numbers(other)
    return [(ours[n], theirs[n]) for n in theirs]


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


# ---- owners that are lost ------------------------------------------------------------------------
class Losing(Here):
    """Loses an owner at the n-th question of a kind, before or after it has answered."""

    plan: tuple[str, int, int, bool] | None = None

    def ask(self, what, common, own):
        when = self.plan
        if when is None or when[0] != what or when[2] not in own:
            return super().ask(what, common, own)
        kind, number, owner, answered = when
        if number > 0:
            self.plan = (kind, number - 1, owner, answered)
            return super().ask(what, common, own)
        self.plan = None
        if answered:
            super().ask(what, common, own)
        del self.members[owner]
        return super().ask(what, common, own)


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", ["probe", "train", "look"])
def test_losing_an_owner_changes_no_bit(what, answered):
    world = tiny_world()
    undisturbed = everything(world, rounds=3)
    for number, owner in ((0, 0), (2, 1)):
        trainer = everything(world, hire=Losing)
        trainer.engine.crew.plan = (what, number, owner, answered)
        trainer.run(3)
        assert trainer.engine.replaced == [owner]
        assert all(torch.equal(a, b) for a, b in both(trainer, undisturbed))


def test_owners_lost_in_turn_for_twenty_rounds():
    world = tiny_world(sizes=(5, 9, 3, 7, 1, 6, 4, 8))
    undisturbed = everything(world, 3, 20, "scaffold/m")
    trainer = everything(world, 3, label="scaffold/m", hire=Losing)
    for r in range(20):
        trainer.engine.crew.plan = ("train", 0, r % 3, bool(r % 2))
        trainer.round()
    assert len(trainer.engine.replaced) >= 15  # a cohort may leave an owner out
    assert all(torch.equal(a, b) for a, b in both(trainer, undisturbed))


def test_whoever_answered_already_does_not_train_again(monkeypatch):
    trainer = everything(tiny_world(), hire=Losing)
    trained = []
    original = member.Member._train_anew
    monkeypatch.setattr(
        member.Member,
        "_train_anew",
        lambda self, *a: trained.append(self.number) or original(self, *a),
    )
    trainer.engine.crew.plan = ("train", 0, 0, True)
    trainer.round()
    assert sorted(trained) == [0, 0, 1]


class Gone(Here):
    """Never answers a question about training."""

    def ask(self, what, common, own):
        if what == "train" and os.environ.get("GONE"):
            raise Lost([0], "it is not there")
        return super().ask(what, common, own)


def test_an_owner_that_is_always_lost_ends_the_round_and_nothing_else(monkeypatch):
    world = tiny_world()
    trainer = everything(world, rounds=1, hire=Gone)
    before = numbers(trainer)
    monkeypatch.setenv("GONE", "1")
    with pytest.raises(FederationError, match="actor 0: it is not there, 5 times in a row"):
        trainer.round()
    assert all(torch.equal(v, before[n]) for n, v in numbers(trainer).items())
    monkeypatch.delenv("GONE")
    trainer.run(2)
    assert far(trainer, everything(world, rounds=3)) == 0.0


# ---- checkpoints ---------------------------------------------------------------------------------
@pytest.mark.parametrize("state", ["device", "file"])
@pytest.mark.parametrize("actors", [1, 2, 3])
def test_a_run_goes_on_with_another_number_of_owners(actors, state, tmp_path):
    world = tiny_world()
    whole = everything(world, rounds=4)
    rows = {"state": state, **({"state_path": tmp_path / "rows"} if state == "file" else {})}
    first = everything(world, rounds=2, **rows)
    first.save(tmp_path / "kept")
    del first
    second = everything(world, actors, **rows)
    assert second.load(tmp_path / "kept")
    second.run(2)
    assert far(second, whole) <= (0.0 if actors == 2 else 1e-12)
    assert (tmp_path / "rows").is_dir() == (state == "file")


def test_rows_in_files_survive_losses_and_checkpoints(tmp_path):
    world = tiny_world()
    undisturbed = everything(world, rounds=6)
    trainer = everything(world, hire=Losing, state="file", state_path=tmp_path / "rows")
    for r in range(6):
        trainer.engine.crew.plan = ("train", 0, r % 2, True)
        trainer.round()
        trainer.save(tmp_path / "kept")
    assert far(trainer, undisturbed) == 0.0
    again = everything(world, 3, state="file", state_path=tmp_path / "rows")
    again.load(tmp_path / "kept")
    assert far(again, undisturbed) == 0.0


def test_damaged_rows_are_found_before_a_run_goes_on(tmp_path):
    world = tiny_world()
    trainer = everything(world, rounds=2, state="file", state_path=tmp_path / "rows")
    trainer.save(tmp_path / "kept")
    damaged = next(iter((tmp_path / "rows").glob("shard-*")))
    data = bytearray(damaged.read_bytes())
    data[4096:] = bytes(b ^ 1 for b in data[4096:])
    damaged.write_bytes(bytes(data))
    again = everything(world, state="file", state_path=tmp_path / "rows")
    with pytest.raises(CorruptCheckpoint, match="the state of client"):
        again.load(tmp_path / "kept")


@fl.record
class Homesick(fl.Rule):
    """Pulls towards the model that a client began with."""

    def init_client(self, w, sizes):
        return w.clone()

    def direction(self, g, view):
        return g + 0.1 * (view.w - view.mine)


@pytest.mark.parametrize("state", ["device", "file"])
def test_whoever_was_never_seen_begins_as_the_checkpoint_says(state, tmp_path):
    """The network of a process that goes on may have been drawn anew."""
    world, algorithm = tiny_world(), fl.Algorithm((Homesick(),))
    world = world._replace(sampler=fl.data.Explicit([[0, 1], [2, 3], [4, 5]], [1.0] * 6))
    whole = world.trainer(algorithm)
    whole.run(3)
    rows = {"state": state, **({"state_path": tmp_path / "rows"} if state == "file" else {})}
    first = world.trainer(algorithm, engine="owners", **rows)
    first.round()
    first.save(tmp_path / "kept")
    del first
    torch.manual_seed(123)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    other = world._replace(task=fl.Task(net, feature="1", dtype=torch.float64))
    second = other.trainer(algorithm, engine="owners", hire=Losing, **rows)
    assert second.load(tmp_path / "kept")
    second.engine.crew.plan = ("train", 0, 0, True)
    second.run(2)
    assert second.engine.replaced == [0] and far(second, whole) <= 1e-12


def test_files_without_a_path_are_refused():
    with pytest.raises(ConfigError, match="state_path"):
        everything(tiny_world(), state="file")
    with pytest.raises(ConfigError, match="one of 'device'"):
        everything(tiny_world(), state="cloud")


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
    with pytest.raises(FederationError, match="actor 0 sent a sum that is not one of"):
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
