"""Elementwise algebra as few kernels: a function of trees, traced once and compiled.

Rules are written line by line for one client; run as they stand, every line is a pass over [C, P].
On a CUDA device `Fused` records the operations of the first call and lets torch's compiler put them
into a few kernels.  What cannot be recorded or compiled is called as it is.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from undrift.core.tree import Tree, leaves, rebuild, structure
from undrift.program.compile import compile_recorded, prove, settings

log = logging.getLogger("undrift")

Rewrite = Callable[[torch.fx.GraphModule], torch.fx.GraphModule]

TRACES = False  # what is not compiled, too: it brings nothing, but shows what a device would do
MOST_LAYERS = 16  # whose gradients are read where they are
SORTS = (torch.ops.aten.sort.default, torch.ops.aten.sort.stable)


class Made(NamedTuple):
    """What stands for a function, for things that lie alike."""

    run: Callable[..., Any]
    shape: Any  # of what the function returns


class Fused:
    """Calls `function(*trees)`; all tensors it reads must be leaves of its arguments.

    It may write into them in place.  For other shapes, or where other arguments are the same
    memory, it is compiled again.  Where it cannot be traced, `plain` is called instead.
    `vectors`: almost all is arithmetic on long vectors.  `proven`: what the compiler has made is
    compared once with the operations as they stand; not for everything, for that takes as much
    memory as it reads, twice.  `rewritten`: passes over the graph of a local step, which is many
    kernels.
    """

    def __init__(
        self,
        function: Callable[..., Tree],
        name: str,
        *,
        compiled: bool,
        plain: Callable[..., Tree] | None = None,
        vectors: bool = False,
        proven: bool = False,
        rewritten: Rewrite | None = None,
    ) -> None:
        self.function, self.plain, self._vectors = function, plain or function, vectors
        self._rewritten = rewritten
        self.name, self.compiled, self._proven = name, compiled, proven
        # by how what is given lies in memory; None: it could not be made
        self._made: dict[Any, Made | None] = {}
        self._plain = False

    def __call__(self, *trees: Tree) -> Tree:
        if self._plain or not (self.compiled or TRACES):
            return self.plain(*trees)
        given = leaves(trees)
        first = _first_of(given) if self.compiled else list(range(len(given)))
        how = lies(given) if self.compiled else ()
        if how not in self._made:
            self._made[how] = self._record(trees, first)
        made = self._made[how]
        if made is None:
            return self.plain(*trees)
        return rebuild(made.shape, made.run(*(v for i, v in enumerate(given) if first[i] == i)))

    @property
    def is_plain(self) -> bool:
        """Whether the function could not be traced or compiled, once at least."""
        return self._plain or None in self._made.values()

    def _record(self, trees: tuple[Tree, ...], first: list[int]) -> Made | None:
        """Trace on copies, so that what is written in place is written once, later.

        For every leaf `first` names the first one that is the same memory: the compiler takes what
        it is given twice for two.
        """
        shape, given, found = structure(trees), leaves(trees), list[Any]()

        def flat(*values: Any) -> list[Any]:
            by_place = dict(zip(sorted(set(first)), values, strict=True))
            result = self.function(*rebuild(shape, [by_place[i] for i in first]))
            found[:] = [structure(result)]
            return leaves(result)

        def copies() -> list[Tensor]:
            return [_copy(v) for i, v in enumerate(given) if first[i] == i]

        begun = time.perf_counter()
        try:
            traced = make_fx(flat)(*copies())
            _bring_constants(traced, given)
            if self._rewritten is not None:
                traced.graph.eliminate_dead_code()
                traced = self._rewritten(traced)
            made: Callable[..., Any] = traced
            if not self.compiled:
                traced.graph.eliminate_dead_code()
                traced.recompile()
            else:
                with (
                    warnings.catch_warnings(),
                    _settings(traced, self._vectors, self._rewritten is not None),
                ):
                    warnings.simplefilter("ignore")  # the compiler's own remarks
                    log.debug("%s: traced in %.1f s", self.name, time.perf_counter() - begun)
                    made = compile_recorded(deepcopy(traced), copies())
                    if self._proven:
                        prove(traced, made, copies)
                    else:
                        made(*copies())  # not those that were traced: a counter has gone on there
        except Exception as error:  # any of the tracer's or the compiler's
            log.info("%s runs unfused (%s: %s)", self.name, type(error).__name__, error)
            return None
        took, count = time.perf_counter() - begun, len(traced.graph.nodes)
        log.info("%s: %d operations, traced and compiled in %.1f s", self.name, count, took)
        return Made(made, found[0])


def _bring_constants(traced: torch.fx.GraphModule, given: Sequence[Tensor]) -> None:
    """Put numbers that a function has written down where its arguments are.

    They are traced on the host, and fetched from there they could not be recorded.
    """
    for node in traced.graph.find_nodes(op="get_attr"):
        value = getattr(traced, node.target)
        if isinstance(value, Tensor) and value.device.type == "cpu" and given:
            setattr(traced, node.target, value.to(given[0].device))


def lies(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Tell how tensors lie in memory: code is made for that."""
    return (*_first_of(tensors), *((v.shape, v.stride(), v.dtype) for v in tensors))


def _first_of(tensors: Sequence[Tensor]) -> list[int]:
    """Give for every tensor the place of the first that is the same memory, read the same way."""
    seen: dict[Any, int] = {}
    return [
        seen.setdefault((v.data_ptr(), v.shape, v.stride(), v.dtype) if v.numel() else i, i)
        for i, v in enumerate(tensors)
    ]


def _copy(tensor: Tensor) -> Tensor:
    """Copy with the gaps between rows: code made for other strides would be made again."""
    once = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]
    room = torch.empty_strided(once.shape, once.stride(), dtype=once.dtype, device=once.device)
    return room.copy_(once).expand_as(tensor)


def _settings(traced: torch.fx.GraphModule, vectors: bool, whole: bool) -> Any:
    """Compile in this process: for a handful of kernels a pool of others takes longer to start.

    A whole step has hundreds of them.

    A gradient is put together from those of the layers.  Of a few, the move reads them where they
    are; of many, it would look through all of them for every number.  A sort of its own takes the
    compiler ten seconds.  Left to itself it takes the fastest of several ways to sum, as timed here
    and now, so that one run would sum in another order than the next.
    """
    put_together = [n for n in traced.graph.nodes if n.target is torch.ops.aten.cat.default]
    few = all(len(node.args[0]) <= MOST_LAYERS for node in put_together)
    wanted: dict[str, Any] = {
        "compile_threads": min(16, os.cpu_count() or 1) if whole else 1,
        "force_pointwise_cat": few,
        "deterministic": True,
    }
    if vectors:
        # What several results are made of is computed for each of them: written down, it would be
        # as long as all that is read.  (Where numbers are hashed, such code has no end.)
        wanted |= {"realize_reads_threshold": 16, "realize_opcount_threshold": 300}
    if any(node.target in SORTS for node in traced.graph.nodes):
        wanted["triton.persistent_reductions"] = False  # torch's sort is as fast, and is there
    return settings(wanted)
