"""Copies that a table lists, in turns, are those that torch would make."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from undrift.engines import copies
from undrift.engines.copies import Copies, row_of


def client(fill: float) -> list[torch.Tensor]:
    """Give tensors of several types and sizes, one of them a view with gaps."""
    kinds = [torch.full((5000,), fill), torch.full((3,), fill).double(), torch.tensor(fill)]
    return [*kinds, torch.tensor([int(fill)]), torch.full((4, 6), fill)[:, ::2]]


@pytest.mark.parametrize("large", [1, 64, 2**16])
def test_everything_is_copied_when_its_turn_comes(monkeypatch, large):
    monkeypatch.setattr(copies, "LARGE", large)
    here, there = ([client(10.0 * side + i) for i in range(3)] for side in (1, 2))
    rows = [[row_of(c) for c in side] for side in (here, there)]
    assert bool(rows[0][0].large) == (large < 2**16)
    a, b = rows
    plan = Copies([[(a[0], b[1]), (a[2], b[2])], [], [(b[0], a[0])]], torch.device("cpu"))
    plan.make(0)
    assert [float(c[0][-1]) for c in here] == [21.0, 11.0, 22.0]
    assert float(there[0][0][0]) == 20.0
    plan.make(1)
    plan.make(2)
    for copied, wanted in ((here[0], 21.0), (here[2], 22.0), (there[0], 21.0), (here[1], 11.0)):
        assert all(bool((v == wanted).all()) for v in copied)


def test_no_copies_at_all():
    Copies([[], []], torch.device("cpu")).make(1)
