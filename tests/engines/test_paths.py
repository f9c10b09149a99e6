"""The paths of the vectorised engine: plain SGD in place, linear layers that move going back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from undrift.engines import capacity, vectorised
from undrift.engines.plain import is_plain, is_sequence
from undrift.errors import ClientError, ConfigError, TaskError


class Net(nn.Module):
    """Not a sequence: its linear layers may not move during the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) + 0.1 * self.first.weight.sum()


def shared() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 3))


MODULES = {
    "sequence": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3)),
    "own forward": Net,
    "shared layer": shared,
    "norms": lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Dropout(), nn.Linear(5, 3)),
}


def make(module: nn.Module, algorithm: fl.Algorithm, **options: object) -> fl.Trainer:
    maker = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(n, 6, generator=maker), torch.randint(0, 3, (n,), generator=maker))
        for n in (9, 4, 12, 7)
    ]
    return fl.Trainer(
        fl.Task(module, dtype=torch.float64),
        fl.Federation.of(clients),
        algorithm,
        work=fl.Work(epochs=2, batch=4),
        **options,
    )


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", MODULES)
def test_moving_in_place_equals_the_general_path(name: str, decay: float) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    algorithm = fl.fedavg(local=fl.Sgd(lr=0.2, weight_decay=decay, schedule=fl.Exponential(0.9)))
    fast, plain = (make(module, algorithm, in_place=choice) for choice in (True, False))
    for _ in range(3):
        assert fast.round().loss == pytest.approx(plain.round().loss, abs=1e-12)
    assert (fast.server.w - plain.server.w).abs().max() < 1e-12


def test_only_sequences_of_torchs_own_layers_may_move_going_back() -> None:
    found = {
        name: is_sequence(fl.Task(make_module()).module) for name, make_module in MODULES.items()
    }
    refused = {name for name, chosen in found.items() if not chosen}
    assert refused == {"own forward", "shared layer"}


def test_what_is_plain() -> None:
    assert is_plain(fl.fedavg())
    assert is_plain(fl.fedadam())
    others = [fl.fedprox(), fl.scaffold(), fl.fednova(), fl.fedavg(local=fl.sgd(0.1, 0.9))]
    assert not any(is_plain(a) for a in [*others, fl.fedavg(local=fl.Sgd(clip=1.0))])


def test_big_convolutions_train_one_client_at_a_time_on_a_cpu() -> None:
    small, big = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 64, 5)
    cpu = torch.device("cpu")
    assert capacity.width_for(capacity.Need(1e9, 1), big, cpu, most=50) == 1
    assert capacity.width_for(capacity.Need(1e5, 1), small, cpu, most=50) is None
    assert capacity.width_for(capacity.Need(1e9, 1), nn.Linear(3, 4), cpu, most=50) is None


def test_a_cohort_that_does_not_fit_is_trained_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(MODULES["sequence"](), fl.scaffold())
    whole = make(trainer.task.original, fl.scaffold())
    batch = trainer.engine.batch(torch.tensor([0]), torch.arange(4)[None])
    one = type(batch)(*(v[0] for v in batch))
    need = capacity.need_of(fl.scaffold(), trainer.task, one, trainer.sizes)
    monkeypatch.setattr(capacity, "free_bytes", lambda device: int(need.num_bytes * 3))
    trainer.run(2)
    monkeypatch.undo()
    whole.run(2)
    assert trainer.engine.plan()["chunk"] == 2
    assert (trainer.server.w - whole.server.w).abs().max() < 1e-12


@pytest.mark.parametrize("chunk", [0, -1, 2.5, True])
def test_a_chunk_is_a_whole_number(chunk: object) -> None:
    with pytest.raises(ConfigError, match="chunk"):
        make(nn.Linear(6, 3), fl.fedavg(), chunk=chunk)


class Picky(nn.Module):
    """Looks at its data, which a batch of clients cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


def test_a_module_that_cannot_be_vectorised_is_named_and_the_reference_engine_runs_it() -> None:
    with pytest.raises(TaskError, match="reference"):
        make(Picky(), fl.fedavg())
    assert make(Picky(), fl.fedavg(), engine="reference").round().round == 1


@fl.record
class Breaks(fl.Rule):
    """Fails at the third local step of client 2."""

    def direction(self, g: Tensor, view: fl.ClientView) -> Tensor:
        if (
            view.client.id == 2
            and view.batch.index[0] >= 0
            and float(view.w.sum()) != float(g.sum())
        ):
            raise ZeroDivisionError("deliberate")
        return g


def test_the_reference_engine_names_client_stage_rule_and_step() -> None:
    trainer = make(nn.Linear(6, 3), fl.Algorithm((Breaks(),)), engine="reference")
    with pytest.raises(ClientError, match="client 2, stage 'direction', rule 'Breaks', step 0"):
        trainer.round()


class Tokens(nn.Module):
    """Token ids with a padding row that must not move."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(1))


class Gated(nn.Module):
    """A GRU, whose batching rule is missing without grad inside."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.unflatten(1, (2, 3)))[0][:, -1])


class Warm(nn.Module):
    """A temperature: a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.warmth = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.warmth


