"""Which long-hand loop an algorithm must equal, and with which settings of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from undrift import rules as r
from undrift.core.algorithm import Algorithm
from undrift.core.local import Sgd
from undrift.rules.named import COMFED_CLIENTS, COMFED_SERVERS
from undrift.rules.policy import read_policy
from undrift.verify.bridge import away, local_of, task_of, trainer_of
from undrift.verify.longhand import averaging as avg
from undrift.verify.longhand import duals, fair
from undrift.verify.longhand.adaptive import fedamsgrad
from undrift.verify.longhand.comfed import comfed
from undrift.verify.longhand.contrast import moon
from undrift.verify.longhand.control import scaffold, scaffold_m
from undrift.verify.longhand.features import rfedavg, rfedavg_plus
from undrift.verify.longhand.fedvra import fedvra
from undrift.verify.longhand.local import Local, Trajectory
from undrift.verify.longhand.mime import Adam, SGDm, mime
from undrift.verify.longhand.momentum import comfed_momentum, fedadc, slowmo
from undrift.verify.longhand.servers import fedavgm, fedopt
from undrift.verify.longhand.steered import fedrl
from undrift.verify.longhand.worlds import (
    Batches,
    World,
    epoch_batches,
    mlp_world,
    sample_participants,
    softmax_world,
    step_batches,
)

Loop = Callable[..., Trajectory]
SIZES = [7, 12, 20, 9, 15, 11]  # two epochs of batches of 6: 4 to 8 local steps
SOME = sample_participants(seed=5, clients=6, per_round=3, rounds=5)
ALL = [list(range(6))] * 5
CHANCES = [0.5] * 6

SGD = Local(lr=0.1, lr_decay=0.97, weight_decay=1e-3)
HEAVY = Local(lr=0.05, optimizer="heavy_ball", rho=0.9, weight_decay=1e-3)
NESTEROV = dataclasses.replace(HEAVY, optimizer="nesterov")
RMSPROP = Local(lr=0.02, optimizer="rmsprop", weight_decay=1e-3)
ADAMW = Local(lr=0.02, optimizer="adamw", weight_decay=1e-2)
CLIPPED = dataclasses.replace(SGD, clip=0.3)
PLAIN = Local(lr=0.1, lr_decay=0.97)
BALL = Local(lr=0.01, optimizer="heavy_ball", rho=0.9, weight_decay=1e-4)  # ComFed's client
STEADY = Local(lr=0.1, weight_decay=1e-3)


class Case(NamedTuple):
    """One algorithm, built twice; `steps`: by epochs, 5 for everybody, or one on all data."""

    of: str
    build: Callable[[Sgd], Algorithm]
    loop: Loop
    local: Local = SGD
    everybody: bool = False
    steps: Literal["epochs", "five", "one"] = "epochs"
    features: bool = False  # the task names its feature layer
    chances: list[float] | None = None

    def world(self) -> World:
        """Make six clients that differ; a network with a hidden layer where features matter."""
        if self.features:
            return mlp_world(2, SIZES, features=4, hidden=6, classes=3)
        return softmax_world(1, SIZES, features=5, classes=3)

    def rounds(self) -> list[list[int]]:
        """Say who takes part: everybody, or three of six."""
        return ALL if self.everybody else SOME

    def difference(self) -> float:
        """Measure the largest difference of any parameter after any round."""
        world = self.world()
        batches, rounds = self.batches(world), self.rounds()
        task = task_of(world, "1" if self.features else None)
        algorithm = self.build(local_of(self.local))
        return away(
            trainer_of(task, world, rounds, batches, algorithm, self.chances),
            self.loop(world, rounds, batches, self.local),
        )

    def batches(self, world: World) -> Batches:
        """Give every local step its examples."""
        if self.steps == "five":
            return step_batches(world, self.rounds(), steps=5, batch_size=6)
        if self.steps == "one":
            return step_batches(world, self.rounds(), steps=1)
        return epoch_batches(world, self.rounds(), 6, epochs=2)


def both(of: str, build: Callable[..., Algorithm], loop: Loop, **same: Any) -> Case:
    """Make a case whose settings have the same names on both sides."""
    return Case(of, lambda local: build(local=local, **same), partial(loop, **same))


def averaging_cases() -> list[Case]:
    """FedAvg and what changes its clients or its weights."""
    option, sizes = {"option": "I"}, partial(scaffold, weighting="size", c_update="size")
    others = (HEAVY, NESTEROV, RMSPROP, ADAMW, CLIPPED)
    return [
        both("fedavg", r.fedavg, avg.fedavg),
        *(both("fedavg", r.fedavg, avg.fedavg)._replace(local=local) for local in others),
        both("fedprox", r.fedprox, avg.fedprox, mu=0.4),
        both("fednova", r.fednova, avg.fednova),
        both("fednova", r.fednova, avg.fednova, mu=0.4)._replace(local=HEAVY),
        both("scaffold", r.scaffold, scaffold),
        both("scaffold", r.scaffold, scaffold)._replace(local=HEAVY),
        both("scaffold", r.scaffold, scaffold, **option)._replace(local=CLIPPED),
        Case("scaffold", partial(_with, r.scaffold, {"by_size": True, "c_weights": "size"}), sizes),
        both("scaffold_m", r.scaffold_m, scaffold_m)._replace(steps="five"),
        both("scaffold_m", r.scaffold_m, scaffold_m)._replace(steps="five", local=HEAVY),
    ]


def dual_cases() -> list[Case]:
    """FedDyn and its relatives, AdaBest, FedVRA."""
    numbers = {"gamma": 0.3, "a": 1.2, "d": 2.0}
    by_client = {
        "gamma": [0.1, 0.3, 0.2, 0.05, 0.5, 0.4],
        "a": [1.0, 0.5, 1.5, 1.0, 0.7, 0.2],
        "d": [2.0, 1.0, 3.0, 2.0, 1.5, 2.5],
    }
    remark = partial(fedvra, gamma=0.4, chances=CHANCES)
    admm = partial(duals.fedadmm, rho=0.3, eta_g=0.5)
    unbalanced = {"mu": 0.1, "beta": 0.8, "unbalanced": True}
    return [
        both("feddyn", r.feddyn, duals.feddyn, alpha=0.2),
        both("feddyn", r.feddyn, duals.feddyn, alpha=0.2, by_size=True)._replace(local=HEAVY),
        both("feddc", r.feddc, duals.feddc, alpha=0.1),
        both("feddc", r.feddc, duals.feddc, alpha=0.1)._replace(local=HEAVY),
        both("fedpd", r.fedpd, duals.fedpd, rho=0.3)._replace(everybody=True),
        Case("fedadmm", lambda local: r.fedadmm(rho=0.3, server_lr=0.5, local=local), admm),
        both("vrlsgd", r.vrlsgd, duals.vrlsgd)._replace(everybody=True, steps="five", local=HEAVY),
        both("adabest", r.adabest, duals.adabest, mu=0.1, beta=0.8),
        both("adabest", r.adabest, duals.adabest, **unbalanced)._replace(local=HEAVY),
        Case("fedvra", lambda local: r.fedvra(gamma=0.4, local=local), remark, chances=CHANCES),
        both("fedvra", r.fedvra, fedvra, **numbers)._replace(local=HEAVY),
        both("fedvra", r.fedvra, fedvra, **by_client),
    ]


def feature_cases() -> list[Case]:
    """Rules that look at features, and fair weights."""
    cases = [
        both("rfedavg", r.rfedavg, rfedavg, strength=0.5),
        both("rfedavg_plus", r.rfedavg_plus, rfedavg_plus, strength=0.5),
        both("rfedavg_plus", r.rfedavg_plus, rfedavg_plus, strength=0.5, refresh="all"),
        both("moon", r.moon, moon, mu=5.0, temperature=1.0)._replace(local=HEAVY),
    ]
    return [case._replace(features=True) for case in cases] + [
        both("qfedavg", r.qfedavg, fair.qfedavg, q=1.0)._replace(local=PLAIN),
        both("qfedavg", r.qfedavg, fair.qfedavg, q=0.5, lipschitz=4.0)._replace(local=HEAVY),
        both("qfedsgd", r.qfedsgd, fair.qfedsgd, q=2.0)._replace(local=PLAIN, steps="one"),
    ]


def momentum_cases() -> list[Case]:
    """Server momentum, adaptive servers, and momentum on both sides."""
    adc = {"beta_local": 0.5, "beta_global": 0.8}
    slow = partial(slowmo, beta=0.7, alpha=0.8)
    ahead = {**adc, "form": "nesterov"}
    cases = [
        Case("slowmo", lambda local: r.slowmo(beta=0.7, server_lr=0.8, local=local), slow),
        Case(
            "fedavgm",
            lambda local: r.fedavgm(beta=0.7, server_lr=0.8, local=local),
            partial(fedavgm, beta=0.7, eta_g=0.8),
        ),
        both("fedadc", r.fedadc, fedadc, **adc),
        both("fedadc", r.fedadc, fedadc, **ahead)._replace(steps="five"),
        Case(
            "fedamsgrad",
            lambda local: r.fedamsgrad(server_lr=0.1, beta2=0.5, local=local),
            partial(fedamsgrad, eta_g=0.1, b2=0.5),
        ),
    ]
    return cases + mime_cases() + adaptive_cases() + steered_cases()


def steered_cases() -> list[Case]:
    """FedRL with a policy that comes with the package."""
    agent = read_policy("digits")
    layers = [(w.double().numpy(), b.double().numpy()) for w, b in agent.layers]
    loop = partial(fedrl, layers=layers, eta_g=0.1, sees_alphas="knobs" in agent.steering.sees)
    return [
        Case("fedrl", partial(_with, r.fedrl, {"server_lr": 0.1}), loop),
        Case("fedrl", partial(_with, r.fedrl, {"server_lr": 0.1}), loop, HEAVY, everybody=True),
    ]


def mime_cases() -> list[Case]:
    """Mime and MimeLite, both base optimizers."""
    cases = []
    adam = {"beta": 0.8, "base": "adam", "beta2": 0.95, "eps": 1e-2}
    for of, build in {"mime": r.mime, "mimelite": r.mimelite}.items():
        lite = of == "mimelite"
        cases.append(Case(of, partial(_with, build, {"beta": 0.5}), partial(_plain_mime, lite)))
        cases.append(Case(of, partial(_with, build, adam), partial(_adam_mime, lite)))
    return cases


def _with(build: Callable[..., Algorithm], settings: dict[str, Any], local: Sgd) -> Algorithm:
    return build(local=local, **settings)


def _plain_mime(lite: bool, *world: Any, **more: Any) -> Trajectory:
    return mime(*world, base=SGDm(0.5), lite=lite, **more)


def _adam_mime(lite: bool, *world: Any, **more: Any) -> Trajectory:
    return mime(*world, base=Adam(0.8, 0.95, 1e-2, False), lite=lite, **more)


def adaptive_cases() -> list[Case]:
    """FedOpt's three servers."""
    settings = {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 1e-3}
    letters: dict[str, Any] = {"eta_g": 0.05, "b1": 0.8, "b2": 0.95, "tau": 1e-3}
    builds = {"adam": r.fedadam, "adagrad": r.fedadagrad, "yogi": r.fedyogi}
    return [
        Case(f"fed{kind}", partial(_with, build, settings), partial(fedopt, server=kind, **letters))
        for kind, build in builds.items()
    ]


