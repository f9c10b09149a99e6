"""A function of trees, recorded as a flat graph of torch's operations.

The graph runs what the function would have called, in the same order: its results are the same
bits.  It leaves out Python: records, views, closures, and torch's function transforms.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from undrift.core.tree import Tree, leaves, rebuild
from undrift.core.watching import WATCHERS

SIMPLE = (bool, int, float, str, type(None))

_tracing = threading.Lock()  # torch's tracer changes nn.Module while it works


class Untraceable(Exception):
    """A function that depends on more than its arguments."""


def trace(
    function: Callable[..., Tree], shape: Any, given: Sequence[Tensor], owners: Sequence[Any]
) -> GraphModule:
    """Record a function of trees with these leaves; it is called once.

    What is recorded takes the leaves of the arguments and gives those of the result.

    `owners` are the objects whose Python attributes it may read.  Raises what the tracer raises,
    and `Untraceable` where a second call might do something else.
    """

    def flat(*values: Tensor) -> list[Tensor]:
        return leaves(function(*rebuild(shape, values)))

    before = _outside(owners)
    # One fake mode for all operations, for which torch has no public way: else the tracer makes one
    # for each of them, which takes three times as long.
    shared = TracingContext(FakeTensorMode(allow_fallback_kernels=True))
    with _tracing, tracing(shared):
        graph: GraphModule = make_fx(flat)(*given)
    if _outside(owners) != before:
        raise Untraceable("it changes Python attributes, or draws from a global generator")
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _outside(owners: Sequence[Any]) -> tuple[Any, ...]:
    """Describe what a pure function leaves alone."""
    drawn = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().numpy().tobytes())
    return (*(settings(owner) for owner in owners), *drawn)


def settings(owner: Any) -> tuple[Any, ...]:
    """Describe the Python attributes of an object and its parts, constants of a trace."""
    parts = owner.modules() if isinstance(owner, nn.Module) else [owner]
    return tuple(
        (id(part), *map(_setting, getattr(part, "__dict__", {}).items())) for part in parts
    )


def _setting(item: tuple[str, Any]) -> Any:
    name, value = item
    if isinstance(value, SIMPLE):
        return name, value
    if isinstance(value, dict):
        # hooks, parameters and buffers: by identity, and by what was written over them
        return name, tuple((key, id(v), getattr(v, "_version", 0)) for key, v in value.items())
    if isinstance(value, list | tuple | set):
        return name, tuple(v if isinstance(v, SIMPLE) else id(v) for v in value)
    return name, id(value), getattr(value, "_version", 0)


def has_hooks(module: nn.Module) -> bool:
    """Whether a user's hooks are called with every pass: a trace would call them once."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = (h for part in module.modules() for kind in kinds for h in getattr(part, kind).values())
    return any(hook not in WATCHERS for hook in hooks)
