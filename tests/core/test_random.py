import math
import os
import subprocess
import sys

import pytest
import torch

from undrift.core.random import (
    Seeds,
    _by_counting,
    bits,
    fold,
    host_fold,
    integers,
    normal,
    permutation,
    uniform,
)
from undrift.errors import ConfigError


def splitmix64(z):
    """Unsigned, as printed by Steele, Lea and Flood: written apart from the library's."""
    mask = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def chi_square(counts):
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


def assert_flat(counts):
    """A chi-square of d degrees has mean d and variance 2 d."""
    degrees = counts.numel() - 1
    assert abs(chi_square(counts.double()) - degrees) < 5 * math.sqrt(2 * degrees)


FROZEN = {
    (0,): 0,
    (0, 1): 2158877437495972032,
    (0, "cohort", 7): 4074937883106823781,
    (-1, 2**63, "x"): -7412198200268827921,
}


@pytest.mark.parametrize("words", FROZEN)
def test_folds_keep_their_values(words):
    assert host_fold(*words) == FROZEN[words]
    assert int(fold(*words)) == FROZEN[words]


def test_draws_keep_their_values():
    assert bits(5, torch.arange(2)).tolist() == [9219117246178990848, 2556342979088636997]
    assert integers(5, torch.arange(5), 0, 10).tolist() == [8, 7, 3, 9, 8]
    assert permutation(fold(torch.arange(2), "a"), 6, 6).tolist()[0] == [2, 1, 3, 0, 5, 4]


def test_the_finalizer_is_splitmix64():
    stride, salt = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
    key = splitmix64(123 ^ salt)
    assert host_fold(123, 45) % 2**64 == splitmix64((key + 45 * stride) % 2**64)


def test_host_and_tensor_words_fold_alike():
    ids = torch.arange(-3, 4)
    tensors = fold(torch.tensor(9), "batches", torch.tensor(3), ids, torch.tensor(2**62))
    assert torch.equal(fold(9, "batches", 3, ids, 2**62), tensors)
    assert tensors.tolist() == [host_fold(9, "batches", 3, i, 2**62) for i in ids.tolist()]


def test_folding_may_be_done_in_two_goes():
    assert host_fold(host_fold(3, "a"), 5) == host_fold(3, "a", 5)
    assert host_fold(3, 5, 4) != host_fold(3, 4, 5)


def test_words_broadcast():
    assert fold(0, torch.arange(3)[:, None], torch.arange(4)).shape == (3, 4)


def test_a_vmapped_fold_equals_a_loop():
    keys = torch.arange(5)
    lengths = torch.tensor([0, 1, 4, 6, 3])

    def draw(key, length):
        folded = fold(key, "dropout", 3)
        order = permutation(folded, length, 6)
        return order, uniform(folded, torch.arange(4)), integers(folded, length, 2, 9)

    together = torch.func.vmap(draw)(keys, lengths)
    alone = [draw(k, n) for k, n in zip(keys, lengths, strict=True)]
    for stacked, one_by_one in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(stacked, torch.stack(one_by_one))


def test_a_million_folds_do_not_collide():
    rounds, clients, steps = torch.arange(50), torch.arange(100), torch.arange(100)
    index = rounds[:, None, None], clients[:, None], steps
    keys = torch.stack([fold(0, purpose, *index) for purpose in ("batches", "dropout")])
    assert keys.unique().numel() == keys.numel() == 1_000_000


def test_small_seeds_and_words_do_not_collide():
    keys = fold(torch.arange(-300, 300)[:, None], torch.arange(-300, 300))
    drawn = bits(torch.arange(600)[:, None], torch.arange(600))
    assert keys.unique().numel() == 360_000
    assert drawn.unique().numel() == 360_000


@pytest.mark.parametrize("where", ["seed", "word", "index"])
def test_flipping_one_bit_flips_half_of_them(where):
    one, flipped = (
        torch.arange(600)[:, None],
        torch.arange(600)[:, None] ^ (1 << torch.arange(63)),
    )
    draw = {
        "seed": lambda v: fold(v, 1),
        "word": lambda v: fold(1, v),
        "index": lambda v: bits(1, v),
    }
    change = draw[where](one) ^ draw[where](flipped)
    width = 63 if where == "index" else 64
    share = torch.stack([((change >> b) & 1).double().mean(0) for b in range(width)])
    assert (share - 0.5).abs().max() < 5.5 * 0.5 / math.sqrt(600)


