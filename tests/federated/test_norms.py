"""Limits on norms beside the cohort's median, and a server that is checked before it counts."""

import functools
import json
import math
import tempfile

import pytest
import torch

import undrift as fl
from federated.hostile import Opened
from federated.silos import FIRST, Silos, distance
from federated.test_bounds import changed
from federated.test_hostile import Wire, only, world
from rules.needs import built
from undrift.core.local import Sgd
from undrift.core.rule import Mean, Rule
from undrift.core.tree import leaves, record
from undrift.errors import EmptyRoundError, FederationError
from undrift.federated.checks import CHANGE, Limits
from undrift.federated.exchange import Patience
from undrift.federated.held import too_long
from undrift.rules import FedAdc, Scaffold, SlowMo
from undrift.testing.world import tiny_task, tiny_world

OPEN = Limits(relative=math.inf)


def in_float32():
    made = world()._replace(task=tiny_task(torch.float32))
    return made._replace(federation=made.federation.to("cpu", torch.float32))


def sending(server_of, value, client=0, phase="train", name="0.total"):
    """The grid's part of rounds in which one client's tensors of a name are full of a value."""

    def change(at, answer):
        if answer.node - FIRST != client or at != phase:
            return [answer]
        opened = Opened(answer.data, server_of().engine.forms[phase])
        for part in [p for p in opened.parts if p.startswith(name) and opened.parts[p].dim()]:
            opened.parts[part] = torch.full_like(opened.parts[part], value)
        return [answer._replace(data=opened.write())]

    return change


def is_finite(server):
    return all(bool(torch.isfinite(v).all()) for v in leaves(server.server))


def rounds_without(silo, made, algorithm, rounds, folder, phase="train"):
    """The numbers of a run in which this silo's reports do not arrive."""
    silos = Silos(made, algorithm, folder)
    silent = Wire(silos.grid, lambda at, a: [] if a.node == FIRST + silo and at == phase else [a])
    server = silos.server(grid=silent)
    server.run(rounds)
    return server


# ---- one report of 3e38 --------------------------------------------------------------------------
ALGORITHMS = {
    "fedavg": lambda: fl.fedavg(lr=0.05),
    "slowmo": lambda: fl.Algorithm((SlowMo(),), Sgd(lr=0.05)),
    "fedadc": lambda: fl.Algorithm((FedAdc(),), Sgd(lr=0.05)),
    "fedvra": lambda: built("fedvra", lr=0.05),
    "scaffold": lambda: fl.scaffold(lr=0.05),
    "fedadam": lambda: built("fedadam", lr=0.05),
}


