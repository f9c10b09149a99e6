"""Other people's behaviours: where they agree with the rules, and where they part."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import undrift as fl
from longhand.cases import ALL, CLIPPED, HEAVY, RMSPROP, SGD, SIZES, SOME, WORLDS, above, below
from proofs.bridge import gap, local_of, run, task_of
from undrift.core.tree import replace
from undrift.rules import compat
from undrift.verify.longhand.worlds import World, epoch_batches

SOME5, ALL5 = SOME[:5], ALL[:5]
STEADY = fl.Sgd(lr=0.1)
FALLING = fl.Sgd(lr=0.1, schedule=fl.Exponential(0.8))


@pytest.fixture
def mlp() -> World:
    return WORLDS["mlp"]()


def even(world: World) -> World:
    return World([(x[:7], y[:7]) for x, y in world.data], world.gradient, world.loss, world.w0)


def trained(world, algorithm, rounds=SOME5):
    return run(world, rounds, epoch_batches(world, rounds, 6, epochs=2), algorithm)


def with_rule(algorithm: fl.Algorithm, *rules: fl.Rule) -> fl.Algorithm:
    return replace(algorithm, rules=rules)


# ---- SCAFFOLD ------------------------------------------------------------------------------------
def test_the_base_rate_matters_only_while_rates_fall(mlp):
    for local, compare, limit in ((STEADY, below, 1e-12), (FALLING, above, 1e-4)):
        algo = fl.scaffold(local=local)
        found = trained(mlp, with_rule(algo, compat.ScaffoldBaseLr(lr=0.1)))
        compare("base lr", gap(found, trained(mlp, algo)), limit)


def test_correcting_after_the_step_matters_only_under_momentum(mlp):
    for local, compare, limit in ((SGD, below, 1e-12), (HEAVY, above, 1e-4)):
        mine = local_of(local)
        algo = fl.scaffold(local=mine)
        found = trained(mlp, with_rule(algo, compat.ScaffoldPostStep()))
        compare("post step", gap(found, trained(mlp, algo)), limit)
    trained(mlp, fl.scaffold(correction="post_step", by_size=True, local=local_of(RMSPROP)))


AFTER_THE_STEP = {
    "persistent": compat.ScaffoldPostStepGradient,
    "fresh": compat.ScaffoldFreshPostStep,
}


@pytest.mark.parametrize("mode", ["persistent", "fresh"])
def test_comfeds_scaffold_after_the_step(mlp, mode):
    for local, compare, limit in ((SGD, below, 1e-12), (HEAVY, above, 1e-4)):
        algo = fl.comfed("scaf", mode=mode, local=local_of(local))
        after = with_rule(algo, AFTER_THE_STEP[mode]())
        compare(f"{mode}, after the step", gap(*(trained(mlp, a) for a in (algo, after))), limit)
        if local is HEAVY:
            named = fl.comfed("scaf", mode=mode, correction="post_step", local=local_of(local))
            assert named == after


@pytest.mark.parametrize("mode", ["persistent", "fresh"])
def test_comfeds_scaffold_after_momentum_by_hand(mlp, mode):
    b = epoch_batches(mlp, SOME5, 6, epochs=2)
    local = fl.HeavyBall(lr=0.05, momentum=0.9)
    algorithm = fl.comfed("scaf", mode=mode, correction="post_step", local=local)
    found = run(mlp, SOME5, b, algorithm)
    x, c, own = mlp.w0.copy(), 0.0, [np.zeros_like(mlp.w0) for _ in SIZES]
    for r, ids in enumerate(SOME5):
        ends, slopes = [], [mlp.gradient(x, *mlp.data[i]) for i in ids]
        for i, slope in zip(ids, slopes, strict=True):
            y, buffer, c_i = x.copy(), 0.0, slope if mode == "fresh" else own[i]
            for batch in b[r, i]:
                buffer = 0.9 * buffer + mlp.gradient(y, *(part[batch] for part in mlp.data[i]))
                y = y - 0.05 * buffer - 0.05 * (c - c_i)
            ends.append(y)
        weights = np.array([SIZES[i] for i in ids]) / sum(SIZES[i] for i in ids)
        x = weights @ np.array(ends)
        if mode == "fresh":
            c = weights @ np.array(slopes)
        else:
            c = c + sum(s - own[i] for i, s in zip(ids, slopes, strict=True)) / len(SIZES)
            for i, slope in zip(ids, slopes, strict=True):
                own[i] = slope
        below(mode, np.abs(found.x[r] - x).max(), 1e-12)


def test_after_momentum_by_hand(mlp):
    """NIID-Bench: torch's SGD with momentum, then w -= lr (c - c_i)."""
    b = epoch_batches(mlp, SOME5, 6, epochs=2)
    local = fl.HeavyBall(lr=0.05, momentum=0.9)
    found = run(mlp, SOME5, b, fl.scaffold(correction="post_step", by_size=True, local=local))
    x, c, own = mlp.w0.copy(), 0.0, [np.zeros_like(mlp.w0) for _ in SIZES]
    for r, ids in enumerate(SOME5):
        ends, changes = [], []
        for i in ids:
            y, buffer = x.copy(), 0.0
            for batch in b[r, i]:
                buffer = 0.9 * buffer + mlp.gradient(y, *(part[batch] for part in mlp.data[i]))
                y = y - 0.05 * buffer - 0.05 * (c - own[i])
            new = own[i] - c + (x - y) / (len(b[r, i]) * 0.05)
            changes.append(new - own[i])
            own[i] = new
            ends.append(y)
        weights = np.array([SIZES[i] for i in ids]) / sum(SIZES[i] for i in ids)
        x, c = weights @ np.array(ends), c + sum(changes) / len(SIZES)
        below("NIID-Bench", np.abs(found.x[r] - x).max(), 1e-12)


