"""The end of a round by the kernel, against the same operations in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from undrift.kernels import closing
from undrift.kernels.ending import Ending, Placed, Size
from undrift.kernels.linear import LinearProblem
from undrift.testing.compare import distance

NEEDS = ((0, 1), (0, 1, 2, 3), (1, 2, 3, 4), (0, 4), (0, 1, 2, 4), (3,))
ROWS, IN, OUT = 70, 40, 36  # more rows than a tile has, and no multiple of one


def an_ending(device: torch.device, experiments: int = 2, count: int = 3) -> Ending:
    """Two of everything: the model's move, two vectors that are shared and two of each client."""
    source = torch.Generator().manual_seed(0)

    def some(*sizes: int, far: int = 5) -> Tensor:
        wide = torch.randn((*sizes[:-2], far + sizes[-1] * sizes[-2]), generator=source)
        return wide.to(device)[..., far:].unflatten(-1, sizes[-2:])  # rows that lie apart

    each, weights = (experiments, count), (OUT, IN)
    taken = torch.ones(each, dtype=torch.bool, device=device)
    taken[0, 1] = False
    return Ending(
        some(len(NEEDS), 1, *each, 5)[:, 0].contiguous(), NEEDS, (True, False),
        [some(experiments, *weights) for _ in range(2)],
        torch.ones(2, dtype=torch.bool, device=device),
        [some(*each, *weights) for _ in range(2)],
        taken,
        [some(*each, *weights) for _ in range(2)], [some(*each, *weights) for _ in range(2)],
        [some(experiments, *weights).double() for _ in range(2)],
    )  # fmt: skip


