"""Several runs in their folders as one batch: the same lines as alone."""

import json

import pytest

import undrift as fl
from undrift.data.partitions import Iid
from undrift.errors import ConfigError
from undrift.experiment import pool
from undrift.experiment.batch import run_together
from undrift.experiment.run import run
from undrift.experiment.spec import Experiment


def experiment(algorithm, seed=0, rounds=4, **settings):
    return Experiment(
        "digits", {"use": "mlp", "hidden": 8}, algorithm, Iid(5), rounds=rounds, seed=seed,
        work=fl.Work(epochs=1, batch=64), sampler=fl.Uniform(3), **settings,
    )  # fmt: skip


def lines(folder):
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        if isinstance(a[name], float):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-4), name
        elif not isinstance(a[name], dict):
            assert a[name] == b[name], name


ALGORITHMS = [fl.fedavg(0.1), fl.scaffold(0.1), fl.fedyogi(0.1)]


def test_a_batch_writes_what_single_runs_write(tmp_path):
    jobs = [experiment(a, seed) for a in ALGORITHMS for seed in (0, 1)]
    together = run_together([(e, tmp_path / "b" / str(i)) for i, e in enumerate(jobs)])
    for i, one in enumerate(jobs):
        alone = run(one, tmp_path / "a" / str(i))
        assert len(together[i]) == len(alone) == 4
        for a, b in zip(
            lines(tmp_path / "a" / str(i)), lines(tmp_path / "b" / str(i)), strict=True
        ):
            close(a, b)
        assert (tmp_path / "b" / str(i) / "summary.json").exists()


def test_a_batch_goes_on_where_each_run_stopped(tmp_path):
    longer = [experiment(fl.fedavg(0.1), s, rounds=5) for s in (0, 1)]
    run(experiment(fl.fedavg(0.1), 0, rounds=2), tmp_path / "0")
    (tmp_path / "0" / "summary.json").unlink()
    found = run_together([(e, tmp_path / str(i)) for i, e in enumerate(longer)])
    assert [len(h) for h in found] == [5, 5]
    assert [row["round"] for row in lines(tmp_path / "0")] == [1, 2, 3, 4, 5]


def test_one_that_cannot_start_does_not_stop_the_others(tmp_path):
    good = experiment(fl.fedavg(0.1), label="good")
    bad = experiment(fl.vrlsgd(0.1), label="bad")  # wants everybody
    error, history = run_together([(bad, tmp_path / "bad"), (good, tmp_path / "good")])
    assert isinstance(error, ConfigError) and "everybody" in str(error)
    assert len(history) == 4 and (tmp_path / "good" / "summary.json").exists()


def test_on_a_device_several_runs_are_one_batch(tmp_path, monkeypatch):
    seen = []

    def noted(tasks, **settings):
        seen.append(len(tasks))
        return run_together(tasks, **settings)

    monkeypatch.setattr(pool, "run_together", noted)
    monkeypatch.setattr(pool, "device_named", lambda name: "cuda")
    jobs = [experiment(a, label=f"a{i}") for i, a in enumerate(ALGORITHMS)]
    assert [len(h) for h in pool.run_all(jobs, tmp_path)] == [4, 4, 4]
    assert seen == [3]


def test_listeners_hear_every_run(tmp_path):
    heard = []

    class Ear:
        def started(self, run, past):
            heard.append(("started", run.seed))

        def round(self, run, record):
            heard.append(("round", run.seed, record["round"]))

        def finished(self, run, history):
            heard.append(("finished", run.seed))

        def failed(self, run, error):
            heard.append(("failed", run.seed))

        def close(self):
            pass

    jobs = [experiment(fl.fedavg(0.1), s, rounds=2) for s in (0, 1)]
    run_together([(e, tmp_path / str(i)) for i, e in enumerate(jobs)], listeners=[Ear()])
    for seed in (0, 1):
        own = [h for h in heard if h[1] == seed]
        wanted = [("started", seed), ("round", seed, 1), ("round", seed, 2), ("finished", seed)]
        assert own == wanted
