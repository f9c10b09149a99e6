"""Wide layers remembered by what moved them: the same as weights that move at every step.

Only tasks with a seam have histories: without one torch computes linear layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from undrift.core import history
from undrift.core.algorithm import Algorithm
from undrift.core.convolution import Seam
from undrift.core.dense import add_product, dense, multiply
from undrift.core.histories import Histories, pays
from undrift.core.history import SHRUNK, Extent, History, Moves, Vectors
from undrift.core.linear import Descent
from undrift.core.local import Sgd
from undrift.core.seam import Way
from undrift.core.task import Batch, Task
from undrift.core.tree import EMPTY, leaves, tree_map
from undrift.core.views import Carry
from undrift.engines.plain import PlainSteps
from undrift.testing.compare import distance

CLIENTS, STEPS, BATCH = 4, 5, 2
RATE = 0.2


def network() -> nn.Sequential:
    """Two layers that remember: the first sees a narrow convolution, the second has no bias."""
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3)),
        *(nn.Linear(27, 24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 20, bias=False)),
        *(nn.GroupNorm(2, 20), nn.Linear(20, 3)),
    )


class World(NamedTuple):
    task: Task
    starts: Tensor  # [S, P]
    batches: Batch  # leading axes S, C, K
    keys: Tensor  # [S, C, K]
    counts: Tensor  # [C], steps of each client, most first

    @property
    def extent(self) -> Extent:
        return Extent(len(self.starts), CLIENTS, STEPS, BATCH)


def world(precision: str = "float32", dtype=torch.float64, experiments: int = 1) -> World:
    task = Task.build(network, seed=0, dtype=dtype)
    task.seam = Seam(precision, default="loop")
    source = torch.Generator().manual_seed(1)
    lead = (experiments, CLIENTS, STEPS, BATCH)
    w, _ = task.initial()
    starts = w + 0.1 * torch.randn((experiments, len(w)), generator=source).to(dtype)
    x = torch.randn((*lead, 1, 8, 8), generator=source).to(dtype)
    y = torch.randint(0, 3, lead, generator=source)
    mask = torch.rand(lead, generator=source) < 0.7
    mask[..., 0] = True
    keys = torch.randint(0, 2**40, lead[:-1], generator=source)
    return World(task, starts, Batch(x, y, mask, mask.long()), keys, torch.tensor([5, 5, 3, 1]))


def remember(world: World, lr: float = RATE) -> Histories:
    made = Histories.for_task(world.task, Sgd(lr=lr), world.extent, torch.device("cpu"), least=0)
    assert made is not None
    return made


def started(world: World) -> Carry:
    task, lead = world.task, (len(world.starts) * CLIENTS,)
    # rows further apart than they are long
    matrix = torch.zeros((*lead, task.size + 3), dtype=task.dtype)[:, : task.size]
    matrix.copy_(world.starts.repeat_interleave(CLIENTS, 0))
    buffers = tree_map(lambda v: v.expand(*lead, *v.shape).clone(), task.initial()[1])
    zeros = torch.zeros(lead, dtype=task.dtype)
    scores = {n: zeros.clone() for n in task.metrics}
    return Carry(matrix, buffers, EMPTY, EMPTY, zeros.clone(), scores, EMPTY)


def first(carry: Any, width: int) -> Any:
    """Copy what the first clients of each experiment have."""
    return tree_map(lambda v: v.unflatten(0, (-1, CLIENTS))[:, :width].flatten(0, 1).clone(), carry)


def put_first(carry: Any, some: Any, width: int) -> None:
    def put(old: Tensor, new: Tensor) -> None:
        old.unflatten(0, (-1, CLIENTS))[:, :width] = new.unflatten(0, (-1, width))

    tree_map(put, carry, some)


def train(world: World, histories: Histories | None, widths: Any = (CLIENTS,) * STEPS) -> Carry:
    """Take all steps; at step k the first widths[k] clients of each experiment."""
    carry, algo = started(world), Algorithm(local=Sgd(lr=RATE))
    steps = PlainSteps(world.task, algo, EMPTY, together=True)  # type: ignore[arg-type]
    if histories is not None:
        histories.begin(world.starts)
    for k, width in enumerate(widths):
        live = (k < world.counts[:width]).repeat(len(world.starts))
        rates = RATE / (1 + k) * live.to(world.task.dtype)
        some = first(carry, width)
        batch, keys = (
            tree_map(lambda v, k=k, n=width: v[:, :n, k].flatten(0, 1), tree)
            for tree in (world.batches, world.keys)
        )
        if histories is not None:
            everybody = torch.full_like(rates, k)
            histories.at(everybody if len(world.starts) > 1 else everybody[0], rates)
        steps.step_in_place(some, batch, keys, rates, live, histories)
        put_first(carry, some, width)
    if histories is not None:
        carry.w[:, forgotten(histories)] = float("nan")  # what is there is not read
        histories.finish(carry.w, world.starts)
    return carry


def forgotten(histories: Histories) -> Tensor:
    """Tell which columns nobody reads until they are written at the end."""
    size = max(h.columns.stop for h in histories.layers.values()) + 1000
    kept = torch.cat(histories.others(torch.arange(size)))
    return torch.tensor(sorted(set(range(size)) - set(kept.tolist())), dtype=torch.long)


def moved(world: World, carry: Carry) -> Tensor:
    return carry.w - world.starts.repeat_interleave(CLIENTS, 0)


@pytest.mark.parametrize("experiments", [1, 2])
@pytest.mark.parametrize("widths", [(4, 4, 4, 4, 4), (4, 3, 3, 2, 2)], ids=["whole", "shrinking"])
def test_a_history_is_the_weights(experiments, widths):
    here = world(experiments=experiments)
    histories = remember(here)
    assert set(histories.layers) == {"5", "8"}
    wanted, found = train(here, None), train(here, histories, widths)
    assert distance(leaves(found), leaves(wanted)) <= 1e-12
    assert moved(here, wanted).abs().amax(1).min() > 1e-3


def test_a_call_is_made_once_all_layers_have_remembered(monkeypatch):
    """And before layers that come first in the network have gone back."""
    here, order = world(), list[str]()
    histories, write = remember(here), history._write

    def noted(*given: Any) -> None:
        order.append("write")
        write(*given)

    monkeypatch.setattr(history, "_write", noted)
    step = PlainSteps.step_in_place

    def watched(self: PlainSteps, carry: Carry, *given: Any) -> None:
        before = here.task.named(carry.w)["0.weight"].clone()

        def call() -> None:
            same = torch.equal(here.task.named(carry.w)["0.weight"], before)
            order.append("call" if same else "late")

        with histories.once_remembered(call):
            step(self, carry, *given)
        order.append("end")

    monkeypatch.setattr(PlainSteps, "step_in_place", watched)
    train(here, histories)
    # inputs and gradients of two layers
    assert order == ["write", "write", "write", "write", "call", "end"] * STEPS


def test_without_a_layer_that_remembers_the_call_is_made_at_the_end():
    histories, called = remember(world()), list[int]()
    with histories.once_remembered(lambda: called.append(1)):
        assert not called
    assert called == [1]


def test_weights_stay_until_the_end(monkeypatch):
    """Else finishing would not be what moves them."""
    here = world()
    histories = remember(here)
    columns = histories.layers["5"].columns
    assert moved(here, train(here, histories))[:, columns].any(1).all()
    monkeypatch.setattr(histories, "finish", lambda *rest: None)
    assert moved(here, train(here, histories))[:, columns].isnan().all()


# How far off the way of a model is, relative to its length and against float64.
BOUNDS = {"tf32": 1e-5, "float32": 1e-5, "fp16": 5e-3, "bf16": 4e-2}


@pytest.mark.parametrize("precision", BOUNDS)
def test_narrow_operands(precision):
    exact, here = world(), world(precision, torch.float32)
    exact = exact._replace(starts=here.starts.double())
    wanted = moved(exact, train(exact, None))
    for histories in (None, remember(here)):  # weights that move are as far off
        error = moved(here, train(here, histories)).double() - wanted
        assert (error.norm(dim=1) <= BOUNDS[precision] * wanted.norm(dim=1)).all()


@pytest.mark.parametrize("size", [1.0, 40.0])
def test_half_precision_holds_what_is_remembered(size):
    """Wide inputs whose products overflow fp16, and rates that would vanish in it."""
    source = torch.Generator().manual_seed(2)
    rate, extent = 1e-4, Extent(1, CLIENTS, STEPS, BATCH)
    made = {}
    for dtype in (torch.float64, torch.float32):
        task = Task.build(lambda: nn.Linear(128, 40), seed=0, dtype=dtype)
        task.seam = Seam("fp16")
        made[dtype] = Histories.for_task(task, Sgd(lr=rate), extent, torch.device("cpu"), least=0)
    x = size * (1 + torch.rand((STEPS, CLIENTS, BATCH, 128), generator=source))
    g = torch.randn((STEPS, CLIENTS, BATCH, 40), generator=source)
    results = {}
    for dtype, histories in made.items():
        layer, w = histories.layers[""], torch.zeros((CLIENTS, 128 * 40 + 40), dtype=dtype)
        histories.begin(w[:1])
        start = w[:1].clone()
        for k in range(STEPS):
            histories.at(torch.tensor(k), torch.full((CLIENTS,), rate, dtype=dtype))
            y, operand = layer.forward(x[k].to(dtype), None, dtype)
            back = layer.backward(g[k].to(dtype), operand, dtype)
        histories.finish(w, start)
        results[dtype] = [y.double(), back.double(), w.double()]
    for narrow, wide in zip(results[torch.float32], results[torch.float64], strict=True):
        assert (narrow - wide).norm() <= 2e-3 * wide.norm()
        assert wide.norm() > 0


def test_nobody_else_sees_a_clients_nan():
    here = world()
    clean, histories = train(here, None), remember(here)
    here.batches.x[0, 1, 2] = float("nan")
    found = train(here, histories)
    others = [0, 2, 3]
    pick = lambda carry: [v[others] for v in leaves(carry)]  # noqa: E731
    assert distance(pick(found), pick(clean)) <= 1e-12
    columns = histories.layers["5"].columns
    assert found.w[1, columns].isnan().all()
    again = world()  # nor does the next round
    assert distance(leaves(train(again, histories)), leaves(train(again, None))) <= 1e-12


def test_who_stands_still_adds_nothing():
    """Not even if what it computed is no number."""
    here = world()
    wanted, histories = train(here, None), remember(here)
    here.batches.x[0, 3, 1:] = float("nan")  # it takes one step
    here.batches.x[0, 2, 4] = float("inf")  # it takes three
    assert distance(leaves(train(here, histories)), leaves(wanted)) <= 1e-12


def test_a_layer_on_more_rows_moves_as_ever():
    """Each example has several rows: the slots are not made for them."""
    layers = (nn.Linear(8, 40), nn.Flatten(), nn.Linear(320, 3))
    task = Task.build(lambda: nn.Sequential(*layers), seed=0, dtype=torch.float64)
    task.seam = Seam(default="loop")
    here = world()
    w, _ = task.initial()
    here = here._replace(task=task, starts=w[None])
    histories = remember(here)
    assert list(histories.layers) == ["0"]
    assert distance(leaves(train(here, histories)), leaves(train(here, None))) <= 1e-12
    assert not histories.layers["0"].x.any()


def test_which_layers_remember():
    """The layer of the module's introduction, and what makes it not worth it."""
    wide, extent = nn.Linear(12544, 128, device="meta"), Extent(1, 50, 5, 10)
    assert all(pays(wide, precision, extent) for precision in BOUNDS)
    assert not pays(wide, "tf32", Extent(1, 50, 1, 10))  # moved once either way
    assert not pays(wide, "tf32", Extent(1, 50, 20, 10))  # a longer history than outputs
    assert not pays(wide, "tf32", Extent(1, 5, 5, 10))  # few clients: launches count
    assert not pays(nn.Linear(128, 10), "tf32", extent)
    scaffold = Vectors(shared=2, own=1, carried=2, in_place=False, inside=True)  # with momentum
    assert pays(wide, "bf16", extent, vectors=scaffold)
    other = nn.Linear(1600, 384, device="meta")
    assert pays(other, "bf16", Extent(1, 100, 10, 50), vectors=scaffold)
    long = Extent(1, 100, 20, 50)  # more examples than outputs: moving is as good
    assert not pays(other, "bf16", long, vectors=scaffold)
    assert pays(other, "bf16", long, vectors=scaffold._replace(inside=False))  # but not by hand


