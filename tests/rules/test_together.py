"""Which parts make no sense together: refused when the sentence or the experiment is built."""

from typing import Any

import pytest

import undrift as fl
from experiment.tiny import tiny
from undrift.core.local import Schedule
from undrift.errors import ConfigError
from undrift.experiment.world import build
from undrift.rules import FedDynExact, compat
from undrift.rules.observe import LastModel, Watch
from undrift.testing import tiny_world


def trainer(algorithm: fl.Algorithm, **options) -> fl.Trainer:
    world = tiny_world()
    made = {"work": world.work, "sampler": world.sampler, **options}
    return fl.Trainer(world.task, world.federation, algorithm, **made)


def refused(why: str):
    return pytest.raises(ConfigError, match=why)


def sentence(*rules: fl.Rule, **parts: Any) -> fl.Algorithm:
    return fl.Algorithm(rules, **parts)


# ---- one of a kind -------------------------------------------------------------------------------
VARIATES = [fl.Scaffold(), fl.ScaffoldGradient(), fl.ScaffoldFresh(), fl.ScaffoldM(), fl.Mime()]
VARIATES += [fl.VrlSgd(), fl.FedDc(), compat.ScaffoldPostStep()]
DUALS = [fl.FedDyn(), fl.FedAdmm(), fl.FedPd(), fl.FedDc(), fl.AdaBest(), fl.FedVra(d=1.0)]
MOMENTA = [fl.FedAdc(), fl.MomentumMix(), fl.MomentumAdd(), fl.Mime(), fl.MimeLite()]
STATES = [compat.KeepOptimizer(fl.Sgd()), compat.AverageOptimizer(fl.Sgd())]


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        (VARIATES, "correct local steps by control variates"),
        (DUALS, "pull a client back by what it remembers"),
        (MOMENTA, "take the server's momentum into local steps"),
        ([fl.TwoBlocks()], "put another objective in the place of the task's loss"),
        (STATES, "choose the first state of the local optimizer"),
    ],
)
def test_what_only_one_rule_can_do(rules, why):
    for one in rules:
        for other in rules:
            both = f"{type(one).__name__} and {type(other).__name__} both"
            with refused(f"{both} .*: leave one of them out"):
                sentence(one, other)
    with refused(why):
        sentence(rules[0], fl.Prox(), rules[0])


def test_a_rule_with_a_client_half_is_no_server_optimizer():
    for rule in (fl.Scaffold(), fl.Prox(), fl.RFedAvg()):
        with refused("has a client half, which would never run: put it among the rules"):
            sentence(server=rule)


# ---- means ---------------------------------------------------------------------------------------
NO_MEANS = [fl.QFair(), fl.ShareSum(), compat.NovaHarmonic(), compat.NovaBySteps()]


@pytest.mark.parametrize("rule", [fl.FedDyn(), fl.FedAdmm(), fl.FedPd(), fl.FedAdc(), fl.VrlSgd()])
def test_a_mean_of_deltas(rule):
    sentence(rule, aggregate=fl.Mean())
    for aggregate in (fl.Nova(), *NO_MEANS):
        given = f"which {type(aggregate).__name__} does not give: use Mean"
        with refused(f"needs the update to be a mean of its clients' deltas, {given}"):
            sentence(rule, aggregate=aggregate)


@pytest.mark.parametrize("rule", [fl.ScaffoldM(), fl.MomentumMix(), fl.MomentumAdd()])
def test_a_mean_of_steps(rule):
    for aggregate in (fl.Mean(), fl.Nova()):
        sentence(rule, aggregate=aggregate)
    for aggregate in NO_MEANS:
        with refused("needs the update to be a mean of its clients' steps"):
            sentence(rule, aggregate=aggregate)


def test_b_m_leaves_the_update_by_the_weights_it_came_in():
    with refused("MomentumAdd takes b M out of the update again, by size"):
        sentence(fl.MomentumAdd(), aggregate=fl.Mean(by_size=False))
    sentence(fl.MomentumMix(), aggregate=fl.Mean(by_size=False))


