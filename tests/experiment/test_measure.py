"""What is measured, against the long way round."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from undrift.errors import ConfigError, DataError
from undrift.experiment.measure import Measure
from undrift.experiment.world import World, build
from undrift.rules.observe import Watch
from undrift.testing import check_rule

from .tiny import tiny

FLOAT64 = "task.dtype=float64"


def final_models(world: World) -> dict[int, torch.Tensor]:
    """Train the next cohort one client at a time and keep their final models."""
    trainer, found = world.trainer, {}
    twin = build(world.experiment)
    for _ in range(trainer.rounds_done):
        twin.trainer.round()
    cohort = twin.trainer.roster.cohort(twin.trainer.rounds_done)
    for place, client in enumerate(cohort.ids):
        alone = cohort.part(slice(place, place + 1))
        outcome = twin.trainer.engine.train(twin.trainer.algorithm, twin.trainer.server, alone)
        weighted, weight = outcome.report.total
        found[client] = twin.trainer.server.w - weighted / weight
    return found


def measured(*changes: str, rounds: int = 3) -> tuple[World, dict[str, Any], Any]:
    world = build(tiny(FLOAT64, *changes))
    for _ in range(rounds - 1):
        world.measure.record(world.trainer.round(), last=False)
    models, before = final_models(world), world.trainer.server.w
    record = world.measure.record(world.trainer.round(), last=True)
    return world, record, (models, before)


def test_drift_is_the_spread_of_the_cohort_over_its_way() -> None:
    _, record, (models, before) = measured("evaluate.drift=true")
    y = torch.stack(list(models.values()))
    average = y.mean(0)  # all clients have 18 examples
    spread = (y - average).norm(dim=1).mean() / (y - before).norm(dim=1).mean()
    assert record["drift"] == pytest.approx(float(spread), rel=1e-12)
    assert record["norm_average"] == pytest.approx(float(average.norm()), rel=1e-12)


def test_avg_is_the_mean_of_this_rounds_client_models() -> None:
    changes = ("evaluate.models=cloud,avg", "algorithm={use='fedavgm', lr=0.1}")
    world, _, (models, _) = measured(*changes)
    average = torch.stack(list(models.values())).mean(0)
    assert torch.allclose(world.measure.model("avg"), average, rtol=0, atol=1e-12)
    assert not torch.allclose(world.measure.model("cloud"), average, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_all_is_the_mean_of_everybodys_last_model(algorithm: str) -> None:
    changes = (
        "evaluate.models=all",
        f"algorithm.use={algorithm}",
        "data.sizes=[10,20,30,10,20,30]",
    )
    world, _, (models, _) = measured(*changes, rounds=1)
    start = world.trainer.task.initial()[0]
    sizes = world.trainer.federation.sizes.double()
    weights = sizes if algorithm == "fedavg" else torch.ones_like(sizes)
    everybody = torch.stack([models.get(i, start) for i in range(6)])
    expected = weights @ everybody / weights.sum()
    assert torch.allclose(world.measure.model("all"), expected, rtol=0, atol=1e-12)


def test_measuring_changes_no_number_and_counts_no_byte() -> None:
    everything = ("evaluate.drift=true", "evaluate.models=cloud,avg,all", "evaluate.clients=true")
    for algorithm in ("fedavg", "scaffold", "comfed:nova-yogi"):
        plain = build(tiny(FLOAT64, f"algorithm.use={algorithm}"))
        watched = build(tiny(FLOAT64, f"algorithm.use={algorithm}", *everything))
        for _ in range(3):
            a, b = plain.trainer.round(), watched.trainer.round()
            assert (a.loss, a.floats_down, a.floats_up) == (b.loss, b.floats_down, b.floats_up)
        assert torch.equal(plain.trainer.server.w, watched.trainer.server.w)


def test_cosines_and_norms_of_the_servers_states() -> None:
    world, record, (models, before) = measured("algorithm.use=scaffold", "evaluate.drift=true")
    c = world.trainer.server_state()["1.Scaffold"]
    step = before - torch.stack(list(models.values())).mean(0)
    assert record["norm_Scaffold"] == pytest.approx(float(c.norm()))
    cosine = float(c @ step / c.norm() / step.norm())
    assert record["cos_Scaffold"] == pytest.approx(cosine, rel=1e-9)
    update = world.trainer.server.w - before
    assert record["norm_update"] == pytest.approx(float(update.norm()))


@pytest.mark.parametrize(
    "algorithm", ["{use='feddyn', alpha=0.1}", "{use='adabest', beta=0.9}", "{use='fedavg'}"]
)
def test_the_offset_is_the_servers_h(algorithm: str) -> None:
    changes = (f"algorithm={algorithm}", "evaluate.drift=true")
    world, record, (models, before) = measured(*changes, rounds=3)
    _, _, (earlier, _) = measured(*changes, rounds=2)
    average, last = (torch.stack(list(m.values())).mean(0) for m in (models, earlier))
    offset = float((average - world.trainer.server.w).norm())
    assert record["norm_offset"] == pytest.approx(offset, rel=1e-9, abs=1e-12)
    assert (offset > 1e-6) is ("fedavg" not in algorithm)
    if "feddyn" in algorithm:
        assert offset == pytest.approx(record["norm_FedDyn"], rel=1e-9)
    if "fedavg" not in algorithm:
        h, step = last - before, before - average  # h of the round before
        assert record["cos_offset"] == pytest.approx(float(h @ step / h.norm() / step.norm()))


def judged(world: World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    examples, model = world.dealt.examples, world.trainer.model().double()
    with torch.no_grad():
        hits = model(examples.test_x.double()).argmax(1) == examples.test_y
    assert examples.test_clients is not None
    return hits.double(), examples.test_y, examples.test_clients


def test_classes_and_clients_are_judged_one_by_one() -> None:
    changes = ("evaluate.per_class=true", "evaluate.clients=true", "data.sizes=40")
    world, record, _ = measured(*changes, "evaluate.batch=3")
    hits, labels, owners = judged(world)
    assert record["test_accuracy"] == pytest.approx(float(hits.mean()))
    by_class = [float(hits[labels == k].mean()) for k in range(3)]
    assert record["per_class"] == pytest.approx(by_class)
    each = torch.stack([hits[owners == i].mean() for i in range(6)])
    assert record["client_accuracy_worst"] == pytest.approx(float(each.min()))
    assert record["client_accuracy_mean"] == pytest.approx(float(each.mean()))
    assert record["client_accuracy_std"] == pytest.approx(float(each.std(correction=0)))
    assert record["client_accuracy_worst10"] == pytest.approx(float(each.min()))


def test_clients_are_judged_on_their_own_held_out_examples() -> None:
    world = build(tiny("hold.client_test=0.25", "evaluate.clients=true"))
    assert world.dealt.test_parts is not None
    record = world.measure.record(world.trainer.round(), last=True)
    assert {"test_accuracy", "own_accuracy", "client_accuracy_worst"} <= set(record)
    trained = {int(i) for part in world.dealt.parts for i in part}
    tested = {int(i) for part in world.dealt.test_parts for i in part}
    assert not trained & tested


def test_the_test_set_is_dealt_like_the_training_set() -> None:
    partition = "partition={use='similarity', clients=4, s=0.1}"
    world = build(
        tiny("data.use=digits", "data={use='digits'}", partition, "evaluate.clients=true")
    )
    record = world.measure.record(world.trainer.round(), last=True)
    assert record["client_accuracy_worst"] <= record["client_accuracy_mean"]


def test_validation_clients_do_not_train() -> None:
    world = build(tiny("hold.validation_clients=0.3", "data.clients=10"))
    assert world.trainer.federation.num_clients == 7
    assert "validation_accuracy" in world.measure.record(world.trainer.round(), last=True)


def test_rounds_between_evaluations_have_no_test_metrics() -> None:
    world = build(tiny("evaluate.every=2"))
    records = [world.measure.record(world.trainer.round(), last=False) for _ in range(4)]
    assert ["test_accuracy" in r for r in records] == [False, True, False, True]
    assert all({"train_loss", "train_accuracy", "seconds", "bytes_up"} <= set(r) for r in records)


def test_numbers_are_predicted_too() -> None:
    changes = ("data={use='synthetic-regression', clients=6, sizes=20}", "evaluate.clients=true")
    world = build(tiny(*changes))
    record = world.measure.record(world.trainer.round(), last=True)
    assert "test_accuracy" not in record
    assert record["client_loss_worst"] >= record["client_loss_mean"] > 0


def test_inputs_can_be_the_targets() -> None:
    data, deal = "data={use='digits'}", "partition={use='iid', clients=6}"
    model = "model={use='autoencoder', inputs=64, hidden=8}"
    world = build(tiny(data, deal, model, "task.target=input"))
    first = world.measure.record(world.trainer.round(), last=True)["test_loss"]
    for _ in range(5):
        last = world.measure.record(world.trainer.round(), last=True)["test_loss"]
    assert last < first


def test_the_watching_rule_passes_the_public_check() -> None:
    check_rule(Watch())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("data={use='digits'}",), "do not say who owns an example"),
        (
            ("evaluate.per_class=true", "data={use='synthetic-regression', clients=6}"),
            "needs class",
        ),
        (("task.loss=mse",), "these targets are classes"),
        (("task.flip=0.5",), "need pictures"),
        (("model={use='mlp', hidden=4, classes=2}",), "the module has 2 outputs"),
        (("model={use='mcmahan_cnn'}",), "fails on inputs"),
        (("model={use='mlp', hiden=4}",), "Did you mean 'hidden'"),
        (("sampler.count=99",), "only 6 clients are enrolled"),
        (("engine.device=tpu",), "no device|not supported"),
        (("data={use='digitz'}",), "Did you mean 'digits'"),
        (("data={use='digits', split_sed=1}",), "Did you mean 'split_seed'"),
        (("partition={use='iid', clients=5000}",), "partition"),
        (("task.feature=nowhere",), "nowhere"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: tuple[str, ...], message: str) -> None:
    with pytest.raises((ConfigError, DataError, TypeError), match=message):
        build(tiny(*changes))


def test_measure_finds_the_state_of_its_rule() -> None:
    world = build(tiny("evaluate.models=avg"))
    assert isinstance(world.measure, Measure)
    assert torch.equal(world.measure.model("avg"), world.trainer.server.w)
