"""Checks for rules, aggregates and engines that live outside this library.

A third party runs the checks that our own parts pass; an error names the hook and what is wrong.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap

from undrift.core.algorithm import Algorithm, init_server, write_broadcast
from undrift.core.local import HeavyBall, Sgd
from undrift.core.round import server_round
from undrift.core.rule import Aggregate, ClientInfo, ClientView, Mean, Rule, ServerView, overrides
from undrift.core.task import LOSSES, Output, Task, Vec, masked_mean
from undrift.core.tree import Tree, leaves, named_leaves, record, stack, structure, tree_map
from undrift.data import Explicit, ExplicitWork, Federation, LocalWork, Sampler, Uniform, Work
from undrift.engines import ENGINES, Engine
from undrift.engines.engine import cohort_mean
from undrift.errors import UndriftError
from undrift.rules import Adaptive, Nova, Prox, Scaffold, ScaffoldGradient, ScaffoldM
from undrift.trainer import Trainer

__all__ = [
    "EngineError",
    "EveryHook",
    "RuleError",
    "World",
    "check_aggregate",
    "check_engine",
    "check_rule",
    "standard_algorithms",
    "tiny_task",
    "tiny_world",
]

FEATURES, CLASSES = 4, 3
SIZES = (5, 9, 3, 7, 1, 6)  # unequal, the last step of an epoch is short, one client has one
TOLERANCE = 1e-12  # in float64
SAME_EACH_TIME = ("probe", "review", "row", "after_round", "broadcast", "lift")
P = TypeVar("P", Rule, Aggregate)
Spec = tuple[str, tuple[str, ...]]


class RuleError(UndriftError, AssertionError):
    """A rule or an aggregate that breaks a promise; the message names the hook."""


class EngineError(UndriftError, AssertionError):
    """An engine that does not compute what the reference engine computes."""


# ---------------------------------------------------------------------------------- the world
class World(NamedTuple):
    """A federation so small that a round takes milliseconds, with everything unequal."""

    task: Task
    federation: Federation
    work: LocalWork
    sampler: Sampler

    def trainer(self, algorithm: Algorithm, **options: Any) -> Trainer:
        """Make a trainer for this world."""
        return Trainer(
            self.task, self.federation, algorithm, work=self.work, sampler=self.sampler, **options
        )


def tiny_task(dtype: torch.dtype = torch.float64) -> Task:
    """Make a small smooth network: 4 features in, 3 classes out, layer "1" is its feature layer.

    >>> tiny_task().size
    43
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    return Task(net, feature="1", dtype=dtype)


def tiny_world(task: Task | None = None, sizes: Sequence[int] = SIZES) -> World:
    """Make a world of few examples, in which four of six clients take part.

    >>> tiny_world().federation
    Federation(6 clients, 31 examples, x [4] float64, y [] int64, cpu)
    """
    draw = torch.Generator().manual_seed(3)
    clients = []
    for size in sizes:
        shift = torch.randn(FEATURES, generator=draw, dtype=torch.float64)
        x = torch.randn(size, FEATURES, generator=draw, dtype=torch.float64) + shift
        clients.append((x, torch.randint(0, CLASSES, (size,), generator=draw)))
    task, federation = tiny_task() if task is None else task, Federation.of(clients)
    return World(task, federation, Work(epochs=(1, 2), batch=4), _two_thirds(federation))


