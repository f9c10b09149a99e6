"""What federation.toml says of examples, names and keys."""

from __future__ import annotations

from typing import Any

import torch

from undrift.errors import ConfigError
from undrift.federated.alone import Example


def read_example(table: dict[str, Any]) -> Example:
    """Read what an example looks like."""
    x, y = table["x"], table["y"]
    return Example(tuple(x["shape"]), _dtype(x), tuple(y["shape"]), _dtype(y))


def read_names(table: dict[str, Any], clients: int) -> tuple[str, ...]:
    """Read the clients' names: one for each, or none."""
    names = tuple(str(name) for name in table.get("names", ()))
    if names and len(names) != clients:
        raise ConfigError(f"federation.toml has {len(names)} names for {clients} clients")
    return names


def read_keys(table: dict[str, Any], clients: int) -> tuple[str, ...]:
    """Read the clients' public keys: as many as clients, and each a client's own."""
    keys = tuple(str(key).strip() for key in table.get("keys", ()))
    if not keys and not table.get("insecure", False):
        raise ConfigError(
            "federation.toml has no keys: without them anybody may say that he is any client; "
            "insecure = true allows it, for a try-out"
        )
    if keys and len(keys) != clients:
        raise ConfigError(f"federation.toml has {len(keys)} keys for {clients} clients")
    owner: dict[str, int] = {}
    for client, key in enumerate(keys):
        if owner.setdefault(key, client) != client:
            raise ConfigError(
                f"federation.toml: clients {owner[key]} and {client} have the same key; each silo "
                "makes its own, and `undrift deploy keys` takes them in"
            )
    return keys


def _dtype(table: dict[str, Any]) -> torch.dtype:
    found = getattr(torch, str(table["dtype"]), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"federation.toml: no type {table['dtype']!r}; 'float32' is one")
    return found