def test_slots_that_a_step_brought_are_not_written():
    """They are the step's: a recorded round would go on to write there."""
    here = world()
    histories = remember(here)
    histories.at(torch.tensor(2), torch.full((CLIENTS,), RATE, dtype=torch.float64))
    brought = next(iter(histories.layers.values())).moves.slots
    before = brought.clone()
    histories.begin(here.starts, steps=torch.zeros((1, CLIENTS)))
    assert torch.equal(brought, before)


def test_where_a_chain_is_worth_a_look():
    """Nobody looks at rules where no layer would remember under any."""
    task, extent = Task.build(lambda: nn.Linear(256, 128), seed=0), Extent(1, 50, 5, 2)
    assert not Histories.could_pay(task, extent, least=0), "without a seam"
    task.seam = Seam("bf16")
    assert Histories.could_pay(task, extent, least=0) and not Histories.could_pay(task, extent)
    assert not Histories.could_pay(task, Extent(1, 50, 5, 200), least=0), (
        "more examples than outputs"
    )


def test_who_has_no_history():
    here, cpu = world(), torch.device("cpu")
    make = Histories.for_task
    assert make(here.task, Sgd(), here.extent, cpu) is None  # small
    assert make(here.task, Sgd(weight_decay=0.1), here.extent, cpu, least=0) is None
    assert make(here.task.plain(), Sgd(), here.extent, cpu, least=0) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_product_is_added_in_place(kind):
    source = torch.Generator().manual_seed(3)
    a, b = (torch.randn(s, generator=source) for s in ((2, 3, 4), (2, 4, 5)))
    y = torch.randn((2, 3, 5), generator=source)
    for target in (y.clone(), y.to(kind)):
        wanted = target.float() - 0.5 * multiply(a.to(kind), b.to(kind), "bf16")
        assert add_product(target, a.to(kind), b.to(kind), -0.5, "bf16") is target
        assert torch.equal(target, wanted.to(target.dtype)) or kind == torch.float32
        assert distance([target.float()], [wanted]) <= 1e-2


