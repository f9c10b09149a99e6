"""The end of a round where no layer remembers, against the same operations in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from undrift.kernels import columns
from undrift.kernels.ending import Ending, Placed
from undrift.testing.compare import distance

NEEDS = ((0, 1), (0, 1, 2, 3), (1, 2, 3, 4), (0, 4), (0, 1, 2, 4), (3,), (0, 2))
SIZE = 300
PLACES = [slice(7, 60), slice(100, 271)]  # no multiples of what a program has


def an_ending(device: torch.device, each: tuple[int, int]) -> tuple[Tensor, Ending]:
    """Two of everything, and three sums; the second client of the first experiment is refused."""
    source = torch.Generator().manual_seed(0)

    def some(*lead: int) -> Tensor:
        return torch.randn((*lead, SIZE), generator=source).to(device)

    taken = torch.ones(each, dtype=torch.bool, device=device)
    taken[0, 1] = False
    table = torch.randn((len(NEEDS), *each, 5), generator=source).to(device)
    model, own = some(*each), [some(*each) for _ in range(2)]
    table[:, 0, 1], model[0, 1], own[1][0, 1] = torch.inf, torch.nan, torch.inf
    states, before = ([some(*each) for _ in range(2)] for _ in range(2))
    shared, sums = ([some(each[0]) for _ in range(count)] for count in (2, 3))
    used = torch.ones(2, dtype=torch.bool, device=device)
    return model, Ending(
        table, NEEDS, (True, False), shared, used, own, taken, states, before,
        [v.double() for v in sums],
    )  # fmt: skip


def wide(e: Ending) -> Ending:
    """Copy it in float64, with weights [1, n]."""

    def twin(vectors: list[Tensor]) -> list[Tensor]:
        return [v.double().clone().unsqueeze(-2) for v in vectors]

    vectors = {name: twin(getattr(e, name)) for name in ("shared", "own", "states", "before")}
    return e._replace(table=e.table.double(), sums=twin(e.sums), **vectors)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("again", [None, False, True])
@pytest.mark.parametrize("each", [(2, 3), (1, 20)])  # fewer clients than a tile has, and more
def test_every_value_is_written(each, again, placed, device, monkeypatch):
    monkeypatch.setattr(columns, "COLUMNS", 64)
    model, e = an_ending(device, each)
    if again is not None:
        e = e._replace(again=torch.tensor(again, device=device))
    before, wanted = wide(e), wide(e)
    assert columns.takes(model, e, PLACES)
    shown = e
    if placed:  # states alone are looked for elsewhere
        at = [[row.data_ptr() for row in v.flatten(0, 1)] for v in e.states]
        there = list(torch.tensor(at, device=device))
        nowhere = [torch.full_like(v, torch.nan) for v in e.states]
        shown = e._replace(states=nowhere, placed=Placed([], there, [], False))
    added = columns.close_columns(model, shown, columns.Blocks.of(PLACES, device))
    there = torch.cat([torch.arange(SIZE)[c] for c in PLACES]).to(device)
    some = wanted.of(lambda v: v[..., there])  # a copy
    sums = some.close(model.double()[..., there].unsqueeze(-2))
    for found, right, old in zip(*map(results, (wide(e), some, before)), strict=True):
        assert distance([found[..., there]], [right]) < 1e-5
        assert torch.equal(found, old) == (again is False)
        old[..., there] = found[..., there]
        assert torch.equal(found, old), "other columns are left alone"
    if again is None:
        assert distance([added], [sums]) < 1e-5
        assert not bool(added[:, 0, 1].any())


def results(e: Ending) -> list[Tensor]:
    return [*e.states, *e.sums]


def test_what_the_kernel_takes(device):
    model, e = an_ending(device, (2, 3))
    assert columns.takes(model, e, PLACES)
    assert not columns.takes(model.double(), e, PLACES)
    assert not columns.takes(model, e._replace(own=[*e.own, e.own[0]]), PLACES)
    assert not columns.takes(
        model, e._replace(own=[e.own[0][:, :2]]), PLACES
    )  # clients unevenly apart
    assert not columns.takes(model, e._replace(shared=[e.shared[0]] * 4), PLACES)
    assert not columns.takes(model, e, [slice(0, 2**26)])  # too much to be kept of each
