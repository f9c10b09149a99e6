"""The same numbers from every engine, chunk by chunk, and from stacked experiments."""

from itertools import cycle

import pytest
import torch
from torch import nn
from torch.func import vmap

import undrift as fl
from longhand.cases import below
from rules.needs import built, world_for
from undrift.core.algorithm import (
    Client,
    init_client,
    init_server,
    write_broadcast,
    write_personal,
)
from undrift.core.round import client_finish, client_start, client_step
from undrift.core.rule import Sizes
from undrift.core.server import server_round
from undrift.core.task import Batch
from undrift.core.tree import EMPTY, leaves, tree_map
from undrift.engines import engine as engine_module
from undrift.rules import compat

SIZES = [3, 5, 10, 6, 7]


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


# A bias before BatchNorm has gradient 0; adaptive steps would blow up its rounding noise.
MODELS = {
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False),
            nn.BatchNorm2d(3),
            nn.Tanh(),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(48, 3),
        ),
        (1, 6, 6),
    ),
    "lstm": (Lstm, (3, 3)),
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (5,)),
}


FEATURES = {"conv": "4", "lstm": "head:input", "mlp": "1"}


def federation(shape: tuple[int, ...]) -> fl.Federation:
    made = torch.Generator().manual_seed(1)

    def client(n: int):
        x = torch.randn(n, *shape, generator=made, dtype=torch.float64)
        return x + torch.randn(shape, generator=made), torch.randint(0, 3, (n,), generator=made)

    return fl.Federation.of([client(n) for n in SIZES])


def train(model: str, algo: fl.Algorithm, engine: str, *, rounds=3, dtype=torch.float64, **more):
    """Train, and give back every number that a run leaves behind."""
    build, shape = MODELS[model]
    torch.manual_seed(0)
    settings = {"work": fl.Work(epochs=(1, 2), batch=4), "sampler": fl.Uniform(count=3), **more}
    task = fl.Task(build(), dtype=dtype, feature=FEATURES.get(model))
    trainer = fl.Trainer(task, federation(shape), algo, engine=engine, seed=2, **settings)
    results = trainer.run(rounds)
    rows = [trainer.client_state(i) for i in range(len(SIZES))]
    numbers = {
        "w": trainer.server.w,
        "running": trainer.server.buffers.floats,
        "counters": trainer.server.buffers.counters,
        "loss": torch.tensor([r.loss for r in results]),
        "accuracy": torch.tensor([r.scores["accuracy"] for r in results]),
        **{f"server {n}": v for n, v in trainer.server_state().items()},
        **{f"client {i} {n}": v for i, row in enumerate(rows) for n, v in row.items()},
    }
    return numbers, [(r.ids, r.skipped, r.floats_up, r.floats_down) for r in results]


def assert_same(label: str, one, other, limit: float = 1e-12) -> None:
    (a, told), (b, also_told) = one, other
    assert told == also_told
    assert a.keys() == b.keys()
    assert torch.equal(a["counters"], b["counters"])
    worst = {n: float((a[n] - b[n]).abs().max()) for n in a if a[n].numel()}
    assert all(v == v for v in worst.values()), worst
    below(f"{label} {max(worst, key=worst.get)}", max(worst.values()), limit)


# ---- algorithms ----------------------------------------------------------------------------------


def named() -> dict[str, fl.Algorithm]:
    """Everything with a name."""
    return {name: built(name, lr=0.05) for name in fl.catalogue()}


