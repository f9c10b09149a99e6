"""Nothing hostile gets through: every answer is checked before any number of it is used."""

import json
import random
import resource
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import undrift as fl
from federated.hostile import KINDS, Opened
from federated.silos import FIRST, Silos, distance
from undrift.errors import ConfigError, ReportRefused
from undrift.federated.checks import Limits
from undrift.federated.exchange import Patience
from undrift.federated.grid import Answer, LocalGrid
from undrift.federated.shelf import Shelf
from undrift.testing.world import tiny_world


class Wire:
    """A grid between a server and a local one, which changes what comes up."""

    def __init__(self, inner: LocalGrid, change) -> None:
        self.inner, self.change = inner, change

    def nodes(self):
        return self.inner.nodes()

    def exchange(self, asks, timeout):
        for answer in list(self.inner.exchange(asks, timeout)):
            yield from self.change(asks[0].phase, answer)


def world():
    made = tiny_world()
    return made._replace(sampler=fl.Everyone())


def only(clients):
    """The grid's part of a round in which only these clients answer."""
    return lambda phase, answer: [answer] if answer.node - FIRST in clients else []


def test_a_thousand_malformed_reports_of_many_kinds_are_refused(tmp_path):
    algorithm, bad_ones, sent = fl.scaffold(lr=0.05), {1, 4}, []
    silos, draw = Silos(world(), algorithm, tmp_path), random.Random(0)

    def change(phase, answer):
        client = answer.node - FIRST
        if client not in bad_ones:
            return [answer]
        form, kinds = server.engine.forms["train"], list(KINDS)
        each = [kinds[(len(sent) + i) % len(kinds)] for i in range(250)]
        sent.extend((client, name) for name in each)
        return [Answer(answer.node, KINDS[name](answer.data, form, draw)) for name in each]

    server = silos.server(grid=Wire(silos.grid, change))
    results = server.run(2)
    assert len(sent) == 1000 and len(KINDS) >= 15
    refused = [e for e in silos.refusals.refused if "no answer" not in e.cause]
    assert len(refused) == 1000
    assert Counter(e.client for e in refused) == Counter(client for client, _ in sent)
    assert all(e.cause and f"client {e.client}, round" in str(e) for e in refused)
    assert [r.skipped for r in results] == [[1, 4], [1, 4]]
    honest = Silos(world(), algorithm, tmp_path / "honest")
    wanted = honest.server(grid=Wire(honest.grid, only({0, 2, 3, 5})))
    wanted.run(2)
    assert distance(server, wanted) == 0


def test_refusals_are_written_into_the_runs_folder(tmp_path):
    silos = Silos(world(), fl.fedavg(lr=0.05), tmp_path)
    broken = Wire(silos.grid, lambda phase, a: [a._replace(data=b"") if a.node == FIRST else a])
    silos.server(grid=broken).round()
    lines = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert [(one["client"], one["round"], one["phase"]) for one in lines] == [(0, 0, "train")]
    assert "no message" in lines[0]["cause"] and lines[0]["node"] == FIRST


def test_every_kind_is_refused_and_the_good_report_behind_them_is_not(tmp_path):
    silos, kinds = Silos(tiny_world(), fl.scaffold(lr=0.05), tmp_path), list(KINDS)

    def change(phase, answer):
        form, draw = server.engine.forms["train"], random.Random(3)
        bad = [KINDS[name](answer.data, form, draw) for name in kinds for _ in range(3)]
        return [*(Answer(answer.node, one) for one in bad), answer]

    server = silos.server(grid=Wire(silos.grid, change))
    assert server.round().skipped == []
    refused = silos.refusals.refused
    assert all(isinstance(e, ReportRefused) for e in refused)
    assert Counter(e.client for e in refused) == {e.client: 3 * len(kinds) for e in refused}
    assert len({e.client for e in refused}) == 4


def test_a_stranger_is_not_listened_to(tmp_path):
    silos = Silos(world(), fl.fedavg(lr=0.05), tmp_path)
    stranger = Wire(silos.grid, lambda phase, a: [a, a._replace(node=7)])
    result = silos.server(grid=stranger).round()
    assert result.skipped == [] and len(silos.refusals.refused) == 6
    assert "node 7 was not asked" in str(silos.refusals.refused[0])


def test_one_client_cannot_answer_for_another(tmp_path):
    silos = Silos(world(), fl.fedavg(lr=0.05), tmp_path)
    swapped = Wire(silos.grid, lambda phase, a: [a._replace(node=FIRST + (a.node - FIRST + 1) % 6)])
    silos.server(grid=swapped).round()
    assert {e.cause.split(",")[0].split(" ")[0] for e in silos.refusals.refused} == {"client"}
    assert len(silos.refusals.refused) == 6


# ---- replays and duplicates ----------------------------------------------------------------------
@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["now", "before", "other"])), max_size=14)
)
def test_a_report_is_counted_once_in_any_order(given_answers):
    """`before` is the same client's report of the round before, `other` that of another run."""
    gate, answers = GATES.fresh()
    taken = []
    for client, which in given_answers:
        try:
            taken.append(gate.admit(answers[which][client]).client)
        except ReportRefused as error:
            assert error.client == client
    now = {client for client, which in given_answers if which == "now"}
    assert sorted(taken) == sorted(now)