def test_what_changes_an_update_stands_behind_who_reads_it():
    with refused("but ServerMomentum changes it before: put FedDyn first"):
        sentence(fl.ServerMomentum(), fl.FedDyn())
    sentence(fl.FedDyn(), fl.ServerMomentum())
    with refused("but AdaBest changes it before: put ScaffoldM first"):
        sentence(fl.AdaBest(), fl.ScaffoldM())
    sentence(fl.ScaffoldM(), fl.AdaBest())
    for pair in ((fl.FedDyn(), fl.FedAdc()), (fl.FedAdc(), fl.FedDyn())):
        with refused("changes it before: leave one of them out"):
            sentence(*pair)
    with refused("but FedAdmm sends something else than what its model lost"):
        sentence(fl.ScaffoldM(), fl.FedAdmm())


@pytest.mark.parametrize("server", [fl.Adaptive(), fl.ServerMomentum(), fl.SlowMo(), fl.Ball(1.0)])
@pytest.mark.parametrize("rule", [fl.VrlSgd(), fl.FedAdmm()])
def test_what_adds_up_over_rounds_needs_a_plain_server(rule, server):
    with refused(f"but {type(server).__name__} changes the update: use a server step"):
        sentence(rule, server=server)
    with refused(f"but {type(server).__name__} changes the update: use a server step"):
        sentence(rule, server)


def test_vrl_sgd_takes_the_next_model_for_the_mean():
    with refused("but Step changes the update: use a server step of 1"):
        sentence(fl.VrlSgd(), server=fl.Step(0.5))
    sentence(fl.VrlSgd(), server=fl.Step(1.0))
    sentence(fl.FedAdmm(), server=fl.Step(0.5))


def test_weights_of_fedvra():
    with refused("before Mean makes up for absent clients twice: use ShareSum, or give d = 1"):
        sentence(fl.FedVra())
    with refused("give both the same weights"):
        sentence(fl.FedVra(by_size=False), aggregate=fl.ShareSum())


# ---- steps ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("local", [fl.HeavyBall(), fl.AdamW()])
def test_fedadc_spreads_its_momentum_over_plain_steps(local):
    with refused("FedAdc spreads its momentum over plain steps .* would not leave it as it is"):
        sentence(fl.FedAdc(), local=local)
    sentence(fl.FedAdc(beta_local=0.0), local=local)  # nothing to spread


def test_alpha_x_and_alpha_y_are_scaled_alike():
    for schedule in (fl.Exponential(0.9), Schedule()):
        sentence(compat.FedDynUnclipped(), local=fl.Sgd(clip=1.0, schedule=schedule))
    for local in (fl.HeavyBall(), fl.Sgd(schedule=fl.InverseTime())):
        with refused("would scale alpha x alone"):
            sentence(compat.FedDynUnclipped(), local=local)
    with refused("so that MimeLite would scale alpha x alone"):
        sentence(compat.FedDynUnclipped(), fl.MimeLite())


def test_who_takes_other_steps_stands_alone():
    with refused("solves its problem at once, so that Prox would be wrong about its local steps"):
        sentence(FedDynExact(), fl.Prox())
    with refused("so that MoonRounds would be wrong"):
        sentence(FedDynExact(), compat.MoonRounds())
    with refused("starts elsewhere than at the model that was sent, so that Scaffold would"):
        sentence(fl.Scaffold(), compat.FedPdAlone())
    sentence(LastModel(), FedDynExact())


def test_places_in_the_chain():
    with refused("Adaptive would take the model out of Ball: put Ball last"):
        sentence(fl.Ball(1.0), server=fl.Adaptive())
    with refused("AdaBest would take the model out of Ball"):
        sentence(fl.Ball(1.0), fl.AdaBest())
    sentence(fl.FedVra(d=1.0), fl.Ball(1.0))
    sentence(server=fl.Ball(1.0))
    with refused("Watch stands behind Prox, which may change what it sees: put it first"):
        sentence(fl.Prox(), Watch())
    sentence(LastModel(), Watch(), fl.Prox())
    for rule in (fl.ScaffoldGradient(), fl.ScaffoldFresh()):
        with refused("corrects gradients, not what MomentumMix makes of them: put it first"):
            sentence(fl.MomentumMix(), rule)
        sentence(rule, fl.MomentumMix())