def comfed_cases() -> list[Case]:
    """The sixteen cells, each also with the server's momentum in the local steps, either style."""
    cases = []
    for client in COMFED_CLIENTS:
        for server in COMFED_SERVERS:
            of = f"comfed:{client}-{server}"
            cell: dict[str, Any] = {"client": client, "server": server}
            tau = {} if server == "sgd" else {"tau": 1e-3}
            loop = partial(comfed, **cell, tau=1e-3)
            cases.append(Case(of, partial(_comfed, cell | tau), loop, BALL))
            style = "mimelite" if (client in ("sgd", "scaf")) == (server != "adam") else "fedadc"
            taken = {"local_momentum": style, "b": 0.9}
            loop = partial(comfed_momentum, style=style, b=0.9, **cell)
            made = partial(_comfed, cell | tau | taken)
            cases.append(Case(of, made, loop, STEADY, steps="five"))
    for mode in ("fresh", "literal"):
        read = {"client": "scaf", "server": "yogi", "mode": mode, "tau": 1e-3}
        loop = partial(comfed, client="scaf", server="yogi", scaf_mode=mode, tau=1e-3)
        cases.append(Case("comfed:scaf-yogi", partial(_comfed, read), loop, BALL))
    return cases


def _comfed(settings: dict[str, Any], local: Sgd) -> Algorithm:
    return r.comfed(local=local, **settings)


CASES = [
    *averaging_cases(),
    *dual_cases(),
    *feature_cases(),
    *momentum_cases(),
    *comfed_cases(),
]