@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_a_relu_before_a_layer_that_remembers(precision):
    layer, source = nn.Linear(5, 4), torch.Generator().manual_seed(3)
    start = torch.cat([layer.weight.flatten(), layer.bias])[None].detach()
    x = torch.randn((2, 3, 5), generator=source)
    x[0, 0, 0], x[0, 0, 1] = 1e-9, 0.0  # a slope that fp16 does not hold; none
    ends = []
    for rectify in (True, False):
        rates = torch.zeros(1, 2, 3)
        moves = Moves(rates, 0.1 / SHRUNK, torch.tensor([0, 3]))
        extent = Extent(1, 2, 2, 3)
        history = History(layer, 0, precision, extent, moves)
        Histories({"": history}, extent, moves, 1.0).begin(start)
        held, said = start.expand(2, -1).clone(), []
        how = Way(
            "grouped", precision, descent=Descent(torch.full((2,), 0.1), 1.0), history=history,
            rectify=rectify,
        )  # fmt: skip
        for step in range(2):
            moves.slots = torch.tensor([0, 3]) + step
            rates.view(-1).index_copy_(0, moves.slots, torch.full((2,), -SHRUNK))
            rows, w = x.clone().requires_grad_(), held[:, :20].view(2, 4, 5).requires_grad_()
            b = held[:, 20:].requires_grad_()
            y = vmap(lambda w, b, x, how=how: dense(x if how.rectify else x.relu(), w, b, how))(
                w, b, rows
            )
            y.square().sum().backward()
            said += [y.detach(), rows.grad]
        held = held.detach()
        history.finish(held, start)
        ends.append([*said, held])
    assert all(map(torch.equal, *ends))
    assert float(ends[0][1][0, 0, 0]) != 0 and float(ends[0][1][0, 0, 1]) == 0


