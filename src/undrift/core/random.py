"""Randomness as a pure function of integers: no generator objects, no global state.

A *key* is 64 mixed bits made by `fold` from a seed and words (a purpose, a round, a client, ...);
a draw is a function of a key and an index.  So a number depends on what it is for and never on the
order of calls: chunks, engines, devices and resumed runs draw the same ones.

Everything up to `integers` and `permutation` is 64-bit integer arithmetic that wraps, hence equal
bit for bit on the CPU and on CUDA; `uniform` too, for it only scales by a power of two.  `normal`
goes through log and cos, which devices round differently in the last place.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from operator import index as as_index
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from undrift.errors import ConfigError

Word = SupportsIndex | str | Tensor
Bits = int | Tensor  # a Python int stands for one number on any device


def _signed(z: int) -> int:
    return ((z + 2**63) & (2**64 - 1)) - 2**63


def _wrap(z: Bits) -> Bits:
    # Tensors wrap by themselves; a Python int is brought back to two's complement.
    return z if isinstance(z, Tensor) else _signed(z)


# The finalizer and the increment of splitmix64 (Steele, Lea & Flood 2014), as signed integers.
FIRST = _signed(0xBF58476D1CE4E5B9)
SECOND = _signed(0x94D049BB133111EB)
STRIDE = _signed(0x9E3779B97F4A7C15)
# Different salts keep `bits(key, i)` apart from `fold(key, i)`.
FOLD_SALT = _signed(0xD1B54A32D192ED03)
BITS_SALT = _signed(0x8CB92BA72F3D8DD7)

# What a device sorts by counting: so many ranks, and pairs of them in all.
FEW, MOST_PAIRS = 128, 2**23


def _xor_shift(z: Bits, shift: int) -> Bits:
    # A signed shift copies the sign bit; the mask makes the shift logical.
    shifted: Bits = (z >> shift) & (2 ** (64 - shift) - 1)
    return z ^ shifted


def _mix(z: Bits) -> Bits:
    z = _wrap(_xor_shift(z, 30) * FIRST)
    z = _wrap(_xor_shift(z, 27) * SECOND)
    return _xor_shift(z, 31)


def _absorb(state: Bits, word: Bits, salt: int) -> Bits:
    # Two mixings, so that neither small seeds nor small words leave a pattern.
    return _mix(_wrap(_mix(state ^ salt) + _wrap(word * STRIDE)))


@cache
def _purpose(name: str) -> int:
    # blake2b, not hash(): Python salts the latter anew in every process.
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _word(word: Word) -> Bits:
    if isinstance(word, Tensor):
        if word.is_floating_point() or word.is_complex() or word.dtype == torch.bool:
            raise ConfigError(f"randomness is keyed by integers, got a tensor of {word.dtype}")
        return word.to(torch.int64)
    return _purpose(word) if isinstance(word, str) else _signed(as_index(word))


def _fold(seed: Word, words: tuple[Word, ...]) -> Bits:
    state = _word(seed)
    for word in words:
        state = _absorb(state, _word(word), FOLD_SALT)
    return state


def fold(seed: SupportsIndex | Tensor, *words: Word) -> Tensor:
    """Mix a seed and words into 64 bits, an int64 tensor; tensors among them broadcast.

    Strings name purposes.  `fold(fold(s, a), b)` is `fold(s, a, b)`; the order of words matters.

    >>> fold(0, "batches", 3, torch.arange(4)).shape
    torch.Size([4])
    >>> int(fold(0, "cohort", 7)) == host_fold(0, "cohort", 7)
    True
    """
    return torch.as_tensor(_fold(seed, words), dtype=torch.int64)


def host_fold(seed: SupportsIndex, *words: SupportsIndex | str) -> int:
    """Compute `fold` as a Python int, without a tensor.

    >>> host_fold(0, "cohort", 7)
    4074937883106823781
    """
    return as_index(_fold(as_index(seed), words))


def bits(key: Bits, index: Bits) -> Tensor:
    """Draw number `index` of a key: an int64 uniform on [0, 2**63); key and index broadcast."""
    mixed = _absorb(_word(key), _word(index), BITS_SALT)
    return torch.as_tensor((mixed >> 1) & (2**63 - 1), dtype=torch.int64)


def uniform(key: Bits, index: Bits) -> Tensor:
    """Draw a float64 on [0, 1) with 53 random bits."""
    return (bits(key, index) >> 10).to(torch.float64) * 2.0**-53


def normal(key: Bits, index: Bits) -> Tensor:
    """Draw a float64 from the standard normal distribution (Box and Muller 1958)."""
    radius = torch.sqrt(-2 * torch.log1p(-uniform(key, 2 * index)))
    return radius * torch.cos(2 * math.pi * uniform(key, 2 * index + 1))


def integers(key: Bits, index: Bits, low: Bits, high: Bits) -> Tensor:
    """Draw an int64 on [low, high).

    The remainder of 63 bits: two values' probabilities differ by 2**-63 at most.
    """
    if isinstance(low, int) and isinstance(high, int) and low >= high:
        raise ConfigError(f"no integer lies in [{low}, {high}): high must exceed low")
    return low + bits(key, index) % (high - low)


def permutation(keys: Tensor, lengths: Bits, width: int, slots: Tensor | None = None) -> Tensor:
    """Permute range(length) for every key: [..., width], padded with -1.

    The order of a key depends on its length but not on `width`.  `slots` may bring range(width).

    >>> permutation(fold(0, torch.arange(2)), torch.tensor([3, 1]), width=4).sort().values
    tensor([[-1,  0,  1,  2],
            [-1, -1, -1,  0]])
    """
    slots = torch.arange(width, device=keys.device) if slots is None else slots
    inside = slots < torch.as_tensor(lengths, device=keys.device)[..., None]
    # The padding takes the greatest rank and the sort is stable, so it always comes last.
    ranks = torch.where(inside, bits(keys[..., None], slots), 2**63 - 1)
    counts = keys.device.type == "cuda" and width <= FEW and ranks.numel() * width <= MOST_PAIRS
    order = _by_counting(ranks, slots) if counts else ranks.argsort(dim=-1, stable=True)
    return torch.where(inside, order, -1)


def _by_counting(ranks: Tensor, slots: Tensor) -> Tensor:
    """Sort a few ranks stably: everyone stands behind those who are less, or equal and earlier.

    Gives what argsort does; on a device it is two short kernels instead of five long ones.
    """
    mine, theirs = ranks[..., :, None], ranks[..., None, :]
    before = (theirs < mine) | ((theirs == mine) & (slots < slots[:, None]))
    place = before.sum(-1)
    return torch.where(place[..., None, :] == slots[:, None], slots, 0).sum(-1)


class Seeds(NamedTuple):
    """Three seeds, to be varied one at a time: how data are dealt, the first model, the run.

    >>> Seeds.of(0)._replace(model=5).model
    5
    """

    partition: int
    model: int
    run: int

    @classmethod
    def of(cls, seed: int) -> Seeds:
        """Derive the three from one; 53 bits each, which every file format keeps exactly."""
        return cls(*(host_fold(seed, "seeds", name) & (2**53 - 1) for name in cls._fields))
