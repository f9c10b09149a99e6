"""Feature layers: who is pulled where, and features that no rule can use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import undrift as fl
from undrift.errors import TaskError
from undrift.testing.world import tiny_world

PULLED: dict[str, Callable[..., fl.Algorithm]] = {
    "rfedavg": fl.rfedavg,
    "rfedavg_plus": fl.rfedavg_plus,
    "rfedavg_plus all": lambda **more: fl.rfedavg_plus(refresh="all", **more),
}


@pytest.mark.parametrize("engine", ["vectorised", "reference"])
@pytest.mark.parametrize("sizes", [(7,), (0, 7, 0)])
@pytest.mark.parametrize("name", PULLED)
def test_alone_there_is_no_pull(name: str, sizes: tuple[int, ...], engine: str) -> None:
    """One client, or one that alone holds examples, trains as under FedAvg."""
    world = tiny_world(sizes=sizes)._replace(sampler=fl.Everyone())
    alone = world.trainer(PULLED[name](strength=2.0, lr=0.2), engine=engine)
    plain = world.trainer(fl.fedavg(lr=0.2), engine=engine)
    alone.run(4)
    plain.run(4)
    assert (alone.server.w - plain.server.w).abs().max() < 1e-14


def test_alone_with_the_own_mean_there_is_a_pull() -> None:
    """The authors' code counts a client among the others."""
    world = tiny_world(sizes=(7,))._replace(sampler=fl.Everyone())
    own = world.trainer(fl.rfedavg_plus(strength=2.0, lr=0.2, include_self=True))
    plain = world.trainer(fl.fedavg(lr=0.2))
    own.run(2)
    plain.run(2)
    assert (own.server.w - plain.server.w).abs().max() > 1e-3


class Odd(nn.Module):
    """Four inputs, three classes, and a feature layer `seen` between them."""

    def __init__(self, make: Callable[[Tensor], object], calls: int = 1) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.seen, self.calls = Seen(make), calls

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        for _ in range(self.calls):
            self.seen(hidden)
        return self.head(hidden)


class Seen(nn.Module):
    def __init__(self, make: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> object:
        return self.make(x)


ODD = {
    "a tuple": (lambda h: (h, h), 1, "gives a tuple, features are one tensor"),
    "a dict": (lambda h: {"h": h}, 1, "gives a dict, features are one tensor"),
    "nothing": (lambda h: None, 1, "gives a NoneType, features are one tensor"),
    "a scalar": (lambda h: h.mean(), 1, r"gives \(\) for 2 examples"),
    "no batch axis": (lambda h: h.mean(0), 1, r"gives \(5,\) for 2 examples"),
    "transposed": (lambda h: h.T, 1, r"gives \(5, 2\) for 2 examples, \(5, 3\) for 3"),
    "as wide as long": (lambda h: h[:, :2].T, 1, r"gives \(2, 2\) for 2 examples, \(2, 3\) for 3"),
    "no width": (lambda h: h[:, :0], 1, r"gives \(2, 0\) for 2 examples"),
    "called twice": (lambda h: h, 2, "is called 2 times"),
    "never called": (lambda h: h, 0, "is never called"),
    "detached": (lambda h: h.detach(), 1, "gives features without a gradient"),
    "whole numbers": (lambda h: h.argmax(1, keepdim=True), 1, "gives torch.int64"),
}


@pytest.mark.parametrize("engine", ["vectorised", "reference"])
@pytest.mark.parametrize("algorithm", [fl.moon(), fl.rfedavg(), fl.rfedavg_plus(), fl.fedavg()])
@pytest.mark.parametrize("name", ODD)
def test_odd_features_are_refused_before_training(
    name: str, algorithm: fl.Algorithm, engine: str
) -> None:
    make, calls, why = ODD[name]
    task = fl.Task(Odd(make, calls), feature="seen")
    with pytest.raises(TaskError, match=f"the feature layer 'seen'.*{why}"):
        fl.Trainer(task, tiny_world().federation, algorithm, engine=engine)


@pytest.mark.parametrize("feature", ["0", "1:input"])
def test_features_that_are_detached_before_the_layer_are_refused(feature: str) -> None:
    class Detaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.parts = nn.Linear(4, 5), nn.ModuleList([nn.Identity(), nn.Tanh()])
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            for part in self.parts:
                part(hidden.detach())
            return self.head(hidden)

    with pytest.raises(TaskError, match="without a gradient"):
        fl.Trainer(
            fl.Task(Detaching(), feature=f"parts.{feature}"), tiny_world().federation, fl.moon()
        )


def test_features_that_nobody_trains_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Behind frozen layers a pull changes nothing, but means may still be wanted."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    net[0].requires_grad_(False)
    with caplog.at_level("WARNING", "undrift"):
        fl.Trainer(fl.Task(net, feature="1"), tiny_world().federation, fl.rfedavg_plus())
    assert "no trainable parameter changes" in caplog.text


def test_a_layer_that_is_called_by_name_has_no_input_to_watch() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(input=x)

    with pytest.raises(TaskError, match="'head:input' gives a NoneType"):
        fl.Trainer(fl.Task(Named(), feature="head:input"), tiny_world().federation, fl.moon())
