"""Modules that train many clients at once: some of torch's layers, rewritten.

torch's own BatchNorm counts padded rows and writes its buffers in place, its Dropout depends on the
order of clients, its recurrent layers have no batching rule, and its Linear cannot take its step
while going back.  `prepare` copies a module and exchanges these, and Conv2d and Sequential, which
do what torch's do unless the pass has a seam.  They read what they need to know from the `Pass`
that is running.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from undrift.core.batchnorm import Running, remember
from undrift.core.blocks import Block, run_block, run_sequence, takes
from undrift.core.convolution import Seam
from undrift.core.dropping import drop
from undrift.core.linear import Descent, descending_linear
from undrift.core.lstm import run_lstm
from undrift.core.normalising import normalised
from undrift.core.recurrent import run_recurrent
from undrift.errors import TaskError
from undrift.kernels.problem import Norm

__all__ = ["Pass", "current_pass", "prepare", "read_buffers", "running"]

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # the fields of Running


@dataclass(eq=False, slots=True)
class Pass:
    """What one forward pass knows; under vmap its tensors are those of one client.

    >>> with running(Pass(training=True)) as p:
    ...     current_pass() is p
    True
    """

    mask: Tensor | None = None  # [B] bool, True for real examples; None: all are real
    key: Tensor | None = None  # [] int64, the randomness of this pass; None: there is none
    training: bool = False
    new_buffers: dict[str, Tensor] = field(default_factory=dict)  # by full name, after the pass
    notes: dict[str, Any] = field(default_factory=dict)  # what hooks want to hand out
    draws: dict[int, int] = field(default_factory=dict)  # how often a layer has drawn
    descent: Descent | None = None  # layers take their SGD step while going back: linear ones,
    #                                 and with a seam convolutions too
    seam: Seam | None = None  # how convolutions and linear layers are computed; None: by torch


class _Stack(threading.local):
    """Passes that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []


_stack = _Stack()


@contextmanager
def running(run: Pass) -> Iterator[Pass]:
    """Make `run` the pass that prepared modules see, in this thread."""
    _stack.passes.append(run)
    try:
        yield run
    finally:
        _stack.passes.pop()


def current_pass() -> Pass:
    """Give the pass that is running in this thread."""
    if not _stack.passes:
        raise TaskError(
            "a prepared module was called outside of a pass: "
            "call it inside `with running(Pass(...)):`"
        )
    return _stack.passes[-1]


class Place(NamedTuple):
    """Where an exchanged module sits."""

    name: str  # dotted, "" for the root
    number: int  # among the exchanged ones: the layer's part in every random decision


def prepare(module: nn.Module) -> nn.Module:
    """Copy a module, with some layers exchanged for our own.

    Parameters, buffers, their names and all flags stay, so that what was trained loads back into
    the original.  Classes that define their own forward are left alone.
    """
    _check_readable(module)
    try:
        twin = copy.deepcopy(module)
    except RuntimeError as error:
        raise TaskError(f"the module cannot be copied: {error}") from error
    number = 0
    for name, part in list(twin.named_modules()):
        if isinstance(part, nn.TransformerEncoder):
            # nested tensors make an example's output as long as the longest text judged beside it
            part.use_nested_tensor = False
        if type(part).forward in FORWARDS and "forward" not in vars(part):
            _refuse(part, name)
            part.__class__ = _exchanged(type(part))
        if type(part).forward in FORWARDS.values():
            part._place = Place(name, number)
            number += type(part).forward not in UNCOUNTED
    return twin


def _check_readable(module: nn.Module) -> None:
    if any(is_lazy(p) for p in [*module.parameters(), *module.buffers()]):
        raise TaskError("a lazy module has no parameters yet: run one batch through it first")
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise TaskError(
                f"module {name!r} is compiled by torch.jit, so its layers cannot be read: give the "
                "module that was compiled"
            )


