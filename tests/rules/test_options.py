"""What the settings of the later algorithms do."""

import numpy as np
import pytest
import torch

import undrift as fl
from longhand.cases import ALL, SIZES, SOME, WORLDS, above, below
from proofs.bridge import gap, run
from undrift.core.tree import replace
from undrift.experiment.names import decode_algorithm, encode_algorithm
from undrift.rules.adabest import Plateau, watched
from undrift.testing import tiny_world
from undrift.verify.longhand.worlds import World, epoch_batches

SOME5, ALL5 = SOME[:5], ALL[:5]


@pytest.fixture
def mlp() -> World:
    return WORLDS["mlp"]()


def batches(world, rounds=SOME5):
    return epoch_batches(world, rounds, 6, epochs=2)


# ---- AdaBest -------------------------------------------------------------------------------------
def test_adabests_mean_size_is_frozen_when_a_round_starts(mlp):
    """By hand: mu_i = mu nbar / n_i, nbar over the participations of earlier rounds."""
    b, mu, beta = batches(mlp), 0.3, 0.6
    found = run(mlp, SOME5, b, fl.adabest(0.1, mu=mu, beta=beta, unbalanced=True))
    x, average = mlp.w0.copy(), mlp.w0.copy()
    h, last, seen = [0.0] * len(SIZES), [0] * len(SIZES), []
    for t, ids in enumerate(SOME5, 1):
        nbar, ends = np.mean(seen) if seen else 0.0, []
        for i in ids:
            y = x.copy()
            for batch in b[t - 1, i]:
                g = mlp.gradient(y, *(part[batch] for part in mlp.data[i]))
                y = y - 0.1 * (g - mu * nbar / SIZES[i] * h[i])
            h[i] = h[i] / (t - last[i]) + (x - y) if last[i] else x - y
            last[i] = t
            ends.append(y)
        seen += [SIZES[i] for i in ids]
        new = np.mean(ends, axis=0)
        x, average = new - beta * (average - new), new
        below("AdaBest unbalanced", np.abs(found.x[t - 1] - x).max(), 1e-12)


def test_adabest_does_not_know_how_many_there_are(mlp):
    """Clients who never take part change nothing."""
    more = World([*mlp.data, *mlp.data], mlp.gradient, mlp.loss, mlp.w0)
    b = batches(mlp)
    algo = fl.adabest(0.1, unbalanced=True)
    below("population", gap(run(mlp, SOME5, b, algo), run(more, SOME5, b, algo)), 0.0)
    dyn = fl.feddyn(0.1, alpha=0.1)
    above("FedDyn does", gap(run(mlp, SOME5, b, dyn), run(more, SOME5, b, dyn)), 1e-4)


def test_clients_may_come_and_go():
    run = tiny_world().trainer(fl.adabest(0.1, unbalanced=True))
    run.round()
    run.leave([0, 1])
    run.round()
    run.enroll([0, 1])
    assert not run.round().skipped


def follow(values: list[float], patience: int) -> list[float]:
    """Give the factor on beta after each value."""
    zero = torch.zeros((), dtype=torch.float64)
    plateau, factors = Plateau(zero + torch.inf, zero, zero, zero + 1), []
    for value in values:
        plateau = watched(plateau, torch.tensor(value), patience)
        factors.append(float(plateau.factor))
    return factors


def test_beta_falls_on_a_plateau():
    """Three rounds without 1 % of progress, then three of cooldown, then three again."""
    assert follow([1.0, 0.9, 0.8, 0.7, 0.6], 3) == [1.0] * 5
    found = follow([1.0, 0.995, 1.0, 2.0, *[1.0] * 9], 3)
    assert found == pytest.approx([1.0] * 3 + [0.9] * 6 + [0.81] * 4)


def test_patience_changes_nothing_before_it_is_lost(mlp):
    b = batches(mlp)
    plain = run(mlp, SOME5, b, fl.adabest(0.1, beta=0.8))
    below("patient", gap(run(mlp, SOME5, b, fl.adabest(0.1, beta=0.8, patience=50)), plain), 0.0)
    above("at once", gap(run(mlp, SOME5, b, fl.adabest(0.1, beta=0.8, patience=1)), plain), 1e-6)


# ---- servers -------------------------------------------------------------------------------------
def test_amsgrad_keeps_the_largest_second_moment(mlp):
    b, local = batches(mlp), fl.Sgd(lr=0.1)
    settings = {"server_lr": 0.05, "beta2": 0.3, "local": local}
    ams = run(mlp, SOME5, b, fl.fedamsgrad(**settings))
    adam = run(mlp, SOME5, b, fl.fedadam(**settings))
    assert np.array_equal(ams.x[0], adam.x[0])
    above("AMSGrad later", gap(ams, adam), 1e-4)
    top = np.zeros_like(mlp.w0)
    for state in ams.server:
        top = np.maximum(top, state["0.Adaptive.v"])
        assert np.array_equal(state["0.Adaptive.top"], top)


def test_fedadc_by_hand(mlp):
    """Nesterov form with decay: the gradient and its decay are taken after the momentum's part."""
    rounds = ALL5[:3]
    b, eta, decay = batches(mlp, rounds), 0.1, 0.05
    local = fl.Sgd(lr=eta, weight_decay=decay)
    algo = fl.fedadc(beta_local=0.6, beta_global=0.8, server_lr=0.7, form="nesterov", local=local)
    found = run(mlp, rounds, b, algo)
    x, m = mlp.w0.copy(), np.zeros_like(mlp.w0)
    for r, ids in enumerate(rounds):
        ends = []
        for i in ids:
            y, share = x.copy(), 0.6 * m / len(b[r, i])
            for batch in b[r, i]:
                z = y - eta * share
                y = z - eta * (mlp.gradient(z, *(part[batch] for part in mlp.data[i])) + decay * z)
            ends.append(y)
        m = (x - np.mean(ends, axis=0)) / eta + (0.8 - 0.6) * m
        x = x - 0.7 * eta * m
        below("FedADC", np.abs(found.x[r] - x).max(), 1e-12)