def others() -> dict[str, fl.Algorithm]:
    decay = fl.Exponential(0.9)
    ball = fl.HeavyBall(lr=0.05, weight_decay=1e-2, clip=0.5, schedule=decay)
    nesterov = fl.Nesterov(lr=0.05, momentum=0.8, schedule=fl.InverseTime(0.1, steps=4))
    return {
        "scaffold-I": fl.scaffold(0.05, option="I"),
        "scaffold-I-c-size": fl.scaffold(0.05, option="I", by_size=True, c_weights="size"),
        "scaffold-II-ball": fl.scaffold(local=ball),
        "fresh": fl.comfed("scaf", "sgd", mode="fresh"),
        "literal": fl.comfed("scaf", "yogi", mode="literal"),
        "printed": fl.Algorithm((compat.ScaffoldMPrinted(),), fl.Sgd(0.05), fl.Mean(False)),
        "sgd-decay": fl.fedavg(local=fl.Sgd(lr=0.05, weight_decay=0.1, schedule=decay)),
        "sgd-clip": fl.fedavg(local=fl.Sgd(lr=0.05, clip=0.1), by_size=False),
        "heavy-ball": fl.fedavg(local=ball),
        "nesterov": fl.fednova(mu=0.1, local=nesterov),
        "rmsprop": fl.scaffold(option="I", local=fl.RmsProp(lr=0.01, weight_decay=1e-2)),
        "adamw": fl.scaffold(option="I", local=fl.AdamW(lr=0.01, weight_decay=0.1)),
        "several": fl.Algorithm((fl.Prox(0.1), fl.Scaffold()), nesterov, server=fl.Step(0.5)),
    }


CHUNKS = cycle([None, 1, 2, 3, 2, None, 3])  # 7 and 4 share no factor: every pair comes up
LASTS = cycle(["keep", "drop", "bootstrap", "full"])
ALGORITHMS = {**named(), **others()}
# those that count rounds up to two; of the others the third round is like the second
LONG = (fl.AdaBest, fl.Moon, fl.TwoBlocks)


def few_rounds(name: str) -> int:
    return 3 if any(isinstance(rule, LONG) for rule in ALGORITHMS[name].rules) else 2


PLAN = [  # by default the models take turns: one for each algorithm
    pytest.param(model, name, chunk, last, few_rounds(name))
    if model == one
    else pytest.param(model, name, chunk, last, 3, marks=pytest.mark.slow)
    for (model, name, one), chunk, last in zip(
        [
            (model, name, one)
            for name, one in zip(ALGORITHMS, cycle(MODELS), strict=False)
            for model in MODELS
        ],
        CHUNKS,
        LASTS,
        strict=False,
    )
]


@pytest.mark.parametrize(("model", "name", "chunk", "last", "rounds"), PLAN)
def test_engines_agree_on_every_algorithm(model, name, chunk, last, rounds):
    algo = ALGORITHMS[name]
    work = fl.Work(epochs=(1, 2) if model == "mlp" else 1, batch=4, last=last)
    more = {"rounds": rounds, **world_for(name, fl.Uniform(count=3), work)}
    plain = train(model, algo, "reference", **more)
    assert_same(f"{model} {name}", train(model, algo, "vectorised", chunk=chunk, **more), plain)


ENDS = [
    ("conv", "keep"),
    ("conv", "drop"),
    ("lstm", "bootstrap"),
    ("lstm", "full"),
    *[("mlp", last) for last in ("keep", "drop", "bootstrap", "full")],
]
HALVES = [((None, True), (1, False), (4, True)), ((None, False), (1, True), (4, False))]


