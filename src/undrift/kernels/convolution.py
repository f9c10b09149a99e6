"""A cohort's convolution and its gradients, by the kernels.

Shapes.  x [C, B, ci, H, W], w [C, co, ci, kh, kw] (rows may lie far apart), b [C, co]; memory of
activations is [C, B, H, W, channels], whatever order the shape has, unless a problem asks for
planes: then its output is [C, B, channels, H, W].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undrift.kernels import candidates, launches, trials
from undrift.kernels.problem import Problem, Thin, thin
from undrift.kernels.settling import Step, sections
from undrift.kernels.tuner import Configuration, as_tuned, configuration, on_device


def convolve(p: Problem, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Give (y [C, B, co, h, w], places of pooled values or empty, x repacked or empty)."""
    with on_device(x):
        form = thin(p)
        p = p._replace(planes=p.planes and p.pool and form is None)
        last = (p.clients, p.batch, *p.output, p.outputs)
        plane = (p.clients, p.batch, p.outputs, *p.output)
        y = torch.empty(plane if p.planes else last, dtype=p.result, device=x.device)
        place = torch.empty(last if p.pool else (p.clients, 0), dtype=torch.int8, device=x.device)
        if form is None:
            _convolve_general(p, x, w, b, y, place)
            packed = x.new_empty((p.clients, 0))
        else:
            packed = _convolve_thin(p, form, x, w, b, y, place)
        return y if p.planes else y.permute(0, 1, 4, 2, 3), place, packed


def gradients(
    p: Problem, g: Tensor, x: Tensor, w: Tensor, y: Tensor, place: Tensor,
    needs: Sequence[bool], wide_input: bool,
) -> list[Tensor]:  # fmt: skip
    """Give the gradients by x, w and b that are needed; x as it was or as `convolve` repacked it.

    `wide_input`: the gradient by x is float32.
    """
    with on_device(g):
        dw = torch.empty((p.clients, p.outputs, p.inputs, *p.kernel), device=g.device)
        db = torch.empty((p.clients, p.outputs), device=g.device)
        targets = Targets(dw if needs[1] else None, db if needs[2] else None, None)
        gx = _go_back(p, g, x, w, y, place, targets, needs[0], wide_input)
        return [t for t, need in zip((gx, dw, db), needs, strict=True) if need and t is not None]


def descend(
    p: Problem, g: Tensor, x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, place: Tensor,
    step: Step, by_input: bool, wide_input: bool,
) -> Tensor | None:  # fmt: skip
    """Move w and b by a step, in place; give the gradient by x if it is needed."""
    with on_device(g):
        targets = Targets(w, b, step)
        return _go_back(p, g, x, w, y, place, targets, by_input, wide_input)


def input_gradient(p: Problem, g: Tensor, w: Tensor) -> Tensor:
    """Give the gradient by x alone, in the type of operands, of a plain convolution."""
    with on_device(g):
        return _input_gradient(p.mirrored(narrow=True), channels_last(g, p.operand), w)


def weight_gradient(p: Problem, g: Tensor, x: Tensor) -> Tensor:
    """Give the gradient by w alone, in float32, of a plain convolution."""
    with on_device(g):
        form = thin(p)
        found = torch.empty((p.clients, p.outputs, p.inputs, *p.kernel), device=g.device)
        targets = Targets(found, None, None)
        if form is None:
            _weight_gradient(p, x, channels_last(g, p.operand), None, None, targets)
        else:
            nothing = torch.empty((p.clients, 0), dtype=torch.int8, device=g.device)
            images = _packed_images(p, form, x)
            _thin_weight_gradient(p, form, images, g, nothing, None, targets)
        return found


class Targets(NamedTuple):
    """Where gradients go: into memory of their own or, with a step, into w and b."""

    w: Tensor | None
    b: Tensor | None
    step: Step


def _go_back(
    p: Problem, g: Tensor, x: Tensor, w: Tensor, y: Tensor, place: Tensor, to: Targets,
    by_input: bool, wide_input: bool,
) -> Tensor | None:  # fmt: skip
    form, seen = thin(p), channels_last(y, y.dtype) if p.relu and not p.pool else place
    whole = bias_parts = peaks = gx = None
    learns = to.w is not None or to.b is not None
    if by_input or form is None:
        whole, bias_parts, peaks = _unfinished(p, g, seen, to.b is not None and form is None)
    if by_input and whole is not None:  # before the weights may move
        gx = _input_gradient(p.mirrored(not wide_input), whole, w)
    if learns and form is not None:
        _thin_weight_gradient(p, form, x, g, seen, peaks, to)
    elif learns and whole is not None:
        _weight_gradient(p, x, whole, peaks, bias_parts, to)
    return gx


