"""What tensors and long lists hold, in one short text each."""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.spool import Rows, pieces

PLAIN = (type(None), bool, int, float, str)
LONG = 100  # values of a list or characters of a text, beyond which it is digested


def digest(*values: Rows) -> str:
    """Digest the bytes of tensors; of what lies in a file, piece by piece."""
    made = hashlib.blake2b(digest_size=16)
    for piece in chain.from_iterable(map(pieces, values)):
        flat = piece.detach().cpu().contiguous().reshape(-1)
        made.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return made.hexdigest()


def short(data: bytes) -> str:
    """Digest some bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def of_tensor(value: Tensor) -> str:
    """Tell type, shape and content.

    >>> of_tensor(torch.tensor(0.5)), of_tensor(torch.zeros(2, 3))[:13]
    ('float32[] 0.5', 'float32[2, 3]')
    """
    kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value.numel() == 1 and not value.is_complex() and not value.is_quantized:
        return f"{kind} {value.detach().item()!r}"  # sync: once in a run
    plain = value.detach().resolve_conj().resolve_neg()
    return f"{kind} {digest(plain)[:16]}"


def of_array(value: np.ndarray[Any, Any]) -> str:
    """Tell type, shape and content of an array that holds no objects."""
    whole = np.ascontiguousarray(value)
    return f"numpy {value.dtype}{list(value.shape)} {short(whole.tobytes())}"


def of_values(value: Any) -> Any | None:
    """Give a long text, or a long list of plain values, as a digest; None for anything else."""
    kind = type(value)
    if kind in (bytes, bytearray):
        return f"{kind.__name__} {len(value)} {short(bytes(value))}"
    if not isinstance(value, str | list | tuple) or len(value) <= LONG:
        return None
    if kind is str or (kind in (list, tuple) and all(type(v) in PLAIN for v in value)):
        data = repr(value).encode("utf-8", "surrogatepass")
        return f"{kind.__name__} of {len(value)}, {short(data)}"
    return None
