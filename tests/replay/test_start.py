"""What a replay may be given, and what it tells beside models: the edges of the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import undrift as fl
from replay.world import DATA, FALL, HEAVY, LR, SGD, SIZES, SOME, N, batches, net, vec
from undrift.errors import ConfigError
from undrift.replay import Moment, by_name, in_order, letters, replay
from undrift.rules import Adam, PerRound, compat


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([v.reshape(-1) for v in named.values()])


def same(a: Moment, b: Moment) -> None:
    assert (flat(a.server) - flat(b.server)).abs().max() < 1e-12
    assert (flat(a.everybody) - flat(b.everybody)).abs().max() < 1e-12
    for i, states in b.client_states.items():
        for name, value in states.items():
            assert (a.client_states[i][name] - value).abs().max() < 1e-12
    for name, value in b.server_state.items():
        assert (a.server_state[name] - value).abs().max() < 1e-12


ALGORITHMS = {
    "scaffold": fl.scaffold(local=HEAVY),
    "feddc": fl.feddc(local=SGD),
    "adabest": fl.adabest(unbalanced=True, local=SGD),
    "fedadam": fl.fedadam(bias_correction="standard", local=SGD),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_trajectory_may_be_taken_up_in_the_middle(name: str) -> None:
    """States that were read back after two rounds go in again, and the third round is the same."""
    algorithm, order = ALGORITHMS[name], batches(SOME)
    whole = replay(net(), DATA, algorithm, SOME, batches=order)
    _, second, third, last = whole
    rest = replay(
        net(), DATA, algorithm, SOME[2:],
        batches=order,
        initial=second.server,
        server_state=second.server_state,
        client_states=second.client_states,
        first_round=2,
    )  # fmt: skip
    assert [m.round for m in rest] == [3, 4]
    assert (flat(rest[0].server) - flat(third.server)).abs().max() < 1e-12
    assert (flat(rest[1].server) - flat(last.server)).abs().max() < 1e-12
    for i, states in last.client_states.items():
        for key, value in states.items():
            assert (rest[1].client_states[i][key] - value).abs().max() < 1e-12


def test_states_may_be_given_by_parameter() -> None:
    """A state dict of variates, as that code keeps them."""
    start = {k: 0.1 * torch.ones_like(v) for k, v in net().state_dict().items()}
    joined = torch.cat([v.reshape(-1) for v in start.values()])
    one, other = (
        replay(
            net(), DATA, fl.scaffold(local=SGD), SOME,
            batches=batches(SOME), server_state={"0.Scaffold": given},
        )
        for given in (start, joined)
    )  # fmt: skip
    same(one[-1], other[-1])
    back = by_name(one[-1].server, one[-1].server_state["0.Scaffold"])
    assert list(back) == list(start) and back["0.weight"].shape == start["0.weight"].shape
    with pytest.raises(ConfigError, match="is not one number per parameter"):
        by_name(one[-1].server, torch.zeros(3))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"server_state": {"0.Scafold": torch.zeros(38)}}, "Did you mean '0.Scaffold'"),
        ({"server_state": {"0.Scaffold": torch.zeros(3)}}, r"has the shape \(3,\), expected"),
        ({"client_states": {1: {"c": torch.zeros(38)}}}, r"client_states\[1\]: no state named"),
        ({"client_states": {9: {}}}, "no client 9"),
        ({"initial": {"0.weight": torch.zeros(5, 4)}}, "does not fit the module"),
        ({"steps": 2}, "either `batches` or `steps`"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], why: str) -> None:
    with pytest.raises(fl.UndriftError, match=why):
        replay(net(), DATA, fl.scaffold(local=SGD), SOME, batches=batches(SOME), **options)


def test_participants_are_named_once() -> None:
    with pytest.raises(ConfigError, match="must name each client once"):
        replay(net(), DATA, fl.fedavg(), [[1, 1]], steps=1)
    with pytest.raises(fl.UndriftError, match="client 7"):
        replay(net(), DATA, fl.fedavg(), [[7]], steps=1)


def test_the_order_of_participants_does_not_matter() -> None:
    order = batches(SOME)
    backwards = [list(reversed(ids)) for ids in SOME]
    one = replay(net(), DATA, fl.scaffold(local=HEAVY), SOME, batches=order)
    other = replay(net(), DATA, fl.scaffold(local=HEAVY), backwards, batches=order)
    same(one[-1], other[-1])


def test_a_round_without_clients_only_counts() -> None:
    """Bernoulli sampling without a redraw: the model stays, the learning rate falls."""
    cohorts, x, rate = [[0, 1], [], [2]], vec(net()), LR
    found = replay(net(), DATA, fl.fedavg(local=fl.sgd(LR, lr_decay=FALL)), cohorts, steps=2)
    for moment, ids in zip(found, cohorts, strict=True):
        ends = []
        for i in ids:
            y = x.clone().requires_grad_()
            for _ in range(2):
                out = _forward(y, DATA[i][0])
                (g,) = torch.autograd.grad(F.cross_entropy(out, DATA[i][1]), y)
                y = (y - rate * g).detach().requires_grad_()
            ends.append((SIZES[i], y.detach()))
        if ends:
            x = sum(n * y for n, y in ends) / sum(n for n, _ in ends)
        rate *= FALL
        assert (flat(moment.server) - x).abs().max() < 1e-12
        assert set(moment.clients) == set(ids)
    assert [m.round for m in found] == [1, 2, 3]


def _forward(w: Tensor, inputs: Tensor) -> Tensor:
    first, bias, second, last = w.split([20, 5, 15, 3])
    return torch.tanh(inputs @ first.view(5, 4).T + bias) @ second.view(3, 5).T + last


def test_steps_may_differ_by_client_or_by_round_and_client() -> None:
    def played(steps: Any) -> Tensor:
        return flat(replay(net(), DATA, fl.fednova(local=SGD), SOME, steps=steps)[-1].server)

    counts = [1, 4, 2, 3]
    by_pair = {(r, i): counts[i] for r, ids in enumerate(SOME) for i in ids}
    whole = {pair: [list(range(SIZES[pair[1]]))] * k for pair, k in by_pair.items()}
    wanted = replay(net(), DATA, fl.fednova(local=SGD), SOME, batches=whole)[-1]
    for steps in (counts, by_pair):
        assert (played(steps) - flat(wanted.server)).abs().max() < 1e-12
    assert (played(3) - flat(wanted.server)).abs().max() > 1e-4


def test_data_may_be_arrays_of_any_kind() -> None:
    """numpy in single and double precision, small integers as labels, plain lists."""
    order = batches(SOME)
    wanted = replay(net(), DATA, fl.fedavg(local=SGD), SOME, batches=order)[-1]
    arrays = [(x.numpy(), y.numpy().astype(np.int32)) for x, y in DATA]
    lists = [(x.tolist(), y.tolist()) for x, y in DATA]
    numbers = {n: v.numpy() for n, v in net().state_dict().items()}
    for clients in (arrays, lists):
        found = replay(net(), clients, fl.fedavg(local=SGD), SOME, batches=order, initial=numbers)
        same(found[-1], wanted)


def test_first_parameters_keep_their_precision() -> None:
    """A module in single precision takes a trajectory in double; the caller's stays as it is."""
    module = net().float()
    before = vec(module)
    wanted = replay(net(), DATA, fl.fedavg(local=SGD), SOME, batches=batches(SOME))[-1]
    first = {n: v + 1e-12 for n, v in net().state_dict().items()}
    found = replay(module, DATA, fl.fedavg(local=SGD), SOME, batches=batches(SOME), initial=first)[
        -1
    ]
    assert (flat(found.server) - flat(wanted.server)).abs().max() < 1e-10
    assert torch.equal(vec(module), before)


