"""undrift against the long-hand numpy loops: models, server states and client states, all rounds.

5 rounds, 3 of 6 clients, unequal n_i, K_i = 4 .. 8, partial batches, float64.  `pytest -s` prints
every difference.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch

import undrift as fl
from longhand.cases import ADAMW, CLIPPED, HEAVY, KINDS, NESTEROV, RMSPROP, SGD, SOME, WORLDS, below
from proofs.bridge import Names, distance, local_of, run
from rules.needs import CELLS
from undrift.engines import engine as engine_module
from undrift.rules import compat
from undrift.verify.longhand.averaging import fedavg, fednova, fedprox
from undrift.verify.longhand.comfed import CLIENTS, SERVERS, comfed
from undrift.verify.longhand.control import scaffold, scaffold_m
from undrift.verify.longhand.local import Local, Trajectory
from undrift.verify.longhand.servers import fedavgm, fedopt
from undrift.verify.longhand.worlds import World, epoch_batches, step_batches

ROUNDS = SOME[:5]
STEPPED = dataclasses.replace(SGD, step_factor=lambda k: 0.9**k)
BALL_STEPPED = dataclasses.replace(NESTEROV, step_factor=lambda k: 0.8**k, lr_decay=0.95)
BALL_CLIPPED = dataclasses.replace(HEAVY, clip=0.3)
PAPER = Local(lr=0.01, optimizer="heavy_ball", rho=0.9, weight_decay=1e-4)  # ComFed's client
ADAPT = {"b1": 0.9, "b2": 0.99, "tau": 1e-3}

NONE: Names = {}


class Case(NamedTuple):
    """Two builds of one algorithm; states map undrift's names to the long-hand ones and signs."""

    ours: fl.Algorithm
    theirs: Callable[..., Trajectory]
    server: Names = NONE
    clients: Names = NONE
    equal: bool = False  # everybody takes the same number of steps
    limit: float = 1e-12


def averaging_cases() -> dict[str, Case]:
    cases = {}
    locals_ = {
        "sgd": SGD,
        "heavy": HEAVY,
        "nesterov": NESTEROV,
        "rmsprop": RMSPROP,
        "adamw": ADAMW,
        "clipped": CLIPPED,
        "heavy-clipped": BALL_CLIPPED,
        "adamw-clipped": dataclasses.replace(ADAMW, clip=0.2),
        "by-step": STEPPED,
        "nesterov-by-step": BALL_STEPPED,
    }
    for name, local in locals_.items():
        mine = local_of(local)
        cases[f"fedavg-{name}"] = Case(fl.fedavg(local=mine), partial(fedavg, local=local))
        prox = partial(fedprox, local=local, mu=0.4)
        cases[f"fedprox-{name}"] = Case(fl.fedprox(mu=0.4, local=mine), prox)
        if local.clip is None and local not in (RMSPROP, ADAMW):
            nova = partial(fednova, local=local)
            cases[f"fednova-{name}"] = Case(fl.fednova(local=mine), nova)
            nova = partial(fednova, local=local, mu=0.4)
            cases[f"fednova-prox-{name}"] = Case(fl.fednova(mu=0.4, local=mine), nova)
    uniform = partial(fedavg, local=SGD, weighting="uniform")
    cases["fedavg-uniform"] = Case(fl.fedavg(local=local_of(SGD), by_size=False), uniform)
    return cases


def scaffold_case(local: Local, option: str = "II", size: str = "", lr: float = 1.0) -> Case:
    """`size` names what is weighted by size: "x", "c" or both."""
    ours = fl.scaffold(
        option=option,
        server_lr=lr,
        local=local_of(local),
        by_size="x" in size,
        c_weights="size" if "c" in size else "uniform",
    )
    theirs = partial(
        scaffold,
        local=local,
        option=option,
        eta_g=lr,
        weighting="size" if "x" in size else "uniform",
        c_update="size" if "c" in size else "population",
    )
    state = {f"0.{type(ours.rules[0]).__name__}": ("c", 1)}
    return Case(ours, theirs, state, state)


