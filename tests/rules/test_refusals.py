"""What does not go together is refused when it is built, with the reason."""

import re

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.errors import ConfigError
from undrift.rules import compat
from undrift.testing import tiny_world


def trainer(algorithm: fl.Algorithm, **options) -> fl.Trainer:
    world = tiny_world()
    made = {"work": world.work, "sampler": world.sampler, **options}
    return fl.Trainer(world.task, world.federation, algorithm, **made)


def refused(why: str):
    return pytest.raises(ConfigError, match=why)


@pytest.mark.parametrize("algorithm", [fl.vrlsgd(), fl.fedpd()])
@pytest.mark.parametrize("sampler", [fl.Uniform(count=3), fl.Bernoulli(0.9), fl.Sequential(5)])
def test_only_with_everybody(algorithm, sampler):
    with refused("everybody takes part"):
        trainer(algorithm, sampler=sampler)
    trainer(algorithm, sampler=fl.Everyone()).round()


def test_everybody_is_looked_at_in_every_round():
    """Explicit lists may leave somebody out later; the round is refused, nothing has changed."""
    cohorts = fl.Explicit([list(range(6)), [0, 1, 2, 3, 4], list(range(6))])
    run = trainer(fl.vrlsgd(), sampler=cohorts)
    run.round()
    before = run.server.w.clone()
    with refused("everybody takes part"):
        run.round()
    assert run.rounds_done == 1 and torch.equal(run.server.w, before)


def test_everybody_means_those_who_are_enrolled():
    run = trainer(fl.fedpd(), sampler=fl.Everyone())
    run.leave([5])
    run.round()
    assert len(run.round().ids) == 5


def test_a_gamma_that_leaves_no_dual_step():
    """d = 6 / 4; gamma eta Q~ = 1 - (1 - gamma eta)^Q must stay below 1 / d."""
    with refused(r"gamma = 5 and eta = 0.1 with \d+ steps and d = 1.5 leave client \d+ a = "):
        trainer(fl.fedvra(0.1, gamma=5.0))
    trainer(fl.fedvra(0.1, gamma=5.0, a=0.1, d=1.0)).round()
    trainer(fl.fedvra(0.1, gamma=5.0), sampler=fl.Everyone()).round()
    with refused("gamma = 20 and eta = 0.1"):
        trainer(fl.fedvra(0.1, gamma=20.0), sampler=fl.Everyone())


@pytest.mark.parametrize("by_size", [True, False])
@pytest.mark.parametrize("gamma", [0.1, 0.3, 0.5, 2.0])
def test_remark_1_holds_for_the_d_that_acts(gamma, by_size):
    """With weights over the cohort d is 1 / sum omega: a round runs by remark 1, or not at all."""
    world = {"sampler": fl.Uniform(count=3), "work": fl.Work(steps=10)}
    plain = trainer(fl.fedavg(0.1), **world)
    sizes, cohort = plain.federation.sizes, plain.round().ids
    omega = float(sizes[cohort].sum() / sizes.sum()) if by_size else 3 / 6
    reach = 1 - (1 - gamma * 0.1) ** 10
    a = min(1.0, 1 / reach - 1)
    algorithm = fl.fedvra(0.1, gamma=gamma, d="cohort", by_size=by_size)
    if (a + 1 / omega) * reach > 1:
        with refused(r"this cohort's d is 1 / sum omega|leave client"):
            trainer(algorithm, **world)
    else:
        trainer(algorithm, **world).round()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"gamma": -0.1}, "gamma = -0.1 is outside"),
        ({"a": -1.0}, "a = -1.0 is outside"),
        ({"d": float("nan")}, "d = nan is outside"),
        ({"gamma": 0.0, "a": 1.0}, "without gamma has nothing to act on"),
        ({"gamma": [0.0, 0.0]}, "0 for every client"),
        ({"gamma": [0.1, -0.1]}, "at least 0"),
        ({"gamma": "much"}, "must be a number"),
        ({"d": "cohrt"}, "Did you mean 'cohort'"),
    ],
)
def test_numbers_of_fedvra(settings, why):
    with refused(why):
        fl.fedvra(0.1, **settings)


