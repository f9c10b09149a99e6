"""Noise that hides, on silos: nothing that anybody is sent, holds or keeps tells what it was."""

import hashlib

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.core.noise import Secret
from undrift.core.random import fold, normal
from undrift.rules import Private
from undrift.testing.world import World

from .silos import FIRST, Silos

WIDE = 48  # features: as many numbers of noise in a row
SIGMA, CLIP, BATCH = 2.0, 0.5, 8.0
SCALE = SIGMA * CLIP / BATCH


def world_of(count=3, shift=0.0):
    draw = torch.Generator().manual_seed(3)
    clients = []
    for _ in range(count):
        x = torch.randn(6, 4, generator=draw, dtype=torch.float64) + shift
        clients.append((x, torch.randint(0, 3, (6,), generator=draw)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(4, WIDE), nn.Tanh(), nn.Linear(WIDE, 3))
    task = fl.Task(net, feature="1", dtype=torch.float64)
    return World(task, fl.Federation.of(clients), fl.Work(steps=2, batch=3), fl.Everyone())


def features(build, sigma=SIGMA):
    return build(0.1, strength=0.0, noise=fl.FeatureNoise(sigma, CLIP, BATCH))


def private(noise=1.0):
    return fl.Algorithm((Private(0.1, noise, 3.0),), fl.Sgd(lr=0.1), fl.Mean(by_size=False))


def simulated_rows(algorithm, seed=5):
    trainer = world_of().trainer(algorithm, seed=seed)
    return table_after_a_round(trainer)


def silo_rows(algorithm, folder, seed=5):
    return table_after_a_round(Silos(world_of(), algorithm, folder).server(seed=seed))


def table_after_a_round(trainer):
    trainer.round()
    return trainer.server.states[0].rows


def redrawn(seed, run_seed, rounds=3, clients=3):
    """All noise that the public words of a run give: hashes of its seed, keys made of them."""
    purposes = ("review", "after_round", "row", "noise", "server", "train", "look", "")
    seeds = {seed, run_seed, 0}
    for purpose in purposes:
        for who in range(clients):
            for round in range(rounds):
                for s in seeds:
                    for words in ((round, who), (who, round), (round,), (who,)):
                        yield normal(fold(s, purpose, *words), torch.arange(WIDE))
                    for rule in (0, 1):
                        for key in (hashlib.sha256(str(s).encode()).digest(), bytes(32)):
                            yield Secret(key).normal(WIDE, purpose, round, who, rule)


@pytest.mark.parametrize("build", [fl.rfedavg, fl.rfedavg_plus])
@pytest.mark.parametrize("rows", [simulated_rows, silo_rows], ids=["simulation", "silos"])
def test_noise_cannot_be_drawn_again_from_what_is_public(build, rows, tmp_path):
    """Whoever has the broadcast, the seed, the experiment and the ids draws all he can think of."""
    wheres = (tmp_path / "a", tmp_path / "b") if rows is silo_rows else ()
    found = [
        rows(features(build, sigma), *wheres[i : i + 1]) for i, sigma in enumerate((0.0, SIGMA))
    ]
    noise = (found[1] - found[0]) / SCALE
    assert 0.8 < float(noise.std()) < 1.2
    run_seed = world_of().trainer(features(build), seed=5).seeds.run
    tried = torch.stack(list(redrawn(5, run_seed)))
    left = (noise[:, None] - tried).norm(dim=2) / noise.norm(dim=1)[:, None]
    assert float(left.min()) > 0.8  # a right guess leaves nothing; a wrong one adds its own


def test_the_attack_finds_what_can_be_found():
    """The same guesses against noise that does follow from the seed."""
    run_seed = world_of().trainer(fl.fedavg(0.1), seed=5).seeds.run
    noise = normal(fold(run_seed, "review", 0, 2), torch.arange(WIDE))
    assert any(torch.equal(noise, guess) for guess in redrawn(5, run_seed))


def test_a_node_that_is_asked_again_gives_nothing_more_away(tmp_path):
    """Two answers about nearly the same model have noise of their own; equal questions one."""
    silos = Silos(world_of(), features(fl.rfedavg_plus), tmp_path)
    asked = []
    node, handler = silos.nodes[0], silos.grid.handlers[FIRST]
    silos.grid.handlers[FIRST] = lambda *question: asked.append(question) or handler(*question)
    tables = []
    for nudge in (0.0, 1e-9, 0.0):
        server = silos.server()
        server.put(server.server._replace(w=server.server.w + nudge))
        server.open_round()
        tables.append(server.open_round().server.states[0].rows)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        gap = (tables[one] - tables[other]).std() / SCALE
        assert 1.1 < float(gap) < 1.8, (one, other)  # sqrt(2): independent
    assert node.answer(*asked[-1]) == node.answer(*asked[-1])


def test_no_key_is_sent_kept_or_logged_by_silos(tmp_path, monkeypatch, caplog):
    keys, init, messages = [], Secret.__init__, []

    def remembered(self, key):
        keys.append(key)
        init(self, key)

    monkeypatch.setattr(Secret, "__init__", remembered)
    caplog.set_level("DEBUG")
    for name, algorithm in (("rows", features(fl.rfedavg)), ("updates", private())):
        silos = Silos(world_of(), algorithm, tmp_path / name)
        for at, handler in list(silos.grid.handlers.items()):

            def heard(*question, handler=handler):
                answer = handler(*question)
                messages.extend([*question, answer])
                return answer

            silos.grid.handlers[at] = heard
        server = silos.server()
        server.run(2)
        server.save(tmp_path / name / "server")
    files = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()]
    assert len(messages) > 10 and len(files) > 5 and len(keys) >= 3 * 3 + 2
    for key in keys:
        for data in (*messages, *files, caplog.text.encode()):
            assert key not in data and key.hex().encode() not in data


class Far(nn.Module):
    """One parameter whose loss falls by the target, wherever it is."""

    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.at * x


def pull(out, y):
    return -(out[:, 0] * y.to(out.dtype))


def test_no_client_decides_whether_others_count(tmp_path):
    """Measured by the median of the others, one would move the sum by more than its own change."""
    own = [(torch.ones(2, 1).double(), torch.full((2,), by)) for by in (1e-3, 1e-3, 1e-3, 100.0)]
    task = fl.Task(Far(), loss=pull, metrics={}, dtype=torch.float64)
    world = World(task, fl.Federation.of(own), fl.Work(steps=1, batch=None), fl.Everyone())
    algorithm = fl.Algorithm((Private(0.5, 0.0, 4.0),), fl.Sgd(lr=0.1), fl.Mean(by_size=False))
    silos = Silos(world, algorithm, tmp_path)
    server = silos.server()
    server.run(1)
    assert float(server.server.w) == pytest.approx((3 * 1e-4 + 0.5) / 4, rel=1e-5)


def test_a_server_that_does_a_round_again_draws_other_noise(tmp_path):
    """Other reports may have come: with equal noise the difference would be a client's change."""
    silos, found = Silos(world_of(), private(), tmp_path), []
    for _ in range(2):
        server = silos.server()
        server.round()
        found.append(server.server.w)
    assert float((found[0] - found[1]).std()) == pytest.approx(2**0.5 * 0.1 / 3, rel=0.3)
