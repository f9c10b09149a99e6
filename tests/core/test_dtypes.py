"""Every dtype that a tensor of a module can have: its numbers survive, or it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from undrift.errors import DataError, TaskError

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
WIDENED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)


class Holding(nn.Module):
    """A layer beside a tensor that takes no part in its numbers."""

    def __init__(self, place: str, value: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        if place == "buffer":
            self.register_buffer("held", value)
        else:
            self.held = nn.Parameter(value, requires_grad=place == "trained")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def value_of(dtype: torch.dtype) -> Tensor:
    """Numbers of a type; types without arithmetic are made of bytes."""
    try:
        return torch.tensor([1.0, 0.0, 1.0]).to(dtype)
    except (RuntimeError, NotImplementedError, TypeError):
        return torch.empty(3, dtype=dtype)


def can_hold(place: str, dtype: torch.dtype) -> bool:
    try:
        Holding(place, value_of(dtype))
    except Exception:
        return False  # torch itself says no
    return True


CASES = [(p, d) for p in ("trained", "frozen", "buffer") for d in DTYPES if can_hold(p, d)]


def clients():
    made = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 3, generator=made), torch.randint(0, 2, (n,), generator=made))
        for n in (4, 6)
    ]


@pytest.mark.parametrize(("place", "dtype"), CASES, ids=lambda v: str(v).removeprefix("torch."))
def test_numbers_survive_or_the_module_is_refused(place, dtype):
    module = Holding(place, value_of(dtype))
    if dtype not in WIDENED and (place == "trained" or dtype not in WHOLE):
        with pytest.raises(TaskError, match=f"'held' is {str(dtype).removeprefix('torch.')}"):
            fl.Task(module)
        return
    trainer = fl.Trainer(fl.Task(module), fl.Federation.of(clients()), fl.fedavg(0.1))
    trainer.run(1)
    after = trainer.model().held
    assert after.dtype == dtype and torch.equal(after, module.held)


def test_the_types_are_all_there():
    assert {d for _, d in CASES} >= {*WIDENED, *WHOLE, torch.complex64, torch.float8_e5m2}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(3, 2, dtype=torch.complex64), r"'weight' is complex64; 'bias' is complex64"),
        (Holding("frozen", torch.eye(3).to_sparse()), r"'held' is stored as sparse_coo"),
        (Holding("buffer", torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint8)), "qint8"),
        (nn.Sequential(*(nn.Linear(2, 2, dtype=torch.cfloat) for _ in range(5))), "and 4 more"),
        (nn.LazyLinear(2), "lazy"),
    ],
    ids=["complex", "sparse", "quantised", "many", "lazy"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_holds_no_dense_real_numbers_is_refused(module, message):
    with pytest.raises(TaskError, match=message):
        fl.Task(module)


def test_values_are_needed_to_begin_and_not_to_count():
    task = fl.Task(nn.Linear(3, 2, device="meta"))
    assert task.size == 8
    with pytest.raises(TaskError, match=r"2 tensors .* have no values .*: 'weight', 'bias'. Load"):
        fl.Trainer(task, fl.Federation.of(clients()), fl.fedavg(0.1))


@pytest.mark.filterwarnings("ignore:Initializing zero")
def test_parameters_without_a_number_are_nothing_to_learn():
    with pytest.raises(TaskError, match="no trainable parameter"):
        fl.Task(nn.Linear(0, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_task_computes_in_single_or_double_precision(dtype):
    if dtype in (torch.float32, torch.float64):
        assert fl.Task(nn.Linear(3, 2), dtype=dtype).initial()[0].dtype == dtype
        return
    with pytest.raises(fl.UndriftError, match=r"dtype must be torch\.float32 or torch\.float64"):
        fl.Task(nn.Linear(3, 2), dtype=dtype)


@pytest.mark.parametrize("dtype", WIDENED, ids=str)
def test_a_module_in_another_precision_learns_the_same(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    twin.load_state_dict({n: v.float() for n, v in module.state_dict().items()})
    runs = [
        fl.Trainer(fl.Task(m), fl.Federation.of(clients()), fl.fedavg(0.1)) for m in (module, twin)
    ]
    for run in runs:
        run.run(2)
    assert torch.equal(runs[0].server.w, runs[1].server.w)
    assert runs[0].model()[0].weight.dtype == dtype


def test_complex_numbers_of_a_loss_or_a_metric_are_refused():
    class Turned(nn.Module):
        def __init__(self, place: str) -> None:
            super().__init__()
            value = torch.ones(2, dtype=torch.complex64)
            if place == "buffer":
                self.register_buffer("turn", value)
            else:
                self.turn = nn.Parameter(value, requires_grad=False)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output * self.turn).abs().sum(1)

    for loss in (
        *(Turned("buffer"), Turned("parameter")),
        nn.CrossEntropyLoss(weight=torch.tensor([1 + 5j, 1j])),
    ):
        with pytest.raises(TaskError, match="is complex"):
            fl.Task(nn.Linear(3, 2), loss=loss)
    data = fl.Federation.of([(torch.randn(4, 3), torch.randint(0, 2, (4,)))])
    for settings in (
        {"loss": lambda o, y: torch.complex(o, o)[:, 0]},
        {"metrics": {"m": lambda o, y: torch.complex(o, o)[:, 0]}},
    ):
        with pytest.raises(TaskError, match="returns complex numbers"):
            fl.Trainer(fl.Task(nn.Linear(3, 2), **settings), data, fl.fedavg(0.1))


@pytest.mark.parametrize("where", ["x", "y"])
def test_complex_data_are_refused(where):
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    x, y = (x + 0j, y) if where == "x" else (x, y + 0j)
    with pytest.raises((DataError, TaskError), match="complex"):
        fl.Trainer(fl.Task(nn.Linear(3, 2), loss="mse"), fl.Federation.of([(x, y)]), fl.fedavg(0.1))
