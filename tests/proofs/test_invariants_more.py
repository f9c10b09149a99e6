"""I-35 to I-39: Mime, FedADC, rFedAvg, MOON; engines on all names."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import undrift as fl
from crossed import crossed
from longhand.cases import HEAVY, KINDS, SGD, above, below
from proofs.bridge import Run, gap, local_of, run
from proofs.common import ALL5, SOME5, pooled, unequal
from rules.needs import KINDS as DISTINCT
from rules.needs import NEW, built, world_for
from undrift.core.tree import replace
from undrift.engines import engine as engine_module
from undrift.rules import compat
from undrift.testing import tiny_world
from undrift.testing.world import numbers
from undrift.verify.longhand.worlds import World, step_batches


# ---- Mime ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("world", "local"), crossed(KINDS, [SGD, HEAVY]), indirect=["world"])
def test_i35_mimelite_without_beta_is_fedavg(world, local):
    b, mine = unequal(world), replace(local_of(local), weight_decay=0.0)
    plain = run(world, SOME5, b, fl.fedavg(local=mine), in_place=False)
    below("I-35", gap(run(world, SOME5, b, fl.mimelite(beta=0.0, local=mine)), plain), 0.0)
    mine = local_of(local)
    plain = run(world, SOME5, b, fl.fedavg(local=mine))
    below("I-35 decay", gap(run(world, SOME5, b, fl.mimelite(beta=0.0, local=mine)), plain), 1e-12)


def test_i35_one_full_step_is_centralised_momentum(world):
    b = step_batches(world, ALL5, steps=1)
    found = [run(world, ALL5, b, f(beta=0.7, local=local_of(SGD))) for f in (fl.mime, fl.mimelite)]
    w, m = world.w0.copy(), np.zeros_like(world.w0)
    for r in range(5):
        g = world.gradient(w, *pooled(world)) + SGD.weight_decay * w
        m = 0.3 * g + 0.7 * m
        w = w - SGD.lr * SGD.lr_decay**r * m
        for one in found:
            below("I-35 centralised", np.abs(one.x[r] - w).max(), 1e-12)


def test_mime_corrects_and_mimelite_does_not(mlp):
    b = unequal(mlp)
    mime, lite = (run(mlp, SOME5, b, f(local=local_of(SGD))) for f in (fl.mime, fl.mimelite))
    above("Mime is not MimeLite", gap(mime, lite), 1e-4)


@pytest.mark.parametrize("corrected", [False, True])
def test_mime_with_adam_is_adam_with_a_fixed_state(mlp, corrected):
    """MimeLite with Adam, one step of the whole data each: by hand on the pooled data."""
    b = step_batches(mlp, ALL5, steps=1)
    algo = fl.mimelite(0.1, base="adam", beta=0.8, beta2=0.9, eps=0.1, bias_correction=corrected)
    found = run(mlp, ALL5, b, algo)
    w, m, v = mlp.w0.copy(), 0.0, 0.0
    for r, x in enumerate(found.x):
        sizes = np.array([len(y) for _, y in mlp.data])
        own = np.array([mlp.gradient(w, *data) for data in mlp.data])
        up = (1 - 0.8 ** (r + 1), 1 - 0.9 ** (r + 1)) if corrected else (1.0, 1.0)
        moved = [
            (0.2 * g + 0.8 * m) / up[0] / (np.sqrt((0.1 * g * g + 0.9 * v) / up[1]) + 0.1)
            for g in own
        ]
        c = sizes @ own / sizes.sum()
        w = w - 0.1 * sizes @ np.array(moved) / sizes.sum()
        m, v = 0.2 * c + 0.8 * m, 0.1 * c * c + 0.9 * v
        below("MimeLite Adam", np.abs(x - w).max(), 1e-12)


# ---- FedADC --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("world", "form"), crossed(KINDS, ["heavy_ball", "nesterov"]), indirect=["world"]
)
def test_i36_fedadc_reduces(world, form):
    b, mine = unequal(world), local_of(SGD)
    bare = fl.fedadc(beta_local=0.0, beta_global=0.0, form=form, local=mine)
    uniform = fl.fedavg(local=mine, by_size=False)
    below("I-36", gap(run(world, SOME5, b, bare), run(world, SOME5, b, uniform)), 1e-12)
    steady = replace(mine, schedule=fl.rules.Schedule())
    only = fl.fedadc(beta_local=0.0, beta_global=0.7, server_lr=0.8, form=form, local=steady)
    slow = fl.slowmo(beta=0.7, server_lr=0.8, local=steady)
    below("I-36 SlowMo", gap(run(world, SOME5, b, only), run(world, SOME5, b, slow)), 1e-12)
    both = fl.fedadc(beta_local=0.7, beta_global=0.7, server_lr=0.8, form=form, local=steady)
    above("I-36 both", gap(run(world, SOME5, b, both), run(world, SOME5, b, slow)), 1e-5)


class Slope(nn.Module):
    """An example's loss is linear in w: a constant gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        return x @ self.w


