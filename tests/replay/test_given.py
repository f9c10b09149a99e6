"""What somebody may give to a replay by mistake: a typed error that names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import undrift as fl
from undrift.errors import UndriftError
from undrift.replay import letters, replay

CLIENTS = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))] * 3
ROUNDS = [[0, 1], [2]]


def given(**changed: Any) -> Any:
    """Replay something that is sound but for what is changed."""
    settings = {
        "clients": CLIENTS, "algorithm": fl.scaffold(), "participants": ROUNDS, **changed,
    }  # fmt: skip
    settings = settings if "batches" in settings else {"steps": 1, **settings}
    return replay(nn.Linear(3, 2), **settings)


STEPS = [
    ({(0, 0): 1}, r"steps name no number for client 1 in round 0"),
    ({}, r"steps name no number for client 0 in round 0"),
    ([1], r"steps has 1 number, but there are 3 clients"),
    ([1, 2.5, 1], r"steps of client 1 = 2\.5"),
    ({(0, 0): 1, (0, 1): -1, (1, 2): 1}, r"steps of client 1 in round 0 = -1"),
    (0, "steps = 0"),
    (True, "steps = True"),
    ("3", "steps = '3'"),
]


@pytest.mark.parametrize(("steps", "why"), STEPS)
def test_steps_are_numbers_for_all_who_take_part(steps: Any, why: str) -> None:
    with pytest.raises(UndriftError, match=why):
        given(steps=steps)


WRONG = {
    "batches by round": ({"batches": [[0]]}, "batches must be a mapping"),
    "batches that lack one": ({"batches": {(0, 0): [[0]]}}, "no batches for client 1 in round 0"),
    "a batch that is no list": ({"batches": {(0, 0): [0]}}, r"batches\[\(0, 0\)\]\[0\] must be"),
    "half a position": ({"batches": {(0, 0): [[0.5]]}}, r"= 0\.5 must be a whole number"),
    "a key of one": ({"batches": {0: [[0]]}}, "keys are"),
    "a position outside": (
        {"participants": [[0]], "batches": {(0, 0): [[-1]]}}, "position -1 is outside",
    ),
    "no rounds": ({"participants": 3}, "participants must be a list"),
    "one round": ({"participants": [0, 1]}, r"participants\[0\] must be a list"),
    "names": ({"participants": [["a"]]}, r"participants\[0\] = 'a'"),
    "half a client": ({"participants": [[0.5]]}, r"participants\[0\] = 0\.5"),
    "a stranger": ({"participants": [[7]]}, "client 7, but there are 3"),
    "clients without targets": ({"clients": [1, 2]}, r"clients\[0\] must be a pair"),
    "clients of three": ({"clients": [(1, 2, 3)]}, r"clients\[0\] must be a pair"),
    "clients of words": ({"clients": [("a", "b")]}, r"clients\[0\]\[0\] is no tensor"),
    "an initial list": ({"initial": [1]}, "initial must be a mapping"),
    "initial words": ({"initial": {"weight": "a", "bias": 1}}, r"initial\['weight'\] is no tensor"),
    "states in a list": ({"client_states": [1]}, "client_states must be a mapping"),
    "a state in words": ({"client_states": {0: {"0.Scaffold": "x"}}}, "is no tensor"),
    "ragged states": ({"server_state": {"0.Scaffold": [[1], [2, 3]]}}, "is no tensor"),
    "a state by parameter": (
        {"server_state": {"0.Scaffold": {"weight": [1], "bias": [2]}}}, "weight has shape",
    ),
    "a negative round": ({"first_round": -1}, "first_round = -1"),
    "half a round": ({"first_round": 1.5}, r"first_round = 1\.5"),
    "a name": ({"algorithm": "fedavg"}, "algorithm must be one"),
    "too few chances": ({"chances": [0.5]}, "chances has 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_given_is_checked(name: str) -> None:
    changed, why = WRONG[name]
    with pytest.raises(UndriftError, match=why):
        given(**changed)


def test_letters_are_those_of_the_algorithm_that_was_replayed() -> None:
    (first, _) = given()
    for other in (fl.fedavg(), fl.feddyn(), fl.fedadam()):
        with pytest.raises(UndriftError, match="give the one that was replayed"):
            letters(other, first)


def test_numbers_and_lists_of_any_kind_are_taken() -> None:
    first = nn.Linear(3, 2).double().state_dict()
    (*_, plain) = given(initial=first)
    (*_, same) = given(
        clients=[(x.numpy(), y.tolist()) for x, y in CLIENTS],
        participants=[np.array([0, 1]), torch.tensor([2])],
        steps=np.int64(1),
        initial={name: value.tolist() for name, value in first.items()},
    )
    for name, value in plain.server.items():
        assert torch.equal(value, same.server[name])
