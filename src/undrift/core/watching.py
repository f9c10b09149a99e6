"""A feature layer: whoever passes through it is noted in the pass that is running."""

from __future__ import annotations

from torch import Tensor, nn

from undrift.core.ops import current_pass
from undrift.errors import ConfigError, unknown_name


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
    current_pass().notes["features"] = args[0]


def _note_output(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    current_pass().notes["features"] = output


WATCHERS = (_note_input, _note_output)  # they change nothing of what flows
