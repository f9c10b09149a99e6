"""Settings that the tests of invariants share: who trains on which batches, and what is read."""

from __future__ import annotations

import numpy as np
import torch

import undrift as fl
from longhand.cases import ALL, SOME
from proofs.bridge import local_of
from undrift.verify.longhand.local import Local
from undrift.verify.longhand.worlds import World, epoch_batches, step_batches

SOME5, ALL5 = SOME[:5], ALL[:5]


def unequal(world, rounds=SOME5):
    """Two epochs of batches of 6: 4 to 8 steps."""
    return epoch_batches(world, rounds, 6, epochs=2)


def equal(world, rounds=SOME5):
    return step_batches(world, rounds, steps=4, batch_size=6)


def even(world: World) -> World:
    """Give everybody seven examples."""
    return World([(x[:7], y[:7]) for x, y in world.data], world.gradient, world.loss, world.w0)


def uniform(local: Local) -> fl.Algorithm:
    return fl.fedavg(local=local_of(local), by_size=False)


def pooled(world) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.concatenate(parts) for parts in zip(*world.data, strict=True))


@fl.record
class PathSpy(fl.Rule):
    """Keep ||a_i||_1 and the delta where a test can read them."""

    needs_path = True

    def init_client(self, w, sizes):
        return {"path": w.new_zeros(()), "delta": torch.zeros_like(w)}

    def finish(self, delta, view):
        return delta, {"path": view.path, "delta": delta}, ()