@pytest.mark.parametrize("settings", [{"beta1": 1.0}, {"beta2": 1.0}, {"tau": 0.0}])
def test_moments_that_would_divide_nothing_by_nothing(settings):
    with refused("outside"):
        fl.Adaptive(**settings)


def test_the_longest_work_counts_not_the_first_round():
    """Who draws many steps in a later round would be refused in the middle of a run."""
    more = {"sampler": fl.Uniform(count=3), "seed": 1}
    work, algorithm = fl.Work(steps=(1, 400)), fl.fedvra(0.1, gamma=0.02)
    first = int(trainer(fl.fedavg(), work=work, **more).roster.cohort(0).steps.max())
    trainer(algorithm, work=fl.Work(steps=first), **more)
    with refused("gamma = 0.02 and eta = 0.1 with 400 steps and d = 2"):
        trainer(algorithm, work=work, **more)
    more, work = {"sampler": fl.Uniform(count=1), "seed": 2}, fl.Work(steps=(1, 2))
    assert trainer(fl.fedavg(), work=work, **more).roster.cohort(0).steps.tolist() == [1]
    with refused("takes one local step, but a client takes 2"):
        trainer(fl.qfedsgd(), work=work, **more)


def test_what_makes_sense_together():
    """Unlike mechanisms, in orders and company that the rules above allow."""
    uniform, slow = {"aggregate": fl.Mean(by_size=False)}, {"local": fl.Sgd(lr=0.05)}
    for algorithm in (
        sentence(fl.Scaffold(), fl.FedDyn(0.1), **slow, **uniform),
        sentence(fl.FedAdmm(0.1), fl.Scaffold(), **slow, **uniform),
        sentence(fl.Prox(), fl.Moon(), fl.RFedAvg(), fl.Scaffold(), **slow, aggregate=fl.Nova()),
        sentence(fl.Scaffold(), fl.FedAdc(), **slow, server=fl.Adaptive("yogi")),
    ):
        assert not trainer(algorithm).round().skipped


# ---- the same in files ---------------------------------------------------------------------------
SENTENCES = {
    "rules=[{use='Scaffold'}, {use='Mime'}]": "both correct local steps by control variates",
    "rules=[{use='FedDyn'}], aggregate={use='Nova'}": "which Nova does not give: use Mean",
    "rules=[{use='FedAdc'}], local={use='HeavyBall'}": "HeavyBall would not leave it as it is",
    "aggregate={use='Nova'}, local={use='Sgd', clip=1.0}": "which clipping at 1.0 destroys",
    "use='fednova', local={use='Sgd', clip=1.0}": "which clipping at 1.0 destroys",
    "rules=[{use='Scaffold'}], local={use='AdamW'}": "which AdamW does not have",
    "server={use='Scaffold'}": "has a client half",
    "rules=[{use='VrlSgd'}], server={use='Adaptive'}": "Adaptive changes the update",
}


@pytest.mark.parametrize("text", SENTENCES)
def test_a_file_is_refused_with_the_same_reason(text):
    with refused(f"^algorithm.*: .*{SENTENCES[text]}"):
        tiny(f"algorithm={{{text}}}")


EXPERIMENTS = {
    "use='vrlsgd'": "VrlSgd is defined only where everybody takes part",
    "use='fedpd'": "FedPd is defined only where everybody takes part",
    "use='qfedsgd'": "takes one local step, but a client takes 2",
    "use='fedvra', lr=0.1, gamma=9.0": "leave client",
    "rules=[{use='Scaffold'}, {use='VrlSgd'}]": "control variates",
}


@pytest.mark.parametrize("text", EXPERIMENTS)
def test_an_experiment_is_refused_when_it_is_built(text):
    with refused(EXPERIMENTS[text]):
        build(tiny(f"algorithm={{{text}}}"))


def test_an_experiment_in_python_is_refused_alike():
    made = tiny()
    with refused("VrlSgd is defined only where everybody takes part"):
        build(fl.Experiment(made.data, made.model, fl.vrlsgd(), sampler=made.sampler))
    build(fl.Experiment(made.data, made.model, fl.vrlsgd()))