def hooked() -> nn.Module:
    module = MODULES["sequence"]()
    module[0].register_forward_hook(lambda layer, args, out: out * layer.weight.sum())
    return module


def pruned() -> nn.Module:
    module = MODULES["sequence"]()
    nn.utils.parametrizations.weight_norm(module[0])
    return module


UNUSUAL = {
    "gru": Gated,
    "scalar": Warm,
    "hooked": hooked,
    "parametrised": pruned,
    "in-place relu": lambda: nn.Sequential(
        nn.Linear(6, 5, bias=False), nn.ReLU(inplace=True), nn.Linear(5, 3)
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_modules_train_alike_on_every_path(name: str) -> None:
    torch.manual_seed(0)
    module = UNUSUAL[name]()
    runs = [make(module, fl.fedavg(0.2), **o) for o in ({}, {"chunk": 1}, {"engine": "reference"})]
    for run in runs:
        run.run(2)
    assert max(float((r.server.w - runs[-1].server.w).abs().max()) for r in runs) < 1e-12


def test_a_padding_row_stays_where_it_is() -> None:
    torch.manual_seed(0)
    module = Tokens()
    clients = [(torch.randint(0, 6, (n, 5)), torch.randint(0, 3, (n,))) for n in (5, 8, 3)]
    runs = [
        fl.Trainer(fl.Task(module, dtype=torch.float64), fl.Federation.of(clients), fl.fedavg(0.3),
                   work=fl.Work(steps=3, batch=4), engine=engine)
        for engine in ("vectorised", "reference")
    ]  # fmt: skip
    for run in runs:
        run.run(2)
        assert torch.equal(run.parameters()["table.weight"][0], torch.zeros(4, dtype=torch.float64))
    assert (runs[0].server.w - runs[1].server.w).abs().max() < 1e-12


def test_an_embedding_that_counts_its_rows_is_refused_where_rows_are_padded() -> None:
    clients = [(torch.randint(0, 6, (n, 5)), torch.randint(0, 3, (n,))) for n in (5, 8)]
    module = Tokens()
    module.table.scale_grad_by_freq = True
    data, task = fl.Federation.of(clients), fl.Task(module)
    with pytest.raises(TaskError, match="scale_grad_by_freq"):
        fl.Trainer(task, data, fl.fedavg(0.1))
    assert fl.Trainer(task, data, fl.fedavg(0.1), engine="reference").round().round == 1


def test_leaving_does_not_touch_a_c_that_is_no_mean() -> None:
    trainer = make(nn.Linear(6, 3), fl.scaffold(0.1, c_weights="size"))
    trainer.run(2)
    before = trainer.server_state()["0.Scaffold"]
    trainer.leave([1])
    assert torch.equal(trainer.server_state()["0.Scaffold"], before)


@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm2d(4), nn.GELU])
def test_images_of_a_client_who_trains_on_alone(norm: type[nn.Module]) -> None:
    maker = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(n, 2, 5, 5, generator=maker), torch.randint(0, 3, (n,), generator=maker))
        for n in (8, 30)
    ]
    found = []
    for engine in ("vectorised", "reference"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(2, 4, 3), norm(), nn.Flatten(), nn.Linear(36, 3))
        task, data = fl.Task(net, dtype=torch.float64), fl.Federation.of(clients)
        trainer = fl.Trainer(task, data, fl.fedavg(0.1), work=fl.Work(batch=4), engine=engine)
        trainer.run(2)
        found.append(trainer.server.w)
    assert torch.allclose(*found, rtol=0, atol=1e-12)


def test_what_does_not_fit_says_what_would(monkeypatch, caplog) -> None:
    maker = torch.Generator().manual_seed(1)
    clients = [(torch.randn(64, 100, generator=maker), torch.zeros(64, dtype=torch.int64))] * 3
    work = fl.Work(epochs=1, batch=32)

    def trainer(hidden: int) -> fl.Trainer:
        net = nn.Sequential(nn.Linear(100, hidden), nn.Tanh(), nn.Linear(hidden, 2))
        return fl.Trainer(fl.Task(net), fl.Federation.of(clients), fl.scaffold(0.1), work=work)

    monkeypatch.setattr(capacity, "free_bytes", lambda device: 60_000)
    trainer(8).round()
    assert "are free: batches of " in caplog.text and "would fit" in caplog.text
    caplog.clear()
    trainer(400).round()
    assert "model and states alone take" in caplog.text

    errors = [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes"),
    ]

    def full(*_: object) -> None:
        raise errors.pop()

    for free, chunk, why in ((60_000, 3, "batches of 6 examples"), (300_000, 3, "chunk = 2 would")):
        monkeypatch.setattr(vectorised, "free_bytes", lambda device, free=free: free)
        broken = trainer(8)
        broken.engine.chunk = chunk
        monkeypatch.setattr(type(broken.engine), "_train", full)
        with pytest.raises(TaskError, match=f"3 are too many for memory; .*{why}"):
            broken.round()
