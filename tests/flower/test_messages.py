"""What becomes of Flower's messages before anything of undrift reads them."""

import contextlib
import json
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="pip install 'undrift[flower]'")

from flwr.app import Array

from undrift.errors import EmptyRoundError
from undrift.federated import flower
from undrift.federated.flower import KIND, FlowerGrid, _answer, _telling
from undrift.federated.grid import Ask


def reply(node, content, error=None):
    return SimpleNamespace(
        metadata=SimpleNamespace(src_node_id=node, reply_to_message_id="m"),
        has_error=lambda: error is not None,
        error=error,
        content=content,
    )


def good(data=b"bytes", kind=KIND):
    return {"answer": {"answer": Array("uint8", (len(data),), kind, data)}}


def test_an_answer_is_its_senders_bytes():
    assert _answer(reply(7, good()), 7) == (7, b"bytes", "")


def test_nobody_answers_in_the_name_of_another():
    found = _answer(reply(8, good()), 7)
    assert (found.node, found.data) == (7, b"") and "node 8" in found.failed


def test_the_superlinks_own_errors_are_those_of_the_node_that_was_asked():
    found = _answer(reply(1, {}, SimpleNamespace(code=3)), 7)
    assert found == (7, b"", "Flower error 3")


class Broken(dict):
    """A record that fails when it is read."""

    def __getitem__(self, name):
        raise ValueError(name)


@pytest.mark.parametrize(
    "content",
    [{}, {"answer": {}}, {"answer": 3}, Broken(), {"answer": Broken()}, good(kind="numpy.ndarray")],
)
def test_what_is_no_report_is_not_read(content):
    found = _answer(reply(7, content), 7)
    assert found.data == b"" and found.failed == "an answer without a report"


# ---- the grid ------------------------------------------------------------------------------------
class SuperLink:
    """What a Flower grid does, with nodes that answer, keep silent, start again or send a half."""

    def __init__(self, ways):
        self.ways, self.since, self.gone = ways, dict.fromkeys(ways, "10:00"), False

    def get_nodes(self):
        if self.gone:
            raise OSError("the SuperLink is gone")
        return [
            SimpleNamespace(node_id=node, public_key=b"", last_activated_at=since)
            for node, since in self.since.items()
        ]

    def push_messages(self, messages):
        self.nodes = [m.metadata.dst_node_id for m in messages]
        for node in self.nodes:
            if self.ways[node] == "starts again":
                self.since[node] = "10:05"
        return [f"m{node}" for node in self.nodes]

    def pull_messages(self, names):
        replies = [reply(n, good()) for n in self.nodes if self.ways[n] == "answers"]
        for one in replies:
            one.metadata.reply_to_message_id = f"m{one.metadata.src_node_id}"
        asked = {self.ways[n] for n in self.nodes if f"m{n}" in names}
        if "half" in asked:
            time.sleep(60)
        if "unreadable" in asked:
            raise ValueError("not the object that it says it is")
        if "fails" in asked:
            self.gone = True
            raise OSError("the SuperLink is gone")
        return [one for one in replies if one.metadata.reply_to_message_id in names]


@pytest.fixture(autouse=True)
def outside_of_an_app(monkeypatch):
    """Flower's own messages know which app they are made in."""
    made = lambda ask, _: SimpleNamespace(metadata=SimpleNamespace(dst_node_id=ask.node))  # noqa: E731
    monkeypatch.setattr(flower, "_message", made)


def exchanged(ways, seconds):
    grid = FlowerGrid(SuperLink(ways))
    return list(grid.exchange([Ask(node, "train", b"", b"") for node in ways], seconds))


def test_a_node_that_was_started_again_is_not_waited_for(monkeypatch):
    """What it was asked was lost with its process; its answer is asked for anew."""
    monkeypatch.setattr(flower, "LOOK", 0.0)
    began = time.monotonic()
    found = {a.node: a for a in exchanged({1: "answers", 2: "starts again"}, 30.0)}
    assert time.monotonic() - began < 10
    assert found[1].data == b"bytes" and found[2].failed == "it was started again"


@pytest.mark.parametrize("way", ["silent", "half"])
def test_the_deadline_holds_whatever_a_node_does_and_nobody_else_is_late(way):
    began = time.monotonic()
    found = exchanged({2: way, 1: "answers", 3: "answers"}, 2.5)
    assert sorted(a.node for a in found) == [1, 3] and all(a.data for a in found)
    assert time.monotonic() - began < 6


def test_a_reply_that_flower_cannot_read_is_its_senders_fault():
    found = {a.node: a for a in exchanged({2: "unreadable", 1: "answers"}, 30.0)}
    assert found[1].data == b"bytes"
    assert found[2].failed == "Flower cannot read its reply (ValueError)"


def test_a_superlink_that_is_gone_is_an_error():
    with pytest.raises(OSError, match="the SuperLink is gone"):
        exchanged({1: "fails"}, 30.0)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, ""),
        (EmptyRoundError("3 rounds in a row"), "3 rounds in a row"),
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(0), "the server's app was stopped"),
    ],
)
def test_the_servers_app_writes_down_how_it_ended(error, told, tmp_path):
    path = tmp_path / "ended.json"
    with contextlib.suppress(BaseException), _telling(str(path)):
        if error is not None:
            raise error
    assert json.loads(path.read_text()) == {"error": told}


def test_a_node_is_the_client_whose_key_it_has():
    nodes = [
        SimpleNamespace(node_id=5, public_key=b"b\n"),
        SimpleNamespace(node_id=6, public_key=b"x"),
    ]
    grid = FlowerGrid(SimpleNamespace(get_nodes=lambda: nodes), ["a\n", "b"])
    assert grid.nodes() == {5: 1, 6: None}
