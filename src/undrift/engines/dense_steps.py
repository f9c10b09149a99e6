"""Local steps of plain SGD for stacks of linear layers, cohort tensors all the way through.

What vmap does around each small operation costs more than a small model's whole step; here layers
are called on [C, B, ...] themselves.  Equal to `PlainSteps` within rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from undrift.core import linear
from undrift.core.algorithm import Algorithm, Broadcast, Client
from undrift.core.chain import parameter
from undrift.core.linear import Descent, take_step
from undrift.core.losses import counts_alone, cross_entropy, per_example
from undrift.core.task import Batch, Task
from undrift.core.views import Carry
from undrift.data.spool import Rows
from undrift.engines.plain import PlainSteps, is_sequence

# Layers that treat every number alike, wherever it stands.
ELEMENTWISE = (
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus),
    nn.Identity,
)

ALIGNED = 16  # rows of parameters begin at multiples of so many numbers: products read them faster
FEW_CLASSES = 16  # with fewer, torch's softmax goes through them one by one


def is_dense(task: Task, dims: int) -> bool:
    """Whether a task is linear layers in a row, and each example of `dims` counts for itself."""
    return (
        is_sequence(task.module)
        and all(_is_simple(layer) for _, layer in layers_of(task.module))
        # a user's own may look at the whole batch
        and all(map(counts_alone, (task.loss, *task.metrics.values())))
        and dims > 0
        and task.augment is None
        and task.feature is None
        and task.seam is None
    )


def layers_of(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """List layers in the order of their calls."""
    if not isinstance(module, nn.Sequential):
        yield name, module
        return
    for key, part in module.named_children():
        yield from layers_of(part, f"{name}.{key}" if name else key)


def _is_simple(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Flatten):
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return isinstance(layer, nn.Linear) or type(layer) in ELEMENTWISE


class Workspace:
    """Memory that every step writes again: fresh memory costs its page faults, step after step."""

    def __init__(self) -> None:
        self._held: dict[Any, Tensor] = {}

    def room(self, name: Any, shape: Sequence[int], like: Tensor) -> Tensor:
        """Give memory of this name, shape and the type of `like`; what is in it is lost."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or len(held) < size or held.dtype != like.dtype:
            held = self._held[name] = like.new_empty(size)
        return held[:size].view(*shape)


class _Linear:
    """A cohort's linear layer, its products written where the last step had them."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, shape: Sequence[int], wanted: bool,
        room: Callable[..., Tensor],
    ) -> None:  # fmt: skip
        self._weight, self._bias, self._shape, self._wanted = weight, bias, shape, wanted
        count, out, size = weight.shape
        batch = math.prod(shape[1:-1])
        self._rows = (count, batch, size)
        self._first = linear.weights_first()
        made = room("y", (count, out, batch) if self._first else (count, batch, out))
        self._product, self._turned = made, weight.transpose(1, 2)
        self._y = (made.transpose(1, 2) if self._first else made).unflatten(1, shape[1:-1] or (1,))
        self._added = bias if bias is None else bias[:, :, None] if self._first else bias[:, None]
        if wanted:
            self._made = room("g", (count, size, batch) if self._first else self._rows)

    def forward(self, x: Tensor) -> Tensor:
        self._x = x.reshape(self._rows)
        a, b = self._x, self._turned
        if self._first:
            a, b = self._weight, self._x.transpose(1, 2)
        if self._added is None:
            torch.bmm(a, b, out=self._product)
        else:
            torch.baddbmm(self._added, a, b, out=self._product)
        return self._y.reshape(*self._shape[:-1], -1)

    def back(self, g: Tensor, how: Descent) -> Tensor:
        """Take the step; gives the gradient by the input, where somebody wants it."""
        g = g.reshape(*self._rows[:2], -1)
        turned, found = g.transpose(1, 2), g
        if self._wanted and self._first:
            found = torch.bmm(self._turned, turned, out=self._made).transpose(1, 2)
        elif self._wanted:
            found = torch.bmm(g, self._weight, out=self._made)
        assert isinstance(how.lr, float) and isinstance(how.keep, float), "the same for all"
        self._weight.baddbmm_(turned, self._x, beta=how.keep, alpha=-how.lr)
        if self._bias is not None:
            take_step(self._bias, g.sum(1), how)
        return found.reshape(self._shape) if self._wanted else found


class _Relu:
    """ReLU behind a linear layer: nobody else reads what is below zero."""

    def forward(self, x: Tensor) -> Tensor:
        self._y = x.relu_()
        return self._y

    def back(self, g: Tensor, how: Descent) -> Tensor:
        torch.ops.aten.threshold_backward.grad_input(g, self._y, 0, grad_input=g)
        return g


class _Flat:
    """What changes nothing but the shape."""

    def __init__(self, layer: nn.Module) -> None:
        self._flattens = isinstance(layer, nn.Flatten)

    def forward(self, x: Tensor) -> Tensor:
        self._shape = x.shape
        return x.flatten(2) if self._flattens else x

    def back(self, g: Tensor, how: Descent) -> Tensor:
        return g.reshape(self._shape)


class _Other:
    """A layer whose way back torch knows."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def forward(self, x: Tensor) -> Tensor:
        self._x = x.detach().requires_grad_()
        with torch.enable_grad():
            self._y = self._layer(self._x)
        return self._y.detach()

    def back(self, g: Tensor, how: Descent) -> Tensor:
        (found,) = torch.autograd.grad(self._y, self._x, g)
        return found


