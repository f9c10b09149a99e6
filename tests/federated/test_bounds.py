"""What one client may send at most, in every phase and whatever the aggregate."""

import random

import pytest
import torch

import undrift as fl
from federated.hostile import KINDS, Opened
from federated.silos import FIRST, Silos, distance
from federated.test_hostile import Wire, world
from rules.needs import built
from undrift.core.local import Sgd
from undrift.errors import ReportRefused
from undrift.federated.checks import Limits
from undrift.federated.grid import Answer
from undrift.rules.bounded import Clipped
from undrift.testing.world import tiny_world


def changed(server_of, name, factor, client=0, phase="train"):
    """The grid's part of a round in which one client's tensors of some names are stretched."""

    def change(at, answer):
        if answer.node - FIRST != client or at != phase:
            return [answer]
        opened = Opened(answer.data, server_of().engine.forms[phase])
        for part in [p for p in opened.parts if p.startswith(name) and opened.parts[p].dim()]:
            opened.parts[part] = opened.parts[part] * factor
        return [answer._replace(data=opened.write())]

    return change


def refusals_of(algorithm, limits, tmp_path, name="0.total", factor=1.0, phase="train"):
    """Who was refused in a first round, and why."""
    silos = Silos(world(), algorithm, tmp_path)
    server = silos.server(
        limits=limits, grid=Wire(silos.grid, changed(lambda: server, name, factor, phase=phase))
    )
    server.round()
    return {e.client: e.cause for e in silos.refusals.refused}


def lengths_of_changes(algorithm):
    """How far one round takes each client's model from the one that was sent."""
    trainer = world().trainer(algorithm, engine="reference")
    inner, found = trainer.engine.run_clients, {}

    def spied(*arguments):
        for ids, states, reports, rows in inner(*arguments):
            found.update(zip(ids, rows.length.tolist(), strict=True))
            yield ids, states, reports, rows

    trainer.engine.run_clients = spied
    trainer.round()
    return found


@pytest.mark.parametrize("name", ["fedavg", "fednova", "qfedavg", "fedvra_u"])
def test_a_limit_on_the_norm_means_the_same_with_every_aggregate(name, tmp_path):
    """Nova sends d / ||a||, q-FFL L F^q d, FedVRA a share: a client of norm 1 is one of norm 1."""
    algorithm = built(name, lr=0.05)
    lengths = lengths_of_changes(algorithm)
    longest = max(lengths.values())
    limits = Limits(norm=1.001 * longest)
    assert refusals_of(algorithm, limits, tmp_path) == {}
    factor = 1.1 * longest / lengths[0] if name != "qfedavg" else 20.0  # F^q is not known
    found = refusals_of(algorithm, limits, tmp_path / "long", factor=factor)
    assert list(found) == [0] and "a change of norm" in found[0]


@pytest.mark.parametrize(
    ("name", "part", "phase"),
    [
        ("scaffold", "0.uploads", "train"),
        ("rfedavg", "1.notes", "train"),
        ("mime", "", "probe"),
        ("rfedavg_plus", "", "look"),
    ],
)
def test_what_is_sent_beside_the_change_has_a_limit_of_its_own(name, part, phase, tmp_path):
    algorithm, limits = built(name, lr=0.05), Limits(upload=1e6)
    assert refusals_of(algorithm, limits, tmp_path) == {}
    found = refusals_of(algorithm, limits, tmp_path / "long", part, 1e30, phase)
    assert list(found) == [0] and "at most 1e+06" in found[0]


def with_batchnorm():
    layers = torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)
    made = tiny_world(fl.Task(torch.nn.Sequential(*layers), dtype=torch.float64))
    return made._replace(sampler=fl.Everyone())


def test_batchnorms_statistics_have_it_too(tmp_path):
    silos = Silos(with_batchnorm(), fl.fedavg(lr=0.05), tmp_path)
    change = changed(lambda: server, "0.buffers.0", 1e30)
    server = silos.server(limits=Limits(upload=1e6), grid=Wire(silos.grid, change))
    assert server.round().skipped == [0]


