"""How to build and run what has a name: some algorithms are particular about their world."""

from collections.abc import Container
from typing import Any

import pytest

import undrift as fl
from undrift.testing.compare import distance
from undrift.testing.world import World, numbers, tiny_world

# tau 1e-3: 1e-9 makes 1e9 of a rounding error near zero
TAU = {name for name in fl.catalogue() if name.endswith(("adam", "adagrad", "yogi"))}
CLASSES = {"fedvra_u": {"objective": fl.PseudoLabels(classes=3, every=3)}}  # worlds of 3 classes
OLD = {"fedavg", "fedprox", "scaffold", "scaffold_m", "fednova", "fedavgm"}
NEW = [n for n in fl.catalogue() if n not in OLD | TAU and not n.startswith("comfed")]
# A cell of ComFed's grid is a client's rule and a server's: by default each of them comes up once.
CELLS = {f"comfed:{cell}" for cell in ("sgd-yogi", "prox-adagrad", "scaf-sgd", "nova-adam")}
# Of those that differ little, one: what is left has no kind of state or hook that these have not.
KINDS = {
    *("fedavg", "scaffold", "scaffold_m", "fedyogi", "fedrl", "fedadc", "mime", "feddc", "vrlsgd"),
    *("adabest", "fedvra_u", "rfedavg", "rfedavg_plus", "moon", "qfedavg", "comfed:nova-adam"),
}


def every(kept: Container[str]) -> list[Any]:
    """Give all names for a parameter; those that are not `kept` are slow."""
    slow = pytest.mark.slow
    return [pytest.param(n, marks=() if n in kept else slow) for n in fl.catalogue()]


NAMED = every([n for n in fl.catalogue() if not n.startswith("comfed:") or n in CELLS])


def built(name: str, **settings: Any) -> fl.Algorithm:
    """Build an algorithm by its name."""
    tau = {"tau": 1e-3} if name in TAU else {}
    return fl.catalogue()[name].build(**{**tau, **CLASSES.get(name, {}), **settings})


def world_for(name: str, sampler: Any, work: Any) -> dict[str, Any]:
    """Choose a sampler and work that the algorithm accepts."""
    needs = fl.catalogue()[name].needs if name in fl.catalogue() else ""
    return {
        "sampler": fl.Everyone() if needs == "everybody" else sampler,
        "work": fl.Work(steps=1, batch=None) if needs == "one step" else work,
    }


def world_of(name: str) -> World:
    """Make eight unequal clients for the algorithm of this name."""
    world = tiny_world(sizes=(5, 9, 3, 7, 1, 6, 4, 8))
    return world._replace(**world_for(name, world.sampler, world.work))


def far(found: fl.Trainer, wanted: fl.Trainer) -> float:
    """Tell how far two trainers' servers and clients are from each other at most."""
    ours, theirs = numbers(found), numbers(wanted)
    assert ours.keys() == theirs.keys()
    return distance(list(ours.values()), list(theirs.values()))
