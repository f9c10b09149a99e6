"""Sums of silos: none that no honest silo can send is added to the others."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from federated.clinics import COLUMNS, assert_close
from undrift.core.tree import EMPTY
from undrift.errors import FederationError
from undrift.experiment.tables import parse_table
from undrift.federated.checks import Limits
from undrift.federated.exchange import Exchange, Patience, RefusalLog
from undrift.federated.grid import LocalGrid
from undrift.federated.letters import FRESH, Down, DownOwn, words
from undrift.federated.preparing import Preparing
from undrift.federated.server import new_run
from undrift.federated.table_node import TableNode
from undrift.federated.wire import pack, words_of
from undrift.tabular import Frame, Question, agree, first_question
from undrift.tabular.holders import Asked

BAD = 2  # the client that cheats
ASKED = Asked.of({
    "path": "nowhere.csv", "target": "outcome", "columns": parse_table(COLUMNS, "here")["columns"],
})  # fmt: skip


def frame(client, rows=12):
    at = range(client * rows, (client + 1) * rows)
    return Frame.of(ASKED.schema, {
        "age": [None if i % 7 == 0 else 20 + i for i in at],
        "dose": [0.1 * i - 1 for i in at],
        "blood": ["AB"[i % 2] if i % 12 else f"rare {client}" for i in at],
        "smoker": [["yes", "no", None][i % 3] for i in at],
        "visited": [f"2024-{1 + i % 12:02d}-03" for i in at],
        "outcome": [["well", "ill"][i % 3 == 0] for i in at],
    })  # fmt: skip


def node(client, folder, rows=12):
    return TableNode(client, lambda: frame(client, rows), ASKED.schema, 5, folder / str(client),
                     lambda made, held: pytest.fail("nobody trains"))  # fmt: skip


class Talk:
    """Three silos, one of which changes what it answers to one of the questions."""

    def __init__(self, folder, spoil=None, question="counts", patience=20.0):
        self.refusals, self.run = RefusalLog(folder / "refused.jsonl", ("a", "b", "bad")), new_run()
        self.nodes = {i: node(i, folder) for i in range(3)}
        self.asked = []

        def answering(client):
            def answer(common, own):
                good = self.nodes[client].answer(common, own)
                told = words_of(common, 10**7)["told"]
                self.asked.append((client, told.get("asks")))
                if spoil is None or client != BAD or told.get("asks") != question:
                    return good
                letter = words_of(good, 10**7)
                found = spoil(letter["told"])
                return (
                    found
                    if isinstance(found, bytes)
                    else pack(EMPTY, {**letter, "told": letter["told"] if found is None else found})
                )

            return answer

        self.grid = LocalGrid(
            {70 + i: answering(i) for i in self.nodes}, {70 + i: i for i in self.nodes}
        )
        exchange = Exchange(
            self.grid, {i: 70 + i for i in self.nodes}, run=self.run, limits=Limits(),
            patience=Patience(patience), refusals=self.refusals,
        )  # fmt: skip
        self.preparing = Preparing(exchange, "", 3)

    def agree(self):
        return self.preparing.agree(ASKED, {i: n.size for i, n in self.nodes.items()})


def pooled(*clients):
    """The preparation of these clients' rows in one place."""
    frames = [frame(c) for c in clients]
    columns = {name: [one for f in frames for one in texts(f, name)] for name in ASKED.schema.names}
    owners = np.repeat(np.arange(len(frames)), [len(f) for f in frames])
    return agree(ASKED.schema, Frame.of(ASKED.schema, columns), owners, least=5)


def texts(held, name):
    column = held[name]
    if column.names is not None:
        return [column.names[c] if c >= 0 else None for c in column.values]
    values = [None if v != v else float(v) for v in column.values]
    if name == "smoker":
        return [None if v is None else bool(v) for v in values]
    if name == "visited":
        return [None if v is None else datetime.datetime.fromtimestamp(v, datetime.UTC)
                for v in values]  # fmt: skip
    return values


