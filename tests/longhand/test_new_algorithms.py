"""undrift's newer algorithms against the long-hand loops: every round's model and states.

5 rounds, 3 of 6 clients or all, unequal n_i, 4 to 8 steps, float64. `pytest -s` prints the
difference.
"""

import numpy as np
import pytest

import undrift.rules
from proofs import bridge
from proofs.bridge import local_of
from undrift.verify.longhand.worlds import World, epoch_batches, step_batches

from .cases import WORLDS
from .new_cases import CASES, Case

KINDS = ("softmax", "mlp", "regression")


def world_of(name: str, case: Case) -> World:
    kind = case.world or KINDS[list(CASES).index(name) % 3]
    return WORLDS[kind]()


def batches_of(case: Case, world: World, rounds):
    if case.batches == "equal":
        return step_batches(world, rounds, steps=5, batch_size=6)
    if case.batches == "one":
        return step_batches(world, rounds, steps=1)
    return epoch_batches(world, rounds, 6, epochs=2)


def run(case: Case, world: World, rounds, batches):
    build = getattr(undrift.rules, case.function)
    algorithm = build(local=local_of(case.local), **case.settings)
    feature = "1" if case.feature else None
    return bridge.run(world, rounds, batches, algorithm, feature=feature, chances=case.chances)


def away(a, b) -> float:
    return float(np.nan_to_num(np.abs(a - b).max(), nan=np.inf)) if a.size else 0.0


def distance(case: Case, ours, theirs) -> float:
    """Find the largest difference of any model and any state that both keep."""
    pairs = list(zip(ours.x, theirs.x, strict=True))
    for own, (other, sign) in SERVER_STATES.get(case.function, {}).items():
        states = zip(ours.server, theirs.server_states, strict=True)
        pairs += [(sign * at(mine, own), their[other]) for mine, their in states]
    for own, other in CLIENT_STATES.get(case.function, {}).items():
        for rows, their in zip(ours.clients, theirs.client_states, strict=True):
            pairs += [(at(mine, own), their[i][other]) for i, mine in enumerate(rows)]
    return max(away(np.squeeze(a), np.squeeze(b)) for a, b in pairs)


def at(state, own: str) -> np.ndarray:
    """Find a state by the end of its name; a rule's place and class may differ."""
    found = [name for name in state if name.partition(".")[2].partition(".")[2] == own]
    assert len(found) == 1, (own, list(state))
    return state[found[0]]


# Of a rule: field -> (the loop's name, sign); "" is a state without fields.
SERVER_STATES = {
    "feddyn": {"": ("h", 1)},
    "feddc": {"c": ("c", 1)},
    "adabest": {"average": ("xbar", 1)},
    "fedvra": {"": ("lambda", 1)},
    "rfedavg": {"rows": ("delta", 1)},
    "rfedavg_plus": {"rows": ("delta", 1)},
    "slowmo": {"": ("u", 1)},
    "fedadc": {"": ("m", 1)},
    "fedamsgrad": {"m": ("m", -1), "v": ("v", 1), "top": ("vmax", 1)},
}
CLIENT_STATES = {
    "feddc": {"h": "h", "c": "c"},
    "adabest": {"h": "h", "last": "last"},
    "fedadmm": {"y": "y", "a": "a"},
    "fedpd": {"": "lambda"},
    "fedvra": {"": "lambda"},
    "moon": {"models": "previous"},
}


# Products of parts that do not see each other; by default every part comes up in some of them.
LATER = {
    *(f"{name}-heavy" for name in ("feddyn", "adabest", "fedadmm", "rfedavg", "moon")),
    *(f"{name}-nesterov" for name in ("feddyn", "fedadmm", "feddc")),
    *(f"{name}-clip" for name in ("adabest", "feddc", "rfedavg", "rfedavg_plus")),
    *("fedvra-numbers-heavy", "qfedsgd-0.0", "qfedavg-0.1", "qfedsgd-2.0"),
    *("mime-0.9", "mime-0.5-plain", "mimelite-0.5", "mimelite-0.9-plain"),
    *(f"fedadc-heavy_ball-{kind}" for kind in ("0.9-unequal", "0.5-equal")),
    *(f"fedadc-nesterov-{kind}" for kind in ("0.9-equal", "0.5-unequal")),
    *(f"comfed-mimelite-{cell}" for cell in ("sgd-yogi", "prox-sgd", "scaf-yogi", "nova-sgd")),
    *(f"comfed-fedadc-{cell}" for cell in ("sgd-sgd", "prox-yogi", "scaf-sgd", "nova-yogi")),
    *("comfed-mimelite-prox-adagrad", "comfed-fedadc-sgd-adam"),
}
assert set(CASES) >= LATER


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LATER else ()) for n in CASES]
)
def test_equals_the_long_hand_loop(name):
    case = CASES[name]
    world = world_of(name, case)
    batches = batches_of(case, world, case.rounds)
    ours = run(case, world, case.rounds, batches)
    theirs = case.loop(world, case.rounds, batches, case.local)
    gap = distance(case, ours, theirs)
    print(f"{name}: {gap:.1e}")
    assert gap <= case.limit


# ---- C8 ------------------------------------------------------------------------------------------

SICK_ROUNDS = [[0, 2, 4], [1, 2, 5], [2], [2, 3, 4], [0, 1, 2]]
LOOKS_AT_ALL_DATA = ("mime", "mimelite", "qfedavg", "comfed")  # client 2 is sick in every round
SKIPPING = [
    name
    for name, case in CASES.items()
    if case.batches == "unequal"
    and case.world is None
    and case.rounds[0] != [0, 1, 2, 3, 4, 5]
    and case.function not in LOOKS_AT_ALL_DATA
    and name.endswith(("-sgd", "-heavy", "-numbers", "-unbalanced", "slowmo", "-b2", "-unequal"))
]


@pytest.mark.parametrize("name", SKIPPING)
def test_a_diverging_client_is_left_out(name):
    case, whole = CASES[name], WORLDS["regression"]()
    batches = epoch_batches(whole, SICK_ROUNDS, 6, epochs=2)
    x, y = whole.data[2]
    data = list(whole.data)
    data[2] = np.concatenate([x, np.full_like(x[:1], 1e200)]), np.concatenate([y, y[:1]])
    world = World(data, whole.gradient, whole.loss, whole.w0)
    for r in (1, 2):
        batches[r, 2] = [*batches[r, 2][:2], np.array([0, len(x)])]
    ours = run(case, world, SICK_ROUNDS, batches)
    theirs = case.loop(world, SICK_ROUNDS, batches, case.local)
    assert distance(case, ours, theirs) <= case.limit
    assert [r.skipped for r in ours.results] == [[], [2], [2], [], []]


# ---- the loops run, with or without undrift ------------------------------------------------------


@pytest.mark.parametrize("function", sorted({case.function for case in CASES.values()}))
def test_every_loop_runs_and_stays_finite(function):
    """At least two settings each, that give different models."""
    chosen = {n: c for n, c in CASES.items() if c.function == function}
    ends = []
    for name, case in list(chosen.items())[:4]:
        world = WORLDS[case.world or "softmax"]()
        batches = batches_of(case, world, case.rounds)
        run = case.loop(world, case.rounds, batches, case.local)
        assert len(run.x) == len(case.rounds) >= 5, name
        assert all(np.isfinite(x).all() for x in run.x), name
        ends.append(run.x[-1])
    assert len(chosen) >= 2
    assert any(np.abs(a - ends[0]).max() > 1e-6 for a in ends[1:])
