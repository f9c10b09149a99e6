"""A finite report that makes the next server infinite: the round goes on without who sent it."""

import logging
from typing import Any

import pytest
import torch
from owned import owners

import undrift as fl
from undrift.core.local import Sgd
from undrift.core.rule import Mean, Rule
from undrift.core.tree import leaves, record
from undrift.engines.guilty import to_leave_out
from undrift.errors import ServerError
from undrift.rules import Adaptive, FedAdc, Scaffold, SlowMo
from undrift.testing.world import numbers, tiny_task, tiny_world

__all__ = ["owners"]

HUGE = 1e200  # finite in float64, its square is not
ENGINES = {
    "reference": {"engine": "reference"},
    "chunks": {"chunk": 2, "workers": 1},
    "graph": {"graph": True},
    "owners": {"engine": "owners", "actors": 2},
}


@record
class Shout(Rule):
    """Some clients send something else than their change."""

    factor: float = HUGE
    who: Any = (2,)

    def finish(self, delta, view):
        loud = sum(view.client.id == i for i in self.who) > 0
        return torch.where(loud, delta * self.factor, delta), view.mine, ()


def algorithm(factor, *rules, who=(2,), server=None):
    chain = (*rules, Shout(factor, who))
    return fl.Algorithm(chain, Sgd(lr=0.1), Mean(), server or Adaptive("adam", lr=0.1))


def everybody(**options):
    return tiny_world(**options)._replace(sampler=fl.Everyone())


def far(one, other):
    ours, theirs = numbers(one), numbers(other)
    return max(float((ours[n] - theirs[n]).abs().max()) for n in theirs if theirs[n].numel())


def warned(caplog):
    return [r.getMessage() for r in caplog.records if "infinite" in r.getMessage()]


# ---- every engine --------------------------------------------------------------------------------
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("who", [(2,), (0, 4)], ids=["one", "two"])
def test_a_huge_finite_report_is_left_out_as_one_that_is_not_finite(options, who, caplog):
    """Its state stays, too; whoever sent nothing huge counts."""
    found = everybody().trainer(algorithm(HUGE, Scaffold(), who=who), **options)
    with caplog.at_level(logging.WARNING, "undrift"):
        results = found.run(2)
    assert [r.skipped for r in results] == [list(who)] * 2
    assert len(warned(caplog)) == 2 and f"clients {list(who)}" in warned(caplog)[0]
    assert "Adaptive.v" in warned(caplog)[0] and warned(caplog)[0].startswith("round 1:")
    wanted = everybody().trainer(algorithm(torch.nan, Scaffold(), who=who), engine="reference")
    wanted.run(2)
    assert far(found, wanted) <= 1e-10
    assert all(bool(torch.isfinite(v).all()) for v in numbers(found).values())


def test_trainers_of_a_fleet_do_it_each_for_itself():
    factors = [1.0, HUGE, 1.0, HUGE]
    made = [everybody().trainer(algorithm(f, Scaffold(), who=(1,))) for f in factors]
    results = fl.Fleet(made).run(2)
    assert [r.skipped for own in results for r in own] == [[], [], [1], [1]] * 2
    for trainer, factor in zip(made, factors, strict=True):
        wanted = torch.nan if factor == HUGE else 1.0
        alone = everybody().trainer(algorithm(wanted, Scaffold(), who=(1,)), engine="reference")
        alone.run(2)
        assert far(trainer, alone) <= 1e-10


def test_a_device_that_nobody_waits_for_refuses_the_whole_round(monkeypatch):
    """There the round cannot be done again: nobody's report counts, and nobody's state moves."""
    trainer = everybody().trainer(algorithm(HUGE, Scaffold()), graph=True)
    taken = []
    monkeypatch.setattr(type(trainer.engine), "take", lambda *args: taken.append(args) or stop())
    with pytest.raises(InterruptedError):
        trainer.round()
    _, _, turn, done = taken[0]
    assert not bool(done.sound) and not bool(done.outcome.rows.accepted.any())
    assert torch.equal(done.server.w, turn.server.w) and float(done.server.round) == 1
    before = trainer.store.gather(range(6))
    assert leaves(before)
    assert all(map(torch.equal, leaves(done.states), leaves(before)))


def stop():
    raise InterruptedError


# ---- every kind of server ------------------------------------------------------------------------
SERVERS = {
    "fedadam": ((), Adaptive("adam"), torch.float32, 1e25),
    "fedadagrad": ((), Adaptive("adagrad"), torch.float32, 1e25),
    "fedyogi": ((), Adaptive("yogi"), torch.float32, 1e25),
    "slowmo": ((SlowMo(),), Rule(), torch.float32, 1e39),
    "fedadc": ((FedAdc(),), Rule(), torch.float32, 1e39),
}