def operands(device: torch.device, clients: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    return (
        torch.randn((clients, ROWS, OUT), generator=source).half().to(device),
        torch.randn((clients, ROWS, IN), generator=source).half().to(device),
    )


def copied(e: Ending, kind: torch.dtype) -> Ending:
    def twin(vectors: list[Tensor]) -> list[Tensor]:
        return [v.to(kind).clone() for v in vectors]

    return e._replace(
        table=e.table.to(kind), shared=twin(e.shared), own=twin(e.own), states=twin(e.states),
        before=twin(e.before), sums=[v.clone() for v in e.sums],
    )  # fmt: skip


def test_more_sums_than_a_kernel_has(device):
    e, p = an_ending(device), LinearProblem(6, ROWS, IN, OUT, "fp16")
    e = e._replace(sums=[*e.sums, e.sums[0].clone()], needs=(*NEEDS, (0, 2, 4)))
    e = e._replace(table=torch.cat([e.table, e.table[:1] + 1]))
    wanted, (g, x) = copied(e, torch.float64), operands(device, 6)
    closing.close(p, g, x, e, 0.5)
    wanted.close(0.5 * (g.double().transpose(1, 2) @ x.double()).unflatten(0, (2, 3)))
    assert distance(e.sums, wanted.sums) < 1e-5 and not torch.equal(e.sums[0], e.sums[2])
    assert distance(e.states, wanted.states) < 1e-5


def by_addresses(e: Ending) -> Ending:
    """Name the places of clients' vectors; the layer begins at their fifth number."""

    def at(vectors: list[Tensor]) -> list[Tensor]:
        first = [[v[i, c].data_ptr() - 20 for i in (0, 1) for c in range(3)] for v in vectors]
        return list(torch.tensor(first, device=e.taken.device))

    return e._replace(placed=Placed(at(e.own), at(e.states), at(e.before), False, 5))


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("pieces", [1, 2])  # of each experiment's clients
@pytest.mark.parametrize("again", [None, False, True])
def test_every_value_is_written(again, pieces, placed, device, monkeypatch):
    e, p = an_ending(device), LinearProblem(6, ROWS, IN, OUT, "fp16")
    tile = dict(BI=32, BO=32, BC=4 - pieces, num_warps=4, num_stages=2)
    monkeypatch.setattr(closing, "configuration", lambda *_: tile)
    g, x = operands(device, 6)
    g[1] = torch.nan  # of the client that does not count
    e.own[0][0, 1], e.own[1][0, 1] = torch.inf, torch.nan
    e.table[:, 0, 1] = torch.inf  # who takes no step has divided by none
    if again is not None:
        e = e._replace(again=torch.tensor(again, device=device))
    before, wanted = copied(e, torch.float32), copied(e, torch.float64)
    moved = -0.5 * (g.double().transpose(1, 2) @ x.double()).unflatten(0, (2, 3))
    shown = by_addresses(e) if placed else e
    added, sums = closing.close(p, g, x, shown, -0.5), wanted.close(moved)
    assert distance([*e.states, *e.sums], [*wanted.states, *wanted.sums]) < 1e-5
    pairs = zip([*e.states, *e.sums], [*before.states, *before.sums], strict=True)
    left = all(torch.equal(a, b) for a, b in pairs)
    assert left == (again is False)
    assert torch.equal(e.states[1][0, 1], e.before[1][0, 1]) or again is False
    if again is None:
        assert distance([added.sum(-1)], [sums[..., 0]]) < 1e-5
        assert not bool(added[:, 0, 1].any())


def test_one_tile_of_rows_and_nothing_of_clients(device):
    """As under plain SGD: one sum, two measures, what is shared alone."""
    e, p = an_ending(device), LinearProblem(6, 20, IN, OUT, "fp16")
    needs = ((0, 1), (0, 1, 2), (0, 1))
    e = e._replace(
        table=e.table[:3, ..., :3].contiguous(), needs=needs, own=[], states=[], before=[],
        sums=e.sums[:1],
    )  # fmt: skip
    wanted, (g, x) = copied(e, torch.float64), (v[:, :20] for v in operands(device, 6))
    moved = 2.0 * (g.double().transpose(1, 2) @ x.double()).unflatten(0, (2, 3))
    added, sums = closing.close(p, g, x, e, 2.0), wanted.close(moved)
    assert distance([added.sum(-1), *e.sums], [sums[..., 0], *wanted.sums]) < 1e-5


def test_what_the_kernels_take():
    p, size = LinearProblem(6, ROWS, IN, OUT, "fp16"), Size(2, 2, 2, 2)
    assert closing.takes(p, size) and not closing.takes(p._replace(precision="tf32"), size)
    assert closing.takes(p, size._replace(sums=9))
    assert not closing.takes(p._replace(rows=closing.MOST_ROWS + 1), size)
    for name, most in (("shared", 3), ("own", 2), ("states", 2)):
        assert closing.takes(p, size._replace(**{name: most}))
        assert not closing.takes(p, size._replace(**{name: most + 1}))


@pytest.mark.parametrize("at", [0, 2])
def test_the_trial_can_fail(at, device):
    p = LinearProblem(3, 20, 40, 36, "fp16")
    tile = dict(BI=32, BO=32, BC=2, num_warps=4, num_stages=2)
    like = an_ending(device)
    if at:  # one sum more
        table = torch.cat([like.table, like.table[:1]])
        more, needs = [*like.sums, like.sums[0]], (*like.needs, (0, 2, 4))
        like = like._replace(sums=more, needs=needs, table=table, states=[], squares=())
    trial = closing._trial(p, device, like, at)
    for output in trial.outputs:
        output.fill_(torch.nan)
    for launch in trial.launches(tile):
        launch.run()
    assert trial.error() < 4e-3 and len(trial.outputs) == (1 if at else 4)
    for output in trial.outputs:
        held = output[..., 3].clone()
        output[..., 3] += 1
        assert trial.error() > 1e-2
        output[..., 3] = held


def test_the_programs_compile_for_a_card_that_is_not_here(compiled):
    found = compiled("end")
    names = [*["close_clients"] * 6, "add_parts", "linear"]
    names += ["close_columns", "add_clients", "add_parts"]
    assert [name for name, _ in found] == names
    ends = [widths for name, widths in found if name == "close_clients"]
    assert "v4.b32" in ends[0] and all("v2.b32" in widths for widths in ends[1::2])
