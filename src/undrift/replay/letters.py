"""States in the papers' letters: what is behind names such as "0.Scaffold", with sign and scale.

Letters are those of docs/conventions.md: x the model that is sent, y_i a client's, D = mean y - x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undrift.core.algorithm import Algorithm
from undrift.core.rule import Rule, Sizes
from undrift.core.tree import named_leaves
from undrift.errors import ConfigError
from undrift.replay.run import Moment
from undrift.replay.witness import Named
from undrift.rules import (
    AdaBest,
    Adaptive,
    FedAdc,
    FedAdmm,
    FedDc,
    FedDyn,
    FedPd,
    FedVra,
    HeavyBall,
    Mime,
    MimeLite,
    MomentumAdd,
    MomentumMix,
    Moon,
    RFedAvg,
    RFedAvgPlus,
    Scaffold,
    ScaffoldFresh,
    ScaffoldGradient,
    ScaffoldLiteral,
    ScaffoldM,
    ServerMomentum,
    Sgd,
    SlowMo,
    Steered,
    Step,
    TwoBlocks,
    VrlSgd,
    adabest,
    catalogue,
    comfed,
    compat,
    feddyn,
    fednova,
    fedpd,
    fedvra,
    mime,
    moon,
    scaffold,
    slowmo,
)


class Letter(NamedTuple):
    """One state: its letter is `scale` times what is stored."""

    name: str
    scale: int = 1
    note: str = ""


Sides = tuple[Mapping[str, Letter], Mapping[str, Letter]]  # (server's fields, client's fields)

VARIATES: Sides = ({"": Letter("c")}, {"": Letter("c_i")})
C_ALONE: Sides = ({"": Letter("c")}, {})
POOL: Sides = (
    {},
    {
        "models": Letter("y_prev", 1, "[k, P], the newest first; x_0 where there is none yet"),
        "trained": Letter("trained", 1, "how many of them are trained (compat: in which round)"),
    },
)
TABLE: Sides = (
    {
        "rows": Letter("delta", 1, "[N, d], feature means by client id"),
        "known": Letter("known", 1, "[N], 1 where there is one"),
    },
    {},
)
GOING: Sides = (
    {
        "m": Letter("mo", -1, "average of D with beta1; what local steps add is -mo / unit"),
        "unit": Letter("unit", 1, "eta times the cohort's mean norm(a_i), by size"),
        "v": Letter("v_mo", 1, "second moment of D, with `scale`"),
    },
    {},
)
AT_START = "feature mean of its last round"
STEERING: Sides = ({"": Letter("m"), "m": Letter("m"), "v": Letter("v")}, {})
HELM: Sides = (
    {
        "m": Letter("m", -1, "m <- alpha1 m + (1 - alpha1) D"),
        "v": Letter("v"),
        "knobs": Letter("alpha", 1, "alpha1 and alpha2, or what else the policy turns"),
        "axis.direction": Letter("PCA_1", 1, "of D * D; zero before it is fitted"),
        "axis.centre": Letter("mean s", 1, "of what it was fitted on"),
        "axis.spread": Letter("deviation of s", 1, "of what it was fitted on"),
        "axis.rows": Letter("D * D", 1, 'of the first ten rounds, with `pca = "rounds"`'),
        "seen.value": Letter("s", 1, "standardised"),
        "seen.rounds": Letter("states so far"),
        "seen.mean": Letter("their mean"),
        "seen.square": Letter("their squared deviations", 1, "summed"),
        "action": Letter("u", 1, "in [-1, 1]"),
        **{f"actor.{i}.0": Letter(f"policy, weight {i}") for i in range(3)},
        **{f"actor.{i}.1": Letter(f"policy, bias {i}") for i in range(3)},
        "waiting.0": Letter("D", -1, "that waits for an action from outside"),
        "waiting.1": Letter("waits", 1, "1 while it does"),
    },
    {},
)
LETTERS: Mapping[type[Rule], Sides] = {
    Steered: HELM,
    Scaffold: VARIATES,
    ScaffoldGradient: VARIATES,
    compat.ScaffoldPostStep: VARIATES,
    compat.ScaffoldPostStepGradient: VARIATES,
    compat.ScaffoldFreshPostStep: C_ALONE,
    ScaffoldFresh: C_ALONE,
    ScaffoldLiteral: C_ALONE,
    ScaffoldM: ({"": Letter("h")}, {"": Letter("h_i")}),
    ServerMomentum: ({"": Letter("v", -1, "v <- beta v + D")}, {}),
    SlowMo: ({"": Letter("u", 1, "u <- beta u + (x - mean y) / eta; FedNova's gmf too")}, {}),
    Adaptive: (
        {
            "m": Letter("m", -1, "m <- b1 m + (1 - b1) D"),
            "v": Letter("v"),
            "steps": Letter("t", 1, "server steps taken"),
            "top": Letter("vmax"),
        },
        {},
    ),
    FedAdc: ({"": Letter("m", 1, "in units of gradients")}, {}),
    Mime: STEERING,
    MimeLite: STEERING,
    FedDyn: (
        {"": Letter("h", 1, "alpha excluded; -h is the mean of sum (y_i - x) over everybody")},
        {"": Letter("h_i", 1, "alpha included; by_size: alpha, not alpha_i")},
    ),
    compat.FedDynUnclipped: (
        {"": Letter("h", 1, "alpha excluded")},
        {"": Letter("hB_i", -1, "sum of (y_i - x), without alpha: -h_i / alpha")},
    ),
    FedDc: (
        {"h": Letter("h", 1, "the mean of h_i over everybody"), "c": Letter("c")},
        {"h": Letter("h_i", 1, "sum of (y_i - x)"), "c": Letter("c_i")},
    ),
    FedPd: ({}, {"": Letter("lambda_i")}),
    compat.FedPdAlone: (
        {},
        {
            "y": Letter("x_i", 1, "its last model"),
            "x0": Letter("x0_i", 1, "y + lambda_i / rho, before an exchange"),
            "dual": Letter("lambda_i"),
            "alone": Letter("alone", 1, "1 after a round without an exchange"),
        },
    ),
    FedAdmm: ({}, {"y": Letter("y_prev"), "a": Letter("a_i")}),
    VrlSgd: (
        {},
        {
            "d": Letter("d_i before", 1, "of the round's start; `letters` gives d_i after it too"),
            "y": Letter("y_i"),
            "per": Letter("1/(K eta)", 1, "of its last round"),
            "last": Letter("last", 1, "number of its last round, 0 first"),
        },
    ),
    AdaBest: (
        {
            "average": Letter("xbar", 1, "with server_lr = 1 `letters` gives h = xbar - x too"),
            "examples": Letter("sum n_i", 1, "over all participations; nbar is it over `reports`"),
            "reports": Letter("reports", 1, "number of participations"),
            "ids": Letter("ids", 1, "of everybody (AdaBestFedsim)"),
            "plateau.best": Letter("best", 1, "smallest norm of h, with `patience`"),
            "plateau.waited": Letter("waited"),
            "plateau.rest": Letter("rest"),
            "plateau.factor": Letter("factor", 1, "on beta"),
        },
        {
            "h": Letter("h_i", 1, "mu excluded (AdaBestPrinted: included)"),
            "last": Letter("t_i'", 1, "1 is the first round, 0 never"),
        },
    ),
    FedVra: (
        {"": Letter("lambda", 1, "sum of omega_i lambda_i over everybody")},
        {"": Letter("lambda_i")},
    ),
    MomentumMix: GOING,
    MomentumAdd: GOING,
    RFedAvg: TABLE,
    RFedAvgPlus: TABLE,
    compat.RFedAvgAtStart: (
        {},
        {"model": Letter("y_prev", 1, "its last model"), "mean": Letter("delta_i", 1, AT_START)},
    ),
    compat.RFedAvgPlusAtStart: ({}, {"": Letter("delta_i", 1, AT_START)}),
    Moon: POOL,
    compat.MoonRounds: POOL,
    TwoBlocks: ({}, {"": Letter("z_i", 1, "[n, width], padded to the largest client")}),
    compat.KeepOptimizer: ({}, {"": Letter("buf_i", 1, "the local optimizer's state")}),
    compat.AverageOptimizer: ({"": Letter("buf", 1, "mean of the local optimizers' states")}, {}),
}


class Letters(NamedTuple):
    """The states of a moment, by letter."""

    server: Named
    clients: dict[int, Named]


def letters(algorithm: Algorithm, moment: Moment) -> Letters:
    """Give a moment's states in the papers' letters, sign and scale included.

    A letter that two parts have stands for the first, and the second has its class behind it; a
    state of an unknown rule keeps its own name.  Clients are all there are; participants also have
    what they reported.
    """
    server = _translated(algorithm.chain, moment.server_state, 0)
    if any(isinstance(rule, AdaBest) for rule in algorithm.rules) and _steps_whole(algorithm):
        server["h"] = server["xbar"] - _flat(moment.server)
    clients = {
        i: {**_translated(algorithm.rules, own, 1), **_completed(algorithm, own, moment)}
        for i, own in moment.all_states.items()
    }
    for i, told in moment.reports.items():
        for name, value in told.items():
            clients[i][f"{name} of q-FFL" if name in clients[i] else name] = value
    return Letters(server, clients)


def letter_of(rule: Rule, side: int, field: str) -> Letter | None:
    """Find the letter of a rule's state on the server (side 0) or on a client (1)."""
    known = (LETTERS[kind][side] for kind in type(rule).__mro__ if kind in LETTERS)
    return next((fields[field] for fields in known if field in fields), None)