@pytest.mark.parametrize(  # by default one half and the other in turns: every model sees both
    ("model", "last", "half"),
    [
        pytest.param(*end, half, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, end in enumerate(ENDS)
        for j, half in enumerate(HALVES)
    ],
)
def test_chunks_and_in_place_steps_change_nothing(model, last, half):
    work = fl.Work(epochs=(1, 2) if last == "full" else 1, batch=4, last=last)
    algo = fl.fedavg(local=fl.Sgd(lr=0.05, weight_decay=0.01, schedule=fl.Exponential(0.9)))
    world = {"work": work, "sampler": fl.Everyone(), "rounds": 2}
    plain = train(model, algo, "reference", **world)
    for chunk, in_place in half:
        found = train(model, algo, "vectorised", chunk=chunk, in_place=in_place, **world)
        assert_same(f"{model} {last} {chunk} {in_place}", found, plain)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fednova", "fedyogi", "comfed:scaf-sgd"])
def test_float32_engines_agree_after_one_local_step(model, name):
    algo = named()[name]
    more = {"rounds": 1, "dtype": torch.float32, "work": fl.Work(steps=1, batch=4)}
    plain = train(model, algo, "reference", **more)
    assert_same(f"{model} {name} float32", train(model, algo, "vectorised", **more), plain, 1e-5)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_buffers_are_averaged_by_size_and_counters_take_the_maximum(engine):
    """One full batch of features without spread in it: the running mean becomes 0.1 of it."""
    module = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 3))
    data = [(torch.full((n, 1), float(i)), torch.zeros(n).long()) for i, n in enumerate((2, 6))]
    task = fl.Task(module, dtype=torch.float64)
    work = fl.ExplicitWork({(0, 0): [[0, 1]] * 3, (0, 1): [[0, 1, 2, 3, 4, 5]]})
    trainer = fl.Trainer(task, fl.Federation.of(data), fl.fedavg(), work=work, engine=engine)
    trainer.round()
    mean, _ = trainer.server.buffers.floats
    below("running mean", abs(float(mean) - 6 / 8 * 0.1), 1e-12)
    assert trainer.server.buffers.counters.tolist() == [3]


@pytest.mark.parametrize("model", MODELS)
def test_engines_agree_when_own_data_come_in_pieces(model, monkeypatch):
    monkeypatch.setattr(engine_module, "PIECE", 4)
    algo = fl.comfed("scaf", "sgd", mode="fresh", lr=0.05)
    plain = train(model, algo, "reference")
    assert_same(f"{model} pieces", train(model, algo, "vectorised", chunk=2), plain)


# ---- unusual modules -----------------------------------------------------------------------------


class Idle(nn.Module):
    """A layer that no forward pass uses still decays."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(5, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.outer(self.inner(self.inner(x).tanh()))


def shared() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3))


def frozen(*names: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


UNUSUAL = {
    "idle layer": Idle,
    "layer called twice": Twice,
    "layer listed twice": shared,
    "frozen first layer": lambda: frozen("0.weight", "0.bias"),
    "frozen last layer": lambda: frozen("2.weight", "2.bias"),
    "frozen bias": lambda: frozen("0.bias"),
    "no bias": lambda: nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)),
    "in-place": lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)),
    "rows of rows": lambda: nn.Sequential(
        nn.Unflatten(1, (5, 1)), nn.Linear(1, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)
    ),
    "norms": lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.PReLU(), nn.Linear(4, 3)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_engines_agree_on_unusual_modules(name, monkeypatch):
    monkeypatch.setitem(MODELS, name, (UNUSUAL[name], (5,)))
    algo = fl.fedavg(local=fl.Sgd(lr=0.1, weight_decay=0.1))
    plain = train(name, algo, "reference", rounds=2)
    for options in ({}, {"chunk": 1}, {"in_place": False}):
        found = train(name, algo, "vectorised", rounds=2, **options)
        assert_same(f"{name} {options}", found, plain)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_padding_never_shows_another_clients_example(engine):
    """The very first example of the federation overflows; only its owner may suffer."""
    made = federation((5,))
    made.x[0] = 1e308
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    nn.init.constant_(module.weight, 3.0)
    task, work = fl.Task(module, dtype=torch.float64), fl.Work(epochs=1, batch=4)
    assert fl.Trainer(task, made, fl.fedavg(), work=work, engine=engine).round().skipped == [0]


# ---- experiments as one more axis ----------------------------------------------------------------


class Tiny:
    """Three clients of 4 examples, two local steps of 2, written with the core functions only."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.task = fl.Task(nn.Linear(4, 3), dtype=torch.float64)
        self.x, self.y = torch.randn(3, 4, 4).double(), torch.randint(0, 3, (3, 4))
        self.ids = torch.arange(3)
        size = torch.tensor([4.0, 2.0, 7.0]).double()
        half = torch.full((3,), 0.5).double()
        self.info = fl.ClientInfo(self.ids, size, half, size / 13, half * 0 + 13 / 3)

    def start(self, algo: fl.Algorithm):
        (w, buffers), sizes = self.task.initial(), Sizes(clients=3, examples=7, features=0)
        state = tree_map(lambda v: torch.stack([v] * 3), init_client(algo, w, sizes))
        return init_server(algo, w, buffers, sizes), state

    def client(self, algo, server, broadcast, info, state, x, y):
        nothing = tuple(EMPTY for _ in algo.parts)
        notes = write_personal(algo, server, info)
        steps = torch.tensor(2.0).double()
        client = Client(info, notes, state, nothing, nothing[:-1], steps)
        carry = client_start(algo, self.task, broadcast, client)
        for k in range(2):
            part = slice(2 * k, 2 * k + 2)
            batch = Batch(x[part], y[part], torch.ones(2).bool(), torch.arange(2) + 2 * k)
            step = torch.tensor(float(k)).double()
            carry = client_step(algo, self.task, broadcast, client, carry, batch, step)
        return client_finish(algo, self.task, broadcast, client, carry)

    def round(self, algo, server, state):
        broadcast = write_broadcast(algo, server, 3, 0)
        each = vmap(lambda *c: self.client(algo, server, broadcast, *c))
        state, reports, rows = each(self.info, state, self.x, self.y)
        report = tree_map(lambda v: v.sum(0), reports)
        return server_round(algo, server, report, rows, self.ids, 3), state