@pytest.mark.parametrize("name", SERVERS)
def test_no_server_becomes_infinite(name):
    rules, server, dtype, factor = SERVERS[name]
    world = everybody(task=tiny_task(dtype))
    world = world._replace(federation=world.federation.to("cpu", dtype))
    # a change of 0.03 in norm times the factor: the sum by size is finite, the server is not
    chain = (*rules, Shout(factor, (2,)))
    made = fl.Algorithm(chain, Sgd(lr=1e-3), Mean(), server)
    trainer = world.trainer(made)
    results = trainer.run(3)
    assert [r.skipped for r in results] == [[2]] * 3
    assert all(bool(torch.isfinite(v).all()) for v in numbers(trainer).values())


@record
class Moved(Rule):
    """One client's model jumps."""

    far: float = 1e19

    def after_step(self, w, view):
        return torch.where(view.client.id == 2, w + self.far, w)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_a_change_whose_square_overflows_counts_as_not_finite(options, caplog):
    """So it is known on a device, client by client, and nothing has to be done again."""
    world = everybody(task=tiny_task(torch.float32))
    made = fl.Algorithm((Moved(),), Sgd(lr=0.1), Mean(), Adaptive("adam"))
    trainer = world.trainer(made, **options)
    assert [r.skipped for r in trainer.run(2)] == [[2], [2]] and not warned(caplog)
    assert bool(torch.isfinite(trainer.server.w).all())


# ---- whatever made it infinite -------------------------------------------------------------------
@record
class Whisper(Rule):
    """Client 2's change is the shortest, and what it uploads is huge; it is squared."""

    upload: float = HUGE

    def init_server(self, w, sizes):
        return {"seen": w.new_zeros(())}

    def finish(self, delta, view):
        mine = view.client.id == 2
        upload = torch.where(mine, self.upload + view.size * 0, view.size)
        return torch.where(mine, delta * 1e-9, delta), view.mine, upload

    def server(self, update, state, view):
        return update, {"seen": state["seen"] + view.upload**2}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_who_sent_it_is_found_however_short_its_change(options, caplog):
    made = fl.Algorithm((Whisper(),), Sgd(lr=0.1))
    trainer = everybody().trainer(made, **options)
    assert trainer.round().skipped == [2]
    assert "Whisper.seen" in warned(caplog)[0]


@record
class Tiny(Rule):
    """The server divides by what clients send: the smallest number is the guilty one."""

    def row(self, delta, view):
        return torch.where(view.client.id == 2, 0.0, 1.0) + 0 * view.size

    def server(self, update, state, view):
        return update / torch.where(view.accepted, view.rows, 1.0).prod(), state


def test_a_division_by_zero_has_a_name_too():
    trainer = everybody().trainer(fl.Algorithm((Tiny(),), Sgd(lr=0.1)))
    assert trainer.round().skipped == [2]


@record
class Echo(Rule):
    """What client 2 finds at the new model is huge; the server squares it."""

    value: float = HUGE

    def init_server(self, w, sizes):
        return {"heard": w.new_zeros(())}

    def after_round(self, view):
        return torch.where(view.client.id == 2, self.value + view.size * 0, view.size)[None]

    def server_after(self, state, view):
        kept = torch.where(view.accepted[:, None], view.rows, 0)
        return {"heard": state["heard"] + (kept * kept).square().sum()}


@pytest.mark.parametrize("options", [ENGINES["reference"], ENGINES["chunks"]], ids=["one", "many"])
def test_what_a_second_look_brings_is_checked_as_well(options, caplog):
    trainer = everybody().trainer(fl.Algorithm((Echo(1e100),), Sgd(lr=0.1)), **options)
    trainer.round()
    assert "Echo.heard" in warned(caplog)[0] and "clients [2]" in warned(caplog)[0]
    assert float(trainer.server_state()["0.Echo.heard"]) < 1e6


@record
class Shared(Rule):
    """Everybody follows the mean probe; client 2's is huge."""

    shares_probe = True

    def probe(self, view):
        return torch.where(view.client.id == 2, 1e308 + 0 * view.w0, 1e-3 + 0 * view.w0)

    def direction(self, g, view):
        return g + view.cohort


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_one_probe_does_not_make_everybody_infinite(options):
    trainer = everybody().trainer(fl.Algorithm((Shared(),), Sgd(lr=0.1)), **options)
    assert trainer.round().skipped == []
    assert bool(torch.isfinite(trainer.server.w).all())