def read_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Give the buffers that the BatchNorms of a prepared module may update, by full name.

    A pass need not update them all: a BatchNorm in evaluation mode keeps its own.
    """
    return {
        _buffer(part, name): value
        for _, part in module.named_modules()
        if type(part).forward is _batch_norm_forward
        for name, value in part.named_buffers(recurse=False)
        if name in STATISTICS
    }


def draws_anything(module: nn.Module) -> bool:
    """Whether a pass through a prepared module takes random decisions."""
    dropouts = (_dropout_forward, _channel_dropout_forward)
    kinds = [(type(part).forward, part) for part in module.modules()]
    return any(f in dropouts or (isinstance(p, nn.RNNBase) and p.dropout > 0) for f, p in kinds)


def _refuse(part: nn.Module, name: str) -> None:
    if isinstance(part, nn.LSTM) and part.proj_size > 0:
        raise TaskError(
            f"LSTM {name!r} has proj_size={part.proj_size}, which is not supported: "
            "use proj_size=0 and a Linear layer after it"
        )


def _derive(kind: Any) -> Any:
    """Derive a class that differs from `kind` only in its forward."""
    parts = {"forward": FORWARDS[kind.forward], "kind": kind, "__reduce_ex__": _reduce}
    return type(f"Prepared{kind.__name__}", (kind,), parts)


_exchanged: Callable[[Any], Any] = cache(_derive)


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    # Pickle looks classes up by name, and a derived one has none: name the original instead.
    plain: Any = object.__reduce_ex__(self, protocol)
    return _blank, (self.kind,), plain[2]


def _blank(kind: type[nn.Module]) -> nn.Module:
    made = _exchanged(kind)
    return cast(nn.Module, made.__new__(made))


def _place(part: nn.Module) -> Place:
    return cast(Place, part._place)


def _buffer(part: nn.Module, name: str) -> str:
    prefix = _place(part).name
    return f"{prefix}.{name}" if prefix else name


def _batch_norm_forward(self: _BatchNorm, input: Tensor, how: Norm | None = None) -> Tensor:
    """Normalise by the real rows; in training the new buffers go into the pass.

    `how`: what a sequence lets follow in the same op.
    """
    self._check_input_dim(input)
    run = current_pass()
    _check_rows(self, input, run.mask)
    known = self.running_mean is not None and self.running_var is not None
    learning = run.training and self.training
    old = _running(self, run) if known else None
    fixed = old[:2] if old and not learning else None
    use_kernels = run.seam is not None and run.seam.uses_kernels(_place(self).name)
    y, stats = normalised(
        input, run.mask, fixed, self.weight, self.bias, how or Norm(self.eps, input.dtype),
        use_kernels,
    )  # fmt: skip
    if learning and old and self.track_running_stats:
        new = remember(old, stats, self.momentum)
        run.new_buffers.update((_buffer(self, n), v) for n, v in zip(STATISTICS, new, strict=True))
    return y


def _running(part: _BatchNorm, run: Pass) -> Running:
    # A layer that is used twice in one pass goes on from its own first update, as torch's does.
    return Running(*(run.new_buffers.get(_buffer(part, n), getattr(part, n)) for n in STATISTICS))


def _check_rows(part: nn.Module, x: Tensor, mask: Tensor | None) -> None:
    if mask is not None and x.shape[0] != mask.shape[0]:
        raise TaskError(
            f"BatchNorm {_place(part).name!r} got {x.shape[0]} rows in a batch of {mask.shape[0]} "
            "examples, so it cannot tell padding from data: keep examples in the first dimension"
        )


def _dropout_forward(self: _DropoutNd, input: Tensor) -> Tensor:
    """Drop single elements."""
    return _drop(self, input, self.p, input.dim())


def _channel_dropout_forward(self: _DropoutNd, input: Tensor) -> Tensor:
    """Drop whole channels: the second dimension, after the examples."""
    return _drop(self, input, self.p, 2)


def _drop(part: nn.Module, x: Tensor, p: float, depth: int) -> Tensor:
    run = current_pass()
    if p == 0 or not (run.training and part.training):
        return x
    use_kernel = x.is_cuda if run.seam is None else run.seam.may_use_kernels
    return drop(x, *_draw_key(part, run), p, depth, use_kernel)


def _draw_key(part: nn.Module, run: Pass) -> tuple[Tensor, tuple[int, int]]:
    """Give the pass's key, and what is folded into it: the layer's number and its use."""
    name, number = _place(part)
    if run.key is None:
        raise TaskError(
            f"dropout in {name!r} needs randomness, but the pass has no key: "
            "give Pass(key=...), or training=False to evaluate"
        )
    # One Dropout may serve several places of a network; each use decides anew.
    use = run.draws.get(number, 0)
    run.draws[number] = use + 1
    return run.key, (number, use)


def _lstm_forward(
    self: nn.LSTM, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Do what nn.LSTM does; the dropout between its layers is keyed."""
    return run_lstm(self, _unpacked(self, input), hx, lambda x: _drop_between(self, x))