def _two_thirds(federation: Federation) -> Sampler:
    return Uniform(count=max(1, 2 * int((federation.sizes > 0).sum()) // 3))


def _in_dtype(task: Task, dtype: torch.dtype) -> Task:
    loss = task.loss_name if task.loss_name in LOSSES else task.loss
    metrics, feature = task.metrics, task.feature
    return Task(task.original, loss, metrics=metrics, feature=feature, dtype=dtype)


# --------------------------------------------------------------------------------- the checks
def check_rule(
    rule: Rule, *, task: Task | None = None, federation: Federation | None = None, rounds: int = 3
) -> None:
    """Raise `RuleError` unless a rule keeps every promise that engines rely on.

    It is a frozen record that pickles, copies and stacks; it is pure; shapes and dtypes are stable;
    it runs for many clients at once, in chunks of any size and in any order; it resumes bit by
    bit; it stays finite.  `task` and `federation` (at least two clients) replace the tiny world's;
    a task alone must take [B, 4] inputs and 3 classes.

    >>> check_rule(Prox(0.1))
    """
    if not isinstance(rule, Rule):
        raise RuleError(f"{rule!r} is not a Rule: derive its class from undrift.Rule")
    _check_all(rule, lambda r: Algorithm((r,), Sgd(lr=0.1)), _world(task, federation), rounds)
    _check_together(rule, _world(task, federation), rounds)


def check_aggregate(
    aggregate: Aggregate,
    *,
    task: Task | None = None,
    federation: Federation | None = None,
    rounds: int = 3,
) -> None:
    """Raise `RuleError` unless an aggregate keeps every promise; as `check_rule`.

    >>> check_aggregate(Mean())
    """
    if not isinstance(aggregate, Aggregate):
        raise RuleError(f"{aggregate!r} is not an Aggregate: derive it from undrift.Aggregate")
    world = _world(task, federation)
    _check_all(aggregate, lambda a: Algorithm((), Sgd(lr=0.1), a), world, rounds)


def check_engine(engine: str | type[Engine], *, rounds: int = 3, **options: Any) -> None:
    """Raise `EngineError` unless an engine agrees with the reference engine to 1e-12.

    >>> check_engine("vectorised", rounds=1, chunk=2)
    """
    world = tiny_world()
    with _registered(engine) as name:
        for label, algorithm in standard_algorithms().items():
            wanted = _run(world, algorithm, rounds, engine="reference")
            try:
                found = _run(world, algorithm, rounds, engine=name, **options)
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                raise EngineError(f"engine {name!r} fails on {label}: {told}") from error
            where = _difference(found, wanted, TOLERANCE)
            if where:
                raise EngineError(f"engine {name!r}, {label}: {where} of the reference engine")


def standard_algorithms() -> dict[str, Algorithm]:
    """List algorithms that together use every hook and every kind of part."""
    sgd, ball = Sgd(lr=0.1, weight_decay=1e-3), HeavyBall(lr=0.05, momentum=0.5)
    return {
        "fedavg": Algorithm(local=Sgd(lr=0.1)),
        "prox, clipped": Algorithm((Prox(0.1),), Sgd(lr=0.1, clip=0.5)),
        "scaffold II": Algorithm((Scaffold(),), sgd, Mean(by_size=False)),
        "scaffold I, yogi": Algorithm((ScaffoldGradient(),), sgd, server=Adaptive("yogi")),
        "scaffold/m": Algorithm((ScaffoldM(),), ball),
        "nova": Algorithm((Prox(0.1),), ball, Nova()),
        "every hook": Algorithm((Prox(0.1), EveryHook()), ball),
    }


def _world(task: Task | None, federation: Federation | None) -> World:
    world = tiny_world(None if task is None else _in_dtype(task, torch.float64))
    if federation is None:
        return world
    return world._replace(federation=federation, sampler=_two_thirds(federation))


def _check_all(part: P, build: Callable[[P], Algorithm], world: World, rounds: int) -> None:
    _check_record(part)
    for dtype in (torch.float32, torch.float64):
        _check_hooks(part, build, world._replace(task=_in_dtype(world.task, dtype)), rounds)
    with _told(part, "cannot run for many clients at once (never branch or loop on a value)"):
        together = _run(world, build(part), rounds)
    _check_equal(part, together, _run(world, build(part), rounds, engine="reference"), "engines")
    for chunk in (1, 3):
        some = _run(world, build(part), rounds, chunk=chunk)
        _check_equal(part, some, together, f"chunks of {chunk}, it must not look at its neighbours")
    _check_order(part, build(part), world, rounds, together["server.w"])
    _check_stacks(part, build, world)
    _check_resumes(part, build(part), world, rounds, together)


def _check_together(rule: Rule, world: World, rounds: int) -> None:
    """A rule must get on with neighbours, momentum and a server optimizer."""
    chain = Algorithm((Prox(0.1), rule), HeavyBall(lr=0.02), server=Adaptive("yogi"))
    with _told(rule, "does not work beside Prox, HeavyBall and Adaptive"):
        found = _run(world, chain, rounds)
    _check_equal(rule, found, _run(world, chain, rounds, engine="reference"), "engines")


# -- a record, frozen, that pickles, copies and stacks -----------------------------------------
def _check_record(part: Rule | Aggregate) -> None:
    name = type(part).__name__
    if leaves(part) == [part]:
        raise RuleError(f"{name} is not a record: write @record above its class")
    _check_frozen(part)
    for what, twin in (("pickled", _pickled), ("copied", copy.deepcopy)):
        with _told(part, f"cannot be {what} (classes inside functions cannot)"):
            again = twin(part)
        if structure(again) != structure(part) or _differs(leaves(again), leaves(part)):
            raise RuleError(f"{name} is not the same after it was {what}")
    for field, value in named_leaves(part).items():
        if not isinstance(value, (int, float, Tensor)) or isinstance(value, bool):
            raise RuleError(
                f"{name}.{field} = {value!r} is not a number: declare it `static(...)`, "
                "or runs that differ in it cannot be stacked"
            )
    stack([part, part])


def _check_frozen(part: Rule | Aggregate) -> None:
    twin = copy.copy(part)
    try:
        twin.undrift_was_here = True  # type: ignore[union-attr]
    except (AttributeError, TypeError):
        return
    raise RuleError(f"{type(part).__name__} is not frozen: write @record above its class")


def _pickled(part: Any) -> Any:
    return pickle.loads(pickle.dumps(part))


# -- pure, and stable in shapes and dtypes -------------------------------------------------------
def _check_hooks(part: P, build: Callable[[P], Algorithm], world: World, rounds: int) -> None:
    """Run with every hook watched; clients leave and come back in between."""
    with _told(part, f"fails in {str(world.task.dtype)[6:]}"):
        trainer = world.trainer(build(_watched(part)), engine="reference")
        for r in range(rounds):
            skipped = trainer.round().skipped
            if skipped:
                raise RuleError(f"{type(part).__name__}: the update of clients {skipped} is NaN")
            last = [world.federation.num_clients - 1]
            (trainer.enroll if r % 2 else trainer.leave)(last)
        if isinstance(part, Rule):
            _check_personal(part, trainer.server.states[0], world.federation.num_clients)


def _watched(part: P) -> P:
    """Derive a twin whose hooks are called twice, on arguments that must not change."""
    kind, base = type(part), Rule if isinstance(part, Rule) else Aggregate
    names = [n for n, hook in vars(base).items() if callable(hook) and n != "personal"]
    seen: dict[Any, Spec] = {}
    hooks = {n: _watch(n, getattr(kind, n), seen) for n in names if overrides(part, n)}
    made: Any = type(kind.__name__, (kind,), hooks)
    twin: P = object.__new__(made)
    for f in fields(part):  # type: ignore[arg-type]
        object.__setattr__(twin, f.name, getattr(part, f.name))
    return twin


def _watch(hook: str, original: Callable[..., Any], seen: dict[Any, Spec]) -> Callable[..., Any]:
    def watched(self: Any, *args: Any) -> Any:
        name = f"{type(self).__name__}.{hook}"
        before, own = _copied(args), copy.deepcopy(vars(self))
        first = original(self, *args)
        if structure(own) != structure(vars(self)) or _differs(own, vars(self)):
            raise RuleError(f"{name} writes on itself: return a new state instead")
        _check_untouched(name, args, before)
        if _differs(original(self, *args), first):
            raise RuleError(f"{name} is not pure: the same call gave two results")
        _check_result(name, hook, args, first, seen)
        return first

    watched.__name__ = hook
    return watched


def _check_untouched(name: str, args: Any, before: Any) -> None:
    now, then = named_leaves(args), named_leaves(before)
    for place, value in then.items():
        if _differs(now[place], value):
            raise RuleError(
                f"{name} changes its argument {_place(place)} in place: write g = g * 2 "
                "instead of g.mul_(2)"
            )


def _place(path: str) -> str:
    number, _, rest = path.partition(".")
    return f"{int(number) + 1}" + (f" ({rest})" if rest else "")


def _check_result(name: str, hook: str, args: Any, result: Any, seen: dict[Any, Spec]) -> None:
    """Compare the shapes of what a hook returns with what it must be like."""
    for what, value, like in _expected(name, hook, args, result):
        if _spec(value) != _spec(like):
            raise RuleError(
                f"{name} returns {what} as {_text(value)}, expected {_text(like)}: structure, "
                "shapes and dtypes must stay"
            )
    if hook == "penalty" and isinstance(result, Tensor) and result.dim():
        raise RuleError(f"{name} returns shape {list(result.shape)}: a penalty is one number")
    varying = result[2] if hook == "finish" and len(args) == 2 else result
    if hook in SAME_EACH_TIME or varying is not result:
        # an impulse of one parameter is another call (see core/round.py), so the state is a key
        key = (hook, str(_spec(args[0])) if hook == "broadcast" else "")
        if seen.setdefault(key, _spec(varying)) != _spec(varying):
            was, now = seen[key][1], _spec(varying)[1]
            raise RuleError(f"{name} returned {was} first and {now} later: shapes must stay")
    if hook not in ("server", "server_after", "init_server", "resize", "broadcast"):
        _check_finite(name, result)


def _expected(name: str, hook: str, args: Any, result: Any) -> list[tuple[str, Any, Any]]:
    """List (what, value, what it must be like) of the results that have a pattern."""
    if hook in ("begin", "direction", "server_after", "resize"):
        like = args[0].mine if hook == "begin" else args[0]
        return [("its result", result, like)]
    if hook == "server" or (hook == "finish" and len(args) == 2):
        wanted = 2 if hook == "server" else 3
        if not isinstance(result, tuple) or len(result) != wanted:
            raise RuleError(f"{name} must return {wanted} values, got {_text(result)}")
        state = args[1] if hook == "server" else args[1].mine
        return [("the vector", result[0], args[0]), ("the state", result[1], state)]
    return []


def _check_finite(name: str, result: Any) -> None:
    for leaf in leaves(result):
        if isinstance(leaf, Tensor) and not bool(torch.isfinite(leaf).all()):
            raise RuleError(f"{name} returns NaN or infinity on an ordinary batch")


def _check_personal(rule: Rule, state: Tree, num_clients: int) -> None:
    """Both engines map `personal` over clients, so it is compared with plain calls here."""
    if not overrides(rule, "personal"):
        return
    ones = torch.ones(num_clients, dtype=torch.float64)
    info = ClientInfo(torch.arange(num_clients), ones, ones, ones, ones)
    mapped = vmap(lambda one: rule.personal(state, one))(info)
    for c in range(num_clients):
        alone = rule.personal(state, ClientInfo(*(v[c] for v in info)))
        if _distance(leaves(tree_map(lambda v, c=c: v[c], mapped)), leaves(alone)) > TOLERANCE:
            raise RuleError(f"{type(rule).__name__}.personal differs when mapped over clients")


# -- the same in every engine, chunking and order ------------------------------------------------
def _run(world: World, algorithm: Algorithm, rounds: int, **options: Any) -> dict[str, Tensor]:
    trainer = world.trainer(algorithm, **options)
    trainer.run(rounds)
    return _numbers(trainer)


def _numbers(trainer: Trainer) -> dict[str, Tensor]:
    """Every number of a trainer, by name."""
    found = {f"server.{n}": v for n, v in named_leaves(trainer.server).items()}
    states = trainer.store.gather(range(trainer.federation.num_clients))
    return found | {f"clients.{n}": v for n, v in named_leaves(states).items()}


def _check_equal(
    part: Rule | Aggregate, found: dict[str, Tensor], wanted: dict[str, Tensor], why: str
) -> None:
    where = _difference(found, wanted, TOLERANCE)
    if where:
        raise RuleError(f"{type(part).__name__}: {where} of the other way ({why})")


def _check_order(
    part: Rule | Aggregate, algo: Algorithm, world: World, rounds: int, wanted: Tensor
) -> None:
    """Give the clients other numbers, so that they are summed and listed in another order."""
    if any(getattr(m, "p", 0) or getattr(m, "dropout", 0) for m in world.task.module.modules()):
        return  # dropout is keyed by the client's number
    new = list(reversed(range(world.federation.num_clients)))
    found = _run(_replayed(world, rounds, new), algo, rounds)["server.w"]
    if _distance([found], [wanted]) > TOLERANCE:
        raise RuleError(f"{type(part).__name__}: the model depends on the order of clients")


def _replayed(world: World, rounds: int, new: list[int]) -> World:
    """Write down who trains on what, then call client i new[i]."""
    federation, trainer = world.federation, world.trainer(Algorithm())
    everybody = [(r, i) for r in range(rounds) for i in new]
    orders: dict[tuple[int, int], list[list[int]]] = {key: [[0]] for key in everybody}
    cohorts = []
    for r in range(rounds):
        trainer.rounds_done = r
        work = trainer._assign()
        cohorts.append([new[i] for i in work.ids])
        for i, order, steps in zip(work.ids, work.order, work.steps, strict=True):
            orders[r, new[i]] = [row[row >= 0].tolist() for row in order[: int(steps)]]
    clients = [federation.client(new.index(i)) for i in range(len(new))]
    turned = Federation.of(clients, arrival=federation.arrival)
    return World(world.task, turned, ExplicitWork(orders), Explicit(cohorts))


# -- many experiments at once ----------------------------------------------------------------------
def _check_stacks(part: P, build: Callable[[P], Algorithm], world: World) -> None:
    """Run one client's round with the part's numbers on an experiment axis."""
    if not leaves(part):
        return
    trainer = world.trainer(build(part), engine="reference")
    wanted = _one_client(trainer, build(part))
    with _told(part, "does not run with its numbers stacked (never branch on a number)"):
        twins = stack([part, part])
        found = vmap(lambda twin: _one_client(trainer, build(twin)))(twins)
    if _distance([found], [torch.stack([wanted, wanted])]) > TOLERANCE:
        raise RuleError(f"{type(part).__name__}: stacking its numbers gives another model")


def _one_client(trainer: Trainer, algo: Algorithm) -> Vec:
    """Give the model after a round in which a single client takes part."""
    engine, work = trainer.engine, trainer._assign().part(slice(0, 1))
    population = trainer.federation.num_clients
    server = init_server(algo, *trainer.task.initial(), population)
    broadcast = write_broadcast(algo, server, 1, work.seed)
    clients = engine.clients(algo, server, work)
    if algo.uses("probe"):
        probes = engine.measure_clients("probe", algo, broadcast, clients, work)
        clients = clients._replace(probe=probes)
        broadcast = broadcast._replace(cohort=cohort_mean(algo, probes, work))
    _, _, reports, rows = next(iter(engine.run_clients(algo, broadcast, clients, work)))
    report = tree_map(lambda v: v[0], reports)
    return server_round(algo, server, report, rows, work.info.id, population).w


# -- resumed bit by bit --------------------------------------------------------------------------
def _check_resumes(
    part: Rule | Aggregate, algo: Algorithm, world: World, rounds: int, straight: dict[str, Tensor]
) -> None:
    middle = rounds // 2
    with tempfile.TemporaryDirectory() as folder, _told(part, "cannot be resumed"):
        first = world.trainer(algo)
        first.run(middle)
        first.save(folder)
        second = world.trainer(_pickled(algo))
        second.load(folder)
        second.run(rounds - middle)
    where = _difference(_numbers(second), straight, 0.0)
    if where:
        raise RuleError(f"{type(part).__name__}: {where} after a checkpoint was resumed")


# --------------------------------------------------------------------------------------- helpers
@contextmanager
def _told(part: Rule | Aggregate, what: str) -> Iterator[None]:
    """Turn any failure into one sentence that names the hook."""
    try:
        yield
    except RuleError:
        raise
    except Exception as error:
        deepest = error
        while deepest.__cause__ is not None and isinstance(deepest.__cause__, Exception):
            deepest = deepest.__cause__
        hook = _hook_of(deepest, part) or _hook_of(error, part)
        name = type(part).__name__ + (f".{hook}" if hook else "")
        raise RuleError(f"{name} {what}: {type(deepest).__name__}: {deepest}") from error


def _hook_of(error: BaseException, part: Rule | Aggregate) -> str | None:
    """Find the innermost hook of a part on the traceback."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, type(part)) and frame.f_code.co_name != "watched":
            found = frame.f_code.co_name
    return found


@contextmanager
def _registered(engine: str | type[Engine]) -> Iterator[str]:
    """Give an engine class a name for a while."""
    if isinstance(engine, str):
        yield engine
        return
    name = f"{engine.__module__}.{engine.__qualname__}"
    ENGINES[name] = engine
    try:
        yield name
    finally:
        del ENGINES[name]


def _copied(args: Any) -> Any:
    return tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, args)


def _differs(a: Any, b: Any) -> bool:
    """Whether some number differs in its bits; NaN equals NaN."""
    some, other = leaves(a), leaves(b)
    return len(some) != len(other) or not all(map(_same_bits, some, other))


def _same_bits(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return bool(a is b or a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Largest difference, relative to the larger of 1 and the largest number."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if x.shape != y.shape:
            return float("inf")
        if x.numel() and not _same_bits(x, y):
            x, y = x.double(), y.double()
            gap = float((x - y).abs().max() / max(1.0, float(y.abs().max())))
            worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def _difference(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> str:
    """Say which number differs most, or nothing."""
    gaps = {n: _distance([found[n]], [wanted[n]]) for n in wanted}
    worst = max(gaps, key=lambda n: gaps[n])
    return f"{worst} is {gaps[worst]:.1e} away from that" if gaps[worst] > limit else ""


def _spec(tree: Any) -> Spec:
    return str(structure(tree)), tuple(_text_of(v) for v in leaves(tree))


def _text_of(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype)[6:]} {list(value.shape)}"


def _text(tree: Any) -> str:
    kinds = ", ".join(_text_of(v) for v in leaves(tree))
    return kinds if isinstance(tree, Tensor) else f"{type(tree).__name__} of ({kinds})"


# ------------------------------------------------------------------------------ for check_engine
@record
class EveryHook(Rule):
    """Use every hook once, so that an engine that forgets one is found out."""

    shares_probe = True

    strength: float = 0.05

    def init_client(self, w: Vec, sizes: Sizes) -> Tree:
        return {"h": torch.zeros_like(w), "begun": w.new_zeros(()), "seen": w.new_zeros(examples)}

    def probe(self, view: ClientView) -> Tree:
        return view.grad_at(view.w0)

    def begin(self, view: ClientView) -> Tree:
        at = torch.arange(len(view.mine["seen"]), device=view.w.device)
        here = (at[:, None] == view.batch.index).any(1)
        count = view.batch.mask.sum().to(view.w.dtype)
        begun = view.mine["begun"] + count
        return {**view.mine, "begun": begun, "seen": view.mine["seen"] + here.to(view.w.dtype)}

    def penalty(self, out: Output, view: ClientView) -> Tensor | float:
        mean = masked_mean(out.value.flatten(1), view.batch.mask)
        pull: Tensor = self.strength * (mean - view.personal).square().sum()
        return pull

    def direction(self, g: Vec, view: ClientView) -> Vec:
        extra: Vec = view.cohort - view.probe + view.mine["h"] + view.broadcast
        return g + self.strength * extra

    def review(self, view: ClientView) -> Tree:
        squares = view.output_at(view.w).value.flatten(1).square().mean(1)
        return masked_mean(squares, view.batch.mask)

    def finish(self, delta: Vec, view: ClientView) -> tuple[Vec, Tree, Tree]:
        return delta, {**view.mine, "h": 0.5 * view.mine["h"] + delta}, view.review

    def row(self, delta: Vec, view: ClientView) -> Tree:
        return view.mine["seen"].sum()

    def after_round(self, view: ClientView) -> Tree:
        means = view.output_at(view.w).value.flatten(1).mean(1, keepdim=True)
        return masked_mean(means, view.batch.mask)

    def init_server(self, w: Vec, sizes: Sizes) -> Tree:
        return {"m": torch.zeros_like(w), "table": w.new_zeros(clients, 1), "sum": w.new_zeros(())}

    def resize(self, state: Tree, before: int, after: int) -> Tree:
        return {**state, "m": state["m"] * (before / after)}

    def broadcast(self, state: Tree) -> Tree:
        return state["m"]

    def personal(self, state: Tree, client: ClientInfo) -> Tree:
        return state["table"][client.id]

    def server(self, update: Vec, state: Tree, view: ServerView) -> tuple[Vec, Tree]:
        rows = torch.where(view.accepted, view.rows, 0.0).sum()
        m = 0.5 * state["m"] + update
        return update, {**state, "m": m, "sum": state["sum"] + view.upload + rows}

    def server_after(self, state: Tree, view: ServerView) -> Tree:
        new = torch.where(view.accepted[:, None], view.rows, state["table"][view.ids])
        return {**state, "table": state["table"].index_copy(0, view.ids, new)}
