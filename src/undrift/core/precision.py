"""Which number type operands have, and tf32 for the time of one call.

Sums are float32 whatever the operands are; float64 stays float64 in every precision.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from undrift.errors import unknown_name

PRECISIONS: dict[str, torch.dtype] = {
    "float32": torch.float32,  # strict: no tf32 anywhere
    "tf32": torch.float32,  # operands are rounded inside the multiplication
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

_lock = threading.Lock()
_found: list[bool] = []  # by everybody inside; the first found what was there before


def operand_type(precision: str, dtype: torch.dtype) -> torch.dtype:
    """Give the type in which operands of a computation in `dtype` are stored.

    >>> operand_type("bf16", torch.float32), operand_type("bf16", torch.float64)
    (torch.bfloat16, torch.float64)
    """
    return dtype if dtype == torch.float64 else PRECISIONS[precision]


def check_precision(precision: str) -> None:
    """Refuse a precision that does not exist."""
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise unknown_name("precision", precision, list(PRECISIONS), "engine")


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Let cuDNN and cuBLAS use tf32, or keep them from it; the switches go back afterwards.

    Of its algorithms cuDNN takes those that give the same bits every time.  A CUDA graph records
    kernels, so a replay needs no switch.
    """
    allowed = precision == "tf32"
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    switches = [(matmul, matmul), (cudnn, cudnn.conv)]
    before = [own.fp32_precision for _, own in switches]
    changed = [
        (pair, old)
        for pair, old in zip(switches, before, strict=True)
        if (old == "tf32") != allowed and torch.cuda.is_available()
    ]
    for (switch, _), _ in changed:
        switch.allow_tf32 = allowed
    try:
        with _repeating():
            yield
    finally:
        for (switch, own), old in changed:
            _restore(switch, own, old)


@contextmanager
def _repeating() -> Iterator[None]:
    """Make cuDNN deterministic; workers are inside at once, and the last puts the switch back."""
    cudnn: Any = torch.backends.cudnn
    with _lock:
        _found.append(cudnn.deterministic)
        cudnn.deterministic = True
    try:
        yield
    finally:
        with _lock:
            found = _found.pop()
            if not _found:
                cudnn.deterministic = found


def _restore(switch: Any, own: Any, old: str) -> None:
    # torch keeps an old and a new switch and refuses when they disagree: set both.
    switch.allow_tf32 = old == "tf32"
    own.fp32_precision = old