def control_cases() -> dict[str, Case]:
    cases = {
        f"scaffold-{option}-{name}": scaffold_case(local, option)
        for option in ("I", "II")
        for name, local in {
            "sgd": SGD,
            "heavy": HEAVY,
            "nesterov": NESTEROV,
            "clipped": CLIPPED,
            "by-step": STEPPED,
            "nesterov-by-step": BALL_STEPPED,
        }.items()
    }
    cases["scaffold-I-rmsprop"] = scaffold_case(RMSPROP, "I")
    cases["scaffold-I-adamw"] = scaffold_case(ADAMW, "I")
    cases["scaffold-I-heavy-clipped"] = scaffold_case(BALL_CLIPPED, "I")
    for option in ("I", "II"):
        for size in ("x", "c", "xc"):
            cases[f"scaffold-{option}-size-{size}"] = scaffold_case(HEAVY, option, size, 0.7)
    for name, local in {"sgd": SGD, "heavy": HEAVY, "nesterov": BALL_STEPPED}.items():
        h = {"0.ScaffoldM": ("h", 1)}
        mine = fl.scaffold_m(local=local_of(local))
        cases[f"scaffold-m-{name}"] = Case(mine, partial(scaffold_m, local=local), h, h, True)
        h = {"0.ScaffoldMPrinted": ("h", 1)}
        mine = dataclasses.replace(mine, rules=(compat.ScaffoldMPrinted(),))
        theirs = partial(scaffold_m, local=local, printed_decay=True)
        cases[f"scaffold-m-printed-{name}"] = Case(mine, theirs, h, h, True)
    return cases


def adaptive_case(kind: str, local: Local = SGD, limit: float = 1e-12, **more) -> Case:
    settings = {"eta_g": 0.05, **ADAPT, **more}
    theirs = partial(fedopt, local=local, server=kind, **settings)
    names = {"eta_g": "lr", "b1": "beta1", "b2": "beta2"}
    server = {names.get(n, n): v for n, v in settings.items()}
    ours = fl.Algorithm(local=local_of(local), server=fl.Adaptive(kind, **server))
    state = {"0.Adaptive.m": ("m", -1), "0.Adaptive.v": ("v", 1)}
    return Case(ours, theirs, state, limit=limit)


def server_cases() -> dict[str, Case]:
    cases = {}
    for damp in (False, True):
        ours = fl.fedavgm(beta=0.7, server_lr=0.8, dampening=damp, local=local_of(SGD))
        theirs = partial(fedavgm, local=SGD, beta=0.7, eta_g=0.8, dampening=damp)
        cases[f"fedavgm-dampening-{damp}"] = Case(ours, theirs, {"0.ServerMomentum": ("v", -1)})
    for kind in ("adam", "adagrad", "yogi"):
        cases[f"fed{kind}"] = adaptive_case(kind)
        cases[f"fed{kind}-v0"] = adaptive_case(kind, HEAVY, v0=1e-4)
        cases[f"fed{kind}-b1-0"] = adaptive_case(kind, b1=0.0)
        cases[f"fed{kind}-eps-inside"] = adaptive_case(kind, eps_inside=True)
        # 1 / tau = 1e9 multiplies rounding where an update is nearly zero
        cases[f"fed{kind}-tau-1e-9"] = adaptive_case(kind, tau=1e-9, limit=1e-10)
    for kind in ("adam", "yogi"):
        for correction in ("flower", "standard"):
            cases[f"fed{kind}-{correction}"] = adaptive_case(kind, bias_correction=correction)
            inside = {"bias_correction": correction, "eps_inside": True, "v0": 1e-4}
            cases[f"fed{kind}-{correction}-inside"] = adaptive_case(kind, **inside)
    return cases


def comfed_case(client: str, server: str, option="I", mode="persistent", c="population", **more):
    ours = fl.comfed(
        client,
        server,
        option=option,
        mode=mode,
        **({"c_weights": {"population": "uniform", "size": "size"}[c]} if client == "scaf" else {}),
        **({} if server == "sgd" else {"tau": 1e-3, **more}),
    )
    scaf = {"scaf_option": option, "scaf_mode": mode, "c_weights": c}
    theirs = partial(
        comfed, local=PAPER, client=client, server=server, **scaf, **{"tau": 1e-3, **more}
    )
    rule = [f"0.{type(r).__name__}" for r in ours.rules if client == "scaf"]
    state = dict.fromkeys(rule, ("c", 1))
    at = len(ours.rules)
    moments = {f"{at}.Adaptive.m": ("m", -1), f"{at}.Adaptive.v": ("v", 1)}
    kept = state if mode == "persistent" else {}
    return Case(ours, theirs, state | ({} if server == "sgd" else moments), kept)