# ---- joining and leaving -------------------------------------------------------------------------
@record
class Crowded(Rule):
    """A server that does not survive a sixth client."""

    def init_server(self, w, sizes):
        return w.new_ones(())

    def resize(self, state, before, after, joined, left):
        return state / (6 - after)


def test_a_population_that_makes_the_server_infinite_is_refused():
    trainer = tiny_world().trainer(fl.Algorithm((Crowded(),), Sgd(lr=0.1)), enrolled=[0, 1, 2, 3])
    trainer.enroll([4])
    with pytest.raises(ServerError, match=r"Crowded.* with 6 clients instead of 5"):
        trainer.enroll([5])
    assert trainer.enrolled == [0, 1, 2, 3, 4]
    assert float(trainer.server_state()["0.Crowded"]) == 1


# ---- a warning, and nothing else -----------------------------------------------------------------
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_a_simulation_warns_of_a_long_change_once_and_counts_it(options, caplog):
    trainer = everybody().trainer(fl.Algorithm((Moved(1e6),), Sgd(lr=0.1)), **options)
    with caplog.at_level(logging.WARNING, "undrift"):
        assert [r.skipped for r in trainer.run(3)] == [[]] * 3
    told = [r.getMessage() for r in caplog.records if "times as long" in r.getMessage()]
    assert len(told) == 1 and "round 1: the changes of clients [2] are more than 10" in told[0]


@pytest.mark.parametrize(
    ("lengths", "steps", "long"),
    [
        ([1, 2, 3, 31], [1, 1, 1, 1], [3]),  # the lower of two in the middle counts
        ([1, 2, 3, 19], [1, 1, 1, 1], []),
        ([1, 2, 3, 100], [2, 2, 2, 20], []),  # ten times the work
        ([0, 0, 0, 100], [1, 1, 1, 1], []),  # nobody knows what is usual
        ([0, 0, 1, 100], [1, 1, 1, 1], [3]),
    ],
)
def test_which_changes_are_long(lengths, steps, long, caplog):
    from undrift.engines.traffic import NOTHING
    from undrift.rounds import Advance

    row = everybody().trainer(fl.fedavg(lr=0.1)).advance().rows
    size = dict.fromkeys(("accepted", "loss"), torch.ones(4)) | {"scores": {}}
    values = {"length": torch.tensor(lengths) * 1.0, "steps": torch.tensor(steps) * 1.0}
    Advance(1, [0, 1, 2, 3], row._replace(**size, **values), NOTHING, 0.0, 0.0, set()).result()
    assert [f"clients {long}" in r.getMessage() for r in caplog.records] == [True] * bool(long)


# ---- the server's own fault ----------------------------------------------------------------------
@record
class Explodes(Rule):
    """A server's state that grows whoever reports."""

    def init_server(self, w, sizes):
        return w.new_ones(())

    def server(self, update, state, view):
        return update, state * 1e120


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_where_nobody_is_to_blame_the_run_stops_before_anything_shows(options, tmp_path):
    trainer = everybody().trainer(fl.Algorithm((Scaffold(), Explodes()), Sgd(lr=0.1)), **options)
    trainer.run(2)
    kept = {n: v.clone() for n, v in numbers(trainer).items()}
    with pytest.raises(ServerError, match=r"round 3: .*Explodes.*whoever's report"):
        trainer.round()
    assert trainer.rounds_done == 2
    assert all(torch.equal(v, kept[n]) for n, v in numbers(trainer).items())


def test_nothing_is_saved_of_such_a_round(tmp_path):
    trainer = everybody().trainer(fl.Algorithm((Explodes(),), Sgd(lr=0.1)))
    with pytest.raises(ServerError):
        fl.run(trainer, tmp_path / "run", rounds=5)
    again = everybody().trainer(fl.Algorithm((Explodes(),), Sgd(lr=0.1)))
    assert again.load(tmp_path / "run" / "checkpoint") and again.rounds_done == 2
    assert bool(torch.isfinite(again.server.states[0]).all())


# ---- the search ----------------------------------------------------------------------------------
@pytest.mark.parametrize("guilty", [{0}, {63}, {31, 32}, {5, 17, 60}, set(range(64))], ids=str)
def test_the_search_finds_the_guilty_and_nobody_else(guilty):
    tries = []

    def works(out):
        tries.append(out)
        return guilty <= out

    assert to_leave_out(range(64), works) == guilty and len(tries) <= 80


def test_sound_rounds_are_never_done_twice(monkeypatch):
    trainer = everybody().trainer(algorithm(1.0, Scaffold()))
    monkeypatch.setattr(type(trainer.engine), "train_again", None)
    assert [r.skipped for r in trainer.run(3)] == [[]] * 3
