"""Vectors in pieces: the same bits, and no vector is written as a whole."""

from itertools import pairwise

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from undrift.engines.whole_step import cuts
from undrift.program.passes.split_flat import split_flat

aten = torch.ops.aten
CUTS = [0, 3, 8, 10]


def pieces(seed):
    maker = torch.Generator().manual_seed(seed)
    return [torch.randn(2, b - a, generator=maker) for a, b in pairwise(CUTS)]


def whole(given):
    return torch.cat(given, -1)


def algebra(a, b, g, scale):
    """What a step does: the rules on flat vectors, a layer on its part."""
    w, m, slope = whole(a), whole(b), torch.cat([g[0], g[1][:, :2], g[1][:, 2:], g[2]], 1)
    m = 0.9 * m + (slope + 0.1 * w).clamp(max=1.0) * scale[:, None]
    after = torch.where(scale[:, None] > 0, w - 0.1 * m, w).unsqueeze(0)[0]
    layers = after.split([3, 2, 3, 2], -1)
    return [*m.split([3, 5, 2], -1), layers[1] @ layers[1].T, after[:, 3:8], after[:, 9:]]


def norms(a, b, g, scale):
    """Something that needs a vector as a whole."""
    w = whole(a) * scale[:, None]
    return [w.norm(dim=-1), w[:, 2:4], whole(b).sum()]


def shapes(a, b, g, scale):
    """Axes come and go in front of the last."""
    w = whole(a).view(2, 1, 10).expand(2, 4, 10).reshape(8, 10) * 2
    return [w[:, 0:3], w[1:5, 8:10], (w + torch.arange(10)).squeeze(0)]


def recorded(function):
    flat = [*pieces(0), *pieces(1), *pieces(2), torch.tensor([0.5, -1.0])]
    return make_fx(lambda *v: function(v[:3], v[3:6], v[6:9], v[9]))(*flat), flat


@pytest.mark.parametrize("function", [algebra, norms, shapes])
def test_bits_stay(function):
    traced, flat = recorded(function)
    made = split_flat(traced, CUTS)
    for found, wanted in zip(made(*flat), traced(*flat), strict=True):
        assert torch.equal(found, wanted)


def test_nobody_writes_a_vector_as_a_whole():
    traced, _ = recorded(algebra)
    traced.graph.eliminate_dead_code()

    def joined(graph):
        return [n for n in graph.nodes if n.target is aten.cat.default and _width(n) == CUTS[-1]]

    assert len(joined(traced.graph)) == 3
    assert not joined(split_flat(traced, CUTS).graph)


def _width(node):
    return node.meta["val"].shape[-1]


def test_one_piece_is_left_alone():
    traced, _ = recorded(algebra)
    assert split_flat(traced, [0, 10]) is traced


def test_small_parameters_share_a_piece():
    assert cuts([5, 6]) == [0, 11]
    assert cuts([10**6, 3, 4, 10**5, 2]) == [0, 10**6, 10**6 + 7, 1100007, 1100009]
