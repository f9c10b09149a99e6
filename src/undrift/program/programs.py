"""Programs of one engine: which functions were traced, for which arguments, and when that pays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from undrift.core.task import Task
from undrift.core.tree import Tree, leaves, rebuild, structure
from undrift.program.compile import compile_for_cpu, lies
from undrift.program.trace import has_hooks, settings, trace

log = logging.getLogger("undrift")

WORTH = 0.2  # seconds of calls before a function is traced: about as long as tracing takes
MOST = 64  # programs that are kept: a cohort whose clients end one by one makes many


class Program:
    """A function for arguments of certain shapes: called as it is, later run as a graph.

    A graph gives the same bits as the function.  `compiled`, it does not, so then all calls run
    what the compiler has made, from the first one on.
    """

    def __init__(
        self, function: Callable[..., Tree], shape: Any, owners: Sequence[Any],
        compiled: bool = False,
    ) -> None:  # fmt: skip
        self._function, self._shape, self._owners = function, shape, owners
        self._compiled = compiled
        self._seconds = 0.0  # spent in calls of the function as it is
        self.graph: Callable[..., list[Tensor]] | None = None
        self.traceable = True  # until it turns out that it is not
        self.result: Any = None  # structure of what the function returns, once it was called

    def run(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Take the leaves of the arguments, give those of the result."""
        if self._compiled and self.result is None:
            self._call(given)  # for errors of its own
        if self.graph is None and self.traceable and (self._compiled or self._seconds >= WORTH):
            self._record(given)
        return self._call(given) if self.graph is None else self.graph(*given)

    def _call(self, given: Sequence[Tensor]) -> list[Tensor]:
        start = time.perf_counter()
        found = self._function(*rebuild(self._shape, given))
        if self.result is None:
            self.result = structure(found)
        self._seconds += time.perf_counter() - start
        return leaves(found)

    def _record(self, given: Sequence[Tensor]) -> None:
        if self.result is None:  # it has to be called once as it is, for errors of its own
            return
        begun = time.perf_counter()
        try:
            graph = trace(self._function, self._shape, given, self._owners)
        except Exception as error:  # any of the tracer's
            log.info("a function runs untraced (%s: %s)", type(error).__name__, error)
            self.traceable = False
            return
        self.graph = graph.forward
        if self._compiled:
            self._compile(graph, given, begun)

    def _compile(self, graph: GraphModule, given: Sequence[Tensor], begun: float) -> None:
        try:
            self.graph = compile_for_cpu(graph, given)
        except Exception as error:  # any of the compiler's
            log.info("a function runs uncompiled (%s: %s)", type(error).__name__, error)
            return
        took, count = time.perf_counter() - begun, len(graph.graph.nodes)
        log.info("a program of %d operations: traced and compiled in %.1f s", count, took)


class Programs:
    """Finds the program for a function and its arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, Program] = {}
        self._settings: Any = None
        # held, so that ids stay those of living objects
        self._owners: tuple[Any, ...] = ()
        self._algorithms: list[Any] = []
        self._traces = True

    def __deepcopy__(self, memo: Any) -> Programs:
        """Start anew: a copied trainer has a module of its own, and graphs hold the old one."""
        return Programs()

    def renew(self, task: Task) -> None:
        """Forget all programs if the module or the loss was changed since."""
        owners = (task.module, task.loss, task.augment, *task.metrics.values())
        now = tuple(settings(owner) for owner in owners)
        if now != self._settings:
            self._known, self._settings, self._owners = {}, now, owners
            self._traces = not has_hooks(task.module)

    def number(self, algorithm: Any) -> int:
        """Number algorithms in the order in which they come."""
        known = next((i for i, a in enumerate(self._algorithms) if a is algorithm), None)
        if known is None:
            self._algorithms.append(algorithm)
            return len(self._algorithms) - 1
        return known

    def find(
        self, key: Any, function: Callable[..., Tree], shape: Any, given: Sequence[Tensor],
        compiled: bool = False,
    ) -> Program:  # fmt: skip
        """Give the program of a function for arguments like these.

        `key` names the function: equal keys mean functions that do the same.
        """
        full = (key, compiled, shape, tuple(map(lies, given)))
        if full not in self._known:
            if len(self._known) >= MOST:
                del self._known[next(iter(self._known))]
            self._known[full] = Program(function, shape, self._owners, compiled)
            self._known[full].traceable = self._traces
        return self._known[full]

    def call(self, key: Any, function: Callable[..., Tree], *trees: Tree) -> Tree:
        """Call a function of trees through its program."""
        given = leaves(trees)
        program = self.find(key, function, structure(trees), given)
        found = program.run(given)
        return rebuild(program.result, found)