# ---- features ------------------------------------------------------------------------------------
def test_everybody_may_look_after_every_round():
    world = tiny_world()
    some, everybody = (
        world.trainer(fl.rfedavg_plus(0.1, strength=0.5, refresh=r)) for r in ("cohort", "all")
    )
    for trainer in (some, everybody):
        trainer.run(2)
    assert not torch.equal(some.server.w, everybody.server.w)
    assert everybody.round().floats_up > some.round().floats_up
    everyone = [
        world._replace(sampler=fl.Everyone()).trainer(t.algorithm) for t in (some, everybody)
    ]
    for trainer in everyone:
        trainer.run(3)
    away = float((everyone[0].server.w - everyone[1].server.w).abs().max())
    below("everybody", away, 1e-12)


def test_newcomers_bring_their_feature_means():
    world = tiny_world()
    sampler = fl.Everyone()
    trainer = fl.Trainer(
        world.task, world.federation, fl.rfedavg(0.1), sampler=sampler, enrolled=[0, 1, 2]
    )
    trainer.round()
    known = trainer.server_state()["0.RFedAvg.known"]
    assert known.tolist() == [1, 1, 1, 0, 0, 0]
    trainer.enroll([4])
    assert trainer.server_state()["0.RFedAvg.known"].tolist() == [1, 1, 1, 0, 1, 0]
    assert not trainer.round().skipped


# ---- composing -----------------------------------------------------------------------------------
def test_rules_compose_with_everything(mlp):
    """A chain of unlike rules, momentum, clipping, an adaptive server: both engines agree."""
    world = tiny_world()
    rules = (fl.Prox(0.1), fl.AdaBest(0.1), fl.Moon(0.5), fl.RFedAvgPlus(0.1), fl.MimeLite())
    local = fl.HeavyBall(lr=0.05, weight_decay=1e-3, clip=1.0, schedule=fl.Exponential(0.9))
    chains = {
        "many rules": fl.Algorithm(rules, local, fl.Mean(), fl.Adaptive("yogi")),
        "fair SCAFFOLD": replace(fl.scaffold(local=local), aggregate=fl.QFair(0.5)),
        "FedVRA, SlowMo": replace(fl.fedvra(local=local), server=fl.SlowMo()),
        "FedDC, Nesterov": fl.feddc(local=fl.Nesterov(lr=0.05)),
        "AdaBest, RMSProp": fl.adabest(local=fl.RmsProp(lr=0.01), server_lr=0.5),
        "MOON, Nova": replace(fl.moon(0.1), aggregate=fl.Nova()),
        "Mime, AMSGrad": replace(fl.mime(0.1), server=fl.Adaptive("amsgrad")),
    }
    for name, algo in chains.items():
        plain, together = (world.trainer(algo, engine=e) for e in ("reference", "vectorised"))
        for trainer in (plain, together):
            assert not any(r.skipped for r in trainer.run(3))
        below(name, float((plain.server.w - together.server.w).abs().max()), 1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [
        fl.fedvra(gamma=[0.1, 0.2], a=[0.5, 0.5], d=1.0),
        fl.rfedavg(noise=fl.FeatureNoise(2.0)),
        fl.fedvra_u(objective=fl.Clusters(groups=4), radius=2.0),
        fl.slowmo(buffers="keep", local=fl.HeavyBall()),
        fl.mime(base="adam", bias_correction=True),
        fl.moon(stored=3, pool="rounds"),
        fl.adabest(patience=20, unbalanced=True),
        fl.feddyn(clip_prox=False, local=fl.sgd(0.1, clip=1.0)),
        fl.comfed("scaf", "yogi", local_momentum="fedadc", b=0.5),
        fl.comfed("prox", "adam", local_momentum="mimelite", scale=True, by_size=False),
        fl.feddyn(solver="exact", by_size=True),
        fl.feddyn(half_pull=True),
        fl.feddc(steps=5.0, scaffold_base_lr=True, local=fl.sgd(0.2, lr_decay=0.9)),
        fl.fedpd(exchanges=[0, 3], start="own"),
        fl.fedpd(skip=0.25),
        fl.fedadmm(restart=True, server_schedule=fl.Milestones((60,), (0.5,))),
        fl.vrlsgd(correction="post_step", buffers="average", local=fl.HeavyBall()),
        fl.fedvra(gamma=0.1, a=[[0.5, 0.4], [0.3, 0.2]], d=[[1.0, 1.5], [2.0, 2.5]]),
        fl.fednova(mu=0.1, gmf=0.5, tau_eff="steps", local=fl.sgd([0.1, 0.05], 0.9)),
        fl.scaffold(
            correction="unbalanced", scaffold_base_lr=True, local=fl.sgd(0.1, lr_decay=0.9)
        ),
        fl.scaffold_m(printed_decay=True),
        fl.rfedavg_plus(include_self=True, single_batch=8, by_size=False),
        fl.mimelite(base="trace"),
    ],
)
def test_sentences_are_tables_and_back(algorithm):
    assert decode_algorithm(encode_algorithm(algorithm)) == algorithm
