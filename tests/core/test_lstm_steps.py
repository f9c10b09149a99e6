"""The steps of an LSTM layer as one operation, against the same steps one after the other."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

from core.nets import close, numbers
from undrift.core.lstm_steps import Start, steps_plainly, take_steps

T, B, H = 3, 2, 4


def start(*lead, size=H):
    shapes = (T, B, 4 * size), (B, size), (B, size), (4 * size, size)
    return [numbers(*lead, *shape) for shape in shapes]


def one(*values):
    return take_steps(Start(*values))


def uneven(steps):
    """Make a number that depends on every output and on the last cell state."""

    def total(*values):
        outputs, c = steps(*values)
        return (
            outputs * torch.arange(outputs.numel()).view_as(outputs)
        ).sin().sum() + c.exp().sum()

    return total


def test_values_and_both_derivatives_are_right():
    values = [v.requires_grad_() for v in start(size=2)]
    for ours, plain in zip(one(*values), steps_plainly(*values), strict=True):
        close(ours, plain)
    assert gradcheck(one, values)
    assert gradgradcheck(one, values)


@pytest.mark.parametrize("dims", [(0, 0, 0, 0), (0, None, None, 0), (None, 0, 0, None)])
def test_clients_and_experiments_at_once_are_each_alone(dims):
    values = [numbers(3, 2, *v.shape) if d == 0 else v for v, d in zip(start(), dims, strict=True)]

    def gradients(steps):
        each = grad(uneven(steps), argnums=(0, 1, 2, 3))
        return vmap(vmap(each, dims), dims)(*values)

    for ours, plain in zip(gradients(one), gradients(steps_plainly), strict=True):
        close(ours, plain)


def test_a_gradient_may_be_differentiated_for_many_at_once():
    values = start(3)

    def curvature(steps):
        def slope(*values):
            return grad(uneven(steps), 3)(*values).square().sum()

        return vmap(grad(slope, argnums=(0, 3)))(*values)

    for ours, plain in zip(curvature(one), curvature(steps_plainly), strict=True):
        close(ours, plain, 1e-10)


def test_without_gradients_nothing_is_kept():
    values = start()
    with torch.no_grad():
        outputs, c = one(*values)
    assert outputs.grad_fn is None
    for ours, plain in zip((outputs, c), steps_plainly(*values), strict=True):
        close(ours, plain)
