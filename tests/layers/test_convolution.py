"""A cohort's convolutions as operations of a program, against torch client by client."""

from itertools import product

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F

from undrift.core.conv_ways import ConvShape
from undrift.layers.conv_forms import FORMS, GROUPED, PATCHES
from undrift.layers.convolution import convolve, deconvolve

CLIENTS, BATCH = 3, 2
SHAPES = [  # inputs, outputs, kernel, stride, padding, dilation, groups
    (3, 4, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (4, 6, (3, 2), (2, 1), (0, 1), (1, 2), 1),
    (4, 4, (3, 3), (2, 2), (1, 1), (1, 1), 4),
    (4, 6, (1, 1), (2, 2), (0, 0), (1, 1), 2),
    (2, 5, (1, 1), (1, 1), (0, 0), (1, 1), 1),
]


def drawn(*size):
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_torchs_convolution_and_so_are_its_gradients(shape):
    inputs, outputs, kernel, *rest, groups = shape
    x = drawn(CLIENTS, BATCH, inputs, 7, 6)
    w = drawn(CLIENTS, outputs, inputs // groups, *kernel)
    stride, padding, dilation = map(list, rest)

    def ours(x, w):
        return (convolve(x, w, stride, padding, dilation, groups, "float32") ** 3).sum()

    def theirs(x, w):
        return (F.conv2d(x, w, None, stride, padding, dilation, groups) ** 3).sum()

    for argument in (0, 1):
        found = vmap(grad(ours, argument))(x, w)
        for c in range(CLIENTS):
            wanted = grad(theirs, argument)(x[c], w[c])
            assert torch.allclose(found[c], wanted, rtol=1e-12, atol=1e-10)


def test_second_derivatives_are_torchs_too():
    x, w = drawn(CLIENTS, BATCH, 3, 5, 5), drawn(CLIENTS, 4, 3, 3, 3)

    def twice(convolution):
        def slope(x, w):
            return (grad(lambda u: (convolution(x, u) ** 3).sum())(w) ** 2).sum()

        return slope

    ours = twice(lambda x, w: convolve(x, w, [2, 2], [1, 1], [1, 1], 1, "float32"))
    theirs = twice(lambda x, w: F.conv2d(x, w, None, 2, 1))
    for argument in (0, 1):
        found = vmap(grad(ours, argument))(x, w)
        wanted = torch.stack([grad(theirs, argument)(*one) for one in zip(x, w, strict=True)])
        assert torch.allclose(found, wanted, rtol=1e-10)


@pytest.mark.parametrize(("groups", "beyond"), [(1, 0), (2, 1)])
def test_a_transposed_one_is_the_gradient_by_the_input(groups, beyond):
    x, w = drawn(CLIENTS, BATCH, 4, 5, 4), drawn(CLIENTS, 4, 3, 3, 2)

    def ours(x, w):
        settings = ([2, 2], [1, 0], [1, 1], [beyond, beyond], groups, "float32")
        return (deconvolve(x, w, *settings) ** 3).sum()

    def theirs(x, w):
        return (F.conv_transpose2d(x, w, None, 2, (1, 0), beyond, groups) ** 3).sum()

    for argument in (0, 1):
        found = vmap(grad(ours, argument))(x, w)
        wanted = torch.stack([grad(theirs, argument)(*one) for one in zip(x, w, strict=True)])
        assert torch.allclose(found, wanted, rtol=1e-10)


def last(t):
    return t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


@pytest.mark.parametrize(("name", "shape"), list(product(FORMS, SHAPES)))
def test_all_forms_give_the_same(name, shape):
    inputs, outputs, kernel, *rest, groups = shape
    if name == PATCHES and groups > 1:
        pytest.skip("products of patches know no groups")
    x = last(drawn(CLIENTS, BATCH, inputs, 7, 6))
    w, how = drawn(CLIENTS, outputs, inputs // groups, *kernel), ConvShape(*rest, groups)
    form, usual = FORMS[name], FORMS[GROUPED]
    y = usual.output(x, w, how)
    g = last(drawn(*y.shape))
    size = list(x.shape[1:])
    assert torch.allclose(form.output(x, w, how), y, rtol=1e-12)
    assert torch.allclose(form.by_x(g, w, how, size), usual.by_x(g, w, how, size), rtol=1e-12)
    assert torch.allclose(form.by_w(g, x, w, how), usual.by_w(g, x, w, how), rtol=1e-12)
