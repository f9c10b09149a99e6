"""Every way to compute a run gives the same: chunks, order, stacked numbers, resumed."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import vmap

from undrift.core.algorithm import Algorithm, init_server, write_broadcast
from undrift.core.rule import Aggregate, ClientView, Rule, Sizes
from undrift.core.server import server_round
from undrift.core.task import Vec
from undrift.core.tree import leaves, record, stack, static, tree_map
from undrift.engines.engine import cohort_mean
from undrift.errors import ConfigError, EmptyRoundError, ServerError
from undrift.fleet import Fleet, hindrance
from undrift.testing.compare import TOLERANCE, difference, distance
from undrift.testing.errors import RuleError, told
from undrift.testing.purity import P
from undrift.testing.records import pickled
from undrift.testing.world import World, in_dtype, numbers, renumbered, run
from undrift.trainer import Trainer


def check_ways(part: P, build: Callable[[P], Algorithm], world: World, rounds: int) -> None:
    """Run in every way there is and compare every number."""
    algo = build(part)
    with told(part, "cannot run for many clients at once (never branch or loop on a value)"):
        together = run(world, algo, rounds)
    check_equal(part, together, run(world, algo, rounds, engine="reference"), "engines")
    for chunk in (1, 3):
        some = run(world, algo, rounds, chunk=chunk)
        check_equal(part, some, together, f"chunks of {chunk}, it must not look at its neighbours")
    _check_order(part, algo, world, rounds, together["server.w"])
    _check_stacks(part, build, world)
    _check_resumes(part, algo, world, rounds, together)
    _check_fleet(part, algo, world, rounds, together)
    _check_single(part, algo, world, rounds)
    _check_left_out(part, algo, world, rounds)


def check_engines(part: Rule | Aggregate, algo: Algorithm, world: World, rounds: int) -> None:
    """Run in both engines and compare every number."""
    found = run(world, algo, rounds)
    check_equal(part, found, run(world, algo, rounds, engine="reference"), "engines")


def check_equal(
    part: Rule | Aggregate, found: dict[str, Tensor], wanted: dict[str, Tensor], why: str
) -> None:
    """Raise if a number differs by more than rounding."""
    where = difference(found, wanted, TOLERANCE)
    if where:
        raise RuleError(f"{type(part).__name__}: {where} of the other way ({why})")


def _check_fleet(
    part: Rule | Aggregate, algo: Algorithm, world: World, rounds: int, wanted: dict[str, Tensor]
) -> None:
    """Train it twice as one batch: both halves are mapped over experiments there."""
    trainers = [world.trainer(algo) for _ in range(2)]
    if hindrance(trainers[0]):
        return
    with told(part, "cannot train in a Fleet (never index by a mask, branch or loop on a value)"):
        Fleet(trainers, alone=False).run(rounds)
    for trainer in trainers:
        check_equal(part, numbers(trainer), wanted, "a Fleet, it must not mix experiments")


def _check_single(part: Rule | Aggregate, algo: Algorithm, world: World, rounds: int) -> None:
    """Train in float32 in the default engine: numbers keep their type and stay finite."""
    with told(part, "cannot train in float32"):
        found = run(world._replace(task=in_dtype(world.task, torch.float32)), algo, rounds)
    for name, value in found.items():
        if value.dtype == torch.float64 and name == "server.w":
            raise RuleError(f"{type(part).__name__}: the model becomes float64 in float32")
    if strange := _not_finite(algo, found):
        raise RuleError(f"{type(part).__name__}: {strange[0]} is not finite in float32")


def _not_finite(algo: Algorithm, found: dict[str, Tensor]) -> list[str]:
    """Name the numbers that are not finite, or NaN where their rule says that they may be."""
    endless = {name for rule in algo.chain for name in rule.may_be_infinite}
    return [
        name
        for name, v in found.items()
        if bool(v.isnan().any() or (name.split(".")[-1] not in endless and v.isinf().any()))
    ]


def _check_left_out(part: Rule | Aggregate, algo: Algorithm, world: World, rounds: int) -> None:
    """Spoil the updates of one client, then of all: nothing of them may stay anywhere."""
    for bad in (1, world.federation.num_clients):
        try:
            spoiled = replace(algo, rules=(*algo.rules, Spoils(bad)))
        except ConfigError:
            return  # a part that allows nobody else to act on local steps
        for engine in ("vectorised", "reference"):
            trainer, why = world.trainer(spoiled, engine=engine), ""
            with told(part, f"fails where the updates of {bad} clients are NaN"), _quiet():
                try:
                    trainer.run(rounds)
                except EmptyRoundError:
                    pass  # it leaves everything as it was
                except ServerError as error:
                    why = str(error)
            strange = _not_finite(spoiled, numbers(trainer))
            if strange or why:
                raise RuleError(
                    f"{type(part).__name__}.server takes in NaN of clients that were left out "
                    f"({engine}; {', '.join(strange) or why}): select their rows by "
                    "torch.where(view.accepted, ...)"
                )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the warnings about clients that are left out, which are meant to be, from the log."""
    log = logging.getLogger("undrift")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@record