def _recurrent_forward(
    self: nn.RNN | nn.GRU, input: Tensor | PackedSequence, hx: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Do what nn.RNN and nn.GRU do; the dropout between their layers is keyed."""
    return run_recurrent(self, _unpacked(self, input), hx, lambda x: _drop_between(self, x))


def _unpacked(part: nn.RNNBase, input: Tensor | PackedSequence) -> Tensor:
    if isinstance(input, PackedSequence):
        raise TaskError(
            f"{part.mode} {_place(part).name!r} got a PackedSequence, which is not supported: "
            "pass the padded tensor and pick each sequence's last step from the output"
        )
    return input


def _drop_between(self: nn.RNNBase, x: Tensor) -> Tensor:
    # Examples first while the elements are counted: [T, B, ...] would count padded rows.
    return _drop(self, x.transpose(0, 1), self.dropout, x.dim()).transpose(0, 1)


def _group_norm_forward(self: nn.GroupNorm, input: Tensor) -> Tensor:
    """Do what nn.GroupNorm does, but take groups of one value too, as in a last batch of one."""
    return torch.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


def _instance_norm_forward(self: _InstanceNorm, input: Tensor) -> Tensor:
    """Normalise every map of every example by itself, without running statistics.

    On a CPU torch's own gradients are wrong for one example whose gradient lies channels last.
    """
    axes = tuple(range(1 - self._get_no_batch_dim(), 0))
    if self.track_running_stats or input.shape[axes[0] :].numel() < 2:  # torch refuses the latter
        return _InstanceNorm.forward(self, input)
    self._check_input_dim(input)
    var, mean = torch.var_mean(input, axes, correction=0, keepdim=True)
    y = (input - mean) * (var + self.eps).rsqrt()
    if self.weight is None:
        return y
    weight, bias = (v.view(-1, *[1] * len(axes)) for v in (self.weight, self.bias))
    return y * weight + bias


def _linear_forward(self: nn.Linear, input: Tensor) -> Tensor:
    """Do what nn.Linear does, and the SGD step too where the pass says so."""
    run = current_pass()
    if run.seam is not None:
        return run_block(Block(self), input, run.seam, run.descent)
    if run.descent is not None:
        return descending_linear(input, self.weight, self.bias, run.descent)
    return F.linear(input, self.weight, self.bias)


def _conv_forward(self: nn.Conv2d, input: Tensor) -> Tensor:
    """Do what nn.Conv2d does, the way that the seam says."""
    run = current_pass()
    if run.seam is None or not takes(self):
        return self._conv_forward(input, self.weight, self.bias)
    return run_block(Block(self), input, run.seam, run.descent)


def _sequence_forward(self: nn.Sequential, input: Tensor) -> Tensor:
    """Call one layer after the other; a seam sees several at once."""
    run = current_pass()
    if run.seam is not None:
        return run_sequence(list(self), input, run.seam, run.descent)
    for layer in self:
        input = layer(input)
    return input


# Keyed by torch's own forward, so a subclass counts as long as it does not define another.
FORWARDS: dict[Callable[..., Any], Callable[..., Any]] = {
    _BatchNorm.forward: _batch_norm_forward,
    nn.Dropout.forward: _dropout_forward,
    nn.Dropout1d.forward: _channel_dropout_forward,
    nn.Dropout2d.forward: _channel_dropout_forward,
    nn.Dropout3d.forward: _channel_dropout_forward,
    nn.LSTM.forward: _lstm_forward,
    nn.RNN.forward: _recurrent_forward,
    nn.GRU.forward: _recurrent_forward,
    _InstanceNorm.forward: _instance_norm_forward,
    nn.GroupNorm.forward: _group_norm_forward,
    nn.Linear.forward: _linear_forward,
    nn.Conv2d.forward: _conv_forward,
    nn.Sequential.forward: _sequence_forward,
}
# Never draw: their numbers would change the random decisions of the layers after them.
UNCOUNTED = (_conv_forward, _sequence_forward, _group_norm_forward, _instance_norm_forward)
