"""How an engine lets layers multiply: by kernels on a GPU, or by the ways that its user names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from undrift import kernels
from undrift.core.choosing import chosen_ways, use_ways
from undrift.core.precision import check_precision
from undrift.core.seam import Seam
from undrift.core.task import Task
from undrift.errors import ConfigError, unknown_name

log = logging.getLogger("undrift")
Ways = str | Mapping[str, str]  # for all layers, or by a layer's full name


def seam_for(
    task: Task, device: torch.device, precision: str | None, ways: Ways | None = None
) -> Seam | None:
    """Choose how layers multiply: on a CPU, and in float64, as torch does unless told otherwise."""
    if precision is not None:
        check_precision(precision)
    by_torch = device.type != "cuda" or task.dtype == torch.float64
    if by_torch and precision not in (None, "float32"):
        log.warning("precision %s is for float32 on a GPU: it changes nothing here", precision)
    if by_torch and ways is None:
        return None
    usual = "triton" if not by_torch and kernels.available(device) else "grouped"
    default, choices = (ways, {}) if isinstance(ways, str) else (usual, _choices(task, ways))
    if "triton" in (default, *choices.values()):
        kernels.need(device)
    seam = Seam("float32" if by_torch else precision or "tf32", choices, default)
    if seam.may_use_kernels and kernels.available(device):
        _prove(task, device)
    return seam


def _prove(task: Task, device: torch.device) -> None:
    """Ask a device whether BatchNorm's kernels are right; others are asked as they are tuned."""
    if any(isinstance(part, _BatchNorm) for part in task.module.modules()):
        from undrift.kernels import batchnorm

        batchnorm.prove(device)


def _choices(task: Task, ways: Mapping[str, str] | None) -> dict[str, str]:
    if ways is None:
        return {}
    if not isinstance(ways, Mapping):
        raise ConfigError(f"ways must be one name, or names by layer, got {ways!r}")
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, _BatchNorm)
    layers = [name for name, part in task.module.named_modules() if isinstance(part, kinds)]
    for name in ways:
        if name not in layers:
            raise unknown_name("layer", name, layers, "ways")
    return dict(ways)


def seam_plan(seam: Seam | None) -> dict[str, Any]:
    """Give the choices of a seam that decide rounding, as plain JSON."""
    if seam is None:
        return {}
    told = {"precision": seam.precision, "default": seam.default, "layers": dict(seam.choices)}
    return {**told, "kernels": kernels.tuned(), "ways": chosen_ways()}


def use_seam_plan(plan: dict[str, Any]) -> None:
    """Repeat the choices of a recorded run."""
    if plan:
        kernels.use(plan["kernels"])
        use_ways(plan["ways"])
