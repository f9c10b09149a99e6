"""What to compare with the long-hand loops, as data: names, settings, and the loop."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from undrift.rules import FeatureNoise
from undrift.verify.longhand.adaptive import fedamsgrad
from undrift.verify.longhand.comfed import CLIENTS
from undrift.verify.longhand.contrast import moon
from undrift.verify.longhand.duals import Plateau, adabest, fedadmm, feddc, feddyn, fedpd, vrlsgd
from undrift.verify.longhand.fair import qfedavg, qfedsgd
from undrift.verify.longhand.features import rfedavg, rfedavg_plus
from undrift.verify.longhand.fedvra import fedvra
from undrift.verify.longhand.local import Local, Trajectory
from undrift.verify.longhand.mime import Adam, SGDm, mime
from undrift.verify.longhand.momentum import comfed_momentum, fedadc, slowmo

from .cases import ALL, CLIPPED, HEAVY, NESTEROV, SGD, SIZES, SOME

Loop = Callable[..., Trajectory]
Settings = dict[str, Any]

SOME5, ALL5 = SOME[:5], ALL[:5]
CHANCES = [len(SOME[0]) / len(SIZES)] * len(SIZES)
STEADY = Local(lr=0.1, weight_decay=1e-3)  # one learning rate for all rounds
PLAIN = Local(lr=0.1, lr_decay=0.97)  # no weight decay
BALL = Local(lr=0.01, optimizer="heavy_ball", rho=0.9, weight_decay=1e-4)  # ComFed's client


@dataclass(frozen=True)
class Case:
    """`batches`: unequal (2 epochs of batches of 6, K_i = 4 .. 8), equal (5 steps), one (full)."""

    function: str
    settings: Settings
    loop: Loop
    local: Local = SGD
    rounds: list[list[int]] = dataclasses.field(default_factory=lambda: SOME5)
    batches: str = "unequal"
    world: str | None = None  # None: any
    feature: bool = False  # the task names its feature layer
    chances: list[float] | None = None
    limit: float = 1e-12


def one(function: str, loop: Loop, settings: Settings, local: Local = SGD, **more: Any) -> Case:
    return Case(function, settings, loop, local, **more)


def dual_cases() -> dict[str, Case]:
    cases = {}
    for name, local in {"sgd": SGD, "heavy": HEAVY, "nesterov": NESTEROV, "clip": CLIPPED}.items():
        cases[f"feddyn-{name}"] = one("feddyn", partial(feddyn, alpha=0.2), {"alpha": 0.2}, local)
        both = {"mu": 0.1, "beta": 0.8}
        cases[f"adabest-{name}"] = one("adabest", partial(adabest, **both), both, local)
        loop = partial(fedadmm, rho=0.3, eta_g=0.5)
        cases[f"fedadmm-{name}"] = one("fedadmm", loop, {"rho": 0.3, "server_lr": 0.5}, local)
        cases[f"feddc-{name}"] = one("feddc", partial(feddc, alpha=0.1), {"alpha": 0.1}, local)
    loop = partial(feddyn, alpha=0.2, by_size=True)
    cases["feddyn-by-size"] = one("feddyn", loop, {"alpha": 0.2, "by_size": True})
    cases["feddyn-defaults"] = one("feddyn", feddyn, {})
    cases["feddyn-everybody"] = one("feddyn", feddyn, {}, HEAVY, rounds=ALL5)
    cases["adabest-defaults"] = one("adabest", adabest, {})
    settings = {"mu": 0.1, "beta": 0.8, "unbalanced": True}
    cases["adabest-unbalanced"] = one("adabest", partial(adabest, **settings), settings)
    cases["adabest-plateau"] = plateau_case()
    cases["fedadmm-defaults"] = one("fedadmm", fedadmm, {})
    cases["feddc-defaults"] = one("feddc", feddc, {})
    cases["vrlsgd"] = one("vrlsgd", vrlsgd, {}, rounds=ALL5, batches="equal")
    cases["vrlsgd-heavy"] = one("vrlsgd", vrlsgd, {}, HEAVY, rounds=ALL5, batches="equal")
    for rho in (0.3, 2.0):
        cases[f"fedpd-{rho}"] = one("fedpd", partial(fedpd, rho=rho), {"rho": rho}, rounds=ALL5)
    return cases


def plateau_case() -> Case:
    """Beta falls after every round in which ||h|| did not."""

    def loop(*world: Any, **more: Any) -> Trajectory:
        return adabest(*world, plateau=Plateau(2), **more)

    slow = dataclasses.replace(SGD, lr=0.02)
    return one("adabest", loop, {"patience": 2}, slow, rounds=ALL * 2)


def fedvra_cases() -> dict[str, Case]:
    gammas = [0.1, 0.3, 0.2, 0.05, 0.5, 0.4]
    a, d = [1.0, 0.5, 1.5, 1.0, 0.7, 0.2], [2.0, 1.0, 3.0, 2.0, 1.5, 2.5]
    numbers = {"gamma": 0.3, "a": 1.2, "d": 2.0}
    averaging = {"gamma": 0.0, "a": 0.0, "d": "fedavg"}
    by_client = {"gamma": gammas, "a": a, "d": d}
    remark = partial(fedvra, chances=CHANCES)
    cases = {
        "fedvra-remark-1": one("fedvra", remark, {}, chances=CHANCES),
        "fedvra-remark-1-gamma": one(
            "fedvra", partial(remark, gamma=0.4), {"gamma": 0.4}, chances=CHANCES
        ),
        "fedvra-numbers": one("fedvra", partial(fedvra, **numbers), numbers),
        "fedvra-numbers-heavy": one("fedvra", partial(fedvra, **numbers), numbers, HEAVY),
        "fedvra-numbers-clip": one("fedvra", partial(fedvra, **numbers), numbers, CLIPPED),
        "fedvra-fedavg": one(
            "fedvra", partial(fedvra, **averaging), {**averaging, "d": "cohort"}, HEAVY
        ),
        "fedvra-by-client": one("fedvra", partial(fedvra, **by_client), by_client),
    }
    loop = partial(fedvra, omega="uniform", **numbers)
    cases["fedvra-uniform"] = one("fedvra", loop, {**numbers, "by_size": False})
    zero = {"gamma": 0.0, "a": 0.0, "d": 2.0}
    cases["fedvra-gamma-0"] = one("fedvra", partial(fedvra, **zero), zero)
    return cases


def model_cases() -> dict[str, Case]:
    """Rules that look at features; the tanh layer of the small network is the feature layer."""
    inside = {"world": "mlp", "feature": True}
    cases = {}
    for name, loop in {"rfedavg": rfedavg, "rfedavg_plus": rfedavg_plus}.items():
        for label, local in {"sgd": SGD, "heavy": HEAVY, "clip": CLIPPED}.items():
            settings = {"strength": 0.5}
            cases[f"{name}-{label}"] = one(
                name, partial(loop, **settings), settings, local, **inside
            )
        cases[f"{name}-defaults"] = one(name, loop, {}, **inside)
        clipped = partial(loop, strength=0.5, clip=0.8)  # half of the examples are longer
        settings = {"strength": 0.5, "noise": FeatureNoise(0.0, clip=0.8)}
        cases[f"{name}-clipped-features"] = one(name, clipped, settings, **inside)
    wide = {"strength": 0.5, "refresh": "all"}
    cases["rfedavg_plus-all"] = one("rfedavg_plus", partial(rfedavg_plus, **wide), wide, **inside)
    for label, local in {"sgd": SGD, "heavy": HEAVY, "clip": CLIPPED}.items():
        settings = {"mu": 5.0, "temperature": 1.0}
        cases[f"moon-{label}"] = one("moon", partial(moon, **settings), settings, local, **inside)
    cases["moon-defaults"] = one("moon", moon, {}, **inside)
    return cases


def fair_cases() -> dict[str, Case]:
    cases = {"qfedavg-defaults": one("qfedavg", qfedavg, {}, PLAIN)}
    for q in (0.0, 0.1, 2.0):
        cases[f"qfedavg-{q}"] = one("qfedavg", partial(qfedavg, q=q), {"q": q}, PLAIN)
        cases[f"qfedsgd-{q}"] = one(
            "qfedsgd", partial(qfedsgd, q=q), {"q": q}, PLAIN, batches="one"
        )
    both = {"q": 0.5, "lipschitz": 4.0}
    cases["qfedavg-lipschitz"] = one("qfedavg", partial(qfedavg, **both), both, HEAVY)
    cases["qfedavg-decay"] = one("qfedavg", partial(qfedavg, q=1.0), {"q": 1.0}, CLIPPED)
    return cases


def mime_cases() -> dict[str, Case]:
    cases = {}
    for name, lite in {"mime": False, "mimelite": True}.items():
        for beta in (0.9, 0.5):
            loop = _mime(lambda beta=beta: SGDm(beta), lite)
            cases[f"{name}-{beta}"] = one(name, loop, {"beta": beta})
            cases[f"{name}-{beta}-plain"] = one(name, loop, {"beta": beta}, PLAIN)
        for corrected in (False, True):
            loop = _mime(lambda corrected=corrected: Adam(0.8, 0.95, 1e-2, corrected), lite)
            settings = {"base": "adam", "beta": 0.8, "beta2": 0.95, "eps": 1e-2}
            settings |= {"bias_correction": corrected}
            cases[f"{name}-adam-{corrected}"] = one(name, loop, settings)
    return cases


def _mime(base: Callable[[], SGDm | Adam], lite: bool) -> Loop:
    """Start with a new base optimiser at every call."""
    return lambda *world, **more: mime(*world, base=base(), lite=lite, **more)


def momentum_cases() -> dict[str, Case]:
    cases = {
        "slowmo-defaults": one("slowmo", slowmo, {}),
        "slowmo": one(
            "slowmo", partial(slowmo, beta=0.7, alpha=0.8), {"beta": 0.7, "server_lr": 0.8}
        ),
        "slowmo-heavy": one("slowmo", partial(slowmo, beta=0.7), {"beta": 0.7}, HEAVY),
        "fedamsgrad": one("fedamsgrad", partial(fedamsgrad, eta_g=0.05), {"server_lr": 0.05}),
        "fedamsgrad-b2": one(
            "fedamsgrad", partial(fedamsgrad, eta_g=0.1, b2=0.5), {"server_lr": 0.1, "beta2": 0.5}
        ),
    }
    for form in ("heavy_ball", "nesterov"):
        for betas in ((0.9, 0.9), (0.5, 0.8)):
            settings = {"beta_local": betas[0], "beta_global": betas[1], "form": form}
            loop = partial(fedadc, alpha=0.9, **settings)
            settings["server_lr"] = 0.9
            for batches in ("equal", "unequal"):
                label = f"fedadc-{form}-{betas[0]}-{batches}"
                cases[label] = one("fedadc", loop, settings, batches=batches)
    cases["fedadc-clip"] = one("fedadc", fedadc, {}, CLIPPED)
    return cases


def comfed_cases() -> dict[str, Case]:
    cases = {}
    for style in ("mimelite", "fedadc"):
        cells = [(client, server) for client in CLIENTS for server in ("sgd", "yogi")]
        for client, server in [*cells, ("sgd", "adam"), ("prox", "adagrad")]:
            label = f"comfed-{style}-{client}-{server}"
            cases[label] = _comfed(client, server, style, STEADY, "equal")
        cases[f"comfed-{style}-heavy"] = _comfed("scaf", "yogi", style, BALL, "equal")
        cases[f"comfed-{style}-decayed"] = _comfed("sgd", "adam", style, SGD, "equal")
        for client in ("sgd", "nova"):
            label = f"comfed-{style}-{client}-unequal"
            cases[label] = _comfed(client, "adam", style, STEADY, "unequal")
    return cases


def _comfed(client: str, server: str, style: str, local: Local, batches: str) -> Case:
    cell = {"client": client, "server": server}
    settings = {**cell, "local_momentum": style, "b": 0.9}
    if server != "sgd":
        settings |= {"tau": 1e-3}
    # M was formed with the last round's learning rate
    rate = "now" if local.lr_decay == 1.0 else "last"
    choices = {"rate": rate, "mu": 0.005}
    loop = partial(comfed_momentum, style=style, b=0.9, **choices, **cell)
    return one("comfed", loop, settings, local, batches=batches)


CASES = (
    dual_cases()
    | fedvra_cases()
    | model_cases()
    | fair_cases()
    | mime_cases()
    | momentum_cases()
    | comfed_cases()
)
