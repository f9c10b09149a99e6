"""A model as a pure function of one flat vector, and what it is trained for.

Shapes.  P trainable parameters, Q floating buffers, B examples of a batch.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from undrift.core.augmented import Augment, augment_rows, check_augment
from undrift.core.batching import batching
from undrift.core.convolution import Seam
from undrift.core.losses import (
    LOSSES,
    METRICS,
    OF_CLASSES,
    PerExample,
    Values,
    WeightedMean,
    check_values,
    masked_mean,
    mean_of,
    named_loss,
)
from undrift.core.ops import (
    Pass,
    draws_anything,
    prepare,
    read_buffers,
    running,
)
from undrift.core.trouble import check_tensors, check_values_there, find_trouble
from undrift.core.watching import check_features, check_gradient, watch
from undrift.errors import ConfigError, TaskError, unknown_name

__all__ = [
    "Batch", "Buffers", "Output", "Task", "Vec", "buffers_to", "masked_mean",
]  # fmt: skip

Vec = Tensor  # [P], the flat parameter vector


class Batch(NamedTuple):
    """Some examples of one client, padded to a common length."""

    x: Tensor  # [B, ...]
    y: Tensor  # [B, ...]
    mask: Tensor  # [B] bool, False for padding
    index: Tensor  # type: ignore[assignment]  # [B] position among the client's own examples, -1 for padding


class Buffers(NamedTuple):
    """What BatchNorm keeps: running statistics and counters (empty for most models)."""

    floats: Tensor  # [Q]
    counters: Tensor  # int64


class Output(NamedTuple):
    """What one forward pass gives."""

    value: Tensor  # what the module returned
    features: Tensor | None  # output of the feature layer, if one was named
    buffers: Buffers  # after the pass


DTYPES = (torch.float32, torch.float64)


class Task:
    """Any `nn.Module`, its loss, its metrics and, where a rule needs it, its feature layer.

    `loss` is a name ("cross_entropy", "focal", "mse", "mae", "huber", "pinball", "poisson"), one of
    torch's loss modules, or a function of (output, target) that returns one value per example, or
    a `WeightedMean`.  `feature` names a submodule whose output is the feature; "name:input" takes
    what goes into that submodule instead.  Parameters with requires_grad=False stay out of the
    vector.
    `augment`, a function (x, key) -> x, changes the batch of every training step.

    >>> task = Task(nn.Linear(3, 2))
    >>> task.size
    8
    """

    def __init__(
        self,
        module: nn.Module,
        loss: str | PerExample = "cross_entropy",
        *,
        metrics: Mapping[str, PerExample] | None = None,
        feature: str | None = None,
        dtype: torch.dtype = torch.float32,
        augment: Augment | None = None,
    ) -> None:
        _check_arguments(module, metrics, feature, augment)
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
        if not module.training:
            raise TaskError(
                "the module is in evaluation mode: call module.train() first "
                "(submodules that you put into evaluation mode afterwards stay frozen so)"
            )
        check_tensors(module)
        self.original, (self.loss_name, self.loss) = module, named_loss(loss, dtype)
        default = METRICS if self.loss_name in OF_CLASSES else {}
        self.metrics = dict(default if metrics is None else metrics)
        self.feature, self.dtype, self.augment = feature, dtype, augment
        self.seam: Seam | None = None  # how an engine lets layers multiply; None: as torch does
        # what every call of the module happens inside of, where functions are exchanged
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.writes = False  # whether the module writes into tensors that it makes
        self.precision: str | None = None  # of products; None: as torch has it
        self.module = prepare(module).to(dtype=dtype)
        self.eval_module = copy.deepcopy(self.module).eval()
        self.draws = augment is not None or draws_anything(self.module)
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if not any(p.numel() for p in named.values()):
            raise TaskError("the module has no trainable parameter: nothing to learn")
        self.names, self.aliases = tuple(named), _aliases(self.module, named)
        self.shapes = tuple(p.shape for p in named.values())
        self.sizes = tuple(p.numel() for p in named.values())
        self.size = sum(self.sizes)
        kept = read_buffers(self.module)
        self.float_buffers = {n: b.shape for n, b in kept.items() if b.is_floating_point()}
        self.counter_names = tuple(n for n, b in kept.items() if not b.is_floating_point())
        if feature is not None:
            watch(self.module, feature)
            watch(self.eval_module, feature)

    @classmethod
    def build(cls, factory: Callable[[], nn.Module], seed: int, **settings: Any) -> Task:
        """Make the module under a seed of its own; torch's generator stays as it was.

        >>> a, b = (Task.build(lambda: nn.Linear(3, 2), seed=5) for _ in range(2))
        >>> torch.equal(a.initial()[0], b.initial()[0])
        True
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(factory(), **settings)

    def initial(self) -> tuple[Vec, Buffers]:
        """Give the module's present parameters and buffers as flat vectors."""
        named = dict(self.module.named_parameters())
        return self.flat({n: named[n].detach() for n in self.names}), self.buffers(self.module)

    def buffers(self, module: nn.Module) -> Buffers:
        """Read the buffers of a module of this architecture."""
        kept = dict(module.named_buffers())
        device = next(module.parameters()).device
        floats = [kept[n].to(self.dtype).reshape(-1) for n in self.float_buffers]
        counters = [kept[n].reshape(-1) for n in self.counter_names]
        empty = torch.empty(0, dtype=self.dtype, device=device)
        none = torch.empty(0, dtype=torch.int64, device=device)
        return Buffers(torch.cat([empty, *floats]), torch.cat([none, *counters]))

    @property
    def loss_scale(self) -> float:
        """Tell what a loss is multiplied by before it is differentiated.

        Where gradients travel in half precision, a power of two keeps small ones from vanishing.
        """
        return 1024.0 if "fp16" in (self.precision, self.seam and self.seam.precision) else 1.0

    def forward(self, w: Vec, buffers: Buffers, x: Tensor, run: Pass) -> Output:
        """Run the module with parameters `w` on one batch."""
        return self.forward_named(self.named(w), buffers, x, run)

    def forward_named(
        self, parameters: dict[str, Tensor], buffers: Buffers, x: Tensor, run: Pass
    ) -> Output:
        """Run the module with named parameters on one batch."""
        values = {**parameters, **self.named_buffers(buffers)}
        values |= {alias: parameters[name] for alias, name in self.aliases.items()}
        run.seam = run.seam or self.seam
        own = (next(iter(parameters.values())), x) if self.writes else ()
        with running(run), batching(*own), self.around():
            module = self.module if run.training else self.eval_module
            value = functional_call(module, values, (x,), tie_weights=False)
        features = run.notes.get("features")
        return Output(value, features, self._updated(buffers, run.new_buffers))

    def named(self, w: Vec) -> dict[str, Tensor]:
        """View a flat vector, or several [..., P], as named parameters."""
        # split, not narrow: its backward is one cat, narrow's is one zero-fill of P per leaf.
        parts, lead = w.split(self.sizes, -1), w.shape[:-1]
        shapes = zip(self.names, parts, self.shapes, strict=True)
        return {n: p.view((*lead, *s)) for n, p, s in shapes}

    def flat(self, named: Mapping[str, Tensor]) -> Vec:
        """Make the flat vector of named parameters."""
        missing = set(self.names) ^ set(named)
        if missing:
            raise TaskError(f"parameters do not match the module: {', '.join(sorted(missing))}")
        for name, shape in zip(self.names, self.shapes, strict=True):
            if named[name].shape != shape:
                raise TaskError(f"{name} has shape {tuple(named[name].shape)}, not {tuple(shape)}")
        return torch.cat([named[n].to(self.dtype).reshape(-1) for n in self.names])

    def named_buffers(self, buffers: Buffers) -> dict[str, Tensor]:
        """View flat buffers as named ones."""
        if not self.float_buffers and not self.counter_names:
            return {}
        parts = buffers.floats.split([s.numel() for s in self.float_buffers.values()])
        pairs = zip(self.float_buffers.items(), parts, strict=True)
        floats = {name: part.view(shape) for (name, shape), part in pairs}
        return {**floats, **dict(zip(self.counter_names, buffers.counters.unbind(), strict=True))}

    def _updated(self, old: Buffers, new: Mapping[str, Tensor]) -> Buffers:
        if not new:
            return old
        values = {**self.named_buffers(old), **new}
        floats = torch.cat([values[n].reshape(-1) for n in self.float_buffers])
        counters = [values[n] for n in self.counter_names]
        return Buffers(floats, torch.stack(counters) if counters else old.counters)

    def augmented(self, batch: Batch, key: Tensor) -> Batch:
        """Augment the batch of a training step, whose key this is."""
        if self.augment is None:
            return batch
        return batch._replace(x=augment_rows(self.augment, batch.x, key))

    def losses(self, value: Tensor, target: Tensor) -> Values:
        """Loss of every example, with its weight where the loss has some."""
        with batching():
            loss = self.loss(value, target)
        check_values("the loss", loss, len(target))
        return loss

    def measured(self, value: Tensor, target: Tensor) -> dict[str, Values]:
        """Every metric of every example."""
        with batching():
            found = {n: metric(value, target) for n, metric in self.metrics.items()}
        for name, values in found.items():
            check_values(f"metric {name!r}", values, len(target))
        return found

    def mean_loss(self, out: Output, batch: Batch) -> Tensor:
        """Mean loss over the real examples of a batch."""
        return mean_of(self.losses(out.value, batch.y), batch.mask)

    def scores(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        """Mean of each metric over the real examples of a batch."""
        with torch.no_grad():
            found = self.measured(out.value, batch.y)
            return {n: mean_of(v, batch.mask) for n, v in found.items()}

    def slice(self, pattern: str) -> Tensor:
        """Mark the parameters whose name matches a shell pattern: a bool vector [P].

        >>> Task(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))).slice("1.*").sum().item()
        3
        """
        marks = [
            torch.full((n,), fnmatch.fnmatch(name, pattern))
            for name, n in zip(self.names, self.sizes, strict=True)
        ]
        mask = torch.cat(marks)
        if not mask.any():
            raise unknown_name("parameter", pattern, list(self.names), "Task.slice")
        return mask

    def module_with(self, w: Vec, buffers: Buffers) -> nn.Module:
        """Copy the user's plain module, with these parameters and buffers in it."""
        module = copy.deepcopy(self.original)
        dtypes = {n: t.dtype for n, t in module.state_dict().items()}
        values = {**self.named(w.detach().cpu()), **self.named_buffers(buffers_to(buffers, "cpu"))}
        cast = {n: v.clone().to(dtypes[n]) for n, v in values.items()}
        module.load_state_dict(cast, strict=False)
        return module

    def plain(self) -> Task:
        """Share everything but the seam: layers multiply as torch does."""
        twin = copy.copy(self)
        twin.seam = None
        return twin

    def inside(self, around: Callable[[], AbstractContextManager[Any]], precision: str) -> Task:
        """Share everything, but call the module inside of a context that exchanges functions."""
        twin = self.plain()
        twin.around, twin.precision = around, precision
        return twin

    def clone(self) -> Task:
        """Copy for another thread: a module must not serve two passes at once."""
        twin = copy.copy(self)
        twin.module, twin.eval_module = copy.deepcopy((self.module, self.eval_module))
        return twin

    def to(self, device: torch.device | str) -> Task:
        """Move what is not in the vector (frozen parameters, constants) to a device."""
        twin = self.clone()
        check_values_there(self.module)
        twin.module, twin.eval_module = twin.module.to(device), twin.eval_module.to(device)
        if isinstance(twin.loss, nn.Module):
            twin.loss = copy.deepcopy(twin.loss).to(device)
        return twin

    def outputs(self, x: Tensor) -> int:
        """Count the classes that the module tells apart."""
        return self._judged(x).shape[1]

    def weighs(self, x: Tensor, y: Tensor) -> bool:
        """Whether the loss weighs its examples, as it does with this one."""
        if self.loss_name in LOSSES:
            return False
        return isinstance(self.losses(self._judged(x), y), WeightedMean)

    @torch.no_grad()
    def _judged(self, x: Tensor) -> Tensor:
        w, buffers = self.initial()
        mask = torch.ones(len(x), dtype=torch.bool, device=x.device)
        return self.forward(w.to(x.device), buffers, x, Pass(mask, None, False)).value

    def check(self, x: Tensor, y: Tensor) -> int:
        """Try one small batch and explain what cannot work, before any training.

        Returns the width of the feature layer, 0 if none is named.
        """
        w, buffers = self.initial()
        mask = torch.ones(len(x), dtype=torch.bool, device=x.device)
        key = torch.zeros((), dtype=torch.int64, device=x.device)
        w, batch = w.to(x.device), Batch(x, y, mask, mask.long())
        plain = torch._C._functorch.maybe_current_level() is None  # else autograd is not at hand
        with torch.enable_grad():
            try:
                w = w.detach().requires_grad_() if plain else w
                run = Pass(mask, key, True)
                out = self.forward(w, buffers, x, run)
                if self.feature is not None:
                    self._check_features(self.feature, run, (w, buffers, x), plain)
                learnable = self.mean_loss(out, batch).requires_grad or not plain
                self.scores(out, batch)
                trouble = find_trouble(self.module, x)
            except TaskError:
                raise
            except Exception as error:
                raise TaskError(
                    f"the module or its loss fails on inputs {tuple(x.shape)} {x.dtype} and "
                    f"targets {tuple(y.shape)} {y.dtype}: {error}{_advice(x)}"
                ) from error
        if trouble:
            raise TaskError("; ".join(trouble))
        if not learnable:
            raise TaskError("the loss does not depend on the module: there is nothing to learn")
        if self.augment is not None:
            check_augment(self.augment, x)
        return 0 if out.features is None else out.features[0].numel()

    def _check_features(
        self, feature: str, run: Pass, at: tuple[Vec, Buffers, Tensor], plain: bool
    ) -> None:
        """Look at the features of this batch, of a longer one, and of another model."""
        w, buffers, x = at
        more = x[torch.arange(len(x) + 1, device=x.device) % len(x)]

        def features(v: Vec, x: Tensor) -> Any:
            mask = torch.ones(len(x), dtype=torch.bool, device=x.device)
            return self.forward(v, buffers, x, Pass(mask, run.key, True)).features

        here: Any = run.notes.get("features")
        found = [(len(x), here), (len(more), features(w, more))]
        check_features(feature, run.notes.get("calls", 0), found)
        if plain:
            check_gradient(feature, here, features(w.detach() + 0.01, x))


def _aliases(module: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
    """Find other places where a trainable parameter is used: {full name there: its name here}.

    A layer that is used twice needs no alias: it is one place under two names.
    """
    names = {id(p): n for n, p in named.items()}
    places: dict[tuple[int, str], str] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for key, value in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(value) in names:
                places.setdefault((id(part), key), f"{prefix}.{key}" if prefix else key)
    found = {place: names[id(_get(module, place))] for place in places.values()}
    return {place: name for place, name in found.items() if place != name}


def _get(module: nn.Module, name: str) -> Tensor:
    return module.get_parameter(name)


def buffers_to(buffers: Buffers, device: torch.device | str) -> Buffers:
    """Move buffers to a device."""
    return Buffers(buffers.floats.detach().to(device), buffers.counters.to(device))


def _check_arguments(module: Any, metrics: Any, feature: Any, augment: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TaskError(f"Task needs an nn.Module, got {module!r}")
    if metrics is not None and not (
        isinstance(metrics, Mapping) and all(callable(m) for m in metrics.values())
    ):
        raise ConfigError(f"Task.metrics must map names to functions, got {metrics!r}")
    if feature is not None and not isinstance(feature, str):
        raise ConfigError(f"Task.feature must be the name of a layer, got {feature!r}")
    if augment is not None and not callable(augment):
        raise ConfigError(f"Task.augment must be a function of (x, key), got {augment!r}")


def _advice(x: Tensor) -> str:
    return "" if x.is_floating_point() else " (does the module expect x.float()?)"