def _translated(rules: tuple[Rule, ...], states: Named, side: int) -> Named:
    found: Named = {}
    for name, value in states.items():
        place, _, rest = name.partition(".")
        kind, _, field = rest.partition(".")
        if int(place) >= len(rules) or type(rules[int(place)]).__name__ != kind:
            raise ConfigError(
                f"letters: the moment has a state {name!r}, which this algorithm does not have: "
                "give the one that was replayed"
            )
        letter = letter_of(rules[int(place)], side, field)
        if letter is None:
            found[name] = value
            continue
        key = f"{letter.name} of {kind}" if letter.name in found else letter.name
        found[key] = letter.scale * value
    return found


def _completed(algorithm: Algorithm, own: Named, moment: Moment) -> Named:
    """VRL-SGD's d_i after the round, which a client completes when it hears the mean."""
    for i, rule in enumerate(algorithm.rules):
        if isinstance(rule, VrlSgd):
            part = {n.rpartition(".")[2]: v for n, v in own.items() if n.startswith(f"{i}.")}
            return {"d_i": part["d"] + (_flat(moment.server) - part["y"]) * part["per"]}
    return {}


def _steps_whole(algorithm: Algorithm) -> bool:
    """Whether the server takes the update as it is, so that AdaBest's h is xbar - x."""
    return algorithm.server in (Rule(), Step())