def close(one, other):
    assert_close(one.to_json(), other.to_json())


def test_sums_of_silos_are_those_of_all_rows_together(tmp_path):
    talk = Talk(tmp_path)
    made, sizes = talk.agree()
    close(made, pooled(0, 1, 2))
    assert sizes == {0: 12, 1: 12, 2: 12} and not talk.refusals.refused
    assert [asks for client, asks in talk.asked if client == 0] == [
        *("counts", "deviations", "quantiles")
    ]


def test_a_level_that_few_rows_have_is_named_by_nobody(tmp_path):
    said = []
    talk = Talk(tmp_path, lambda told: said.append(json.dumps(told)))
    made, _ = talk.agree()
    assert said and "rare" not in said[0] and "rare" not in json.dumps(made.to_json())


# ---- what no honest silo can send ----------------------------------------------------------------
def put(value, *path):
    def spoil(told):
        place = told
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value(place[path[-1]]) if callable(value) else value

    return spoil


def drop(*path):
    def spoil(told):
        place = told
        for name in path[:-1]:
            place = place[name]
        del place[path[-1]]

    return spoil


def both(*spoils):
    def spoil(told):
        for one in spoils:
            one(told)

    return spoil


COUNTS = {
    "a sum that is no number": (put("1", "series", "dose", 2), "finite number"),
    "a truth for a count": (put(True, "series", "dose", 0), "finite number"),
    "an infinite sum": (put(1e308, "series", "dose", 2), "a sum of"),
    "a count below 0": (put(-3, "series", "dose", 1), "below 0"),
    "half a row": (both(put(11.5, "series", "dose", 0), put(0.5, "series", "dose", 1)), "cells"),
    "too many cells": (put(999, "series", "dose", 0), "999 cells"),
    "too few cells": (put(3, "series", "dose", 0), "3 cells"),
    "too many rows": (put(10**6, "rows"), "greeted with 12"),
    "rows below 0": (put(-12, "rows"), "no count"),
    "no rows": (drop("rows"), "it should hold"),
    "one field more": (put({}, "more"), "it should hold"),
    "a list": (lambda told: {"told": []}, "it should hold"),
    "a missing column": (drop("series", "dose"), "series are not those"),
    "an unknown column": (put([1, 0, 1.0], "series", "height"), "series are not those"),
    "an unknown category": (put({}, "levels", "town"), "columns are not those"),
    "a column of levels less": (drop("levels", "blood"), "columns are not those"),
    "two numbers of three": (put([12, 0], "series", "dose"), "2 numbers where 3"),
    "a nested number": (put([[12], 0, 0], "series", "dose"), "finite number"),
    "text for numbers": (put("1230", "series", "dose"), "numbers where 3|finite number"),
    "a level of two rows": (both(put(2, "levels", "blood", "C"), put(0, "unnamed", "blood", 0),
                                 put(lambda n: n - 1, "levels", "blood", "A")),
                            "fewer than 5|add up"),
    "a level too many": (put(10, "levels", "blood", "C"), "do not add up to 12"),
    "a count of levels below 0": (put(-1, "levels", "blood", "A"), "no count"),
    "a fraction of a level": (put(5.0, "levels", "blood", "A"), "no count"),
    "a huge count of levels": (put(2**60, "levels", "blood", "A"), "no count"),
    "a level without a name": (lambda told: told["levels"].__setitem__(
        "blood", {" ": 12 - sum(told["unnamed"]["blood"])}), "without a name"),
    "a level of a flag": (lambda told: told["levels"].__setitem__(
        "smoker", {"true": 4, "false": 4, "maybe": 0}), "not those of \\[columns\\]"),
    "a declared level less": (drop("levels", "outcome", "ill"), "not those|add up"),
    "a class that nobody declared": (lambda told: told["levels"].__setitem__(
        "outcome", {"well": 8, "ill": 0, "dead": 4}), "not those of \\[columns\\]"),
    "rows without a target": (both(put(lambda n: n - 2, "levels", "outcome", "well"),
                                   put(2, "unnamed", "outcome", 1)), "without a target"),
    "classes without a name": (both(put(lambda n: n - 2, "levels", "outcome", "well"),
                                    put(2, "unnamed", "outcome", 0)), "other levels"),
    "other years than dates": (put([3, 9, 6072.0], "series", "visited year"), "its years"),
    "another question's answer": (lambda told: {
        "asks": "deviations", "rows": 12, "levels": {}, "unnamed": {},
        "series": {n: [1.0] for n in told["series"]}}, "asked was 'counts'"),
    "a question that nobody asks": (put("all rows", "asks"), "KeyError"),
    "nothing": (lambda told: b"", "no message"),
    "deep nesting": (lambda told: pack(EMPTY, {}).replace(b'"{}"', b'"' + b"[" * 900 + b'"'),
                     "no message|makes no sense|cut off"),
    "a thousand levels": (lambda told: told["levels"].__setitem__(
        "blood", {str(i): 5 for i in range(1000)}), "do not add up"),
}  # fmt: skip
LATER = {
    "squares below 0": ("deviations", put(-1.0, "series", "dose", 0), "below 0"),
    "squares that no sum allows": ("deviations", put(0.0, "series", "dose", 0), "at least"),
    "squares beyond all": ("deviations", put(1e300, "series", "dose", 0), "squares of 1e\\+300"),
    "squares of a column less": ("deviations", drop("series", "dose"), "series are not those"),
    "an answer of before": ("deviations", lambda told: {
        "asks": "quantiles", "rows": 12, "levels": {}, "unnamed": {}, "series": {}}, "asked was"),
    "bins of other rows": ("quantiles", put(40, "series", "age", 3), "do not add up"),
    "half a row in a bin": ("quantiles", both(put(lambda n: n + 0.5, "series", "age", 3),
                                              put(lambda n: n - 0.5, "series", "age", 4)),
                            "below 0|whole number"),
    "bins below 0": ("quantiles", put(-1, "series", "age", 3), "below 0"),
    "too few bins": ("quantiles", put([12.0], "series", "age"), "1 numbers where 1024"),
    "bins of another column": ("quantiles", lambda told: told["series"].update(
        dose=told["series"].pop("age")), "other columns"),
    "bins of no column": ("quantiles", drop("series", "age"), "other columns"),
}  # fmt: skip
ALL = {name: ("counts", *one) for name, one in COUNTS.items()} | LATER


