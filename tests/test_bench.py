"""`undrift bench`: an algorithm against itself, on as many threads; no timing is judged."""

import json

import pytest
import torch

import undrift as fl
from undrift import bench as measuring
from undrift import models
from undrift.bench import ALGORITHMS, HAND, LOADS, REFERENCE, Spread, algorithm_of, bench
from undrift.cli import main
from undrift.errors import ConfigError
from undrift.hand_loops import HAND_LOOPS
from undrift.replay import in_order

LOAD = LOADS["emnist_mlp"]._replace(clients=6, cohort=4, steps=3, batch=5)
COHORTS = [[0, 2, 3, 5], [1, 2, 4, 5], [0, 1, 2, 3]]


@pytest.mark.parametrize("name", LOADS)
def test_every_work_can_be_measured(name):
    found = bench(name, "scaffold", rounds=2, tiny=True)
    for spread in (found.loop, found.undrift, found.faster, found.wall_faster):
        assert 0 < spread.least <= spread.median <= spread.most


@pytest.mark.parametrize("name", HAND_LOOPS)
def test_the_loop_by_hand_computes_the_algorithm_of_its_name(name):
    """Three rounds with the same cohorts and batches give the same model: nobody does less."""
    data = measuring.examples(LOAD)
    loop = measuring.loop_of(LOAD, data.to("cpu", torch.float64), name, "cpu")
    order = in_order(data.sizes.tolist(), COHORTS, batch=LOAD.batch)
    trainer = fl.Trainer(
        fl.Task(models.build(LOAD.model, 0), dtype=torch.float64),
        data,
        algorithm_of(LOAD, name),
        work=fl.ExplicitWork(order),
        sampler=fl.Explicit(COHORTS),
    )
    for r, ids in enumerate(COHORTS):
        loop.round([(i, [torch.tensor(rows) for rows in order[r, i]]) for i in ids])
        trainer.round()
    for own, (key, value) in zip(
        loop.server.parameters(), trainer.parameters().items(), strict=True
    ):
        assert (own - value).abs().max() < 1e-12, key


def test_a_loop_draws_as_many_clients_and_batches_as_undrift():
    loop = measuring.loop_of(LOAD, measuring.examples(LOAD), "fedavg", "cpu")
    drawn = loop.draw()
    assert len({i for i, _ in drawn}) == LOAD.cohort
    for _, batches in drawn:
        assert [len(rows) for rows in batches] == [LOAD.batch] * LOAD.steps
        assert sorted(torch.cat(list(batches)).tolist()) == list(range(LOAD.steps * LOAD.batch))


@pytest.mark.parametrize("threads", [1, 2])
def test_both_sides_have_the_same_threads(threads, monkeypatch):
    """Whatever torch has by itself; afterwards it has that again."""
    before, seen = torch.get_num_threads(), []
    timed = measuring._timed

    def noted(*arguments):
        seen.append(torch.get_num_threads())
        return timed(*arguments)

    monkeypatch.setattr(measuring, "_timed", noted)
    bench("emnist_mlp", rounds=1, threads=threads, tiny=True)
    assert seen == [threads] * 2
    assert torch.get_num_threads() == before


def test_sides_take_turns_and_change_places(monkeypatch):
    order = []
    monkeypatch.setattr(
        measuring, "_timed",
        lambda action, device, rounds: order.append(getattr(action, "__name__", ""))
        or measuring.Seconds(1.0, 2.0),
    )  # fmt: skip
    found = bench("emnist_mlp", rounds=4, tiny=True)
    assert order == ["round", "<lambda>", "<lambda>", "round"] * 2
    assert found.faster == Spread(1.0, 1.0, 1.0) and found.clock == "cpu"


def test_an_algorithm_without_a_hand_written_loop_says_so(capsys):
    assert bench("emnist_mlp", "fedavg", rounds=1, tiny=True).against == HAND
    assert bench("emnist_mlp", "mime", rounds=1, tiny=True).against == REFERENCE
    arguments = ["emnist_mlp", "--tiny", "--rounds", "1", "--device", "cpu"]
    assert main(["bench", *arguments, "--algorithms", "fedprox,adabest"]) == 0
    text = capsys.readouterr().out
    assert "* Not written by hand" in text and "1 CPU thread\n" in text
    marked = [line.split()[1] for line in text.splitlines() if line.endswith(" *")]
    assert marked == ["adabest"]


def test_every_algorithm_that_is_offered_can_be_built():
    for name in ALGORITHMS:
        assert algorithm_of(LOAD, name).local.lr > 0


def test_the_command_prints_and_writes(tmp_path, capsys):
    out = tmp_path / "bench.json"
    arguments = ["bench", "emnist_mlp", "--tiny", "--rounds", "2", "--device", "cpu"]
    assert main([*arguments, "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [one["algorithm"] for one in written["results"]] == ["fedavg", "scaffold"]
    assert written["threads"] == 1 and written["machine"]
    for one in written["results"]:
        assert one["against"] == HAND and one["clock"] == "cpu"
        assert one["faster"]["least"] <= one["faster"]["median"] <= one["faster"]["most"]
    text = capsys.readouterr().out
    assert "Each line compares an algorithm with itself" in text and "* Not" not in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "no work named 'nope'"),
        (["--algorithms", "fedpro"], "no algorithm named 'fedpro'"),
        (["--algorithms", "fedavg,"], "no algorithm named ''"),
        (["--precision", "fp8"], "no precision named 'fp8'"),
        (["--rounds", "0"], "--rounds"),
        (["--threads", "0"], "--threads"),
        (
            ["emnist_mlp", "--tiny", "--rounds", "1", "--json", "/nowhere/x.json"],
            "cannot be written",
        ),
    ],
)
def test_wrong_arguments_are_told(arguments, says, capsys):
    assert main(["bench", *arguments, "--device", "cpu"]) != 0
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [{"algorithm": "fedpd"}, {"algorithm": "x"}, {"rounds": 0}, {"threads": 0}]
)
def test_what_cannot_be_measured_is_named(wrong):
    with pytest.raises(ConfigError, match=r"algorithm named|rounds|threads"):
        bench("emnist_mlp", **{"tiny": True, **wrong})
