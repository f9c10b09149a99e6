"""Every rule and aggregate keeps the promises that engines rely on."""

import pytest

import undrift as fl
from undrift.rules import FedDynExact, MomentumScaled, compat
from undrift.testing import check_aggregate, check_rule


def by_mean_size(client):
    return 0.1 * client.mean_size / client.size


RULES = [
    fl.FedDyn(0.1),
    fl.FedDyn(0.1, by_size=True),
    fl.FedAdmm(0.1),
    fl.FedDc(0.1),
    fl.AdaBest(),
    fl.AdaBest(unbalanced=True, patience=2),
    fl.FedVra(d=1.0),
    fl.FedVra(0.2, 0.5, 1.0, by_size=False),
    fl.FedVraEach(fl.PerClient(by_mean_size), a=1.0, d=1.0),
    fl.Moon(),
    fl.Moon(stored=2),
    fl.RFedAvg(0.1),
    fl.RFedAvgPlus(0.1),
    fl.RFedAvgPlus(0.1, include_self=True),
    fl.RFedAvgPlusAll(0.1),
    fl.MimeLite(),
    fl.Mime(),
    fl.MimeLite(fl.EmaAdam()),
    fl.Mime(fl.EmaAdam(bias_correction=True)),
    fl.SlowMo(),
    fl.FedAdc(),
    fl.FedAdc(nesterov=True),
    fl.MomentumMix(),
    fl.MomentumAdd(),
    MomentumScaled(kind="yogi"),
    FedDynExact(1.0),
    fl.TwoBlocks(fl.PseudoLabels(classes=3, every=2)),
    fl.TwoBlocks(fl.Clusters(groups=3)),
    fl.Ball(0.5),
    fl.Adaptive("amsgrad"),
]
OTHERS = [
    compat.ScaffoldBaseLr(),
    compat.ScaffoldPostStep(),
    compat.ScaffoldPostStepGradient(),
    compat.ScaffoldFreshPostStep(),
    compat.ScaffoldUnbalanced(),
    compat.FedDynUnclipped(0.1),
    compat.FedDynUnclipped(0.1, by_size=True, half_pull=True),
    compat.FedAdmmRestart(),
    compat.AdaBestPrinted(),
    compat.AdaBestFedsim(unbalanced=True),
    compat.RFedAvgPlusAtStart(0.1),
    compat.RFedAvgPlusAtStart(0.1, batch=2),
    compat.RFedAvgAtStart(0.1),
    compat.MoonRounds(),
]
AGGREGATES = [
    fl.QFair(),
    fl.QFair(q=2.0, lipschitz=5.0),
    fl.ShareSum(),
    fl.ShareSum(by_size=False),
    compat.NovaBySteps(),
    compat.NovaHarmonic(),
    compat.NovaCounted(0.5, 0.1),
    compat.MeanBy(fl.PerClient(by_mean_size)),
    compat.QFairFree(),
]


# Those that count rounds up to two; of the others the third round is like the second.
LONG = (fl.AdaBest, fl.Moon, fl.TwoBlocks)


def first(parts):
    """Of every class one by default; the others, and what is of other people, are slow."""
    kinds = [type(p) for p in parts]
    return [
        pytest.param(
            part,
            id=kind.__name__,
            marks=pytest.mark.slow
            if kind in kinds[:i] or kind.__module__.startswith(compat.__name__)
            else (),
        )
        for i, (part, kind) in enumerate(zip(parts, kinds, strict=True))
    ]


@pytest.mark.parametrize("rule", first(RULES))
def test_rules(rule):
    check_rule(rule, rounds=3 if isinstance(rule, LONG) else 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [r for r in RULES if not isinstance(r, LONG)], ids=lambda part: type(part).__name__
)
def test_rules_for_longer(rule):
    check_rule(rule)


@pytest.mark.slow
@pytest.mark.parametrize("rule", OTHERS, ids=lambda part: type(part).__name__)
def test_other_peoples_rules(rule):
    check_rule(rule, rounds=2)


ALL = [
    fl.VrlSgd(),
    fl.FedPd(0.1),
    compat.VrlPostStep(),
    compat.FedPdAlone(0.1, skip=0.5),
]


@pytest.mark.parametrize("rule", first(ALL))
def test_rules_for_everybody(rule):
    check_rule(rule, sampler=fl.Everyone())


@pytest.mark.parametrize("aggregate", first(AGGREGATES))
def test_aggregates(aggregate):
    check_aggregate(aggregate)