class Gates:
    """One gate per example, and the answers of two rounds, made once."""

    def __init__(self) -> None:
        self.made = None

    def fresh(self):
        if self.made is None:
            self.made = self._make()
        from undrift.federated.checks import Gate

        arguments, answers = self.made
        return Gate(*arguments), answers

    def _make(self):
        import tempfile
        from pathlib import Path

        folder, kept, asked = tempfile.mkdtemp(), [], []
        silos = Silos(world(), fl.fedavg(lr=0.05), Path(folder))

        def change(phase, answer):
            kept.append(answer)
            return [answer]

        server = silos.server(grid=Wire(silos.grid, change))
        inner = server.engine.exchange.ask

        def spied(phase, round, common, own, form, expected, free):
            exchange = server.engine.exchange
            nodes = {exchange.nodes[e.client]: e for e in expected}
            asked.append((phase, silos.run, round, form, nodes, exchange.limits, free))
            return inner(phase, round, common, own, form, expected, free)

        server.engine.exchange.ask = spied
        server.run(2)
        before, now = ({a.node - FIRST: a for a in some} for some in (kept[:6], kept[6:]))
        silos.run = "f" * 32
        other = {
            c: a._replace(data=a.data.replace(asked[0][1].encode(), b"f" * 32))
            for c, a in now.items()
        }
        return asked[1], {"now": now, "before": before, "other": other}


GATES = Gates()


# ---- size ----------------------------------------------------------------------------------------
HUGE = 32 * 2**20
TABLE = b'{"__metadata__": {"undrift": "{}"}, ' + b'"a": [1], ' * (HUGE // 10) + b'"b": 1}'


@pytest.mark.parametrize(
    "huge", [bytes(HUGE), len(TABLE).to_bytes(8, "little") + TABLE], ids=["zeros", "table"]
)
def test_oversized_answers_cost_no_memory(huge, tmp_path):
    """Reading the table would take hundreds of megabytes, before anything is said about it."""
    silos = Silos(world(), fl.fedavg(lr=0.05), tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flood = Wire(silos.grid, lambda phase, a: [a._replace(data=huge)] * 17)
    server = silos.server(grid=flood)
    model = server.server.w.clone()
    result = server.round()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(silos.refusals.refused) == 102 and len(result.skipped) == 6
    assert all("bytes where at most" in e.cause for e in silos.refusals.refused)
    assert grown < 50 * 1024  # kilobytes
    assert torch.equal(server.server.w, model)


@pytest.mark.parametrize("factor", [1.2, 2.0])
def test_what_is_a_tenth_longer_than_expected_is_refused(factor):
    from undrift.federated.wire import Form, Malformed, pack, unpack

    form = Form({"w": torch.zeros(100_000)})
    data = pack({"w": torch.zeros(int(100_000 * factor))}, {})
    assert len(data) > 1.1 * form.num_bytes
    with pytest.raises(Malformed, match="bytes where at most"):
        unpack(data, form)


# ---- limits --------------------------------------------------------------------------------------
def test_a_limit_on_the_norm_refuses_long_changes(tmp_path):
    silos = Silos(world(), fl.fedavg(lr=0.5), tmp_path)
    result = silos.server(limits=Limits(norm=1e-3)).round()
    assert len(result.skipped) == 6 and "at most 0.001" in str(silos.refusals.refused[0])
    silos = Silos(world(), fl.fedavg(lr=0.5), tmp_path / "wide")
    assert silos.server(limits=Limits(norm=1e3)).round().skipped == []


@pytest.mark.parametrize("value", [-1.0, 0.0, 1e9])
def test_a_weight_that_the_data_decide_is_above_zero_and_below_its_limit(value, tmp_path):
    """q-FFL's: the server cannot know it, so that it is bounded."""
    silos = Silos(world(), fl.qfedavg(lr=0.05), tmp_path)

    def change(phase, answer):
        opened = Opened(answer.data, server.engine.forms["train"])
        opened.parts["0.total.1"] = torch.full_like(opened.parts["0.total.1"], value)
        return [answer, answer._replace(data=opened.write())][answer.node == FIRST :][:1]

    server = silos.server(grid=Wire(silos.grid, change), limits=Limits(weight=1e6))
    assert server.round().skipped == [0]
    assert "outside (0, 1e+06]" in silos.refusals.refused[0].cause


@pytest.mark.parametrize("limits", [Limits(norm=-1.0), Limits(weight=float("nan")), Limits(size=0)])
def test_limits_that_nobody_could_keep_are_refused(limits, tmp_path):
    with pytest.raises(ConfigError, match="limits"):
        Silos(world(), fl.fedavg(lr=0.5), tmp_path).server(limits=limits)


def test_patience_must_be_above_zero(tmp_path):
    with pytest.raises(ConfigError, match=r"patience\.seconds"):
        Silos(world(), fl.fedavg(lr=0.5), tmp_path).server(patience=Patience(seconds=0))


# ---- names as paths ------------------------------------------------------------------------------
NAMES = [
    *("../x", "/etc/passwd", "a/b", "a\0b", "~", "~root", ".", "..", "", "x" * 300, "․․/x"),
    *("\x1b[31m", "con", "a b", "0" * 31, "0" * 33, "G" * 32, "0" * 31 + "/", "0" * 31 + "\n"),
]


def test_a_run_that_is_no_plain_name_touches_no_file(tmp_path):
    names = NAMES + [f"{i:x}" * 3 + "/.." * (i % 7) for i in range(181)]
    for name in names:
        with pytest.raises(ConfigError, match="does not name a run"):
            Shelf(tmp_path / "inside", name).keep_answer("train", "0" * 32, b"x")
    assert len(names) == 200 and list(tmp_path.iterdir()) == []
