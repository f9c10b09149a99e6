"""What a replay starts from: data, first parameters, first states."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from undrift.core.algorithm import Server
from undrift.core.tree import rebuild, structure
from undrift.errors import ConfigError, unknown_name
from undrift.replay.given import in_double, mapping
from undrift.replay.witness import Named, own_names
from undrift.trainer import Trainer


def started(module: nn.Module, initial: Mapping[str, Any] | None, dtype: torch.dtype) -> nn.Module:
    """Copy a module with the first parameters, in the precision that it will have."""
    made = copy.deepcopy(module).to(dtype=dtype)
    if initial is not None:
        first = mapping("initial", initial, "names to parameters and buffers")
        values = {n: in_double(v, f"initial[{n!r}]") for n, v in first.items()}
        try:
            made.load_state_dict(values, strict=True)
        except RuntimeError as error:
            raise ConfigError(f"`initial` does not fit the module: {error}") from error
    return made


def by_name(like: Mapping[str, Tensor], flat: Tensor) -> Named:
    """View a flat state as tensors of the parameters' names and shapes, e.g. of `moment.server`.

    >>> by_name({"a": torch.zeros(1, 2), "b": torch.zeros(1)}, torch.arange(3.0))["a"]
    tensor([[0., 1.]])
    """
    if flat.shape != (sum(v.numel() for v in like.values()),):
        raise ConfigError(f"a state of shape {tuple(flat.shape)} is not one number per parameter")
    parts = flat.split([v.numel() for v in like.values()])
    return {n: p.view(v.shape) for (n, v), p in zip(like.items(), parts, strict=True)}


def begin(
    trainer: Trainer,
    first_round: int,
    server: Mapping[str, Any],
    clients: Mapping[int, Mapping[str, Any]],
) -> None:
    """Put a trainer before round `first_round` with these states; others stay as they are."""
    state = trainer.server
    values = _changed(trainer, trainer.server_state(), server, "server_state")
    states = rebuild(structure(state.states), values)
    kept = {
        i: _changed(trainer, trainer.client_state(i), given, f"client_states[{i}]")
        for i, given in mapping("client_states", clients, "client ids to states").items()
    }
    # only now: reading a state forgets what is staged
    for i, row in kept.items():
        shape = structure(trainer.store.gather([i]))
        trainer.store.stage([i], rebuild(shape, [v[None].contiguous() for v in row]))
    trainer.store.commit()
    before = server_at(state._replace(states=states), first_round)
    trainer.put(before, first_round, *(v for row in kept.values() for v in row))


def server_at(server: Server, rounds: int) -> Server:
    """Let a server count so many rounds."""
    return server._replace(round=torch.full_like(server.round, float(rounds)))


def _changed(trainer: Trainer, now: Named, given: Mapping[str, Any], place: str) -> list[Tensor]:
    """Give the leaves of states, those that are named replaced."""
    names, values = own_names(now, trainer.algorithm), dict(now)
    for name, value in mapping(place, given, "names to states").items():
        if name not in names:
            raise unknown_name("state", name, list(names), place)
        old = values[names[name]]
        where = f"{place}[{name!r}]"
        if isinstance(value, Mapping):
            new = trainer.task.flat({n: in_double(v, f"{where}[{n!r}]") for n, v in value.items()})
        else:
            new = in_double(value, where)
        if new.shape != old.shape:
            shapes = f"{tuple(new.shape)}, expected {tuple(old.shape)}"
            raise ConfigError(f"{place}: {name!r} has the shape {shapes}")
        values[names[name]] = new.to(old.dtype)
    return list(values.values())