def linear_trainer(algorithm: fl.Algorithm, **more) -> fl.Trainer:
    draw = torch.Generator().manual_seed(2)
    data = [(torch.randn(n, 3, generator=draw).double(), torch.zeros(n)) for n in (4, 7, 5, 3, 6)]
    task = fl.Task(Slope(), lambda out, y: out, metrics={}, dtype=torch.float64)
    settings = {"work": fl.Work(epochs=(1, 2), batch=2), "sampler": fl.Uniform(count=3), **more}
    trainer = fl.Trainer(task, fl.Federation.of(data), algorithm, **settings)
    trainer.run(6)
    return trainer


@pytest.mark.parametrize("form", ["heavy_ball", "nesterov"])
def test_i36_the_servers_momentum_forgets_the_local_one(form):
    """Constant gradients, unequal K: m is the same for every beta_local."""
    made = [
        linear_trainer(fl.fedadc(0.1, beta_local=beta, form=form)).server_state()["0.FedAdc"]
        for beta in (0.0, 0.5, 0.9)
    ]
    for other in made[1:]:
        below("I-36 m", float((other - made[0]).abs().max()), 1e-12)


@pytest.mark.parametrize("client", ["sgd", "nova"])
@pytest.mark.parametrize("server", ["sgd", "adam"])
def test_comfed_in_fedadcs_style_counts_momentum_once(client, server):
    """Constant gradients, unequal sizes and steps: m is the same for every b."""
    made = []
    for b in (0.0, 0.5, 0.9):
        algo = fl.comfed(client, server, local_momentum="fedadc", b=b)
        made.append(linear_trainer(replace(algo, local=replace(algo.local, weight_decay=0.0))))
    for other in made[1:]:
        for name in ("0.MomentumAdd.m", "0.MomentumAdd.unit"):
            away = other.server_state()[name] - made[0].server_state()[name]
            below(f"ComFed {name}", float(away.abs().max()), 1e-12)


def test_comfed_in_mimelites_style_speaks_in_gradients():
    """Everybody has the same constant gradient: M becomes it, and the model moves as without b."""
    algo = fl.Algorithm((fl.MomentumMix(b=0.7, beta=0.0),), fl.HeavyBall(lr=0.1))
    draw = torch.Generator().manual_seed(2)
    row = torch.randn(1, 3, generator=draw).double()
    data = [(row.repeat(n, 1), torch.zeros(n)) for n in (4, 7, 5)]
    task = fl.Task(Slope(), lambda out, y: out, metrics={}, dtype=torch.float64)
    trainer = fl.Trainer(task, fl.Federation.of(data), algo, work=fl.Work(epochs=1, batch=2))
    trainer.run(60)
    state = trainer.server.states[0]
    below("ComFed M", float((state.m / state.unit - row[0]).abs().max()), 1e-9)


# ---- features ------------------------------------------------------------------------------------
def trained(world: World, algorithm: fl.Algorithm, rounds=SOME5, b=None, **options) -> Run:
    """Train with the hidden layer of the mlp world as the feature layer."""
    return run(world, rounds, b or unequal(world, rounds), algorithm, feature="1", **options)


@pytest.mark.parametrize("local", [SGD, HEAVY])
def test_i37_regularisers_without_strength_are_fedavg(mlp, local):
    mine = local_of(local)
    plain = trained(mlp, fl.fedavg(local=mine), in_place=False)
    for build in (fl.rfedavg, fl.rfedavg_plus):
        below("I-37", gap(trained(mlp, build(strength=0.0, local=mine)), plain), 0.0)
        above("I-37 strong", gap(trained(mlp, build(strength=0.5, local=mine)), plain), 1e-4)