@pytest.mark.parametrize(("more", "skipped"), [(0, []), (1, [0]), (-100, [0])])
def test_batchnorms_counters_follow_from_those_that_were_sent(more, skipped, tmp_path):
    """The largest counts: one client could make all of them any number."""
    silos = Silos(with_batchnorm(), fl.fedavg(lr=0.05), tmp_path)

    def change(phase, answer):
        opened = Opened(answer.data, server.engine.forms["train"])
        opened.parts["1.counters"] += more
        return [answer._replace(data=opened.write()) if answer.node == FIRST else answer]

    server = silos.server(grid=Wire(silos.grid, change))
    assert server.round().skipped == skipped
    assert all("counters" in e.cause for e in silos.refusals.refused)


def test_who_does_not_clip_is_refused(tmp_path):
    """The rule runs on the client; a hostile one would leave it out."""
    clipping = fl.Algorithm((Clipped(0.01),), Sgd(lr=0.5))
    silos = Silos(world(), clipping, tmp_path)
    assert silos.server().round().skipped == []
    loose = Silos(world(), fl.Algorithm((Clipped(9.0),), Sgd(lr=0.5)), tmp_path / "loose")
    loose.algorithm = clipping
    assert len(loose.server().round().skipped) == 6
    assert "at most 0.01" in loose.refusals.refused[0].cause
    tighter = silos.server(limits=Limits(norm=0.001))
    assert len(tighter.round().skipped) == 6  # the smaller of two limits holds


# ---- other phases --------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "phase"), [("mime", "probe"), ("rfedavg_plus", "look")])
def test_nothing_malformed_gets_through_in_another_phase(name, phase, tmp_path):
    algorithm, draw, sent = built(name, lr=0.05), random.Random(1), []
    of_reports = {
        *("counted twice", "other steps", "other path", "says it is not finite"),
        *("negative length", "a truth value of 2", "tensors on top of each other"),
    }
    kinds = [k for k in KINDS if k not in of_reports and "weight" not in k]

    def change(at, answer):
        if at != phase or answer.node != FIRST + 1:
            return [answer]
        form = server.engine.forms[phase]
        bad = [KINDS[k](answer.data, form, draw) for k in kinds if k != "another phase"]
        sent.extend(bad)
        return [Answer(answer.node, one) for one in bad]

    silos = Silos(world(), algorithm, tmp_path)
    server = silos.server(grid=Wire(silos.grid, change))
    server.round()
    causes = [e for e in silos.refusals.refused if "no answer" not in e.cause]
    assert len(causes) == len(sent) > 20
    assert {(e.client, e.phase) for e in causes} == {(1, phase)}
    honest = Silos(world(), algorithm, tmp_path / "honest")
    silent = Wire(honest.grid, lambda at, a: [] if at == phase and a.node == FIRST + 1 else [a])
    wanted = honest.server(grid=silent)
    wanted.round()
    assert distance(server, wanted) == 0


def test_a_strangers_words_cannot_pass_for_lines_of_the_log(tmp_path):
    error = ReportRefused(3, 1, "train", "run is a\nround 9: all is well\x1b[31m" + "x" * 9000)
    assert "\n" not in str(error) and "\x1b" not in str(error) and len(str(error)) < 600
    silos = Silos(world(), fl.fedavg(lr=0.05), tmp_path)

    def forging(phase, answer):
        opened = Opened(answer.data, server.engine.forms["train"])
        opened.about["run"] = "\nclient 5"
        return [answer._replace(data=opened.write()) if answer.node == FIRST else answer]

    server = silos.server(grid=Wire(silos.grid, forging))
    server.round()
    assert silos.refusals.refused[0].cause.startswith("run is ?client 5, expected")
