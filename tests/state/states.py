"""States of clients to be kept: any types, any bits; and the three places to keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from undrift.state.store import ClientStateStore

PLACES = ("device", "host", "file")


class Memory(NamedTuple):
    c: Any
    step: Any


def template():
    return {
        "m": Memory(torch.full((3, 5), 0.5), torch.tensor(7)),
        "wide": torch.tensor([1e-300, 2.0], dtype=torch.float64),
        "flags": torch.tensor([True, False, True]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "none": None,
        "empty": torch.zeros(0, 4),
        "number": 0.25,
    }


def some_states(ids, salt):
    """Any bits at all: NaNs, denormals and -0.0 included."""
    random = torch.Generator().manual_seed(salt)

    def bits(shape, dtype):
        size = (len(ids), *shape)
        if dtype == torch.bool:
            return torch.randint(0, 2, size, generator=random).bool()
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        limits = torch.iinfo(whole)
        return torch.randint(limits.min, limits.max, size, dtype=whole, generator=random).view(
            dtype
        )

    return {
        "m": Memory(bits((3, 5), torch.float32), bits((), torch.int64)),
        "wide": bits((2,), torch.float64),
        "flags": bits((3,), torch.bool),
        "half": bits((3,), torch.bfloat16),
        "none": None,
        "empty": bits((0, 4), torch.float32),
        "number": bits((), torch.float32),
    }


def flat(states):
    return [*states["m"], states["wide"], states["flags"], states["half"], states["number"]]


def digest(states, row):
    """The bytes of one client, or of a template (row None)."""
    tensors = [torch.as_tensor(v) for v in flat(states)]
    picked = tensors if row is None else [v[row] for v in tensors]
    return b"".join(v.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for v in picked)


def make(place, path, like=None, **more):
    like = template() if like is None else like
    rows = Path(path) / "clients.rows" if place == "file" else None
    return ClientStateStore(like, dtype=torch.float32, place=place, path=rows, **more)