@pytest.mark.parametrize("value", [3e38, 1e18, 1e3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_huge_report_is_refused_and_the_round_is_that_of_the_others(name, value, tmp_path):
    silos, algorithm = Silos(in_float32(), ALGORITHMS[name](), tmp_path), ALGORITHMS[name]()
    server = silos.server(grid=Wire(silos.grid, sending(lambda: server, value)))
    assert [r.skipped for r in server.run(3)] == [[0]] * 3
    assert is_finite(server)
    wanted = rounds_without(0, in_float32(), algorithm, 3, tmp_path / "honest")
    assert distance(server, wanted) == 0


def test_the_refusal_names_silo_norm_median_and_setting(tmp_path, caplog):
    silos = Silos(world(), fl.fedavg(lr=0.05), tmp_path)
    server = silos.server(grid=Wire(silos.grid, changed(lambda: server, "0.total", 1e4, client=3)))
    server.round()
    [told] = [r.getMessage() for r in caplog.records if "client 3" in r.getMessage()]
    for part in ("norm of its change of the model", "median", "limits.relative = 10", "inf lifts"):
        assert part in told
    [line] = [json.loads(one) for one in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert (line["client"], line["phase"], line["node"]) == (3, "train", FIRST + 3)
    assert line["cause"] in told


@pytest.mark.parametrize(
    ("name", "part", "phase"),
    [
        ("scaffold", "0.uploads", "train"),
        ("rfedavg", "1.notes", "train"),
        ("mime", "", "probe"),
        ("rfedavg_plus", "", "look"),
    ],
)
def test_what_is_sent_beside_the_change_has_the_limit_squared(name, part, phase, tmp_path):
    algorithm = built(name, lr=0.05)
    for factor, refused in ((2.0, False), (1e5, True)):
        silos = Silos(world(), algorithm, tmp_path / str(factor))
        change = changed(lambda: server, part, factor, client=2, phase=phase)  # noqa: B023
        server = silos.server(grid=Wire(silos.grid, change))
        server.round()
        causes = {e.client: e.cause for e in silos.refusals.refused}
        assert list(causes) == [2] * refused, causes
        assert all("limits.relative" in cause for cause in causes.values())
    wanted = rounds_without(2, world(), algorithm, 1, tmp_path / "honest", phase)
    assert distance(server, wanted) == 0


# ---- small cohorts -------------------------------------------------------------------------------
def pair(sizes=(6, 8)):
    return tiny_world(sizes=sizes)._replace(sampler=fl.Everyone())


def pair_server(tmp_path, change, made=None):
    silos = Silos(pair() if made is None else made, fl.fedavg(lr=0.05), tmp_path)
    return silos, silos.server(grid=Wire(silos.grid, change))


def test_of_two_reports_the_longer_one_is_the_suspect(tmp_path):
    _, server = pair_server(tmp_path, lambda *a: sending(lambda: server, 1e30)(*a))
    assert [r.skipped for r in server.run(2)] == [[0], [0]]
    assert distance(server, rounds_without(0, pair(), fl.fedavg(lr=0.05), 2, tmp_path / "h")) == 0


def test_a_tiny_report_cannot_shut_out_another_after_a_sound_round(tmp_path):
    """What was counted last is a measure, too."""

    def shrinking(phase, answer):
        if server.rounds_done == 0:
            return [answer]
        return sending(lambda: server, 1e-30)(phase, answer)

    _, server = pair_server(tmp_path, shrinking)
    assert [r.skipped for r in server.run(2)] == [[], []]


def test_of_one_report_only_the_rounds_before_tell(tmp_path):
    """In the first round nobody knows: there any sound report counts."""
    made = pair()._replace(sampler=fl.Uniform(count=1))
    silos, server = pair_server(tmp_path, lambda phase, a: [a], made)
    assert server.round().skipped == []
    one = server.roster.cohort(1, ordered=False).ids[0]
    server.engine.exchange.grid.change = sending(lambda: server, 1e9, client=one)
    assert server.round().skipped == [one]
    assert "the cohort's median" in silos.refusals.refused[-1].cause


def test_the_measure_is_kept_with_the_run(tmp_path):
    made = pair()._replace(sampler=fl.Uniform(count=1))
    silos, server = pair_server(tmp_path, lambda phase, a: [a], made)
    server.round()
    server.save(tmp_path / "checkpoint")
    one = server.roster.cohort(1, ordered=False).ids[0]
    again = silos.server(grid=Wire(silos.grid, sending(lambda: again, 1e9, client=one)))
    assert again.load(tmp_path / "checkpoint")
    assert again.round().skipped == [one]


# ---- what honest silos do ------------------------------------------------------------------------
def test_changes_may_grow_together():
    """As when a schedule warms up: the cohort's own median counts, if it is the larger one."""
    norms = {i: {CHANGE: 1e3 + i} for i in range(3)}
    assert too_long(norms, [1.0] * 3, 10.0, before=1e-3) == {}


def test_changes_may_shrink_apart():
    """Late in a run some silos have nothing left to learn."""
    norms = {0: {CHANGE: 1e-9}, 1: {CHANGE: 1e-9}, 2: {CHANGE: 0.1}}
    assert too_long(norms, [1.0] * 3, 10.0, before=0.05) == {}
    assert list(too_long(norms, [1.0] * 3, 10.0, before=0.0)) == [2]


def test_a_silo_that_takes_part_for_the_first_time_is_no_suspect():
    """Its control variate begins at 0 and changes a lot; that of the others changes little."""
    norms = {i: {CHANGE: 1.0, "uploads.0": u} for i, u in enumerate((1e-3, 1e-3, 0.5))}
    assert too_long(norms, [1.0] * 3, 10.0, before=1.0, beside=0.4) == {}
    assert list(too_long(norms, [1.0] * 3, 10.0, before=1.0)) == [2]


def test_who_does_much_may_send_much():
    norms = {0: {CHANGE: 1.0}, 1: {CHANGE: 1.0}, 2: {CHANGE: 90.0}}
    assert too_long(norms, [1.0, 1.0, 10.0], 10.0, 0.0) == {}
    assert list(too_long(norms, [1.0, 1.0, 5.0], 10.0, 0.0)) == [2]


def test_a_silo_with_far_more_examples_is_no_suspect(tmp_path):
    made = tiny_world(sizes=(2, 2, 400))._replace(sampler=fl.Everyone())
    silos = Silos(made, fl.scaffold(lr=0.3), tmp_path)
    assert [r.skipped for r in silos.server().run(2)] == [[], []]


def test_the_limit_can_be_lifted(tmp_path):
    silos = Silos(world(), fl.fedavg(lr=0.05), tmp_path)
    change = changed(lambda: server, "0.total", 1e6)
    server = silos.server(grid=Wire(silos.grid, change), limits=OPEN)
    assert server.round().skipped == []


# ---- a server that would not be finite -----------------------------------------------------------
@record
class Squares(Rule):
    """The server squares what is uploaded, twice."""

    def init_server(self, w, sizes):
        return {"seen": w.new_zeros(())}

    def finish(self, delta, view):
        return delta, view.mine, view.size

    def server(self, update, state, view):
        return update, {"seen": state["seen"] + view.upload**4}


def squares():
    return fl.Algorithm((Squares(), Scaffold()), Sgd(lr=0.05), Mean())


def huge_upload(server_of, clients=(2,)):
    def change(phase, answer):
        if answer.node - FIRST not in clients:
            return [answer]
        opened = Opened(answer.data, server_of().engine.forms["train"])
        opened.parts["0.uploads.0"] = torch.full_like(opened.parts["0.uploads.0"], 1e100)
        return [answer._replace(data=opened.write())]

    return change


@pytest.mark.parametrize("at_once", [None, 2])
@pytest.mark.parametrize("clients", [{2}, {0, 4}], ids=str)
def test_a_server_that_would_be_infinite_is_refused_and_the_silos_named(clients, at_once, tmp_path):
    """Nobody is asked twice: a silo could give another answer."""
    silos, asked = Silos(world(), squares(), tmp_path), []

    def counted(phase, answer):
        asked.append(answer.node)
        return huge_upload(lambda: server, clients)(phase, answer)

    server = silos.server(
        grid=Wire(silos.grid, counted), limits=OPEN, patience=Patience(30.0, at_once=at_once)
    )
    assert [r.skipped for r in server.run(2)] == [sorted(clients)] * 2
    assert is_finite(server) and len(asked) == 12
    causes = {(e.client, e.round) for e in silos.refusals.refused if "infinite" in e.cause}
    assert causes == {(client, round) for client in clients for round in (0, 1)}
    assert "Squares.seen" in silos.refusals.refused[0].cause
    honest = Silos(world(), squares(), tmp_path / "honest")
    wanted = honest.server(grid=Wire(honest.grid, only(set(range(6)) - clients)))
    wanted.run(2)
    assert distance(server, wanted) == 0
    for client in clients:  # its state has not moved
        assert server.engine._bases([client]) == {client: ""}


def test_too_few_that_are_sound_are_an_empty_round_and_no_error_of_the_server(tmp_path):
    silos = Silos(world(), squares(), tmp_path)
    change = huge_upload(lambda: server, {0, 1, 2, 3})
    server = silos.server(
        grid=Wire(silos.grid, change), limits=OPEN, patience=Patience(30.0, minimum=3)
    )
    before = server.server.w.clone()
    assert [len(r.skipped) for r in server.run(2)] == [6, 6]
    assert torch.equal(server.server.w, before)
    assert set(server.engine._bases(range(6)).values()) == {""}
    with pytest.raises(EmptyRoundError, match="3 rounds in a row"):
        server.round()


def test_one_silo_alone_cannot_end_the_run_with_its_report(tmp_path):
    silos = Silos(world(), squares(), tmp_path)
    change = huge_upload(lambda: server, {3})
    lonely = Wire(silos.grid, lambda at, a: change(at, a) if a.node == FIRST + 3 else [])
    server = silos.server(grid=lonely, limits=OPEN)
    assert len(server.round().skipped) == 6 and is_finite(server)
    assert "infinite" in silos.refusals.refused[-1].cause
    server.engine.exchange.grid.change = lambda phase, a: [a]
    assert server.round().skipped == []


@record
class Heard(Rule):
    """The server squares what clients find at the new model."""

    def init_server(self, w, sizes):
        return {"heard": w.new_zeros(())}

    def after_round(self, view):
        return view.size[None]

    def server_after(self, state, view):
        kept = torch.where(view.accepted[:, None], view.rows, 0)
        return {"heard": state["heard"] + (kept * kept).square().sum()}


def test_a_second_look_that_makes_the_server_infinite_is_left_out_and_named(tmp_path):
    silos = Silos(world(), fl.Algorithm((Heard(),), Sgd(lr=0.05)), tmp_path)
    change = sending(lambda: server, 1e100, client=5, phase="look", name="")
    server = silos.server(grid=Wire(silos.grid, change), limits=OPEN)
    server.round()
    assert is_finite(server)
    told = [(e.client, e.phase) for e in silos.refusals.refused if "infinite" in e.cause]
    assert set(told) == {(5, "look")}


# ---- reports that are held in a file -------------------------------------------------------------
def test_a_disk_without_room_for_reports_is_a_clear_error(tmp_path, monkeypatch):
    full = functools.partial(open, "/dev/full", "r+b")
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    silos = Silos(world(), fl.fedavg(lr=0.05), tmp_path)
    server = silos.server(patience=Patience(30.0, at_once=1))
    with pytest.raises(FederationError, match=r"cannot be held .*No space left.*TMPDIR"):
        server.round()