class DenseSteps(PlainSteps):
    """Moves the parameters of a chunk of clients; the task `is_dense`.

    Goes forward and back by hand: every product is written where the last step had it, and only
    losses other than cross-entropy and layers that are neither linear nor ReLU are left to
    autograd.
    """

    def __init__(
        self, task: Task, algo: Algorithm, broadcast: Broadcast, workspace: Workspace
    ) -> None:
        super().__init__(task, algo, broadcast, together=True)
        self._workspace = workspace
        self._made_for: Any = None
        self._prepared: list[Any] = []
        self._first = 0  # that moves

    def start(self, clients: Client) -> Carry:
        """Give every client its own row of parameters, in memory that another chunk had before."""
        carry = self.begun(clients)
        count, size = carry.w.shape
        room = self._workspace.room("w", (count, -(-size // ALIGNED) * ALIGNED), carry.w)
        return carry._replace(w=room[:, :size].copy_(carry.w))

    def room_for(self, rows: Tensor, x: Rows) -> Tensor | None:
        """Give memory for a batch of these rows, which the next one has again."""
        if not isinstance(x, Tensor):
            return None  # read from a file
        return self._workspace.room("x", (*rows.shape, *x.shape[1:]), x)

    def step(self, clients: Client, carry: Carry, batch: Batch, k: Tensor) -> Carry:
        """Take one local step; the rows of `carry.w` move."""
        lr = float(self.algo.local.lr_at(self.broadcast.round, k))
        how = Descent(lr, 1 - lr * self.algo.local.weight_decay)
        self._prepare(carry.w, batch.x)
        y = batch.x
        for layer in self._prepared:
            y = layer.forward(y)
        value, target = y.flatten(0, 1), batch.y.flatten(0, 1)
        count = batch.mask.sum(1).clamp(min=1)
        losses, g = self._losses_and_gradient(value, target, batch.mask, count)
        metrics = self.task.metrics.items()
        scores = {
            n: carry.scores[n] + _means(m(value, target), batch.mask, count) for n, m in metrics
        }
        g = g.view(y.shape)
        for layer in reversed(self._prepared[self._first :]):
            g = layer.back(g, how)
        return carry._replace(loss=carry.loss + losses, scores=scores)

    def _losses_and_gradient(
        self, value: Tensor, target: Tensor, mask: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Give each client's mean loss, and the gradient of their sum by the output."""
        if self.task.loss is cross_entropy and value.dim() == 2 and target.dim() == 1:
            # classes first where they are few: one by one it takes five times as long
            few = value.shape[1] < FEW_CLASSES
            turned, by = (value.t().contiguous(), 0) if few else (value, 1)
            logs, at = torch.log_softmax(turned, by), target.long().unsqueeze(by)
            picked = logs.gather(by, at).squeeze(by)
            share = (mask.to(value.dtype) / count[:, None]).view(-1).unsqueeze(by)
            g = logs.exp_().mul_(share).scatter_add_(by, at, -share)
            return _means(-picked, mask, count), g.t().contiguous() if few else g
        value = value.detach().requires_grad_()
        with torch.enable_grad():
            loss = _means(self.task.losses(value, target), mask, count)
            (g,) = torch.autograd.grad(loss.sum(), value)
        return loss.detach(), g

    def _prepare(self, w: Tensor, x: Tensor) -> None:
        """Make the layers for these weights and batches, unless they are those of the last step."""
        wanted = (w.data_ptr(), w.shape, x.shape)
        if wanted == self._made_for:
            return
        parts, made, shape = self._parts(w.detach()), list[Any](), x.shape
        for number, (name, layer) in enumerate(layers_of(self.task.module)):
            if isinstance(layer, nn.Linear):
                own = [parts.get(parameter(name, key)) for key in ("weight", "bias")]
                assert own[0] is not None, "every linear layer has weights"
                room = partial(self._room, number, own[0])
                behind = any(isinstance(one, _Linear) for one in made)
                made.append(_Linear(own[0], own[1], shape, behind, room))
                shape = torch.Size((*shape[:-1], layer.out_features))
            elif type(layer) is nn.ReLU and made and isinstance(made[-1], _Linear):
                made.append(_Relu())
            elif isinstance(layer, nn.Flatten | nn.Identity):
                made.append(_Flat(layer))
                shape = shape if isinstance(layer, nn.Identity) else _flattened(shape)
            else:
                made.append(_Other(layer))
        # nobody wants the gradient by what goes into the first layer that moves
        self._first = next((i for i, one in enumerate(made) if isinstance(one, _Linear)), len(made))
        self._prepared, self._made_for = made, wanted

    def _room(self, number: int, like: Tensor, name: str, shape: Sequence[int]) -> Tensor:
        return self._workspace.room((name, number), shape, like)


def _flattened(shape: torch.Size) -> torch.Size:
    return torch.Size((*shape[:2], math.prod(shape[2:])))


def _means(values: Any, mask: Tensor, count: Tensor) -> Tensor:
    """Mean over each client's real examples: [C * B, ...] -> [C]."""
    return torch.where(mask, per_example(values).view(mask.shape), 0.0).sum(1) / count