def channels_last(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Give [C, B, c, H, W] as [C, B, H, W, c] in that order of memory; no copy if it is so."""
    view = t.permute(0, 1, 3, 4, 2)
    if view.dtype == dtype and view.is_contiguous():
        return view
    return torch.empty(view.shape, dtype=dtype, device=t.device).copy_(view)


def _joined_taps(w: Tensor) -> Tensor:
    """[C, co, ci, kh, kw] -> [C, co, ci, taps]; the clients stay where they lie."""
    return (w if w[0].is_contiguous() else w.contiguous()).flatten(3)


def _rows(b: Tensor | None) -> Tensor | None:
    """Give biases [C, co] whose rows are contiguous; the clients stay where they lie."""
    return b if b is None or b.stride(1) == 1 else b.contiguous()


# ------------------------------------------------------------------------------- general kernels
def _convolve_general(
    p: Problem, x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, place: Tensor
) -> None:
    weights = _packed_weights(p, w, mirror=False)
    config = _convolution_config(p, x.device, mirror=False)
    bias = _rows(b)
    launches.convolve(p, config, channels_last(x, p.operand), weights, bias, y, place).run()


def _packed_weights(p: Problem, w: Tensor, mirror: bool) -> Tensor:
    packed = torch.empty((p.clients, p.rows, p.depth), dtype=p.operand, device=w.device)
    launches.pack_weights(p, _joined_taps(w), packed, mirror).run()
    return packed


def _convolution_config(p: Problem, device: torch.device, mirror: bool) -> Configuration:
    name = "input gradient" if mirror else "convolution"
    p = as_tuned(p._replace(planes=False))  # where results lie is not what is tuned
    options = candidates.for_convolution(p)
    return configuration(name, p, device, options, lambda: trials.convolution(p, device, mirror))


def _unfinished(
    p: Problem, g: Tensor, seen: Tensor, bias: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Give the gradient by the convolution's own output, parts of its sum, and peaks [C]."""
    if not (p.relu or p.pool):
        whole = channels_last(g, p.operand)
        sums = whole.sum((2, 3), dtype=torch.float32) if bias else None
        return whole, sums, None
    rows, columns = p.between
    make = torch.zeros if p.pool and (rows % 2 or columns % 2) else torch.empty
    whole = make((p.clients, p.batch, rows, columns, p.outputs), dtype=p.operand, device=g.device)
    cells, blocks = launches.unfinish_parts(p)
    parts = torch.empty((p.clients, cells, p.outputs), device=g.device) if bias else None
    half = launches.rounds_to_half(p)
    peaks = torch.empty((p.clients, cells * blocks), device=g.device) if half else None
    launches.unfinish(p, g, seen, whole, parts, peaks).run()
    return whole, parts, None if peaks is None else peaks.amax(1)


def _peaks(p: Problem, g: Tensor, x: Tensor, known: Tensor | None) -> Tensor:
    """Give each client's largest |g| and |x| where a kernel asks for them, else anything."""
    if not launches.rounds_to_half(p):
        return g
    return torch.stack([trials.largest(g) if known is None else known, trials.largest(x)], 1)


def _input_gradient(mirrored: Problem, whole: Tensor, w: Tensor) -> Tensor:
    p = mirrored
    weights = _packed_weights(p, w, mirror=True)
    config = _convolution_config(p, w.device, mirror=True)
    gx = torch.empty((p.clients, p.batch, *p.output, p.outputs), dtype=p.result, device=w.device)
    launches.convolve(p, config, whole, weights, None, gx, gx).run()
    return gx.permute(0, 1, 4, 2, 3)


def _weight_gradient(
    p: Problem, x: Tensor, whole: Tensor, peaks: Tensor | None, bias_parts: Tensor | None,
    to: Targets,
) -> None:  # fmt: skip
    tuned = as_tuned(p)
    options = candidates.for_weight_gradient(tuned)
    config = configuration(
        "weight gradient", tuned, x.device, options, lambda: trials.weight_gradient(tuned, x.device)
    )
    size = (config["SPLIT"], p.clients, p.outputs, p.taps, p.inputs)
    parts = torch.empty(size, device=x.device)
    inputs = channels_last(x, p.operand)
    known = _peaks(p, whole, inputs, peaks)
    launches.weight_gradient(p, config, inputs, whole, known, parts).run()
    target = torch.empty(size[1:], device=x.device) if to.w is None else to.w
    for own, step in sections(to.step):
        biases, bias = (None if v is None else v[own] for v in (bias_parts, to.b))
        some = (parts[:, own], biases, target[own], bias)
        launches.sum_parts(p, config["SPLIT"], *some, step).run()


# --------------------------------------------------------------------------------- a first layer
def _convolve_thin(
    p: Problem, form: Thin, x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, place: Tensor
) -> Tensor:
    images = _packed_images(p, form, x)
    weights = torch.empty(
        (p.clients, form.blocks, 2 * form.block, form.depth), dtype=p.operand, device=x.device
    )
    launches.pack_pairs(p, form, _joined_taps(w), _rows(b), weights).run()
    tuned = as_tuned(p)
    options = candidates.for_thin(tuned, form)
    config = configuration(
        "first layer", tuned, x.device, options, lambda: trials.thin_convolution(tuned, x.device)
    )
    launches.thin_convolve(p, form, config, images, weights, y, place).run()
    return images


def _packed_images(p: Problem, form: Thin, x: Tensor) -> Tensor:
    size = (p.clients, p.batch, form.height, form.width, 4)
    images = torch.empty(size, dtype=p.operand, device=x.device)
    launches.pack_images(p, form, x, images).run()
    return images


def _thin_weight_gradient(
    p: Problem, form: Thin, images: Tensor, g: Tensor, seen: Tensor, peaks: Tensor | None,
    to: Targets,
) -> None:  # fmt: skip
    tuned = as_tuned(p)
    options = candidates.for_thin_weight_gradient(tuned, form)
    config = configuration(
        "first layer's weight gradient", tuned, g.device, options,
        lambda: trials.thin_weight_gradient(tuned, g.device),
    )  # fmt: skip
    parts = torch.empty(launches.thin_parts(p, form, config), device=g.device)
    last = channels_last(g, p.operand)
    known = _peaks(p, last, images, peaks)
    launches.thin_weight_gradient(p, form, config, images, last, seen, known, parts).run()
    size = (p.clients, p.outputs, p.inputs, *p.kernel)
    target = torch.empty(size, device=g.device) if to.w is None else to.w
    for own, step in sections(to.step):
        bias = None if to.b is None else to.b[own]
        launches.sum_pairs(p, form, config, parts[:, own], target[own], bias, step).run()