def _flat(named: Named) -> Tensor:
    return torch.cat([v.reshape(-1) for v in named.values()])


class Entry(NamedTuple):
    """One state of an algorithm, as the documentation lists it."""

    name: str
    side: str
    letter: Letter


def entries(chain: Sequence[Rule]) -> Iterator[Entry]:
    """List the states of an algorithm's rules without training."""
    w, sizes = torch.zeros(1), Sizes(clients=2, examples=1, features=1)
    for i, rule in enumerate(chain):
        sides = (("server", rule.init_server(w, sizes)), ("client", rule.init_client(w, sizes)))
        for side, (where, state) in enumerate(sides):
            for field in named_leaves(state):
                name = f"{i}.{type(rule).__name__}" + (f".{field}" if field else "")
                yield Entry(name, where, letter_of(rule, side, field) or Letter(name))


def described(letter: Letter) -> str:
    """Say what is stored, in one cell of a table."""
    stored = {1: letter.name, -1: f"-{letter.name}"}[letter.scale]
    return f"`{stored}`" + (f": {letter.note}" if letter.note else "")


def documented() -> dict[str, Algorithm]:
    """Name the algorithms of the table, and the options under which states have other names."""
    singles = {n: named.build() for n, named in catalogue().items() if "comfed" not in n}
    heavy = HeavyBall()
    return {
        **singles,
        "comfed:scaf-adam": comfed("scaf", "adam"),
        'comfed(mode="fresh")': comfed("scaf", mode="fresh"),
        'comfed(local_momentum="mimelite")': comfed(local_momentum="mimelite"),
        "comfed(..., scale=True)": comfed(server="adam", local_momentum="mimelite", scale=True),
        'scaffold(option="I")': scaffold(option="I"),
        'scaffold(correction="post_step")': scaffold(correction="post_step", local=heavy),
        "fednova(gmf=0.5)": fednova(gmf=0.5),
        'slowmo(buffers="keep")': slowmo(buffers="keep", local=heavy),
        'slowmo(buffers="average")': slowmo(buffers="average", local=heavy),
        'mime(base="adam")': mime(base="adam"),
        "feddyn(clip_prox=False)": feddyn(clip_prox=False, local=Sgd(clip=10.0)),
        'fedpd(start="own")': fedpd(start="own"),
        "fedvra(gamma=[...])": fedvra(gamma=(0.1, 0.2)),
        "adabest(patience=50)": adabest(patience=50),
        'moon(pool="rounds")': moon(pool="rounds", stored=2),
        "compat.RFedAvgAtStart()": Algorithm((compat.RFedAvgAtStart(),)),
        "compat.RFedAvgPlusAtStart()": Algorithm((compat.RFedAvgPlusAtStart(),)),
    }


def markdown(algorithms: Mapping[str, Algorithm]) -> str:
    """Write the table of states that docs/replay.md holds."""
    lines = ["| algorithm | state | of | is, in the papers' letters |", "|---|---|---|---|"]
    for name, algorithm in algorithms.items():
        found = list(entries(algorithm.chain))
        for n, entry in enumerate(found):
            shown = f"`{name}`" if n == 0 else ""
            lines.append(f"| {shown} | `{entry.name}` | {entry.side} | {described(entry.letter)} |")
        if not found:
            lines.append(f"| `{name}` | none | | |")
    return "\n".join(lines) + "\n"
