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
    def recording(graph, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        seen.append(("recorded", gc.isenabled()))
        yield

    monkeypatch.setattr(torch.cuda, "graph", recording)
    graph = SimpleNamespace(replay=lambda: seen.append(("replayed", gc.isenabled())))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    piece = Piece(lambda: seen.append(("called", gc.isenabled())), pool=(0, 1))
    for _ in range(3):
        piece()
    first, second = [("called", True)], [("recorded", False), ("called", False)]
    assert seen == [*first, *second, ("replayed", True), ("replayed", True)]
