"""Problems with a private block: FedVRA-U, and any other algorithm on the same problem."""

import pytest
import torch
from torch import nn

import undrift as fl
from longhand.cases import below
from undrift.rules.two_blocks import entropy, simplex
from undrift.testing import tiny_world
from undrift.testing.compare import distance
from undrift.testing.world import numbers

HALF = fl.PseudoLabels(classes=3, every=2)
ALGORITHMS = {
    "fedvra_u": fl.fedvra_u(0.1, objective=HALF),
    "fedvra_u in a ball": fl.fedvra_u(0.1, objective=HALF, radius=1.0),
    "fedavg": fl.two_blocks(fl.fedavg(0.1), HALF),
    "fedprox": fl.two_blocks(fl.fedprox(0.1), HALF),
    "scaffold": fl.two_blocks(fl.scaffold(0.1), HALF),
    "scaffold I": fl.two_blocks(fl.scaffold(0.1, option="I"), HALF),
    "feddyn": fl.two_blocks(fl.feddyn(0.1), HALF),
}


def test_projection_is_the_nearest_point_of_the_simplex():
    z = 3 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).double()
    p = simplex(z)
    assert (p >= 0).all() and torch.allclose(p.sum(1), torch.ones(50).double())
    # nearest: z - p is constant where p > 0, and not larger elsewhere
    level = (z - p).masked_fill(p == 0, -torch.inf).amax(1, keepdim=True)
    assert torch.allclose(torch.where(p > 0, z - p, level), level.expand_as(p))
    assert ((z - p) <= level + 1e-12).all()
    assert torch.allclose(simplex(p), p)


def test_entropy_of_rows():
    rows = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    assert torch.allclose(entropy(rows), torch.tensor([2.0, 1.0]).log())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_both_engines_agree(name):
    world = tiny_world()
    plain, together = (
        world.trainer(ALGORITHMS[name], engine=e) for e in ("reference", "vectorised")
    )
    for trainer in (plain, together):
        trainer.run(3)
    wanted = numbers(plain)
    for key, value in numbers(together).items():
        below(f"{name} {key}", distance([value], [wanted[key]]), 1e-12)


def test_all_labelled_is_fedvra():
    world = tiny_world()
    every = fl.PseudoLabels(classes=3, every=1)
    one = world.trainer(fl.fedvra_u(0.1, objective=every, gamma=0.2))
    other = world.trainer(fl.fedvra(0.1, gamma=0.2))
    for trainer in (one, other):
        trainer.run(3)
    below("FedVRA-U, all labelled", float((one.server.w - other.server.w).abs().max()), 1e-12)


def test_fedvra_u_by_hand():
    """One client, two rounds of one full step: z first, at x; then the model, at the new z."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double()
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    net = nn.Linear(4, 3, bias=False).double()
    start = net.weight.detach().clone()
    algo = fl.fedvra_u(0.1, objective=HALF, gamma=0.5, a=0.6, d=0.9, rate=0.7, steps=2)
    task = fl.Task(net, metrics={}, dtype=torch.float64)
    work = fl.Work(steps=1, batch=None)
    trainer = fl.Trainer(task, fl.Federation.of([(x, y)]), algo, work=work)
    labelled = torch.arange(6) % 2 == 0

    def objective(w, z):
        log_p = (x @ w.T).log_softmax(1)
        known = -log_p[torch.arange(6), y][labelled].mean()
        guessed = (-(z * log_p).sum(1) + 0.5 * (z * z.clamp(min=1e-8).log()).sum(1))[~labelled]
        return known + guessed.mean()

    w, z, dual = start, torch.full((6, 3), 1 / 3).double(), torch.zeros_like(start)
    for _ in range(2):
        for _ in range(2):
            z = simplex(z - 0.7 * torch.func.grad(objective, argnums=1)(w, z))
        gradient = torch.func.grad(objective)(w, z)
        moved = 0.1 * (gradient - dual)  # y = x, so there is no pull
        dual = dual + 0.6 * 0.5 * moved
        w = w - 0.9 * moved - dual / 0.5
        trainer.round()
        below("model", float((trainer.server.w.view(3, 4) - w).abs().max()), 1e-12)
        mine = trainer.client_state(0)["0.TwoBlocks"]
        below("z", float((mine - z).abs()[~labelled].max()), 1e-12)


def test_labels_that_are_hidden_are_never_read():
    world = tiny_world()
    clients = [world.federation.client(i) for i in range(6)]
    # examples at odd places have no label
    hidden = [(x, torch.where(torch.arange(len(y)) % 2 == 0, y, 2 - y)) for x, y in clients]
    models = []
    for data in (clients, hidden):
        trainer = world._replace(federation=fl.Federation.of(data)).trainer(ALGORITHMS["feddyn"])
        trainer.run(3)
        models.append(trainer.server.w)
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(clients, hidden, strict=True))
    assert torch.equal(*models)


def test_the_private_block_stays_at_home():
    world = tiny_world()
    shared, alone = (world.trainer(a) for a in (ALGORITHMS["fedavg"], fl.fedavg(0.1)))
    one, other = shared.round(), alone.round()
    assert (one.floats_down, one.floats_up) == (other.floats_down, other.floats_up)
    rows = shared.client_state(one.ids[0])["0.TwoBlocks"]
    assert torch.allclose(rows.sum(1), torch.ones(len(rows)).double())


def test_a_ball_keeps_the_model_inside():
    trainer = tiny_world().trainer(ALGORITHMS["fedvra_u in a ball"])
    trainer.run(2)
    assert float(trainer.server.w.norm()) <= 1 + 1e-12
    free = tiny_world().trainer(ALGORITHMS["fedvra_u"])
    free.run(2)
    assert float(free.server.w.norm()) > 1.2


class Centres(nn.Module):
    """Squared distances to shared centres."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(4)
        self.centres = nn.Parameter(torch.randn(3, 2, generator=draw))

    def forward(self, x):
        return (x[:, None] - self.centres).square().sum(2)


def nearest(distances, target):
    return distances.amin(1)


def test_clusters_are_found_together():
    """Every client sees two of three groups; the centres find all three."""
    truth = torch.tensor([[4.0, 0.0], [-4.0, 0.0], [0.0, 5.0]])
    draw = torch.Generator().manual_seed(0)
    clients = []
    for i in range(6):
        groups = torch.tensor([i % 3, (i + 1) % 3]).repeat(10)
        points = truth[groups] + 0.3 * torch.randn(20, 2, generator=draw)
        clients.append((points, torch.zeros(20)))
    task = fl.Task(Centres(), nearest, metrics={}, dtype=torch.float64)
    algo = fl.two_blocks(fl.scaffold(0.1), fl.Clusters(groups=3), rate=5.0, steps=10)
    trainer = fl.Trainer(task, fl.Federation.of(clients), algo, work=fl.Work(steps=5, batch=None))
    trainer.run(60)
    found = trainer.parameters()["centres"]
    away = torch.cdist(truth.double(), found).amin(1)
    assert float(away.max()) < 0.5