def test_unbalanced_scaffold_matters_only_for_unequal_sizes(mlp):
    algo = fl.scaffold(0.1)
    for world, compare, limit in ((even(mlp), below, 1e-12), (mlp, above, 1e-4)):
        found = trained(world, with_rule(algo, compat.ScaffoldUnbalanced()))
        compare("unbalanced", gap(found, trained(world, algo)), limit)


# ---- pulls ---------------------------------------------------------------------------------------
def test_a_pull_after_clipping_matters_only_under_clipping(mlp):
    for local, compare, limit in ((SGD, below, 1e-12), (CLIPPED, above, 1e-4)):
        mine = local_of(local)
        algo = fl.feddyn(alpha=0.3, local=mine)
        found = trained(mlp, with_rule(algo, compat.FedDynUnclipped(0.3)))
        compare("clip_prox", gap(found, trained(mlp, algo)), limit)


def test_clip_prox_by_hand(mlp):
    """FedDyn's code, one client of two: clip(g + alpha (hB - x)) + (alpha + wd) y."""
    rounds, alpha, decay, most = [[0], [0], [1], [0]], 0.5, 0.01, 0.2
    b = epoch_batches(mlp, rounds, 6, epochs=1)
    local = fl.Sgd(lr=0.1, weight_decay=decay, clip=most)
    found = run(mlp, rounds, b, fl.feddyn(alpha=alpha, clip_prox=False, local=local))
    x, sums = mlp.w0.copy(), [np.zeros_like(mlp.w0) for _ in SIZES]
    for r, (i,) in enumerate(rounds):
        y = x.copy()
        for batch in b[r, i]:
            u = mlp.gradient(y, *(part[batch] for part in mlp.data[i])) + alpha * (sums[i] - x)
            u = u * min(1, most / (np.linalg.norm(u) + 1e-6))
            y = y - 0.1 * (u + (alpha + decay) * y)
        sums[i] = sums[i] + (y - x)
        x = y + sum(sums) / len(SIZES)
        below("clip_prox by hand", np.abs(found.x[r] - x).max(), 1e-12)


def test_half_a_pull():
    assert compat.prox_of_rfedavg(0.5) == fl.Prox(1.0)
    assert compat.prox_of_fedsim(0.5) == fl.Prox(0.25)


def test_fedsims_feddyn_pulls_half(mlp):
    algo = fl.feddyn(alpha=0.3, local=STEADY)
    half = trained(mlp, with_rule(algo, compat.FedDynUnclipped(0.3, half_pull=True)))
    # FedDyn's own pull, half of which is taken back
    wanted = trained(mlp, with_rule(algo, Push(0.15), fl.FedDyn(0.3)))
    below("fedsim", gap(half, wanted), 1e-12)


