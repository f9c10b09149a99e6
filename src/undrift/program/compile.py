"""Recorded operations, made into machine code by torch's compiler and proven on the way.

Code that the compiler has made is used only after its results were compared once with those of the
operations as they stand.
"""

from __future__ import annotations

import contextlib
import shutil
import sysconfig
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from undrift.kernels.memory import own_compiler_cache

Run = Callable[..., Any]
# Largest difference between compiled code and the operations as they stand, of the largest number.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5}

MOST = 64  # compiled functions that are kept for whoever asks for the same

_compiling = threading.RLock()  # settings of the compiler are global
_made: dict[Any, Run] = {}


def compile_recorded(recorded: GraphModule, given: Sequence[Tensor]) -> Run:
    """Compile recorded operations for tensors like these.

    Not by `torch.compile`: it would ask every time whether they still are, and compile anew for
    reasons of its own, even while a round is being recorded.
    """
    from torch._inductor import compile as inductor

    own_compiler_cache()
    with torch.no_grad():
        made: Run = inductor(recorded, list[Any](given))
    return made


def compile_for_cpu(recorded: GraphModule, given: Sequence[Tensor]) -> Run:
    """Compile recorded operations, which write into nothing they are given, for one thread.

    Workers and experiments that record the same operations share their code.
    """
    with _compiling:
        key = _described(recorded, given)
        if key not in _made:
            if len(_made) >= MOST:
                del _made[next(iter(_made))]
            _made[key] = _compile_for_cpu(recorded, given)
        return _made[key]


def _described(recorded: GraphModule, given: Sequence[Tensor]) -> Any:
    """Describe everything that code depends on."""
    constants = [getattr(recorded, n.target) for n in recorded.graph.find_nodes(op="get_attr")]
    own: Any = tuple(v.numpy(force=True).tobytes() for v in constants if isinstance(v, Tensor))
    if len(own) < len(constants):
        own = (id(recorded),)  # a part that is no tensor: nobody else has it
    return recorded.code, own, tuple(map(lies, given))


def lies(tensor: Tensor) -> tuple[Any, ...]:
    """Tell how a tensor lies in memory; a stride along one element alone means nothing."""
    strides = (n > 1 and stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.shape, tuple(strides), tensor.dtype


def _compile_for_cpu(recorded: GraphModule, given: Sequence[Tensor]) -> Run:
    # Left to itself it takes the fastest of several ways to sum, as timed here and now; the code of
    # each of several threads that train side by side must not start threads of its own.
    wanted = {"cpp.threads": 1, "deterministic": True, "compile_threads": 1}
    with warnings.catch_warnings(), settings(wanted):
        warnings.simplefilter("ignore")  # the compiler's own remarks
        made = compile_recorded(recorded, given)
        prove(recorded, made, lambda: list(given))
    return made


def prove(recorded: Run, made: Run, arguments: Callable[[], list[Tensor]]) -> None:
    """Refuse what the compiler has made if its numbers are not those of the operations.

    Arguments are asked for twice, as the operations may write into them.
    """
    wanted, found = arguments(), arguments()
    wanted += recorded(*wanted)
    found += made(*found)
    if not all(map(alike, found, wanted)):
        raise RuntimeError("compiled, it gives other numbers")


def alike(found: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors are the same but for rounding."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not found.is_floating_point():
        return torch.equal(found, wanted)
    known = wanted.isfinite()
    largest = float(wanted[known].abs().max()) if bool(known.any()) else 0.0
    on_cpu = found.device.type == "cpu"
    most = ROUNDING.get(found.dtype, 1e-2) if on_cpu else 1e-6
    return torch.allclose(found, wanted, rtol=1e-4, atol=most * largest, equal_nan=True)


def settings(wanted: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Set those settings of the compiler that this torch knows."""
    from torch._inductor import config

    return config.patch({name: value for name, value in wanted.items() if _is_known(config, name)})


def _is_known(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


@cache
def has_cpp_compiler() -> bool:
    """Whether this machine has all that compiling for a CPU takes: a compiler, Python's headers."""
    from torch._inductor import config

    given = config.cpp.cxx
    names = given if isinstance(given, tuple | list) else (given,)
    found = any(name and shutil.which(name) for name in names)
    return found and Path(sysconfig.get_path("include"), "Python.h").exists()