def comfed_cases() -> dict[str, Case]:
    cases = {f"comfed-{c}-{s}": comfed_case(c, s) for c in CLIENTS for s in SERVERS}
    for server in SERVERS:
        cases[f"comfed-scaf-II-{server}"] = comfed_case("scaf", server, "II")
        cases[f"comfed-scaf-fresh-{server}"] = comfed_case("scaf", server, mode="fresh", c="size")
    cases["comfed-scaf-fresh-uniform"] = comfed_case("scaf", "yogi", mode="fresh")
    for server in SERVERS:
        for c in ("size", "population"):
            literal = comfed_case("scaf", server, mode="literal", c=c)
            cases[f"comfed-scaf-literal-{c}-{server}"] = literal
    for c in ("size", "population"):
        cases[f"comfed-scaf-literal-II-{c}"] = comfed_case("scaf", "sgd", "II", "literal", c)
    for option in ("I", "II"):
        cases[f"comfed-scaf-{option}-c-size"] = comfed_case("scaf", "yogi", option, c="size")
    for client in CLIENTS:
        case = comfed_case(client, "adam", tau=1e-9)
        cases[f"comfed-{client}-adam-tau-1e-9"] = case._replace(limit=1e-10)
    return cases


CASES = averaging_cases() | control_cases() | server_cases() | comfed_cases()
EVERYWHERE = (
    "fedavg-sgd",
    "fedprox-heavy",
    "scaffold-I-sgd",
    "scaffold-II-heavy",
    "fednova-heavy",
    "comfed-scaf-yogi",
)
# Products of parts that do not see each other; by default every part comes up in some of them.
LATER = {
    *(f"fedprox-{n}" for n in ("nesterov", "rmsprop", "heavy-clipped", "adamw-clipped")),
    *("fedprox-by-step", "fedprox-nesterov-by-step", "fednova-prox-sgd", "fednova-prox-nesterov"),
    *("fednova-prox-nesterov-by-step", "scaffold-I-nesterov", "scaffold-I-nesterov-by-step"),
    *("scaffold-m-printed-sgd", "scaffold-m-printed-nesterov", "fedadam-b1-0", "fedyogi-b1-0"),
    *("fedadam-tau-1e-9", "fedadagrad-v0", "fedadagrad-eps-inside"),
    *(f"comfed-{c}-{s}" for c in CLIENTS for s in SERVERS if f"comfed:{c}-{s}" not in CELLS),
    *(f"comfed-scaf-II-{server}" for server in ("sgd", "adam", "adagrad")),
    *(f"comfed-scaf-fresh-{server}" for server in ("adam", "adagrad", "yogi")),
    *(f"comfed-scaf-literal-size-{server}" for server in ("sgd", "adagrad", "yogi")),
    *(f"comfed-scaf-literal-population-{server}" for server in ("adam", "adagrad", "yogi")),
    *(f"comfed-{client}-adam-tau-1e-9" for client in ("sgd", "prox", "nova")),
}
assert set(CASES) >= LATER
SETTINGS = [
    pytest.param(name, kind, marks=pytest.mark.slow if name in LATER - {*EVERYWHERE} else ())
    for number, name in enumerate(CASES)
    for kind in (KINDS if name in EVERYWHERE else (KINDS[number % 3],))
]


@pytest.mark.parametrize(("name", "kind"), SETTINGS)
def test_equals_the_long_hand_loop(name, kind):
    case, world = CASES[name], WORLDS[kind]()
    batches = epoch_batches(world, ROUNDS, 6, epochs=2)
    if case.equal:
        batches = step_batches(world, ROUNDS, steps=5, batch_size=6)
    ours = run(world, ROUNDS, batches, case.ours)
    theirs = case.theirs(world, ROUNDS, batches)
    below(f"{name} {kind}", distance(ours, theirs, case.server, case.clients), case.limit)


