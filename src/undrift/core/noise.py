"""Noise that hides: drawn from a secret on the host, an input of the round like data.

A rule says how many standard normal numbers it wants, for each client's row (`client_noise`) or for
the server (`server_noise`), and adds them in `hide` or `server`.  Whoever adds them draws them:
they are no hash of the run's seed, which every node is sent and could subtract.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from undrift.core.algorithm import Algorithm
from undrift.core.rule import Sizes, overrides
from undrift.core.transfer import send
from undrift.core.tree import EMPTY, Tree, leaves
from undrift.errors import ConfigError

KEY_BYTES = 32


class Secret:
    """A key that nobody else may know; it is neither shown, nor compared, nor pickled.

    >>> Secret.drawn()
    Secret(...)
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigError(f"a secret has {KEY_BYTES} bytes, not {len(key)}: let one be drawn")
        self._key = key

    @classmethod
    def drawn(cls) -> Secret:
        """Draw one from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> Any:
        raise ConfigError("a secret stays where it was drawn: it is not sent and not stored")

    def derived(self, purpose: str) -> Secret:
        """Make another secret of this one; who knows it learns nothing about this one."""
        return Secret(self._stream(purpose, KEY_BYTES))

    def hex(self) -> str:
        """Write it out, for the file that keeps it."""
        return self._key.hex()

    def normal(self, count: int, *purpose: str | int) -> Tensor:
        """Draw standard normal numbers in float64; one purpose always has the same ones.

        Each is half the sum of four: a single one's rounding would tell what it was added to
        (Mironov 2012).
        """
        half = -(-count // 2)
        found = np.zeros(2 * half)
        for part in range(4):
            data = self._stream("/".join(map(str, (*purpose, part))), 16 * half)
            raw = np.frombuffer(data, dtype="<u8").reshape(2, half) >> np.uint64(11)
            radius = np.sqrt(-2.0 * np.log((raw[0] + 1.0) * 2.0**-53))
            angle = 2 * math.pi * 2.0**-53 * raw[1]
            found += np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        return torch.from_numpy(found[:count] / 2)

    def _stream(self, purpose: str, count: int) -> bytes:
        # a sponge with the key in front: without the key, its output is random to anybody
        return hashlib.shake_256(b"undrift noise" + self._key + purpose.encode()).digest(count)


class Known(NamedTuple):
    """What the server's half is told beside the reports."""

    everyone: Tree = EMPTY  # ClientInfo of all that hold examples, if a rule reads it
    noise: tuple[Tree, ...] = ()  # for the server, one per rule of the chain
    rows: tuple[Tree, ...] | None = ()  # for clients, leading axis C; None: they added their own


SOME = Sizes(1, 1, 1)


def hides_rows(algo: Algorithm) -> bool:
    """Whether rows of some rule leave clients with noise."""
    return any(rule.client_noise(SOME) for rule in algo.rules)


def draws_noise(algo: Algorithm) -> bool:
    """Whether a rule adds noise that has to stay secret."""
    return hides_rows(algo) or any(rule.server_noise(1) for rule in algo.chain)


def row_noise(
    algo: Algorithm, sizes: Sizes, secret: Secret, hook: str, round: int, ids: Sequence[int],
    device: torch.device,
) -> tuple[Tree, ...]:  # fmt: skip
    """Draw what clients add to rows of a hook: by rule, leading axis C."""
    found: list[Tree] = []
    for i, rule in enumerate(algo.rules):
        count = rule.client_noise(sizes) if overrides(rule, hook) else 0
        if not count:
            found.append(EMPTY)
            continue
        each = [secret.normal(count, hook, round, client, i) for client in ids]
        made = torch.stack(each) if each else torch.zeros(0, count, dtype=torch.float64)
        found.append(send(made, device))
    return tuple(found)


def server_noise(
    algo: Algorithm, parameters: int, secret: Secret, round: int, device: torch.device
) -> tuple[Tree, ...]:
    """Draw what the server adds: by rule of the chain."""
    counts = [rule.server_noise(parameters) for rule in algo.chain]
    return tuple(
        send(secret.normal(count, "server", round, i), device) if count else EMPTY
        for i, count in enumerate(counts)
    )


def hidden(
    algo: Algorithm, rows: tuple[Tree, ...], noise: tuple[Tree, ...] | None
) -> tuple[Tree, ...]:
    """Let rules add noise to the rows of clients, leading axis C."""
    if noise is None or not hides_rows(algo):
        return rows
    found: list[Tree] = []
    for i, (rule, row) in enumerate(zip(algo.rules, rows, strict=True)):
        if not (rule.client_noise(SOME) and leaves(row)):
            found.append(row)
            continue
        if not (noise and leaves(noise[i])):
            raise ConfigError(f"{type(rule).__name__} hides rows, and no noise was drawn for them")
        found.append(vmap(rule.hide)(row, noise[i]))
    return tuple(found)
