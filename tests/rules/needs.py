"""How to build and run what has a name: some algorithms are particular about their world."""

from typing import Any

import undrift as fl
from undrift.testing.compare import distance
from undrift.testing.world import World, numbers, tiny_world

# tau 1e-3: 1e-9 makes 1e9 of a rounding error near zero
TAU = {name for name in fl.catalogue() if name.endswith(("adam", "adagrad", "yogi"))}
CLASSES = {"fedvra_u": {"objective": fl.PseudoLabels(classes=3, every=3)}}  # worlds of 3 classes
OLD = {"fedavg", "fedprox", "scaffold", "scaffold_m", "fednova", "fedavgm"}
NEW = [n for n in fl.catalogue() if n not in OLD | TAU and not n.startswith("comfed")]


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
