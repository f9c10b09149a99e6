"""Tensors from outside: safetensors, whose header is measured before anything is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from undrift.guarded.limits import Unreadable, check
from undrift.guarded.text import parse_json, read_bytes

TEXTS = "__metadata__"


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read the texts and the tensors of a file; OSError as usual."""
    return parse_tensors(read_bytes(path, "weights_bytes"))


def parse_tensors(data: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read the bytes of a file of safetensors: the texts in its header, and its tensors."""
    length = int.from_bytes(data[:8], "little")
    check("names_bytes", "bytes of names and texts", length)
    try:
        header: Any = parse_json(data[8 : 8 + length])
        texts = header.get(TEXTS, {})
        if not all(isinstance(text, str) for text in texts.values()):
            raise ValueError("its texts are no texts")
        return dict(texts), load(data)
    except (SafetensorError, AttributeError, KeyError, ValueError, TypeError, RuntimeError) as e:
        # where its names end is chance: safetensors writes them in any order
        why = "" if isinstance(e.__cause__, json.JSONDecodeError) else f" ({e})"
        raise Unreadable(f"this is no safetensors file, or it was cut off{why}") from e
