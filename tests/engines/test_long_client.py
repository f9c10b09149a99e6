"""One client with far more examples than the others: nothing is padded to it."""

import pytest
import torch
from owned import owners
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import undrift as fl
from undrift.core.rule import ClientInfo
from undrift.engines.engine import Assignment, Engine
from undrift.errors import ConfigError

__all__ = ["owners"]

LONG, SHORT, MANY = 60_000, 4, 400  # padded: 48 million positions an epoch
WORKS = {
    "epochs": fl.Work(epochs=2, batch=2_000),
    "few steps of all data": fl.Work(steps=2, batch=8),  # few batches, shuffled among many examples
    "all examples in a step": fl.Work(steps=2, batch=None),
    "bootstrap": fl.Work(epochs=(1, 2), batch=3_000, last="bootstrap"),
}


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that anything gives."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = function(*args, **(kwargs or {}))
        # storages: an expanded tensor takes no memory for its repetitions
        held = [v.untyped_storage().nbytes() for v in tree_leaves(given) if isinstance(v, Tensor)]
        self.bytes = max([self.bytes, *held])
        return given


def federation(long: int, many: int) -> fl.Federation:
    maker = torch.Generator().manual_seed(0)
    sizes = [SHORT] * (many // 2) + [long] + [SHORT] * (many // 2)
    x = torch.randn(sum(sizes), 3, generator=maker, dtype=torch.float64)
    y = torch.randint(0, 2, (len(x),), generator=maker)
    return fl.Federation.split(x, y, torch.arange(len(x)).split(sizes))


def trainer(algorithm, work, engine, long=LONG, many=MANY, **options) -> fl.Trainer:
    torch.manual_seed(0)
    task, data = fl.Task(nn.Linear(3, 2), dtype=torch.float64), federation(long, many)
    return fl.Trainer(task, data, algorithm, work=work, engine=engine, **options)


@pytest.mark.parametrize(
    ("name", "work", "engine", "options"),
    [
        *(("fedavg", work, "vectorised", {}) for work in WORKS),
        *(("scaffold", work, "vectorised", {"native": False}) for work in WORKS),
        ("mime", "epochs", "vectorised", {}),  # looks at all own data
        ("fedpd", "few steps of all data", "vectorised", {}),
        ("fedavg", "epochs", "reference", {}),
        ("scaffold", "epochs", "owners", {"actors": 2}),
    ],
)
def test_a_long_client_takes_memory_for_itself_alone(name, work, engine, options):
    with Largest() as largest:
        made = trainer(getattr(fl, name)(lr=0.1), WORKS[work], engine, **options)
        done = made.round()
    assert len(done.ids) == MANY + 1 and not done.skipped
    # padded to the longest client, a single epoch of everybody would be 192 MB
    assert largest.bytes < 100e6


@pytest.mark.parametrize("work", WORKS)
def test_parts_of_a_cohort_give_the_numbers_of_one_client_at_a_time(work, monkeypatch):
    monkeypatch.setattr("undrift.engines.vectorised.SLOTS", {"cpu": 2**13})
    for algorithm in (fl.fedavg(lr=0.1), fl.scaffold(local=fl.sgd(0.1, momentum=0.9))):
        ours = trainer(algorithm, WORKS[work], "vectorised", 3_000, 12)
        theirs = trainer(algorithm, WORKS[work], "reference", 3_000, 12)
        ours.run(2)
        theirs.run(2)
        assert (ours.server.w - theirs.server.w).abs().max() < 1e-12


def test_a_fleet_says_why_it_cannot_pad(monkeypatch):
    monkeypatch.setattr("undrift.fleet.SLOTS", {"cpu": 2**17})
    made = [trainer(fl.fedavg(lr=lr), WORKS["epochs"], "vectorised") for lr in (0.1, 0.2)]
    with pytest.raises(ConfigError, match="differ so much in their work"):
        fl.Fleet(made)


def test_a_part_is_taken_where_each_tensor_lies():
    """What is known of clients may lie on the CPU while their batches lie on a device."""
    known = ClientInfo(*(torch.arange(3.0) for _ in ClientInfo._fields))
    order = torch.zeros((3, 0, 2), device="meta")
    ids = torch.arange(3)
    work = Assignment(ids, known, order, ids, ids, seed=0)
    for index in (torch.tensor([2, 0]), slice(1, 3)):
        part = work.part(index)
        assert torch.equal(part.info.id, known.id[index]) and part.order.device.type == "meta"
        assert torch.equal(part.clients, ids[index]) and part.order.shape == (2, 0, 2)


@pytest.mark.parametrize("way", ["judged", "looked at"])
def test_passes_over_own_data_end_with_the_own_data(way, monkeypatch):
    """Nobody is padded to the longest client: that would be 400 times the examples there are."""
    read = []
    batch = Engine.batch

    def counted(self, ids, positions, *more):
        read.append(positions.numel())
        return batch(self, ids, positions, *more)

    made = trainer(fl.mime(lr=0.1), fl.Work(steps=1, batch=8), "vectorised")
    made.round()
    monkeypatch.setattr(Engine, "batch", counted)
    if way == "judged":
        made.judge_clients(range(MANY + 1)).result()
    else:
        made.round()
    there = LONG + SHORT * MANY
    assert there <= sum(read) < 3 * there
