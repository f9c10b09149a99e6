"""How the layers of a cohort multiply on a device."""

from __future__ import annotations

from typing import Any

import torch

from undrift import kernels
from undrift.core.choosing import chosen_ways, use_ways
from undrift.core.convolution import Seam
from undrift.core.precision import check_precision
from undrift.core.task import Task


def seam_for(task: Task, device: torch.device, precision: str | None) -> Seam | None:
    """Choose how layers multiply: on a CPU, and in float64, as torch does."""
    if precision is not None:
        check_precision(precision)
    if device.type != "cuda" or task.dtype == torch.float64:
        return None
    return Seam(precision or "tf32", default="triton" if kernels.available(device) else "grouped")


def seam_plan(seam: Seam | None) -> dict[str, Any]:
    """Give the choices of a seam that decide rounding, as plain JSON."""
    if seam is None:
        return {}
    return {"precision": seam.precision, "kernels": kernels.tuned(), "ways": chosen_ways()}


def use_seam_plan(plan: dict[str, Any]) -> None:
    """Repeat the choices of a recorded run."""
    if plan:
        kernels.use(plan["kernels"])
        use_ways(plan["ways"])
