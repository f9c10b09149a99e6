"""Evaluation that does not wait: the same numbers, read once."""

import math
import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import undrift as fl
from experiment.tiny import tiny
from undrift import rounds
from undrift.engines.traffic import NOTHING
from undrift.errors import ConfigError, DataError
from undrift.experiment.world import build
from undrift.rounds import Advance, Reading
from undrift.rules.observe import LastModel
from undrift.testing import tiny_task, tiny_world

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "is_nonzero"}


class NoWaits(TorchDispatchMode):
    """Refuses what would wait for a device, were the tensors there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put_") else []
        by_mask = any(i is not None and i.dtype == torch.bool for i in indices)
        assert name not in WAITS and not by_mask, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def trainer_of(algorithm=None, dtype=torch.float64):
    world = tiny_world()
    algorithm = fl.fedavg(lr=0.1) if algorithm is None else algorithm
    return fl.Trainer(
        tiny_task(dtype), world.federation, algorithm, work=world.work, sampler=world.sampler
    )


def test_the_guard_of_these_tests_sees_waits():
    with pytest.raises(AssertionError, match="waits"), NoWaits():
        float(torch.ones(1))
    with pytest.raises(AssertionError, match="waits"), NoWaits():
        torch.ones(3)[torch.ones(3, dtype=torch.bool)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_of_batches_is_the_one_that_python_makes(dtype):
    trainer = trainer_of(dtype=dtype)
    trainer.run(2)
    x, y = trainer.federation.x, trainer.federation.y
    totals = {"loss": 0.0, "accuracy": 0.0}
    for start in range(0, len(x), 7):
        some = slice(start, start + 7)
        for name, value in trainer.evaluate(x[some], y[some]).items():
            totals[name] += value * len(x[some])
    assert len(x) % 7
    found = trainer.evaluate(x, y, batch=7)
    assert found == {name: total / len(x) for name, total in totals.items()}


def test_a_model_is_judged_as_it_was_when_asked():
    trainer = trainer_of()
    x, y = trainer.federation.x, trainer.federation.y
    early, wanted = trainer.judge(x, y), trainer.evaluate(x, y)
    trainer.run(2)
    assert early.result() == wanted != trainer.evaluate(x, y)


def test_nothing_waits_while_a_model_is_judged():
    trainer = trainer_of(fl.Algorithm((LastModel(), fl.Scaffold())))
    ids = trainer.round().ids
    with NoWaits():
        whole = trainer.judge(trainer.federation.x, trainer.federation.y, batch=5)
        parts = [trainer.judge_clients(ids, own=own) for own in (False, True)]
    assert whole.result()["loss"] > 0 and all(part.result()["loss"] > 0 for part in parts)


def test_examples_in_place_are_not_copied():
    seen = []
    task = fl.Task(nn.Linear(4, 3), dtype=torch.float64)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 3, (8,))
    trainer = fl.Trainer(task, fl.Federation.of([(x, y)]), fl.fedavg())
    trainer.task.eval_module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    trainer.evaluate(x, y, batch=6)
    assert [v.data_ptr() for v in seen] == [x.data_ptr(), x[6:].data_ptr()]


# ---- clients -------------------------------------------------------------------------------------
def dropping_task():
    def net():
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

    return fl.Task.build(net, seed=5, dtype=torch.float64)


def client_trainer(algorithm, sizes=(5, 300, 2, 9), **options):
    data = torch.Generator().manual_seed(3)
    clients = [
        (torch.randn(n, 6, generator=data), torch.randint(0, 3, (n,), generator=data))
        for n in sizes
    ]
    federation = fl.Federation.of(clients)
    work, sampler = fl.Work(steps=3, batch=4), fl.Uniform(count=3)
    return fl.Trainer(dropping_task(), federation, algorithm, work=work, sampler=sampler, **options)


@pytest.mark.parametrize("batch", [1, 4096])
def test_clients_are_judged_on_their_own_examples(batch):
    trainer = client_trainer(fl.fedavg(lr=0.1))
    trainer.run(2)
    found = trainer.judge_clients(range(4), batch=batch)
    wanted = [trainer.evaluate(*trainer.federation.client(i)) for i in found.ids]
    assert sorted(found.ids) == [0, 1, 2, 3]
    for name in ("loss", "accuracy"):
        assert found.each()[name] == pytest.approx([w[name] for w in wanted], rel=1e-12)
    everything = trainer.evaluate(trainer.federation.x, trainer.federation.y)
    assert found.result() == pytest.approx(everything, rel=1e-12)


@pytest.mark.parametrize("batch", [1, 4096])
def test_clients_are_judged_by_their_own_models_without_dropout(batch):
    trainer = client_trainer(fl.Algorithm((LastModel(),), local=fl.sgd(0.3)))
    ids = trainer.round().ids
    found = trainer.judge_clients(ids, own=True, batch=batch)
    assert sorted(found.ids) == sorted(ids)
    for place, client in enumerate(found.ids):
        x, y = trainer.federation.client(client)
        w = trainer.client_state(client)["0.LastModel"]
        net = trainer.task.module_with(w, trainer.server.buffers).double().eval()
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(net(x), y))
        assert found.each()["loss"][place] == pytest.approx(loss, abs=1e-6)  # by way of float32
    assert found.result() != trainer.judge_clients(ids).result()


@pytest.mark.parametrize("in_place", [True, False])
def test_models_of_a_round_on_a_device_are_at_hand_until_the_next(in_place):
    kept = client_trainer(fl.Algorithm((LastModel(),), local=fl.sgd(0.3)))
    plain = client_trainer(fl.Algorithm(local=fl.sgd(0.3)), graph=True, in_place=in_place)
    for _ in range(2):
        ids = kept.round().ids
        plain.advance()
        found, wanted = (t.judge_clients(ids, own=True).each() for t in (plain, kept))
        assert found == {n: pytest.approx(v, rel=1e-9) for n, v in wanted.items()}
        some = plain.judge_clients(ids[:2], own=True)
        assert some.each()["loss"] == pytest.approx(
            [wanted["loss"][sorted_ids(kept, ids).index(i)] for i in some.ids], rel=1e-9
        )
    with pytest.raises(ConfigError, match="LastModel"):
        plain.judge_clients(range(4), own=True)


def sorted_ids(trainer, ids):
    return trainer.judge_clients(ids).ids


def test_local_training_lowers_the_loss_on_the_own_examples():
    trainer = client_trainer(fl.Algorithm((LastModel(),), local=fl.sgd(0.1)))
    ids = trainer.roster.cohort(0, ordered=False).ids
    before = trainer.judge_clients(ids)
    trainer.advance()
    assert trainer.judge_clients(ids, own=True).result()["loss"] < before.result()["loss"]


def test_what_cannot_be_judged_is_refused():
    trainer = client_trainer(fl.fedavg())
    with pytest.raises(ConfigError, match="LastModel"):
        trainer.judge_clients([0], own=True)
    with pytest.raises(DataError, match="at least one client"):
        trainer.judge_clients([])
    with pytest.raises(DataError, match="99"):
        trainer.judge_clients([99])
    with pytest.raises(ConfigError, match="batch"):
        trainer.judge_clients([0], batch=0)


# ---- rounds --------------------------------------------------------------------------------------
def test_rounds_read_together_tell_what_they_tell_alone():
    one, other = (trainer_of(fl.scaffold(lr=0.1)) for _ in range(2))
    together = Reading([one.advance() for _ in range(3)]).results()
    alone = [other.round() for _ in range(3)]
    assert [r._replace(seconds=0.0) for r in together] == [r._replace(seconds=0.0) for r in alone]
    assert Reading([]).results() == []


def test_rounds_of_other_sizes_are_read_together():
    """Cohorts by coins, so that neighbours differ; in some of them somebody diverges."""
    made = []
    for _ in range(2):
        world = tiny_world()._replace(sampler=fl.Bernoulli(0.5))
        made.append(world.trainer(fl.fedavg(lr=0.1)))
        data = made[-1].federation
        data.x[data.members[int(data.offsets[1])]] = torch.inf  # an example of client 1
    together = Reading([made[0].advance() for _ in range(12)]).results()
    alone = [made[1].round() for _ in range(12)]
    assert [r._replace(seconds=0.0) for r in together] == [r._replace(seconds=0.0) for r in alone]
    assert len({len(r.ids) for r in alone}) > 1
    assert any(r.skipped for r in alone) and not all(r.skipped for r in alone)


def test_rounds_that_tell_alike_are_read_as_one(monkeypatch):
    """Also where others stand between them; the order stays."""
    made = []
    monkeypatch.setattr(
        rounds, "fetched", lambda v, fetch=rounds.fetched: made.append(0) or fetch(v)
    )
    trainer = tiny_world()._replace(sampler=fl.Bernoulli(0.5)).trainer(fl.fedavg(lr=0.1))
    found = Reading(trainer.advance() for _ in range(40)).results()
    assert [one.round for one in found] == list(range(1, 41))
    sizes = [len({len(r.ids) for r in part}) for part in (found[:32], found[32:])]
    assert len(made) == sum(sizes)


def test_on_a_cpu_every_round_has_its_own_time():
    trainer = trainer_of()
    started = time.perf_counter()
    seconds = [result.seconds for result in trainer.run(5)]
    assert 0 < sum(seconds) <= time.perf_counter() - started


def test_a_result_is_made_of_whoever_counted():
    """Means in float64 over those who were not left out; what is infinite stays so."""
    losses = torch.tensor([0.1, torch.inf, 0.2, -torch.inf])

    def result(accepted: list[bool]) -> fl.rounds.RoundResult:
        row = trainer_of().advance().rows._replace(
            accepted=torch.tensor(accepted), steps=torch.tensor([1.0, 2.0, 3.0, 4.0]),
            loss=losses, scores={"accuracy": torch.tensor([1.0, 0.0, 0.5, 0.0])},
        )  # fmt: skip
        return Advance(1, [5, 3, 9, 7], row, NOTHING, 0.0, 0.0, set()).result()

    some = result([True, False, True, False])
    assert (some.skipped, some.steps, some.scores) == ([3, 7], 10, {"accuracy": 0.75})
    assert some.loss == float(losses[0].double() + losses[2].double()) / 2
    nobody = result([False] * 4)
    assert math.isnan(nobody.loss) and math.isnan(nobody.scores["accuracy"])
    assert result([True, True, True, False]).loss == math.inf
    assert math.isnan(result([True] * 4).loss)


def test_a_measured_round_is_queued_without_waiting():
    everything = ("evaluate.drift=true", "evaluate.models=cloud,avg,all")
    shares = ("evaluate.clients=true", "evaluate.per_class=true", "data.sizes=40")
    world = build(tiny("algorithm.use=scaffold", *everything, *shares))
    world.trainer.round()
    with NoWaits():
        later = world.measure.measuring(1, last=True)
    found = later()
    assert {"test_accuracy", "per_class", "client_accuracy_worst", "drift"} <= found.keys()