def test_quadratics_with_an_own_module_and_loss_equal_the_long_hand_loop():
    world = WORLDS["quadratic"]()
    rounds = [[0, 1, 3], [1, 4], [0, 1, 2, 3, 4], [2, 3], [0, 4]]
    batches = step_batches(world, rounds, {i: i + 4 for i in range(5)})
    for option in ("I", "II"):
        case = scaffold_case(HEAVY, option)
        ours, theirs = run(world, rounds, batches, case.ours), case.theirs(world, rounds, batches)
        worst = distance(ours, theirs, case.server, case.clients)
        below(f"quadratic scaffold {option}", worst, 1e-12)


def test_full_gradients_over_many_pieces_equal_the_long_hand_loop(monkeypatch):
    monkeypatch.setattr(engine_module, "PIECE", 4)
    world = WORLDS["mlp"]()
    batches = epoch_batches(world, ROUNDS, 6, epochs=2)
    case = CASES["scaffold-I-heavy"]
    for chunk in (None, 2):
        ours = run(world, ROUNDS, batches, case.ours, chunk=chunk)
        worst = distance(ours, case.theirs(world, ROUNDS, batches), case.server, case.clients)
        below("pieces", worst, 1e-12)


# ---- learning rates ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [
        (fl.Exponential(0.9), lambda r, k: 0.9**r),
        (fl.Milestones((2, 3), (0.1, 0.01)), lambda r, k: {0: 1, 1: 1, 2: 0.1, 3: 0.01}[r]),
        (fl.InverseTime(0.5, steps=4), lambda r, k: 1 / (1 + 0.5 * (4 * r + k))),
    ],
)
@pytest.mark.parametrize("in_place", [True, False])
def test_a_schedule_gives_the_rate_of_every_step(schedule, factor, in_place):
    """The gradient is always 1, so the model tells the sum of the learning rates."""
    module = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(module.weight)
    task = fl.Task(module, lambda output, target: output, dtype=torch.float64)
    data = fl.Federation.of([(torch.ones(2, 1), torch.zeros(2, 1))])
    algo = fl.fedavg(local=fl.Sgd(lr=0.3, schedule=schedule))
    work = fl.Work(steps=4, batch=2)
    trainer = fl.Trainer(task, data, algo, work=work, in_place=in_place)
    moved = 0.0
    for r in range(4):
        trainer.round()
        moved += sum(0.3 * factor(r, k) for k in range(4))
        below("sum of the rates", abs(float(trainer.server.w) + moved), 1e-12)


# ---- C8: clients that cannot be used -------------------------------------------------------------


def sick_world() -> World:
    """Client 2 owns one more example, with which everything overflows."""
    world = WORLDS["regression"]()
    x, y = world.data[2]
    data = list(world.data)
    data[2] = np.concatenate([x, np.full_like(x[:1], 1e200)]), np.concatenate([y, y[:1]])
    return World(data, world.gradient, world.loss, world.w0)


SICK_ROUNDS = [[0, 2, 4], [1, 2, 5], [2], [2, 3, 4], [0, 1, 2]]
SICK = (1, 2)  # the rounds in which client 2 meets its bad example


def sick_batches(world: World, rounds):
    healthy = World(WORLDS["regression"]().data, world.gradient, world.loss, world.w0)
    batches = epoch_batches(healthy, SICK_ROUNDS, 6, epochs=2)
    poison = len(world.data[2][0]) - 1
    for r in SICK:
        batches[r, 2] = [*batches[r, 2][:2], np.array([0, poison])]
    return {(r, i): b for (r, i), b in batches.items() if i in rounds[r]}


# Option I looks at all its data, so client 2 is sick in every round; see below.
SKIPPING = [
    "fedavg-sgd",
    "fedprox-heavy",
    "scaffold-II-sgd",
    "scaffold-II-size-xc",
    "fednova-heavy",
    "fedavgm-dampening-False",
    "fedyogi",
    "comfed-nova-adagrad",
]


