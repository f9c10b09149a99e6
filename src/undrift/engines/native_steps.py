"""All local steps of plain SGD for stacks of linear layers in one call, by loops in C.

In `dense_steps` every operation of a small model costs its start, and what a cohort has between two
of them leaves the caches of a core.  Here a client's steps are one loop.  Equal within rounding.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrift import native
from undrift.core.algorithm import Algorithm, Broadcast, Client
from undrift.core.chain import parameter
from undrift.core.losses import accuracy, cross_entropy
from undrift.core.task import Task
from undrift.core.views import Carry
from undrift.data.federation import Federation
from undrift.engines.dense_steps import DenseSteps, Workspace, is_dense, layers_of
from undrift.errors import DataError

ROOM = 64  # bytes: where memory for the loops may begin


class _Stack(ctypes.Structure):
    """`struct stack` of dense.c."""

    _fields_ = (
        ("layers", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("sizes", "cuts", "weights", "biases")),
    )


class _Work(ctypes.Structure):
    """`struct work` of dense.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y", "rows")),
        *((name, ctypes.c_int64) for name in ("steps", "batch")),
    )


class Layers(NamedTuple):
    """A stack of linear layers."""

    sizes: list[int]  # features before each, and behind the last
    cuts: list[int]  # whether ReLU follows
    names: list[str]


def fits(task: Task, data: Federation) -> bool:
    """Whether the loops do this task: layers, ReLU between them at most, classes as labels."""
    known = (
        task.dtype in native.BITS
        and is_dense(task, data.x.dim() - 1)
        and task.loss is cross_entropy
        and all(metric is accuracy for metric in task.metrics.values())
        and isinstance(data.x, Tensor)
        and isinstance(data.y, Tensor)
    )
    if not known or layers_in(task.module, data.x.shape[1:]) is None:
        return False
    assert isinstance(data.x, Tensor) and isinstance(data.y, Tensor)
    plain = data.y.dim() == 1 and data.x.is_contiguous() and data.y.is_contiguous()
    return plain and (data.x.dtype, data.y.dtype) == (task.dtype, torch.int64)


def layers_in(module: nn.Module, shape: Sequence[int]) -> Layers | None:
    """List the layers of a module for examples of a shape; None where others are among them."""
    made, flat = Layers([math.prod(shape)], [], []), len(shape) == 1
    for name, layer in layers_of(module):
        if isinstance(layer, nn.Linear) and flat and _joins(layer, made.sizes[-1]):
            made.sizes.append(len(layer.weight))
            made.cuts.append(0)
            made.names.append(name)
        elif type(layer) is nn.ReLU and made.cuts and not made.cuts[-1]:
            made.cuts[-1] = 1
        elif isinstance(layer, nn.Flatten):
            flat = True
        elif not isinstance(layer, nn.Identity):
            return None
    # the loss is taken of what the last layer gives
    return made if made.names and not made.cuts[-1] else None


def _joins(layer: nn.Linear, inputs: int) -> bool:
    """Whether a layer takes so many inputs: its tensors tell, whatever it says of itself."""
    weight, bias = layer.weight, layer.bias
    fits = weight.dim() == 2 and weight.shape[1] == inputs and weight.numel() > 0
    return fits and (bias is None or bias.shape == weight.shape[:1])


class NativeSteps(DenseSteps):
    """Takes all steps of a chunk of clients at once; the task `fits`."""

    def __init__(
        self, task: Task, algo: Algorithm, broadcast: Broadcast, workspace: Workspace,
        data: Federation,
    ) -> None:  # fmt: skip
        super().__init__(task, algo, broadcast, workspace)
        self._data = data
        found, loops = layers_in(task.module, data.x.shape[1:]), native.loops(task.dtype)
        assert found is not None and loops is not None, "asked for before"
        self._layers, self._loops = found, loops

    def take_all(self, clients: Client, rows: Tensor, order: Tensor, steps: Tensor) -> Carry:
        """Take so many steps of each client: rows and positions of examples [C, K, B]."""
        return self._trained(self.start(clients), rows, order, steps)

    def _trained(
        self, carry: Carry, rows: Tensor, order: Tensor, steps: Tensor,
        chains: Sequence[ctypes.Structure] | None = None,
    ) -> Carry:  # fmt: skip
        """Move the rows of `carry.w`, and under linear rules whatever else their chains name."""
        loss, correct = carry.loss.clone(), torch.zeros_like(carry.loss)
        rows = torch.where(order >= 0, rows, -1).contiguous()
        rates, keeps = self._rates(rows.shape[1])
        x, y = self._data.x, self._data.y
        assert isinstance(x, Tensor) and isinstance(y, Tensor), "asked for before"
        held = self._stack(carry.w)
        stack = _Stack(len(self._layers.names), *(v.data_ptr() for v in held))
        room = self._loops.undrift_dense_room(ctypes.byref(stack), rows.shape[2])
        memory = self._workspace.room("c", (room + ROOM,), torch.empty(0, dtype=torch.uint8))
        given = (-(-memory.data_ptr() // ROOM) * ROOM, *(v.data_ptr() for v in (rates, keeps)))
        for c, taken in enumerate(steps.tolist()):  # one by one: an interrupt waits for one
            work = _Work(x.data_ptr(), y.data_ptr(), rows[c].data_ptr(), taken, rows.shape[2])
            own = [v[c].data_ptr() for v in (carry.w, loss, correct)]
            chain = None if chains is None else ctypes.byref(chains[c])
            wrong = self._loops.undrift_dense_train(
                ctypes.byref(stack), ctypes.byref(work), *given, chain, *own
            )
            if wrong:
                raise self._no_class(wrong - 1, y)
        return carry._replace(loss=loss, scores={n: v + correct for n, v in carry.scores.items()})

    def _no_class(self, example: int, y: Tensor) -> DataError:
        label, last = int(y[example]), self._layers.sizes[-1] - 1
        return DataError(f"label {label} of example {example}: classes are 0 to {last}")

    def _rates(self, steps: int) -> tuple[Tensor, Tensor]:
        """Give the learning rate of each step, and what weights keep of themselves."""
        local, number = self.algo.local, self.task.dtype
        lrs = [
            float(local.lr_at(self.broadcast.round, torch.tensor(k, dtype=number)))
            for k in range(steps)
        ]
        keeps = [1 - lr * local.weight_decay for lr in lrs]
        return torch.tensor(lrs, dtype=number), torch.tensor(keeps, dtype=number)

    def _stack(self, w: Tensor) -> list[Tensor]:
        """Tell how wide layers are, and where in a row of w they have their parameters."""
        parts: dict[str, Any] = self._parts(w)

        def places(key: str) -> list[int]:
            own = [parts.get(parameter(name, key)) for name in self._layers.names]
            return [-1 if v is None else v.storage_offset() - w.storage_offset() for v in own]

        told = (self._layers.sizes, self._layers.cuts, places("weight"), places("bias"))
        return [torch.tensor(v, dtype=torch.int64) for v in told]