@fl.record
class Push(fl.Rule):
    """Prox with the other sign."""

    mu: float = 0.1

    def direction(self, g, view):
        return g - self.mu * (view.w - view.w0)


def test_fedadmms_code_doubles_its_messages(mlp):
    """It is FedAvg with a server step of 2, and the same duals."""
    algo = fl.fedadmm(rho=0.3, local=STEADY)
    found = trained(mlp, with_rule(algo, compat.FedAdmmRestart(0.3)), ALL5[:1])
    plain = fl.Algorithm((fl.Prox(0.3),), STEADY, fl.Mean(False), fl.Step(2.0))
    below("FedADMM's code", gap(found, trained(mlp, plain, ALL5[:1])), 1e-12)
    later = trained(mlp, with_rule(algo, compat.FedAdmmRestart(0.3)), ALL5)
    above("FedADMM's code later", gap(later, trained(mlp, algo, ALL5)), 1e-4)


def test_fedpd_skips_exchanges_by_chance():
    """The same rounds for everybody, and in both engines; the duals go on all the same."""
    from undrift.testing import tiny_world

    world = tiny_world()._replace(sampler=fl.Everyone())
    kept = {}
    for engine in ("reference", "vectorised"):
        trainer = world.trainer(fl.fedpd(0.1, rho=0.5, skip=0.5), engine=engine)
        models, duals = [trainer.server.w], []
        for _ in range(12):
            trainer.round()
            models.append(trainer.server.w)
            duals.append(trainer.client_state(0)["0.FedPdAlone.dual"])
        kept[engine] = models
        assert all(not torch.equal(a, b) for a, b in itertools.pairwise(duals))
    still = [torch.equal(a, b) for a, b in itertools.pairwise(kept["reference"])]
    assert 2 <= sum(still) <= 10
    away = max((a - b).abs().max() for a, b in zip(*kept.values(), strict=True))
    below("engines", float(away), 1e-12)


def test_fedpd_alone_with_exchanges_is_fedpd(mlp):
    algo = fl.fedpd(rho=0.3, exchanges=range(5), local=STEADY)
    below(
        "FedPD",
        gap(trained(mlp, algo, ALL5), trained(mlp, fl.fedpd(rho=0.3, local=STEADY), ALL5)),
        1e-12,
    )


# ---- AdaBest -------------------------------------------------------------------------------------
@pytest.mark.parametrize("unbalanced", [False, True])
def test_the_printed_convention_needs_a_constant_mu(mlp, unbalanced):
    algo = fl.adabest(mu=0.3, unbalanced=unbalanced, local=STEADY)
    printed = with_rule(algo, compat.AdaBestPrinted(mu=0.3, unbalanced=unbalanced))
    compare, limit = (above, 1e-6) if unbalanced else (below, 1e-12)
    compare("printed", gap(trained(mlp, printed), trained(mlp, algo)), limit)


def test_fedsim_counts_batches_for_sizes(mlp):
    """nbar = E times the mean batch, a mean over participations."""
    b = epoch_batches(mlp, SOME5, 6, epochs=2)
    rule = compat.AdaBestFedsim(mu=0.3, unbalanced=True, epochs=2.0)
    found = run(mlp, SOME5, b, with_rule(fl.adabest(0.1), rule))
    wanted = np.mean([2 * 2 * SIZES[i] / len(b[r, i]) for r, ids in enumerate(SOME5) for i in ids])
    state = found.server[-1]
    name = "0.AdaBestFedsim"
    below("nbar", abs(state[f"{name}.examples"] / state[f"{name}.reports"] - wanted), 1e-12)


# ---- aggregates ----------------------------------------------------------------------------------
def test_novas_length_by_steps_matters_only_with_prox(mlp):
    for mu, compare, limit in ((None, below, 1e-12), (0.5, above, 1e-5)):
        algo = fl.fednova(mu=mu, local=STEADY)
        found = trained(mlp, replace(algo, aggregate=compat.NovaBySteps()))
        compare("tau_eff by K", gap(found, trained(mlp, algo)), limit)