@pytest.mark.parametrize("vectors", [Vectors(), Vectors(2, 1, 2)], ids=["plain", "chain"])
@pytest.mark.parametrize("experiments", [1, 2])
def test_the_first_step_of_a_round_reads_nothing_that_is_remembered(vectors, experiments):
    extent = Extent(experiments, CLIENTS, STEPS, BATCH)
    sizes, count = (experiments, CLIENTS), experiments * CLIENTS
    moves = Moves(
        torch.zeros((*sizes, STEPS + 1)).double(), 1.0, torch.arange(count) * (STEPS + 1),
        torch.full((*sizes, vectors.shared + vectors.own), torch.nan) if vectors.own else None,
    )  # fmt: skip
    layer = nn.Linear(7, 4, dtype=torch.float64)
    history = History(layer, 0, "float32", extent, moves, vectors)
    wide, shared = 28, [torch.randn(experiments, 28).double() for _ in range(vectors.shared)]
    made = Histories({"": history}, extent, moves, 1.0)
    made.begin(*shared[:1], shared[1:], [torch.randn(*sizes, wide).double()] * vectors.own)
    for held in (history.x, history.g, *history.own):
        held.fill_(torch.nan)  # nobody may look
    x, g = torch.randn(count, BATCH, 7).double(), torch.randn(count, BATCH, 4).double()
    with made.after(0):
        y, _ = history.forward(x, None, torch.float64)
        back = history.backward(g, x, torch.float64)
    w0 = shared[0].view(experiments, 4, 7).repeat_interleave(CLIENTS, 0)
    assert distance([y, back], [x @ w0.transpose(1, 2), g @ w0]) < 1e-12
    assert torch.equal(history.x[:, :, 0].flatten(0, 1), x), "but it is remembered"
    assert moves.taken is None and history.forward(x, None, torch.float64)[0].isnan().all()