@pytest.mark.parametrize("name", ALL)
def test_bad_sums_are_refused_and_the_others_agree_without_them(name, tmp_path):
    question, spoil, cause = ALL[name]
    talk = Talk(tmp_path, spoil, question)
    made, sizes = talk.agree()
    assert set(sizes) == {0, 1}
    close(made, pooled(0, 1))
    [refused] = talk.refusals.refused
    assert (refused.client, refused.phase) == (BAD, "sums")
    assert re.search(cause, refused.cause), refused.cause
    assert '"who": "client 2 (bad)"' in (tmp_path / "refused.jsonl").read_text()


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_what_is_no_number_in_json_is_refused(text, tmp_path):
    def spoil(told):
        told["series"]["dose"][2] = 0.123456789
        good = pack(EMPTY, words_of(talk.last, 10**7) | {"told": told})
        return good.replace(b"0.123456789", text.encode().ljust(11))

    talk = Talk(tmp_path, spoil)
    inner = talk.nodes[BAD].answer

    def answer(common, own):
        talk.last = inner(common, own)
        return talk.last

    talk.nodes[BAD].answer = answer
    _, sizes = talk.agree()
    assert set(sizes) == {0, 1} and len(talk.refusals.refused) == 1


def test_an_answer_of_megabytes_is_not_even_parsed(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDRIFT_LIMITS", "letter_bytes=200000")
    talk = Talk(tmp_path, lambda told: told["levels"]["blood"].update({"x" * 300000: 5}))
    assert set(talk.agree()[1]) == {0, 1}
    assert "bytes where at most" in talk.refusals.refused[0].cause


def test_other_phases_keep_their_limit(tmp_path):
    talk = Talk(tmp_path)
    made, sizes = talk.agree()
    inner = talk.nodes[BAD].answer

    def long(common, own):
        letter = words_of(inner(common, own))
        return pack(EMPTY, {**letter, "told": {"more": "x" * 5000}})

    talk.nodes[BAD].answer = long
    assert talk.preparing.hand_out(made, sizes) == {0, 1}
    assert "bytes where at most" in talk.refusals.refused[0].cause


def test_nobody_s_answer_is_an_error(tmp_path):
    talk = Talk(tmp_path, lambda told: b"")
    talk.nodes = {BAD: talk.nodes[BAD]}
    with pytest.raises(FederationError, match="nobody answered"):
        talk.agree()


# ---- what a curious server is not told -----------------------------------------------------------
def asked(one, told, phase="sums", run=None, plan=""):
    run = new_run() if run is None else run
    common = pack(EMPTY, words(Down(phase, run, 0, plan, 3, 0, told)))
    own = pack(EMPTY, words(DownOwn(phase, run, 0, one.client, FRESH)))
    return words_of(one.answer(common, own), 10**7)


def test_a_node_names_no_level_for_a_server_that_asks_with_a_smaller_minimum(tmp_path):
    one = node(0, tmp_path)
    assert "experiment says 5" in asked(one, first_question(1).to_json())["failed"]
    assert asked(one, first_question(5).to_json())["failed"] == ""
    assert asked(one, first_question(9).to_json())["failed"] == ""


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"asks": "rows", "given": {}, "least": 5},
        {"asks": "quantiles", "given": {"age": [1.0]}, "least": 5},
        replace(Question("quantiles", {"height": (1.0, 2.0)}), least=5).to_json(),
    ],
)
def test_a_node_answers_its_experiments_questions_alone(told, tmp_path):
    found = asked(node(0, tmp_path), told)
    assert found["failed"].startswith("asked about columns") or "no question" in found["failed"]
    assert found["told"] == {}


