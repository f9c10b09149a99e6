"""A parameter that is used in two places is one parameter: both uses train it, in every engine."""

import pytest
import torch
from torch import nn

import undrift as fl

CLIENTS = [
    (torch.randn(n, 3, generator=torch.Generator().manual_seed(n)), torch.zeros(n, 3))
    for n in (5, 2, 4)
]


class Tied(nn.Module):
    """Two modules that share a weight, as an encoder and its decoder do."""

    def __init__(self):
        super().__init__()
        self.first, self.up, self.down = (nn.Linear(3, 3) for _ in range(3))
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.first(x))))


# In each a layer comes first: the shared weight must still be whole when its gradient passes on.
def tied_in_a_sequence():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[3].weight = net[1].weight
    return net


def used_twice():
    layer = nn.Linear(3, 3)
    return nn.Sequential(nn.Linear(3, 3), layer, nn.Tanh(), layer)


def used_in_two_sequences():
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return nn.Sequential(nn.Linear(3, 3), inner, nn.Linear(3, 3), inner)


NETS = [Tied, tied_in_a_sequence, used_twice, used_in_two_sequences]
ENGINES = [
    {"engine": "reference"},
    {"in_place": True},
    {"in_place": False},
    {"chunk": 1, "in_place": True},
    {"chunk": 1, "in_place": False},
]


def by_torch(net, rounds, steps):
    """Plain federated averaging with torch.optim; returns the parameters."""
    net = net.double()
    for _ in range(rounds):
        start, total = nn.utils.parameters_to_vector(net.parameters()).detach().clone(), 0
        for x, y in CLIENTS:
            nn.utils.vector_to_parameters(start.clone(), net.parameters())
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(steps):
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x.double()), y.double()).backward()
                optimizer.step()
            total = total + len(x) * nn.utils.parameters_to_vector(net.parameters()).detach()
        nn.utils.vector_to_parameters(total / sum(len(x) for x, _ in CLIENTS), net.parameters())
    return dict(net.named_parameters())


@pytest.mark.parametrize("options", ENGINES, ids=str)
@pytest.mark.parametrize("make", NETS, ids=lambda m: m.__name__)
def test_shared_weights_train_as_in_torch(make, options):
    torch.manual_seed(2)
    net = make()
    task = fl.Task(net, "mse", dtype=torch.float64)
    work, algorithm = fl.Work(steps=2, batch=None), fl.fedavg(lr=0.1)
    trainer = fl.Trainer(task, fl.Federation.of(CLIENTS), algorithm, work=work, **options)
    trainer.run(2)
    found, wanted = trainer.parameters(), by_torch(net, 2, 2)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", NETS, ids=lambda m: m.__name__)
def test_the_model_that_is_read_back_still_shares(make):
    task = fl.Task(make(), "mse")
    trainer = fl.Trainer(task, fl.Federation.of(CLIENTS), fl.fedavg(lr=0.1))
    trainer.round()
    model = trainer.model()
    again = dict(model.named_parameters())
    assert again.keys() == trainer.parameters().keys()
    for name, value in trainer.parameters().items():
        torch.testing.assert_close(again[name].detach(), value)