def test_only_so_many_steps_are_read_as_were_taken():
    """Rounded up, and never more than there are; slots behind them may hold anything."""
    extent = Extent(1, CLIENTS, STEPS, BATCH)
    moves = Moves(torch.rand((1, CLIENTS, STEPS + 1)).double(), 1.0, torch.arange(CLIENTS))
    history = History(nn.Linear(7, 4, dtype=torch.float64), 0, "float32", extent, moves)
    history.x.normal_()
    history.g.normal_()
    x, g = torch.randn(CLIENTS, BATCH, 7).double(), torch.randn(CLIENTS, BATCH, 4).double()
    made = Histories({"": history}, extent, moves, 1.0)
    for taken, read in enumerate((0, 1, 2, 4, 4, STEPS)):
        held = (history.x.clone(), history.g.clone())
        history.x[:, :, read:], history.g[:, :, read:] = torch.nan, torch.nan
        with made.after(taken):
            y, back = (
                history.forward(x, None, torch.float64)[0],
                history.backward(g, x, torch.float64),
            )
        assert y.isfinite().all() and back.isfinite().all()
        rows = [v[0, :, :read].flatten(1, 2) for v in held]
        rates = moves.rates[0, :, :read].repeat_interleave(BATCH, 1)[:, None]
        wanted = [(x @ rows[0].transpose(1, 2) * rates) @ rows[1]]
        wanted += [(g @ rows[1].transpose(1, 2) * rates) @ rows[0]]
        assert distance([y, back], wanted) < 1e-12, taken
        history.x.copy_(held[0])
        history.g.copy_(held[1])
