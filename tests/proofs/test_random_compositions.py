"""Any sentence of the algebra trains alike in both engines, or is refused when it is built.

`pytest -s` shows how many are refused, and why.
"""

import logging
import re
from collections import Counter

import pytest
import torch

import undrift as fl
from proofs.compositions import (
    AGGREGATES,
    ALONE,
    LOCALS,
    ROUNDS,
    RULES,
    SERVERS,
    Composition,
    composition,
)
from undrift.errors import ConfigError
from undrift.testing.compare import TOLERANCE, difference
from undrift.testing.world import numbers

CHUNKS, EACH = 21, 25  # 21: a third of the chunks has one of every three sentences in a row
# Every reason there is to refuse a sentence; an error that is none of them fails the test.
REASONS = {
    "||a||_1 does not exist": r"divides by \|\|a\|\|_1, which",
    "||a||_1 under clipping": r"needs \|\|a\|\|_1 exactly, which clipping",
    "two control variates": "both correct local steps by control variates",
    "two kinds of duals": "both pull a client back by what it remembers",
    "momentum of the server twice": "both take the server's momentum into local steps",
    "two objectives or first states": "both (put another objective|choose the first state)",
    "the update is no mean": "needs the update to be a mean",
    "the update is changed": "changes the update: use a server step",
    "everybody must take part": "is defined only where everybody takes part",
    "one local step": "q-FedSGD .*takes one local step",
    "FedVRA's coefficients": "FedVra.* (leave client|makes up for absent|give both the same)",
    "no mean size": "without a mean size it is AdaBest",
    "weights of MomentumAdd": "MomentumAdd takes b M out of the update again",
    "a place in the chain": "put (it|Ball|Scaffold\\w+) (first|last)",
    "plain steps": "plain Sgd|use Sgd",
    "no local steps of its own": "would be wrong about its local steps",
    "another local optimizer": "must be the algorithm's local optimizer",
    "what noise cannot hide": "Private (needs clients that|bounds the model's change|cannot)",
    "no feature layer": "names no feature layer",
    "a setting that nothing reads": "changes nothing|so keep at least 2, or use Moon",
    "a solver of its own": "solves the local problem at once",
    "an optimizer without a state": "keeps nothing between local steps",
    "Adagrad has no bias": "Adagrad's v is a sum",
}


def reason(error: fl.UndriftError) -> str:
    """Name the reason of a refusal."""
    found = [name for name, pattern in REASONS.items() if re.search(pattern, str(error))]
    assert isinstance(error, ConfigError) and found, f"refused without a known reason: {error}"
    return found[0]


def resting(trainer: fl.Trainer) -> list[list[int]]:
    """Who takes no step in each round: its data do not fill a batch."""
    cohorts = [trainer.roster.cohort(r) for r in range(ROUNDS)]
    return [
        sorted(i for i, steps in zip(c.ids, c.steps, strict=True) if not steps) for c in cohorts
    ]


def check_trains(made: Composition, plain: fl.Trainer) -> None:
    """Train in both engines: nobody is left out, all numbers are finite and the same."""
    together = made.trainer("vectorised")
    for trainer in (plain, together):
        assert [r.skipped for r in trainer.run(ROUNDS)] == resting(trainer), made
    wanted = numbers(plain)
    # a plateau that has just begun has no best value yet
    odd = {n for n, v in wanted.items() if not torch.isfinite(v).all() and not n.endswith(".best")}
    assert not odd, f"{made}: {sorted(odd)} not finite"
    where = difference(numbers(together), wanted, TOLERANCE)
    assert not where, f"{made}: {where}\n{made!r}"


# By default every rule alone once, and of the other sentences a fifth in which every part occurs.
FEW = {True: range(0, CHUNKS, 3), False: range(1, CHUNKS, 5)}


@pytest.mark.parametrize(
    ("chunk", "alone"),
    [
        pytest.param(chunk, alone, marks=() if chunk in few else pytest.mark.slow)
        for alone, few in FEW.items()
        for chunk in range(CHUNKS)
    ],
)
def test_a_sentence_trains_alike_in_both_engines_or_is_refused(chunk, alone, caplog):
    caplog.set_level(logging.ERROR, logger="undrift")
    for number in range(chunk, CHUNKS * EACH, CHUNKS):
        if (number < len(ALONE)) != alone:
            continue
        try:
            made = composition(number)
            plain = made.trainer("reference")
        except fl.UndriftError as error:
            reason(error)
            continue
        check_trains(made, plain)


def test_at_least_half_is_accepted_and_every_part_takes_part():
    kinds, refused, total = Counter(), Counter(), CHUNKS * EACH
    by_default = set()
    for number in range(total):
        try:
            made = composition(number)
            if number >= len(ALONE):  # the others are built already
                made.trainer("reference")
        except fl.UndriftError as error:
            refused[reason(error)] += 1
            continue
        own = {type(p) for p in (*made.rules, made.local, made.aggregate, made.server)}
        kinds.update(own)
        if number % CHUNKS in FEW[number < len(ALONE)]:
            by_default |= own
    for name, count in refused.most_common():
        print(f"refused, {name}: {count}")
    print(f"refused: {refused.total()} of {total - len(ALONE)}; trained: {total - refused.total()}")
    assert refused.total() <= total / 2
    rare = [k.__name__ for k in (*RULES, *SERVERS, *LOCALS, *AGGREGATES) if kinds[k] < 3]
    assert not rare
    assert by_default == kinds.keys()