def test_uniform_draws_are_flat():
    drawn = uniform(fold(1, "test"), torch.arange(200_000))
    assert drawn.dtype == torch.float64 and drawn.min() >= 0 and drawn.max() < 1
    assert_flat(torch.histc(drawn, 100, 0, 1))
    assert_flat(torch.histc((drawn * 2**20) % 1, 100, 0, 1))


def test_pairs_from_different_keys_are_independent():
    index = torch.arange(100_000)
    streams = [uniform(fold(0, p, r), index) for p in ("batches", "cohort") for r in (0, 1)]
    streams.append(uniform(fold(0, "batches", 0), index + 1))
    for other in streams[1:]:
        cells = (streams[0] * 10).long() * 10 + (other * 10).long()
        assert_flat(torch.bincount(cells, minlength=100))


def test_normal_draws_have_the_moments_of_the_bell():
    z = normal(fold(2, "noise"), torch.arange(200_000))
    moments = [float((z**p).mean()) for p in (1, 2, 3, 4)]
    assert z.isfinite().all()
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.05)


def test_integers_are_flat_over_their_range():
    drawn = integers(fold(3, "range"), torch.arange(70_000), -2, 5)
    assert_flat(torch.bincount(drawn + 2, minlength=7))


def test_integers_take_a_range_per_draw():
    high = torch.tensor([1, 2, 100])
    assert (integers(7, torch.arange(3), 0, high) < high).all()


def test_all_24_orders_of_four_are_equally_likely():
    order = permutation(fold(4, torch.arange(24_000)), 4, 4)
    code = (order * 4 ** torch.arange(4)).sum(1)
    counts = code.unique(return_counts=True)[1]
    assert len(counts) == 24
    assert_flat(counts)


def test_a_permutation_is_padded_at_its_end():
    lengths = torch.tensor([0, 3, 5])
    order = permutation(fold(0, torch.arange(3)), lengths, 7)
    for row, n in zip(order.tolist(), lengths.tolist(), strict=True):
        assert sorted(row[:n]) == list(range(n)) and row[n:] == [-1] * (7 - n)


def test_a_permutation_does_not_depend_on_its_padding():
    keys = fold(0, torch.arange(3))
    assert torch.equal(permutation(keys, 5, 5), permutation(keys, 5, 9)[:, :5])


def test_torch_seeds_change_nothing():
    drawn = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        drawn.append(normal(fold(0, "a"), torch.arange(3)))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*drawn)


def test_the_hash_seed_of_python_changes_nothing():
    program = "from undrift.core.random import host_fold; print(host_fold(1, 'batches', 2))"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    out = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True
    )
    assert int(out.stdout) == host_fold(1, "batches", 2)


def test_three_seeds_from_one():
    seeds = Seeds.of(0)
    assert len({*seeds, *Seeds.of(1)}) == 6
    assert all(0 <= s < 2**53 for s in seeds)


@pytest.mark.parametrize("word", [torch.tensor(0.5), torch.tensor(True)])
def test_only_integers_are_words(word):
    with pytest.raises(ConfigError, match="keyed by integers"):
        fold(0, word)


def test_an_empty_range_is_refused():
    with pytest.raises(ConfigError, match="high must exceed low"):
        integers(0, 0, 3, 3)


def test_counting_sorts_as_a_stable_sort_does():
    ranks = bits(fold(0, torch.arange(40))[:, None], torch.arange(9)) % 5  # many are equal
    ranks[:, 6:] = 2**63 - 1
    assert torch.equal(_by_counting(ranks, torch.arange(9)), ranks.argsort(dim=-1, stable=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_the_same_bits():
    ids = torch.arange(10_000)
    here, there = fold(1, "a", ids, -5), fold(1, "a", ids.cuda(), -5)
    assert torch.equal(here, there.cpu())
    for draw in (bits, uniform, lambda k, i: integers(k, i, 3, 1000)):
        assert torch.equal(draw(here, ids), draw(there, ids.cuda()).cpu())
    for width in (64, 256):
        assert torch.equal(permutation(here, 60, width), permutation(there, 60, width).cpu())
    assert torch.allclose(normal(here, ids), normal(there, ids.cuda()).cpu(), rtol=1e-14)
