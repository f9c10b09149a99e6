"""A replay from the middle needs only what comes after it."""

import pytest
import torch
from torch import nn

import undrift as fl
from undrift.replay import replay

SIZES = (5, 9, 4, 7)
SOME = [[0, 1], [1, 2], [2, 3], [0, 3]]
ALL = [[0, 1, 2, 3]] * 4
LOCAL = fl.sgd(0.1, weight_decay=1e-2, lr_decay=0.9, clip=0.5)
PLAIN = fl.sgd(0.1, weight_decay=1e-2)
ALGORITHMS = {
    "scaffold": (fl.scaffold(local=LOCAL), SOME),
    "feddyn": (fl.feddyn(local=LOCAL), SOME),
    "adabest": (fl.adabest(local=LOCAL), SOME),
    "fedadmm": (fl.fedadmm(rho=0.3, local=LOCAL), SOME),
    "moon": (fl.moon(local=LOCAL), SOME),
    "fedyogi": (fl.fedyogi(local=LOCAL), SOME),
    "rfedavg_plus": (fl.rfedavg_plus(strength=0.5, local=LOCAL), SOME),
    "vrlsgd": (fl.vrlsgd(local=PLAIN), ALL),
    "fedpd": (fl.fedpd(start="own", local=LOCAL), ALL),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("full_batch", [True, False])
def test_the_rest_is_the_same_from_the_middle(name, full_batch):
    """Clients 2 and 3 have not trained when the replay goes on, with batches of the rest only."""
    algorithm, rounds = ALGORITHMS[name]
    draw = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(n, 3, generator=draw), torch.randint(0, 2, (n,), generator=draw))
        for n in SIZES
    ]
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    order = {(r, i): [[0, 1], [2, 3], [1]] for r, ids in enumerate(rounds) for i in ids}
    given = {"steps": 3} if full_batch else {"batches": order}
    whole = replay(net, clients, algorithm, rounds, feature="1", **given)
    if not full_batch:
        given = {"batches": {key: steps for key, steps in order.items() if key[0] >= 1}}
    rest = replay(
        net,
        clients,
        algorithm,
        rounds[1:],
        feature="1",
        initial=whole[0].server,
        server_state=whole[0].server_state,
        client_states=whole[0].all_states,
        first_round=1,
        **given,
    )
    for before, after in zip(whole[1:], rest, strict=True):
        assert before.round == after.round
        for key, value in before.server.items():
            assert torch.equal(value, after.server[key])


COUNTING = {"adabest", "vrlsgd", "qfedsgd"}  # read the round's number, or take one step


@pytest.mark.parametrize("name", [n for n in fl.catalogue() if n not in COUNTING and ":" not in n])
def test_states_that_are_given_in_round_0_are_the_first_ones(name):
    """A round after another is the same when it is called the first and its states are given."""
    draw = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(n, 3, generator=draw), torch.randint(0, 2, (n,), generator=draw))
        for n in SIZES
    ]
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 10))
    strong = {"strength": 0.5} if name.startswith("rfedavg") else {}
    algorithm, given = fl.catalogue()[name].build(**strong), {"steps": 3, "feature": "1"}
    one, two = replay(net, clients, algorithm, ALL[:2], **given)
    (again,) = replay(
        net,
        clients,
        algorithm,
        ALL[:1],
        initial=one.server,
        server_state=one.server_state,
        client_states=one.all_states,
        **given,
    )
    for key, value in two.server.items():
        assert (value - again.server[key]).abs().max() < 1e-12
    for key, value in two.server_state.items():
        assert torch.allclose(value, again.server_state[key], rtol=0, atol=1e-12), key


@pytest.mark.parametrize("build", [fl.rfedavg, fl.rfedavg_plus])
def test_all_look_at_the_first_model_before_a_round_that_nobody_plays(build):
    """An empty first round leaves the feature means that everybody has at x_0."""
    clients = [(torch.randn(n, 3), torch.randint(0, 2, (n,))) for n in SIZES]
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    given = {"steps": 2, "feature": "1"}
    algorithm = build(strength=0.5, local=PLAIN)
    (plain,) = replay(net, clients, algorithm, ALL[:1], **given)
    _, late = replay(net, clients, algorithm, [[], ALL[0]], **given)
    for key, value in plain.server.items():
        assert torch.equal(value, late.server[key])


@pytest.mark.parametrize(
    "algorithm", [fl.fedpd(start="own", rho=1.0, local=fl.sgd(0.1, weight_decay=0.1, clip=0.5))]
)
def test_clipping_does_not_see_decay(algorithm):
    """One weight, gradients 1 and 3: a step is clip(g + dual + rho (y - x0)) + decay at y."""
    net = nn.Linear(1, 1, bias=False)
    clients = [(torch.tensor([[v]]), torch.zeros(1, 1)) for v in (1.0, 3.0)]
    moments = replay(
        net,
        clients,
        algorithm,
        [[0, 1]] * 4,
        steps=2,
        initial={"weight": torch.ones(1, 1)},
        loss=lambda output, target: output[:, 0],
    )
    y, dual, x = [1.0, 1.0], [0.0, 0.0], 1.0
    for moment in moments:
        for i, g in enumerate((1.0, 3.0)):
            for _ in range(2):
                whole = g + dual[i] + (y[i] - x)
                clipped = whole * min(1.0, 0.5 / (abs(whole) + 1e-6))
                y[i] -= 0.1 * (clipped + 0.1 * y[i])
            dual[i] += y[i] - x
            assert moment.clients[i]["weight"].item() == pytest.approx(y[i], abs=1e-12)
        x = sum(y[i] + dual[i] for i in range(2)) / 2
        assert moment.server["weight"].item() == pytest.approx(x, abs=1e-12)


def test_fedadc_looks_ahead_with_its_decay():
    """Nesterov form: z = y - eta mbar; y <- y - eta (clip(g(z) + mbar) + decay at z)."""
    local = fl.sgd(0.1, weight_decay=0.1, clip=0.5)
    algorithm = fl.fedadc(form="nesterov", beta_local=0.5, beta_global=0.5, local=local)
    net = nn.Linear(1, 1, bias=False)
    moments = replay(
        net,
        [(torch.ones(1, 1), torch.zeros(1, 1))],
        algorithm,
        [[0]] * 4,
        steps=2,
        initial={"weight": torch.ones(1, 1)},
        loss=lambda output, target: output[:, 0] ** 2,
    )
    x, m = 1.0, 0.0
    for moment in moments:
        y, mbar = x, 0.5 * m / 2
        for _ in range(2):
            z = y - 0.1 * mbar
            whole = 2 * z + mbar
            y -= 0.1 * (whole * min(1.0, 0.5 / (abs(whole) + 1e-6)) + 0.1 * z)
        m = (x - y) / 0.1
        x = x - 0.1 * m
        assert moment.server["weight"].item() == pytest.approx(x, abs=1e-12)