class Spoils(Rule):
    """Make the updates of the first clients NaN, so that they are left out."""

    below: int = static(default=1)

    def after_step(self, w: Vec, view: ClientView) -> Vec:
        return torch.where(view.client.id < self.below, torch.nan, w)


def _check_order(
    part: Rule | Aggregate, algo: Algorithm, world: World, rounds: int, wanted: Tensor
) -> None:
    """Give the clients other numbers, so that they are summed and listed in another order."""
    if any(getattr(m, "p", 0) or getattr(m, "dropout", 0) for m in world.task.module.modules()):
        return  # dropout is keyed by the client's number
    if getattr(part, "in_turn", False):
        return
    new = list(reversed(range(world.federation.num_clients)))
    found = run(renumbered(world, rounds, new), algo, rounds)["server.w"]
    if distance([found], [wanted]) > TOLERANCE:
        raise RuleError(f"{type(part).__name__}: the model depends on the order of clients")


def _check_stacks(part: P, build: Callable[[P], Algorithm], world: World) -> None:
    """Run one client's round with the part's numbers on an experiment axis."""
    if not leaves(part):
        return
    trainer = world.trainer(build(part), engine="reference")
    wanted = _one_client(trainer, build(part))
    with told(part, "does not run with its numbers stacked (never branch on a number)"):
        twins = stack([part, part])
        axes = tree_map(lambda v: 0, twins)  # what is None has no axis
        found = vmap(lambda twin: _one_client(trainer, build(twin)), in_dims=(axes,))(twins)
    if distance([found], [torch.stack([wanted, wanted])]) > TOLERANCE:
        raise RuleError(f"{type(part).__name__}: stacking its numbers gives another model")


def _one_client(trainer: Trainer, algo: Algorithm) -> Vec:
    """Give the model after a round in which a single client takes part."""
    engine, work = trainer.engine, trainer.roster.cohort(0).part(slice(0, 1))
    server = init_server(algo, *trainer.task.initial(), _sizes(trainer))
    broadcast = write_broadcast(algo, server, 1, work.seed)
    clients = engine.clients(algo, server, work)
    if algo.uses("probe"):
        probes = engine.measure_clients("probe", algo, broadcast, clients, work)
        clients = clients._replace(probe=probes)
        broadcast = broadcast._replace(cohort=cohort_mean(algo, probes, work))
    _, _, reports, rows = next(iter(engine.run_clients(algo, broadcast, clients, work)))
    report = tree_map(lambda v: v[0], reports)
    ids, roster = work.info.id, trainer.roster
    known = trainer.known(work)._replace(everyone=roster.lookers(0).info)
    return server_round(algo, server, report, rows, ids, roster.count, known).w


def _sizes(trainer: Trainer) -> Sizes:
    federation = trainer.federation
    rows = federation.members[:2]
    features = trainer.task.check(federation.x[rows], federation.y[rows])
    return Sizes(federation.num_clients, federation.max_size, features)


def _check_resumes(
    part: Rule | Aggregate, algo: Algorithm, world: World, rounds: int, straight: dict[str, Tensor]
) -> None:
    """Stop in the middle, go on in a new trainer: bit by bit the same."""
    middle = rounds // 2
    with tempfile.TemporaryDirectory() as folder, told(part, "cannot be resumed"):
        first = world.trainer(algo)
        first.run(middle)
        first.save(folder)
        second = world.trainer(pickled(algo))
        second.load(folder)
        second.run(rounds - middle)
    where = difference(numbers(second), straight, 0.0)
    if where:
        raise RuleError(f"{type(part).__name__}: {where} after a checkpoint was resumed")
