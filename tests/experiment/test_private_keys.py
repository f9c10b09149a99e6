"""Private keys: where they are, who can read them, and what follows from them."""

import copy
import os
import shutil
import stat

import pytest
import torch

import undrift as fl
from undrift.core.noise import Secret
from undrift.engines import ENGINES, Sharded
from undrift.errors import CheckpointError, ConfigError
from undrift.experiment.run import run
from undrift.private_key import NAME, kept_secret
from undrift.replay.start import begin
from undrift.rules import Private
from undrift.testing import tiny_world
from undrift.testing.world import numbers

from .tiny import tiny

NOISE = fl.FeatureNoise(sigma=2.0, clip=0.5, batch=8.0)


def private(norm=0.1):
    return fl.Algorithm((Private(norm, 1.0, 6.0),), fl.Sgd(lr=0.1), fl.Mean(by_size=False))


ALGORITHMS = {
    "rfedavg": lambda: fl.rfedavg(0.1, strength=0.3, noise=NOISE),
    "rfedavg_plus": lambda: fl.rfedavg_plus(0.1, strength=0.3, noise=NOISE),
    "refresh all": lambda: fl.rfedavg_plus(0.1, strength=0.3, noise=NOISE, refresh="all"),
    "private": private,
}


def trained(algorithm, rounds=3, **options):
    trainer = tiny_world().trainer(algorithm, **options)
    trainer.run(rounds)
    return numbers(trainer)


def same(one, other):
    return all(torch.equal(v, other[n]) for n, v in one.items())


# ---- what follows from a key -----------------------------------------------------------------
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_key_gives_the_same_bits(name, tmp_path):
    build = ALGORITHMS[name]
    one, again = (trained(build(), private_key=tmp_path / "a") for _ in range(2))
    assert same(one, again)
    assert not same(one, trained(build(), private_key=tmp_path / "b"))
    assert not same(*(trained(build()) for _ in range(2)))


@pytest.mark.parametrize("name", ["rfedavg", "private"])
@pytest.mark.parametrize("engine", ["vectorised", "owners"])
def test_engines_add_the_same_noise(name, engine, tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "owners", Sharded)
    build, key = ALGORITHMS[name], tmp_path / "key"
    found = [trained(build(), private_key=key, engine=e) for e in ("reference", engine)]
    for n, v in found[0].items():
        assert torch.allclose(v.double(), found[1][n].double(), rtol=0, atol=1e-12), n


@pytest.mark.parametrize("name", ["rfedavg", "private"])
def test_a_fleet_adds_the_same_noise(name, tmp_path):
    build, key = ALGORITHMS[name], tmp_path / "key"
    trainers = [tiny_world().trainer(build(), private_key=key, seed=s) for s in (0, 1)]
    fl.Fleet(trainers).run(3)
    for seed, trainer in enumerate(trainers):
        alone, together = trained(build(), private_key=key, seed=seed), numbers(trainer)
        for n, v in alone.items():
            assert torch.allclose(v.double(), together[n].double(), rtol=0, atol=1e-12), n


def test_one_key_never_gives_two_runs_the_same_noise(tmp_path):
    """Else the difference of two runs would be that of their clean means."""
    world, found = tiny_world(), []
    x, y = world.federation.client(0)
    own = [world.federation.client(c) for c in range(6)]
    changed = fl.Federation.of([(x + 1e-9, y), *own[1:]])
    cases = [{}, {"seed": 1}, {"lr": 0.2}, {"federation": changed}, {"work": fl.Work(steps=3)}]
    for case in cases:
        own_world = world._replace(**{n: case[n] for n in ("federation", "work") if n in case})
        lr, seed = case.get("lr", 0.1), case.get("seed", 0)
        pair = []
        for sigma in (0.0, 2.0):
            noise = fl.FeatureNoise(sigma, 0.5, 8.0)
            run = own_world.trainer(
                fl.rfedavg_plus(lr, strength=0.0, noise=noise),
                private_key=tmp_path / "key",
                seed=seed,
            )
            run.open_round()
            run.round()
            pair.append(run.server.states[0].rows)
        found.append((pair[1] - pair[0]).flatten())
    gaps = [float((a - b).norm() / b.norm()) for i, a in enumerate(found) for b in found[:i]]
    assert min(gaps) > 0.5


@pytest.mark.parametrize("way", ["made with", "put", "replayed from"])
def test_one_key_gives_other_noise_to_a_run_that_begins_at_another_model(way, tmp_path):
    """Whoever knows both models would subtract one run from the other."""
    task, found = tiny_world().task, []
    for step in (0.0, 1e-9):
        pair = []
        for sigma in (0.0, 2.0):
            module = copy.deepcopy(task.original)
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(step if way == "made with" else 0.0)
            world = tiny_world()._replace(
                task=fl.Task(module, dtype=torch.float64, feature=task.feature)
            )
            run = world.trainer(
                fl.rfedavg_plus(0.1, strength=0.0, noise=fl.FeatureNoise(sigma, 0.5, 8.0)),
                private_key=tmp_path / "key",
            )
            moved = run.server._replace(w=run.server.w + step)
            if way == "put":
                run.put(moved)
            elif way == "replayed from":
                begin(run, 0, {}, {})
                run.put(moved, 0)
            run.round()
            pair.append(run.server.states[0].rows)
        found.append((pair[1] - pair[0]).flatten())
    assert float((found[0] - found[1]).norm() / found[0].norm()) > 0.5


def test_a_resumed_run_draws_the_noise_of_the_model_that_it_began_at(tmp_path):
    build, key = ALGORITHMS["rfedavg"], tmp_path / "key"
    first = tiny_world().trainer(build(), private_key=key)
    first.run(1)
    first.save(tmp_path / "kept")
    first.run(2)
    again = tiny_world().trainer(build(), private_key=key)
    assert again.load(tmp_path / "kept")
    again.run(2)
    assert same(numbers(first), numbers(again))


