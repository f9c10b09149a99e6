"""Owners that are lost, and runs that go on without them: nobody counts twice."""

import os

import pytest
import torch
from owned import both, everything, owners
from torch import nn

import undrift as fl
from crossed import crossed
from rules.needs import far
from undrift.engines import member
from undrift.engines.crew import Lost
from undrift.engines.sharded import Here
from undrift.errors import ConfigError, CorruptCheckpoint, FederationError
from undrift.testing.world import numbers, tiny_world

__all__ = ["owners"]


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
@pytest.mark.parametrize(("actors", "state"), crossed([1, 2, 3], ["device", "file"]))
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
