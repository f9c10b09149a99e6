"""Recording: what may not happen meanwhile does not."""

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from undrift.engines.graphs import Piece


def test_nothing_is_collected_while_a_graph_is_recorded(monkeypatch):
    """A graph of an earlier run that goes away then would spoil the new one."""
    seen = []

    @contextmanager
    def recording(graph, pool, stream):
        assert stream is None
        seen.append(("recorded", gc.isenabled()))
        yield

    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: 0)
    graph = SimpleNamespace(replay=lambda: seen.append(("replayed", gc.isenabled())))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    piece = Piece(lambda: seen.append(("called", gc.isenabled())), pool=(0, 1))
    for _ in range(3):
        piece()
    first, second = [("called", True)], [("recorded", False), ("called", False)]
    assert seen == [*first, *second, ("replayed", True), ("replayed", True)]


def test_a_branch_is_recorded_on_its_own_stream(monkeypatch):
    """Libraries keep scratch by stream, and branches go on at the same time."""
    seen = []

    @contextmanager
    def recording(graph, pool, stream):
        seen.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: 7)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    piece = Piece(lambda: None, pool=(0, 1))
    for _ in range(2):
        piece()
    assert seen == [7]
