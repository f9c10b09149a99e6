"""What becomes of Flower's messages before anything of undrift reads them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="pip install 'undrift[flower]'")

from flwr.app import Array

from undrift.federated.flower import KIND, FlowerGrid, _answer


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


@pytest.mark.parametrize("content", [{}, {"answer": {}}, {"answer": 3}, good(kind="numpy.ndarray")])
def test_what_is_no_report_is_not_read(content):
    found = _answer(reply(7, content), 7)
    assert found.data == b"" and found.failed == "an answer without a report"


def test_a_node_is_the_client_whose_key_it_has():
    nodes = [
        SimpleNamespace(node_id=5, public_key=b"b\n"),
        SimpleNamespace(node_id=6, public_key=b"x"),
    ]
    grid = FlowerGrid(SimpleNamespace(get_nodes=lambda: nodes), ["a\n", "b"])
    assert grid.nodes() == {5: 1, 6: None}
