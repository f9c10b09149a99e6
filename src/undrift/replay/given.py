"""What somebody gives to a replay, checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.core.algorithm import Algorithm
from undrift.errors import ConfigError

Steps = int | Sequence[int] | Mapping[tuple[int, int], int]


def whole_number(place: str, value: Any, least: int | None = 0) -> int:
    """Take a whole number of any kind, numpy's and torch's too."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{place} = {value!r} must be a whole number{bound}")
    return number


def in_double(x: Any, place: str) -> Tensor:
    """Take tensors, arrays and lists, floats in double precision."""
    try:
        made = torch.as_tensor(x if isinstance(x, Tensor) else np.asarray(x))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{place} is no tensor, array or list of numbers: {error}") from error
    return made.double() if made.is_floating_point() else made


def mapping(place: str, value: Any, of: str) -> Mapping[Any, Any]:
    """Take a mapping, and say what of otherwise."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place} must be a mapping of {of}, got {value!r}")
    return value


def algorithm_of(value: Any) -> Algorithm:
    """Take an algorithm."""
    if not isinstance(value, Algorithm):
        raise ConfigError(f"algorithm must be one such as fedavg(), got {value!r}")
    return value


def data_of(clients: Any) -> list[tuple[Tensor, Tensor]]:
    """Take one (x, y) per client."""
    made = []
    for i, one in enumerate(_listed("clients", clients, "one (x, y) per client")):
        if not isinstance(one, Sequence) or len(one) != 2:
            raise ConfigError(f"clients[{i}] must be a pair (x, y), got {type(one).__name__}")
        x, y = (in_double(v, f"clients[{i}][{k}]") for k, v in enumerate(one))
        made.append((x, y))
    return made


def rounds_of(participants: Any, clients: int) -> list[list[int]]:
    """Take client ids by round."""
    rounds = _listed("participants", participants, "one list of client ids per round")
    ids = [
        [whole_number(f"participants[{r}]", i) for i in _listed(f"participants[{r}]", row, "ids")]
        for r, row in enumerate(rounds)
    ]
    strangers = sorted({i for row in ids for i in row} - set(range(clients)))
    if strangers:
        raise ConfigError(f"participants name client {strangers[0]}, but there are {clients}")
    return ids


def batches_of(batches: Any) -> dict[tuple[int, int], list[list[int]]]:
    """Take the positions of every local step, by (round, client)."""
    made = {}
    for key, steps in mapping("batches", batches, "(round, client) to positions").items():
        if not isinstance(key, tuple) or len(key) != 2:
            raise ConfigError(f"batches has the key {key!r}: keys are (round, client)")
        place = f"batches[{key}]"
        made[whole_number(place, key[0]), whole_number(place, key[1])] = [
            [
                whole_number(f"{place}[{k}]", p, None)
                for p in _listed(f"{place}[{k}]", step, "positions")
            ]
            for k, step in enumerate(_listed(place, steps, "one list of positions per step"))
        ]
    return made


def count_of(steps: Any, round: int, client: int, clients: int) -> int:
    """Look up how many steps a client takes in a round."""
    if isinstance(steps, Mapping):
        if (round, client) not in steps:
            raise ConfigError(
                f"steps name no number for client {client} in round {round}: give {{(round, "
                "client): number}} for all participants, rounds and ids from 0"
            )
        return whole_number(f"steps of client {client} in round {round}", steps[round, client])
    if isinstance(steps, Sequence) and not isinstance(steps, str):
        if len(steps) < clients:
            numbers = f"{len(steps)} number" + "s" * (len(steps) != 1)
            raise ConfigError(
                f"steps has {numbers}, but there are {clients} clients: give one for each id"
            )
        return whole_number(f"steps of client {client}", steps[client])
    return whole_number("steps", steps, least=1)


def _positions(place: str, batch: Any) -> list[int]:
    """Take positions; those outside are told later, with the sizes."""
    return [whole_number(place, p, least=None) for p in _listed(place, batch, "positions")]


def _listed(place: str, value: Any, of: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)):
        raise ConfigError(f"{place} must be a list of {of}, got {value!r}")
    try:
        return list(value)
    except TypeError as error:
        raise ConfigError(f"{place} must be a list of {of}, got {value!r}") from error
