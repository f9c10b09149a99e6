"""B8: the numbers follow from the seed; nothing else that may vary changes them."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import torch

from rules.needs import KINDS, every
from undrift.data import Work

from . import everyone
from .forked import ask
from .tiny import assert_same_bits, everything, largest_difference, threads, trainer

ROUNDS = 2


def trained(name, seed=0, **settings):
    work = Work(steps=(1, 3), batch=4)
    run = trainer(name, dtype=torch.float64, work=work, seed=seed, **settings)
    run.run(ROUNDS)
    return everything(run)


first_of = cache(trained)


@pytest.mark.parametrize("name", every(KINDS))
def test_the_same_seed_gives_the_same_bits_and_another_does_not(name):
    first = first_of(name)
    assert_same_bits(trained(name), first)
    assert largest_difference(trained(name, seed=6), first) > 1e-6


@pytest.mark.parametrize("name", every(KINDS))
def test_how_clients_are_put_together_does_not_matter(name):
    for settings in ({"chunk": 2}, {"in_place": False}):
        assert largest_difference(trained(name, **settings), first_of(name)) <= 1e-12, settings
    with threads(2):
        assert largest_difference(trained(name), first_of(name)) <= 1e-12


def test_another_process_with_another_hash_seed_gives_the_same_bits(tmp_path):
    there, here = ask("everyone", tmp_path, hash_seed=4242), everyone.main(tmp_path)
    assert there == here and len(here) == 10


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def generators():
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), (name, keys.tolist(), *rest), random.getstate()


def test_global_generators_are_neither_read_nor_moved(tmp_path):
    results = []
    for seed in (1, 2):
        seed_all(seed)
        before = generators()
        run = trainer("comfed:scaf-yogi", work=Work(epochs=(1, 2), batch=4, last="bootstrap"))
        run.run(ROUNDS)
        run.save(tmp_path / str(seed))
        run.load(tmp_path / str(seed))
        assert generators() == before
        results.append(everything(run))
    assert_same_bits(*results)
