"""A feature layer: whoever passes through it is noted in the pass that is running."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undrift.core.ops import current_pass
from undrift.errors import ConfigError, TaskError, unknown_name

log = logging.getLogger("undrift")


def watch(module: nn.Module, feature: str) -> None:
    """Let the pass that is running note what flows through the feature layer."""
    name, _, side = feature.partition(":")
    known = [n for n, _ in module.named_modules() if n]
    if name not in known:
        raise unknown_name("layer", name, known, "Task.feature")
    layer = module.get_submodule(name)
    if side == "input":
        layer.register_forward_pre_hook(_note_input)
    elif side == "":
        layer.register_forward_hook(_note_output)
    else:
        raise ConfigError(f"Task.feature: {feature!r} should read 'layer' or 'layer:input'")


def _note_input(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
    _note(args[0] if args else None)


def _note_output(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    _note(output)


def _note(value: Any) -> None:
    notes = current_pass().notes
    notes["features"], notes["calls"] = value, notes.get("calls", 0) + 1


WATCHERS = (_note_input, _note_output)  # they change nothing of what flows


def check_features(feature: str, calls: int, found: Sequence[tuple[int, Any]]) -> None:
    """Refuse features that no rule can average; `found` are (examples, features) of two batches."""
    place = f"the feature layer {feature!r}"
    values = [value for _, value in found]
    if not calls:
        raise TaskError(f"{place} is never called in forward()")
    if calls > 1:
        raise TaskError(
            f"{place} is called {calls} times in forward(): give each call a layer of its own, so "
            "that one of them can be named"
        )
    if not all(isinstance(v, Tensor) for v in values):
        kind = type(next(v for v in values if not isinstance(v, Tensor))).__name__
        raise TaskError(
            f"{place} gives a {kind}, features are one tensor: name a layer that gives a tensor, "
            "or 'layer:input' of the one that takes it"
        )
    if not all(v.dim() and len(v) == n and v[0].numel() for n, v in found):
        shapes = ", ".join(f"{tuple(v.shape)} for {n} examples" for n, v in found)
        raise TaskError(
            f"{place} gives {shapes}: features need one row of at least one number per example, "
            "examples first"
        )
    if not values[0].is_floating_point():
        raise TaskError(f"{place} gives {values[0].dtype}: features are floating-point numbers")


def check_gradient(feature: str, here: Tensor, elsewhere: Tensor) -> None:
    """Refuse features that the model changes, but that have no gradient; tell of constant ones."""
    place = f"the feature layer {feature!r}"
    if here.requires_grad:
        return
    if not torch.equal(here, elsewhere):
        raise TaskError(
            f"{place} gives features without a gradient (detached, or made under no_grad): a pull "
            "on them would change nothing; name a layer before they are detached"
        )
    log.warning(
        "%s gives features that no trainable parameter changes: a pull on them changes nothing",
        place,
    )