@pytest.mark.parametrize("algorithm", [fl.rfedavg(), fl.rfedavg_plus(), fl.moon()])
def test_features_need_a_layer(algorithm):
    world = tiny_world()
    task = fl.Task(nn.Linear(4, 3), dtype=torch.float64)
    with refused("names no feature layer"):
        fl.Trainer(task, world.federation, algorithm)
    for rule in (compat.MoonRounds(), compat.RFedAvgPlusAtStart()):
        with refused("names no feature layer"):
            fl.Trainer(task, world.federation, fl.Algorithm((rule,)))


@pytest.mark.parametrize("local", [fl.RmsProp(), fl.AdamW()])
@pytest.mark.parametrize(
    "build", [fl.vrlsgd, fl.feddc, lambda local: fl.comfed(local=local, local_momentum="fedadc")]
)
def test_a_mean_gradient_needs_a_linear_local_optimizer(build, local):
    with refused(f"which {type(local).__name__} does not have"):
        build(local=local)


def test_clipping_has_no_exact_length():
    with refused("MomentumAdd needs .* exactly, which clipping at 1.0 destroys"):
        fl.comfed(local=fl.Sgd(clip=1.0), local_momentum="fedadc")
    with refused("NovaBySteps needs"):
        fl.Algorithm((), fl.Sgd(clip=1.0), compat.NovaBySteps())
    fl.comfed(local=fl.Sgd(clip=1.0), local_momentum="mimelite")


@pytest.mark.parametrize("build", [fl.mime, fl.mimelite])
def test_a_direction_that_is_not_linear_has_no_length(build):
    adam = build(base="adam")
    for other in ({"aggregate": fl.Nova()}, {"rules": (*adam.rules, fl.Scaffold())}):
        with refused("bends the gradient|both correct local steps"):
            fl.Algorithm(**{"rules": adam.rules, "local": adam.local, **other})


def test_numbers_of_every_round_need_both():
    """Remark 1 would need d before the round is known."""
    with refused("for a and d, both of them"):
        trainer(fl.fedvra(gamma=0.1, d=[[1.0] * 6] * 3))


def test_q_fedsgd_takes_one_step():
    with refused(r"takes one local step, but a client takes \d+"):
        trainer(fl.qfedsgd())
    trainer(fl.qfedsgd(), work=fl.Work(steps=1, batch=None)).round()