def test_fedsims_nova_is_shorter(mlp):
    """One round: the directions are FedNova's, the length is the harmonic mean of K_i."""
    rounds = SOME5[:1]
    b = epoch_batches(mlp, rounds, 6, epochs=2)
    nova = run(mlp, rounds, b, fl.fednova(0.1)).x[0] - mlp.w0
    harmonic = fl.Algorithm((), STEADY, compat.NovaHarmonic())
    found = run(mlp, rounds, b, harmonic).x[0] - mlp.w0
    n, k = (
        np.array([f(i) for i in rounds[0]]) for f in (SIZES.__getitem__, lambda i: len(b[0, i]))
    )
    q = n / n.sum()
    below("harmonic", np.abs(found - nova * (1 / (q / k).sum()) / (q * k).sum()).max(), 1e-12)


def test_rfedavgs_q_fedavg(mlp):
    zero = fl.Algorithm((), STEADY, compat.QFairFree(q=0.0, lipschitz=2.0))
    plain = trained(mlp, fl.fedavg(local=STEADY, by_size=False))
    below("q 0", gap(trained(mlp, zero), plain), 1e-12)
    one = fl.Algorithm((), STEADY, compat.QFairFree(q=1.0, lipschitz=10.0))
    above("q 1", gap(trained(mlp, one), trained(mlp, fl.qfedavg(q=1.0, local=STEADY))), 1e-4)
    assert fl.qfedavg(0.1, lipschitz=10.0, free=True).aggregate == one.aggregate
    assert fl.qfedavg(0.1, free=True).aggregate == compat.QFairFree(1.0, 1.0)


def test_a_large_batch_of_features_is_all_of_them():
    from undrift.testing import tiny_world

    world = tiny_world()
    models = []
    for batch in (None, 9, 2):
        rule = compat.RFedAvgPlusAtStart(0.5, batch)
        trainer = world.trainer(fl.Algorithm((rule,)))
        trainer.run(3)
        models.append(trainer.server.w)
    below("features of all", float((models[0] - models[1]).abs().max()), 1e-12)
    above("features of two", float((models[0] - models[2]).abs().max()), 1e-6)


# ---- local optimizers' states --------------------------------------------------------------------
def continuous(world: World, b, rounds: int) -> list[np.ndarray]:
    """Train one client with torch's own optimizer, which lives on."""
    module = task_of(world).original
    optim = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    x, y = (torch.tensor(part) for part in world.data[0])
    models = []
    for r in range(rounds):
        for batch in b[r, 0]:
            optim.zero_grad()
            F.cross_entropy(module(x[batch]), y[batch]).backward()
            optim.step()
        models.append(torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy())
    return [m.copy() for m in models]


@pytest.mark.parametrize("buffers", ["keep", "average", "reset"])
def test_momentum_lives_on_if_asked_to(mlp, buffers):
    alone = World(mlp.data[:1], mlp.gradient, mlp.loss, mlp.w0)
    rounds = [[0]] * 4
    b = epoch_batches(alone, rounds, 6, epochs=1)
    local = fl.HeavyBall(lr=0.1, momentum=0.9)
    algo = fl.slowmo(beta=0.0, buffers=buffers, local=local)
    found = run(alone, rounds, b, algo)
    away = max(np.abs(x - w).max() for x, w in zip(found.x, continuous(alone, b, 4), strict=True))
    (above if buffers == "reset" else below)(buffers, away, 1e-4 if buffers == "reset" else 1e-12)
    if buffers == "keep":
        kept = compat.keep_client_opt(fl.fedavg(local=local))
        below("keep_client_opt", gap(run(alone, rounds, b, kept), found), 1e-12)


@pytest.mark.parametrize("local", [fl.HeavyBall(lr=0.05), fl.RmsProp(lr=0.01), fl.AdamW(lr=0.01)])
@pytest.mark.parametrize("buffers", ["keep", "average"])
def test_engines_agree_on_kept_states(mlp, buffers, local):
    algo = fl.slowmo(buffers=buffers, local=local)
    b = epoch_batches(mlp, SOME5, 6, epochs=1)
    plain = run(mlp, SOME5, b, algo, engine="reference")
    below("kept", gap(run(mlp, SOME5, b, algo, chunk=2), plain), 1e-12)