# ---- where it is ------------------------------------------------------------------------------
def test_a_key_file_is_private_from_its_first_byte(tmp_path, monkeypatch):
    before, seen = os.umask(0), []
    write = os.write
    from undrift.state import disk

    monkeypatch.setattr(
        disk, "_os_write", lambda fd, data: seen.append(os.fstat(fd).st_mode) or write(fd, data)
    )
    try:
        kept_secret(tmp_path / "new" / "key")
    finally:
        os.umask(before)
    assert seen and all(stat.S_IMODE(mode) == 0o600 for mode in seen)
    assert stat.S_IMODE((tmp_path / "new" / "key").stat().st_mode) == 0o600


def test_keys_that_are_none(tmp_path):
    path = tmp_path / "key"
    kept_secret(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others can read .* \(mode 0640\)"):
        kept_secret(path)
    path.chmod(0o600)
    path.write_text("5ec2e7")
    with pytest.raises(ConfigError, match="64 hexadecimal digits") as told:
        kept_secret(path)
    assert "5ec2e7" not in str(told.value)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(CheckpointError, match="cannot read the private key"):
        kept_secret(tmp_path / "link")
    with pytest.raises(ConfigError, match="path of a key file"):
        tiny_world().trainer(private(), private_key=7)
    with pytest.raises(ConfigError, match="no part of this algorithm adds noise"):
        tiny_world().trainer(fl.fedavg(0.1), private_key=path)


class Stop:
    """A listener that stops a run after a round."""

    def __init__(self, at):
        self.at = at

    def started(self, run, past): ...
    def finished(self, run, history): ...
    def failed(self, run, error): ...
    def close(self): ...

    def round(self, run, record):
        if record["round"] == self.at:
            raise KeyboardInterrupt


NOISY = (
    "task.feature=feature",
    "algorithm={use='rfedavg', lr=0.1, strength=0.3, noise={use='FeatureNoise'}}",
)
HIDDEN = (
    "algorithm={rules=[{use='Private', norm=0.5, noise=1.0, cohort=3}], "
    "local={use='Sgd', lr=0.1}, aggregate={use='Mean', by_size=false}}",
)


def lines(history):
    return [{n: v for n, v in record.items() if n != "seconds"} for record in history]


def stopped(experiment, folder, at=2):
    with pytest.raises(KeyboardInterrupt):
        run(experiment, folder, listeners=[Stop(at)])


@pytest.mark.parametrize("changes", [NOISY, HIDDEN])
@pytest.mark.parametrize("saved", [True, False])
def test_a_stopped_run_goes_on_with_its_noise(changes, saved, tmp_path):
    """What is trained again, from a checkpoint or from the start, is what it was."""
    experiment, folder = tiny(*changes), tmp_path / "a"
    stopped(experiment, folder)
    if not saved:  # killed before the first checkpoint was written
        for path in folder.glob("checkpoint/round-*"):
            path.unlink()
    shutil.copytree(folder, tmp_path / "b")
    before = (folder / "rounds.jsonl").read_text().splitlines()
    one, other = run(experiment, folder), run(experiment, tmp_path / "b")
    assert lines(one) == lines(other) and len(one) == 4
    kept = (folder / "rounds.jsonl").read_text().splitlines()[:2]
    assert [k.split('"seconds"')[0] for k in kept] == [b.split('"seconds"')[0] for b in before]


@pytest.mark.parametrize("changes", [NOISY, HIDDEN])
def test_a_run_with_a_key_of_the_users(changes, tmp_path):
    experiment = tiny(*changes, f"engine.private_key='{tmp_path / 'key'}'")
    whole = run(experiment, tmp_path / "a")
    stopped(experiment, tmp_path / "b")
    assert lines(run(experiment, tmp_path / "b")) == lines(whole)
    assert lines(whole) != lines(run(tiny(*changes), tmp_path / "c"))
    assert (tmp_path / "key").is_file() and not list(tmp_path.rglob(NAME))
    told = (tmp_path / "a" / "summary.json").read_text()
    assert "can subtract it" in told and str(tmp_path / "key") in told
    assert "deleted when the run is complete" in (tmp_path / "c" / "summary.json").read_text()


@pytest.mark.parametrize("changes", [NOISY, HIDDEN])
def test_no_key_is_in_anything_that_travels(changes, tmp_path, monkeypatch, caplog):
    """Every key, and every one made of it, is looked for in every file and every line logged."""
    keys, init = [], Secret.__init__

    def remembered(self, key):
        keys.append(key)
        init(self, key)

    monkeypatch.setattr(Secret, "__init__", remembered)
    caplog.set_level("DEBUG")
    stopped(tiny(*changes), tmp_path / "run")
    (kept,) = tmp_path.rglob(NAME)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert kept.read_text().strip() in {key.hex() for key in keys}
    files = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p != kept]
    assert len(files) > 5
    run(tiny(*changes), tmp_path / "run")
    files += [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()]
    assert not list(tmp_path.rglob(NAME))  # complete: nobody can subtract its noise any more
    files.append(caplog.text.encode())
    assert len(keys) >= 2
    for key in keys:
        assert not any(key in data or key.hex().encode() in data for data in files)


def test_a_trainer_that_is_saved_keeps_its_key(tmp_path):
    world, build = tiny_world(), ALGORITHMS["rfedavg_plus"]
    trainer = world.trainer(build())
    trainer.run(2)
    trainer.save(tmp_path / "saved")
    trainer.run(2)
    other = world.trainer(build())
    assert other.load(tmp_path / "saved")
    other.run(2)
    assert same(numbers(trainer), numbers(other))