def clipped(lr: float) -> fl.HeavyBall:
    return fl.HeavyBall(lr=lr, momentum=0.5 + lr, weight_decay=lr / 10, clip=0.5 + lr)


PAIRS = {
    "scaffold": lambda a: fl.scaffold(local=clipped(a), server_lr=1 - a),
    "prox-yogi": lambda a: fl.Algorithm(
        (fl.Prox(a),), clipped(a), server=fl.Adaptive("yogi", lr=a, tau=a / 100, v0=a / 10)
    ),
    "adam-flower": lambda a: fl.Algorithm(
        local=fl.RmsProp(lr=a, clip=1.0, schedule=fl.Exponential(1 - a)),
        server=fl.Adaptive("adam", beta1=1 - a, bias_correction="flower"),
    ),
    "fedavgm": lambda a: fl.fedavgm(beta=a, local=fl.AdamW(lr=a, clip=1.0)),
    "scaffold-m": lambda a: fl.Algorithm(
        (fl.ScaffoldM(),), fl.Nesterov(lr=a, momentum=a, clip=9.0), server=fl.Step(a)
    ),
}


def assert_stacks(build) -> None:
    world, algos = Tiny(), [build(0.1), build(0.3)]
    alone = [world.start(algo) for algo in algos]
    together, stacked = fl.stack(alone), fl.stack(algos)
    axes = tree_map(lambda v: None if v is None else 0, stacked)  # what is None has no axis
    for _ in range(3):
        alone = [world.round(algo, *state) for algo, state in zip(algos, alone, strict=True)]
        together = vmap(world.round, in_dims=(axes, 0, 0))(stacked, *together)
    for one, other in zip(alone, fl.unstack(together, 2), strict=True):
        gaps = tree_map(lambda a, b: float((a - b).abs().max()) if a.numel() else 0.0, one, other)
        below("stacked", max(leaves(gaps)), 1e-12)
    assert not torch.allclose(alone[0][0].w, alone[1][0].w)


@pytest.mark.parametrize("name", PAIRS)
def test_stacked_experiments_equal_separate_ones(name):
    assert_stacks(PAIRS[name])


# ---- open faults ---------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", [fl.Mean(), fl.Nova()])
def test_experiments_without_clipping_stack(aggregate):
    assert_stacks(lambda a: fl.Algorithm((), fl.HeavyBall(lr=a), aggregate, fl.Step(a)))


def test_experiments_without_a_server_optimizer_stack():
    assert_stacks(lambda a: fl.Algorithm((fl.Prox(a),), fl.Sgd(lr=a, clip=1.0)))


@pytest.mark.parametrize("name", fl.catalogue())
def test_an_algorithm_equals_its_twin(name):
    build = fl.catalogue()[name].build
    assert build() == build()