def test_i38_both_regularisers_have_the_same_gradient(mlp):
    """The first round starts from the same feature means; then they part."""
    one, plus = (
        trained(mlp, f(0.1, strength=0.5), SOME5[:1]) for f in (fl.rfedavg, fl.rfedavg_plus)
    )
    below("I-38", gap(one, plus), 1e-12)
    one, plus = (trained(mlp, f(0.1, strength=0.5)) for f in (fl.rfedavg, fl.rfedavg_plus))
    above("I-38 later", gap(one, plus), 1e-6)


def test_i38_they_differ_by_the_covariance_of_the_means():
    draw = torch.Generator().manual_seed(0)
    table, mine = torch.randn(5, 6, generator=draw).double(), torch.randn(9, 6, generator=draw)
    batch = SimpleNamespace(mask=torch.ones(9).bool())
    out = fl.Output(None, mine.double(), None)
    full = fl.RFedAvg(1.0).penalty(out, SimpleNamespace(personal=table, batch=batch))
    short = fl.RFedAvgPlus(1.0).penalty(out, SimpleNamespace(personal=table.mean(0), batch=batch))
    trace = torch.cov(table.T, correction=0).trace()
    below("I-38 trace", float((full - short - trace).abs()), 1e-12)


def test_i38_counting_oneself_is_a_weaker_strength(mlp):
    """One step of all data at x_0, where the own mean is current: (N - 1) / N of the gradient."""
    b = step_batches(mlp, ALL5[:1], steps=1)
    alone = trained(mlp, fl.rfedavg_plus(0.1, strength=0.5), ALL5[:1], b)
    rule = fl.RFedAvgPlus(strength=0.5 * 6 / 5, include_self=True)
    below("I-38 self", gap(trained(mlp, fl.Algorithm((rule,)), ALL5[:1], b), alone), 1e-12)
    start = compat.RFedAvgPlusAtStart(strength=0.5 * 6 / 5)
    same = World([(x[:7], y[:7]) for x, y in mlp.data], mlp.gradient, mlp.loss, mlp.w0)
    b = step_batches(same, ALL5[:1], steps=1)
    alone = trained(same, fl.rfedavg_plus(0.1, strength=0.5), ALL5[:1], b)
    found = trained(same, fl.Algorithm((start,)), ALL5[:1], b)
    below("I-38 at the start", gap(found, alone), 1e-12)


@pytest.mark.parametrize("stored", [1, 3])
def test_i39_moon_starts_as_fedavg(mlp, stored):
    mine = local_of(HEAVY)
    plain = trained(mlp, fl.fedavg(local=mine), in_place=False)
    below("I-39 mu 0", gap(trained(mlp, fl.moon(mu=0.0, stored=stored, local=mine)), plain), 1e-12)
    first = trained(mlp, fl.fedavg(local=mine), SOME5[:1])
    moon = fl.moon(mu=5.0, stored=stored, local=mine)
    below("I-39 first round", gap(trained(mlp, moon, SOME5[:1]), first), 1e-12)
    above("I-39 later", gap(trained(mlp, moon), plain), 1e-4)


def test_moon_keeps_participations_and_its_code_keeps_rounds(mlp):
    two, rounds = (fl.moon(0.1, mu=2.0, stored=2, pool=p) for p in ("participations", "rounds"))
    above("MOON two models", gap(trained(mlp, two), trained(mlp, rounds)), 1e-6)
    b = unequal(mlp, ALL5)
    everybody = [trained(mlp, algo, ALL5, b) for algo in (two, rounds)]
    below("MOON two models, everybody", gap(*everybody), 1e-12)


# ---- all names -----------------------------------------------------------------------------------
def tiny(name: str, **options) -> fl.Trainer:
    world = tiny_world()
    chosen = world_for(name, world.sampler, world.work)
    return fl.Trainer(world.task, world.federation, built(name, lr=0.05), **chosen, **options)


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        *crossed([name for name in NEW if name in DISTINCT], [256, 2]),
        *crossed([name for name in NEW if name not in DISTINCT], [256, 2], slow=True),
    ],
)
def test_both_engines_agree(name, piece, monkeypatch):
    monkeypatch.setattr(engine_module, "PIECE", piece)
    plain, together = (tiny(name, engine=e) for e in ("reference", "vectorised"))
    assert [r.floats_up for r in plain.run(4)] == [r.floats_up for r in together.run(4)]
    wanted = numbers(plain)
    gaps = {n: float((v - wanted[n]).abs().max()) for n, v in floats(numbers(together)).items()}
    below(f"engines {name}", max(gaps.values()), 1e-12)


def floats(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: v for n, v in found.items() if v.numel() and v.dtype != torch.bool}