def test_regression_and_a_loss_of_ones_own() -> None:
    targets = [(x, x @ torch.ones(4, 3).double()) for x, _ in DATA]

    def half(output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (output - target).square().mean(1)

    mse = replay(net(), targets, fl.fedavg(lr=0.05), SOME, steps=2, loss="mse")[-1]
    own = replay(net(), targets, fl.fedavg(lr=0.1), SOME, steps=2, loss=half)[-1]
    assert (flat(mse.server) - flat(own.server)).abs().max() < 1e-12


def test_batchnorms_statistics_are_told() -> None:
    """Averaged by the weights of the parameters, as state dicts are."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    order, state, momentum = (
        in_order(SIZES, SOME, batch=4, drop_last=True),
        module.state_dict(),
        0.1,
    )
    found = replay(module, DATA, fl.fedavg(local=SGD), SOME, batches=order)
    for r, ids in enumerate(SOME):
        ends = {}
        for i in ids:
            client = nn.Sequential(
                nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=momentum), nn.ReLU(), nn.Linear(5, 3)
            ).double()
            client.load_state_dict(state)
            optimizer = torch.optim.SGD(client.parameters(), lr=LR * FALL**r, weight_decay=0.02)
            for batch in order[r, i]:
                optimizer.zero_grad()
                F.cross_entropy(client(DATA[i][0][batch]), DATA[i][1][batch]).backward()
                optimizer.step()
            ends[i] = client.state_dict()
        total = sum(SIZES[i] for i in ids)
        state = {
            k: sum(SIZES[i] / total * ends[i][k] for i in ids) for k in state if "num" not in k
        } | {k: max(ends[i][k] for i in ids) for k in state if "num" in k}
        mine = {**found[r].server, **found[r].buffers}
        assert set(mine) == set(state)
        for key, value in state.items():
            assert (mine[key] - value).abs().max() < 1e-10, key


def test_everybodys_last_models() -> None:
    """Who has not trained yet has x_0; who was away keeps its last one."""
    found = replay(net(), DATA, fl.feddyn(local=SGD), SOME, batches=batches(SOME))
    assert torch.equal(flat(found[0].last_models[3]), vec(net()))
    assert torch.equal(flat(found[2].last_models[3]), flat(found[1].clients[3]))
    mean = sum(flat(m) for m in found[2].last_models.values()) / N
    assert (flat(found[2].everybody) - mean).abs().max() < 1e-12


ROWS = [[0.5, 0.6, 0.7, 0.4], [0.3, 0.3, 0.9, 0.2], [0.5, 0.5, 0.5, 0.5], [0.1, 0.2, 0.3, 0.4]]
CHOSEN = compat.chosen_examples({(r, i): [r % 3, i] for r in range(4) for i in range(N)})
BOTH = {
    "feddc": fl.feddc(local=HEAVY),
    "feddc's code": fl.feddc(steps=3.0, scaffold_base_lr=True, local=HEAVY),
    "fedsim's adabest": fl.Algorithm(
        (compat.AdaBestInTurn(nbar=compat.means_in_turn(SIZES, SOME, N)),), SGD, fl.Mean(False)
    ),
    "fedvra": fl.fedvra(gamma=0.3, a=ROWS, d=ROWS, local=HEAVY),
    "features": fl.Algorithm((compat.RFedAvgAtStart(0.5, CHOSEN),), SGD),
    "lrs": fl.fednova(gmf=0.5, local=fl.sgd([0.1, 0.2, 0.05, 0.1], 0.8)),
    "weights": fl.Algorithm((), SGD, compat.MeanBy(PerRound(ROWS))),
    "adam": fl.fedavg(local=Adam(lr=0.02, weight_decay=0.1, clip=0.5)),
}


@pytest.mark.parametrize("name", BOTH)
def test_engines_replay_alike(name: str) -> None:
    given = {"batches": batches(SOME), "feature": "1"}
    one, other = (
        replay(net(), DATA, BOTH[name], SOME, engine=e, **given)
        for e in ("reference", "vectorised")
    )
    same(one[-1], other[-1])


def test_letters_of_two_parts_are_kept_apart() -> None:
    @fl.record
    class Strange(fl.Rule):
        def init_server(self, w: Tensor, sizes: fl.Sizes) -> Tensor:
            return torch.ones_like(w)

    rules = (fl.ServerMomentum(), Strange())
    algorithm = fl.Algorithm(rules, SGD, server=fl.Adaptive())
    (moment,) = replay(net(), DATA, algorithm, SOME[:1], batches=batches(SOME))
    told = letters(algorithm, moment)
    assert set(told.server) == {"v", "1.Strange", "m", "v of Adaptive", "t"}