@pytest.mark.parametrize(
    ("build", "settings", "why"),
    [
        (fl.fedadc, {"form": "nesterow"}, "Did you mean 'nesterov'"),
        (fl.mime, {"base": "adm"}, "Did you mean 'adam'"),
        (fl.moon, {"pool": "round"}, "Did you mean 'rounds'"),
        (fl.moon, {"stored": 0}, "stored = 0 must be a whole number of at least 1"),
        (fl.moon, {"stored": 1.5, "pool": "rounds"}, "MoonRounds.stored = 1.5"),
        (fl.adabest, {"patience": 0}, "patience = 0.0 is outside"),
        (fl.two_blocks, {"algorithm": fl.fedavg(), "steps": -1}, "TwoBlocks.steps = -1"),
        (fl.PseudoLabels, {"every": 0}, "PseudoLabels.every = 0"),
        (fl.Clusters, {"groups": 1}, "Clusters.groups = 1"),
        (fl.rfedavg_plus, {"refresh": "al"}, "Did you mean 'all'"),
        (fl.slowmo, {"buffers": "kept"}, "Did you mean 'keep'"),
        (fl.comfed, {"local_momentum": "mime"}, "Did you mean 'mimelite'"),
        (fl.scaffold, {"correction": "poststep"}, "Did you mean"),
        (fl.scaffold, {"correction": "post_step", "option": "I"}, "option II"),
        (fl.comfed, {"client": "scaf", "correction": "poststep"}, "Did you mean 'post_step'"),
        (
            fl.comfed,
            {"client": "scaf", "correction": "post_step", "mode": "literal"},
            "no SCAFFOLD named",
        ),
        (fl.comfed, {"client": "scaf", "mode": "fresh", "option": "II"}, "no SCAFFOLD named"),
        (fl.comfed, {"client": "scaf", "c_weights": "sizes"}, "Did you mean 'size'"),
        (fl.scaffold, {"correction": "post_step", "scaffold_base_lr": True}, "scaffold_base_lr"),
        (fl.scaffold, {"scaffold_base_lr": True, "option": "I"}, "option II"),
        (fl.scaffold, {"correction": "unbalanced", "c_weights": "size"}, "uniform weights of c"),
        (fl.feddyn, {"solver": "exakt"}, "Did you mean 'exact'"),
        (fl.feddyn, {"solver": "exact", "half_pull": True}, "no half_pull"),
        (fl.feddyn, {"solver": "exact", "alpha": 0.0}, "outside"),
        (fl.fedpd, {"start": "mine"}, "Known: received, own"),
        (fl.fedpd, {"skip": 1.5}, "outside"),
        (fl.vrlsgd, {"correction": "poststep"}, "Did you mean 'post_step'"),
        (fl.vrlsgd, {"buffers": "keep"}, "Known: reset, average"),
        (fl.fednova, {"tau_eff": "step"}, "Did you mean 'steps'"),
        (fl.fednova, {"tau_eff": "steps", "by_size": False}, "weighted by size"),
        (fl.rfedavg, {"single_batch": 0}, "single_batch = 0"),
        (fl.rfedavg, {"single_batch": 4, "noise": fl.FeatureNoise()}, "over all own examples"),
        (fl.fedvra, {"gamma": [[0.1, 0.2]]}, "gamma must be a number"),
        (fl.fedvra, {"a": [[0.1, 0.2], [0.1]]}, "all of one length"),
        (fl.sgd, {"lr": []}, "a list starts above 0"),
        (fl.sgd, {"lr": [0.1], "lr_decay": 0.9}, "no lr_decay beside it"),
        (fl.sgd, {"lr_decay": 0.9, "schedule": fl.Exponential(0.9)}, "give one schedule"),
        (fl.sgd, {"lr": [0.1, -0.1]}, "numbers of at least 0"),
        (fl.sgd, {"clip": 1.0, "clip_eps": -1.0}, "outside"),
        (fl.feddyn, {"alpha": -1.0}, "outside"),
        (fl.fedpd, {"rho": 0.0}, "outside"),
        (fl.adabest, {"beta": 1.5}, "outside"),
        (fl.feddyn, {"lr": 0.1, "local": fl.Sgd()}, "give the learning rate once"),
    ],
)
def test_settings(build, settings, why):
    with refused(why):
        build(**settings)


@pytest.mark.parametrize(
    ("build", "setting"),
    [
        (fl.comfed, "client"),
        (fl.comfed, "server"),
        (fl.comfed, "local_momentum"),
        (fl.comfed, "correction"),
        (fl.comfed, "mode"),
        (fl.feddyn, "solver"),
        (fl.fedadc, "form"),
        (fl.fednova, "tau_eff"),
        (fl.fedpd, "start"),
        (fl.fedrl, "client"),
        (fl.fedrl, "pca"),
        (fl.mime, "base"),
        (fl.mimelite, "base"),
        (fl.moon, "pool"),
        (fl.rfedavg_plus, "refresh"),
        (fl.scaffold, "c_weights"),
        (fl.scaffold, "correction"),
        (fl.scaffold, "option"),
        (fl.slowmo, "buffers"),
        (fl.vrlsgd, "buffers"),
        (fl.vrlsgd, "correction"),
        (fl.fedadam, "bias_correction"),
    ],
)
@pytest.mark.parametrize("value", [["prox"], {}, None])
def test_a_name_that_is_no_string(build, setting, value):
    with refused(f"no .* named .*{re.escape(repr(value))}"):
        build(**{setting: value})


def test_a_private_block_as_wide_as_the_output():
    with refused("PseudoLabels.classes = 10, but the module gives"):
        trainer(fl.fedvra_u(0.1)).round()


def test_a_kept_optimizer_state_belongs_to_the_optimizer():
    with refused("must be the algorithm's local optimizer"):
        fl.Algorithm((compat.KeepOptimizer(fl.AdamW()),), fl.HeavyBall())