@pytest.mark.parametrize("name", SKIPPING)
@pytest.mark.parametrize("engine", ["vectorised", "reference"])
def test_a_diverging_client_is_left_out(name, engine):
    case, world = CASES[name], sick_world()
    batches = sick_batches(world, SICK_ROUNDS)
    ours = run(world, SICK_ROUNDS, batches, case.ours, engine=engine)
    theirs = case.theirs(world, SICK_ROUNDS, batches)
    below(f"C8 {name}", distance(ours, theirs, case.server, case.clients), 1e-12)
    assert [r.skipped for r in ours.results] == [[2] if r in SICK else [] for r in range(5)]
    for r in SICK:
        for key, value in ours.clients[r][2].items():
            assert np.array_equal(value, ours.clients[r - 1][2][key])
    # nobody else took part in round 2: nothing moves, and the loss of nobody is not a number
    assert np.array_equal(ours.x[2], ours.x[1])
    for key, value in ours.server[2].items():
        assert np.array_equal(value, ours.server[1][key])
    assert np.isnan(ours.results[2].loss)


def test_weights_are_renormalised_over_the_others():
    world = sick_world()
    batches = sick_batches(world, SICK_ROUNDS)
    without = [[i for i in s if i != 2] for s in SICK_ROUNDS[:2]]
    with_it = run(world, [SICK_ROUNDS[1]], {(0, i): batches[1, i] for i in (1, 2, 5)}, fl.fedavg())
    alone = run(world, [without[1]], {(0, i): batches[1, i] for i in (1, 5)}, fl.fedavg())
    below("C8 renormalised", np.abs(with_it.x[0] - alone.x[0]).max(), 1e-14)


@pytest.mark.parametrize("mode", ["persistent", "fresh", "literal"])
def test_a_client_whose_full_gradient_overflows_is_left_out(mode):
    case, world = comfed_case("scaf", "yogi", mode=mode), sick_world()
    batches = sick_batches(world, SICK_ROUNDS)
    ours = run(world, SICK_ROUNDS, batches, case.ours)
    theirs = case.theirs(world, SICK_ROUNDS, batches)
    below(f"C8 {mode}", distance(ours, theirs, case.server, case.clients), 1e-12)
    assert all(r.skipped == [2] for r in ours.results)


def test_a_loss_that_is_not_a_number_for_one_client_leaves_it_out():
    def loss(output, target):
        return torch.where(target > 1e3, torch.nan, 1.0) * (output - target) ** 2

    x, y = torch.ones(4, 1, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64)
    task = fl.Task(torch.nn.Linear(1, 1).double(), loss, dtype=torch.float64)
    data = fl.Federation.of([(x, y), (x, y + 1e6), (x, y + 2)])
    trainer = fl.Trainer(task, data, fl.scaffold(), work=fl.Work(steps=3, batch=2))
    result = trainer.round()
    assert result.skipped == [1]
    assert np.isfinite(result.loss)
    assert torch.isfinite(trainer.server.w).all()
    assert not trainer.client_state(1)["0.Scaffold"].any()
    assert trainer.client_state(0)["0.Scaffold"].any()


def test_adaptive_names_are_server_optimizers_on_fedavg():
    local = fl.HeavyBall(lr=0.2)
    for build, kind in [(fl.fedadam, "adam"), (fl.fedyogi, "yogi")]:
        made = fl.Algorithm(local=local, server=fl.Adaptive(kind, tau=1e-4))
        assert build(local=local, tau=1e-4) == made
    made = fl.Algorithm(local=local, server=fl.Adaptive("adagrad", beta1=0.0))
    assert fl.fedadagrad(local=local) == made


# ---- open faults ---------------------------------------------------------------------------------


def test_standard_bias_correction_counts_the_steps_that_the_server_took():
    """A round that nobody survived moves no moment, so it must not count."""
    case = adaptive_case("adam", SGD, bias_correction="standard")
    world = sick_world()
    batches = sick_batches(world, SICK_ROUNDS)
    ours = run(world, SICK_ROUNDS, batches, case.ours)
    theirs = case.theirs(world, SICK_ROUNDS, batches)
    below("C8 standard correction", distance(ours, theirs, case.server, case.clients), 1e-12)


@pytest.mark.parametrize("build", [fl.fedadam, fl.fedadagrad, fl.fedyogi])
def test_the_server_rate_of_the_adaptive_algorithms_can_be_chosen(build):
    assert build(0.1, server_lr=0.05).server.lr == 0.05


@pytest.mark.parametrize("correction", ["flower", "standard"])
def test_adagrad_has_no_bias_to_correct(correction):
    with pytest.raises(fl.UndriftError):
        fl.fedadagrad(bias_correction=correction)
