"""Modules of random structure under random rules: the default engine equals the reference.

Each case is a function of its seed (`random_cases.py`): a module with its own forward, rules, a
local optimizer, a loss, clients of unequal size, ragged batches.  It is trained by both engines
and agrees to 1e-9 in float64, or is refused by an error of ours before training.  Two hundred:

    python -m pytest tests/engines/test_random_modules.py --slow
"""

from __future__ import annotations

import pytest
from random_cases import case, compare, text

QUICK = range(12)
MANY = range(12, 212)
# Seeds that an engine failed once, the first of each kind, and what it failed on.
FOUND = {
    14: "a bag of words has no batching rule",
    47: "fused attention has none, in training",
    285: "fused attention has none, in a probe",
    15: "a bilinear layer has none",
    78: "a weight norm has none",
    114: "a GRU cell has none, where a probe reads the model of all",
    144: "an LSTM cell has none",
    214: "a plain cell has none",
    152: "a cell writes into a state that clients share",
    245: "the same, behind the trial",
    16: "the same, in a part of the cohort",
    12: "one-hot classes read their number off the data",
    110: "a module writes into a tensor that it makes",
    185: "the same, over itself",
    61: "a system of equations takes clients for examples",
    73: "a last batch of one example in groups of one value",
    42: "renorm has no batching rule: one warning names it",
    93: "max_unpool2d has none",
    229: "affine_grid has none",
}


def check(seed: int) -> None:
    """Compare the engines; modules that engines can take may not be refused."""
    made = case(seed)
    told = compare(made)
    assert not told.apart, text(seed, made)
    assert made.made.hostile or not told.refused, f"{text(seed, made)}: {told.refused}"


@pytest.mark.parametrize("seed", [*QUICK, *FOUND])
def test_engines_agree_on_a_random_module(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(MANY.start, MANY.stop, 25))
def test_engines_agree_on_many_random_modules(start):
    for seed in range(start, min(start + 25, MANY.stop)):
        check(seed)


def test_a_case_is_a_function_of_its_seed():
    for seed in QUICK:
        one, other = case(seed), case(seed)
        assert text(seed, one) == text(seed, other)
        assert str(one.made.module) == str(other.made.module)
        for a, b in zip(one.made.module.parameters(), other.made.module.parameters(), strict=True):
            assert a.equal(b)
        for a, b in zip(one.clients, other.clients, strict=True):
            assert a[0].equal(b[0]) and a[1].equal(b[1])