@pytest.mark.parametrize("phase", ["probe", "train", "look", "model"])
def test_without_a_preparation_a_node_does_not_train(phase, tmp_path):
    found = asked(node(0, tmp_path), {"bytes": 0}, phase)["failed"]
    assert "not on this node yet" in found or "Malformed" in found or "DataError" in found


def test_a_node_reads_a_long_question_and_no_other_long_words(tmp_path):
    one, long = node(0, tmp_path), {"asks": "counts", "least": 5}
    long["given"] = {f"column {i}": [] for i in range(8000)}
    assert "asked about columns" in asked(one, long)["failed"]
    assert "unreadable" in asked(one, long, "train")["failed"]


def test_a_node_keeps_to_the_first_preparation_of_a_run(tmp_path):
    talk = Talk(tmp_path)
    made, sizes = talk.agree()
    one, other = talk.nodes[0], replace(made, rows=made.rows + 1)
    assert talk.preparing.hand_out(made, sizes) == {0, 1, 2}
    assert talk.preparing.hand_out(made, sizes) == {0, 1, 2}
    assert talk.preparing.hand_out(other, sizes) == set()
    causes = {refused.cause for refused in talk.refusals.refused}
    assert len(causes) == 1 and "another preparation" in causes.pop()
    for plan in ("", ":", f":{'0' * 32}"):
        failed = asked(one, {}, "train", talk.run, plan)["failed"]
        assert "another preparation" in failed
    assert "experiment is" in asked(one, {}, "train", talk.run, "x:")["failed"]
