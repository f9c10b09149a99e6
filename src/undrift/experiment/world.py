"""Build what an experiment describes: data dealt to clients, a task, a trainer and its exams."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from undrift import models, own
from undrift.core.task import Task
from undrift.data import Federation
from undrift.data.partitions import ByKey, Parts, hold_out, per_client_test
from undrift.data.partitions.protocol import Ids
from undrift.describe import unchanging
from undrift.errors import ConfigError, DataError, TaskError, UndriftError
from undrift.experiment.exams import exams_of, papers_of, sites_of
from undrift.experiment.losses import loss_settings, meaning_of
from undrift.experiment.measure import Measure, watched
from undrift.experiment.names import (
    find,
    make,
    parameters,
    prefixed,
    sections,
    told,
)
from undrift.experiment.sections import Choice, EngineSettings
from undrift.experiment.shared import dealt_once, resident
from undrift.experiment.spec import Experiment
from undrift.rules.steered import ALONE, Steered
from undrift.sources import Examples, augment
from undrift.tabular.schema import Columns
from undrift.trainer import Trainer

log = logging.getLogger("undrift")


@dataclass(frozen=True, eq=False)
class Dealt:
    """Examples, and which of them each client trains and is tested on."""

    examples: Examples
    parts: Parts
    test_parts: Parts | None  # of the training examples: a share of every client's own
    validation: Ids | None  # training examples of clients that are held out
    owner: Tensor | None  # [test examples] the client of each, -1 for nobody's
    names: Ids | None = None  # of each client, in the numbers of the data; None: they have none

    def site_names(self) -> tuple[str, ...]:
        """Name every client, by a number where it has no name."""
        known = self.examples.info.client_names
        numbers = range(len(self.parts)) if self.names is None else map(int, self.names)
        named = self.names is not None
        return tuple(known[i] if named and i < len(known) else str(i) for i in numbers)


@dataclass(frozen=True, eq=False)
class World:
    """An experiment that is ready to run."""

    experiment: Experiment
    dealt: Dealt
    trainer: Trainer
    measure: Measure


def build(experiment: Experiment, state_path: Path | None = None) -> World:
    """Build a trainer and its exams; what does not fit together is refused here."""
    try:
        return _build(experiment, state_path)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "alloc" not in str(error).lower():
            raise
        raise ConfigError(
            "this experiment does not fit into memory: lower the size of the model, of the data, "
            f"work.batch or work.steps ({str(error).splitlines()[0][:120]})"
        ) from error


def _build(experiment: Experiment, state_path: Path | None) -> World:
    dealt = deal(experiment)
    task = make_task(experiment, dealt.examples, trained_on(experiment, dealt))
    examples = resident_of(experiment, dealt.examples, task)
    x, y = examples.train_x, targets_of(experiment, examples.train_x, True, examples)
    federation = dealt_once(
        "federation", experiment, examples,
        lambda: unchanging(Federation.split(x, y, dealt.parts, arrival=experiment.arrival)),
    )  # fmt: skip
    trainer = trainer_of(experiment, task, federation, state_path)
    _tell_idle(trainer)
    return World(experiment, dealt, trainer, _measure(experiment, dealt, examples, trainer))


def resident_of(experiment: Experiment, examples: Examples, task: Task) -> Examples:
    """Give the examples as they lie where the experiment trains."""
    return resident(examples, _device(experiment), task.dtype)


def _device(experiment: Experiment) -> str:
    engine = experiment.engine
    return "cpu" if engine.use == "ray" else device_named(engine.device)  # actors have the others


def trainer_of(
    experiment: Experiment, task: Task, federation: Federation, state_path: Path | None = None
) -> Trainer:
    """Make the trainer of an experiment over a federation."""
    engine = experiment.engine
    settings: dict[str, Any] = {"chunk": engine.chunk, "workers": engine.workers}
    settings["precision"] = engine.precision
    settings |= {} if engine.ways is None else {"ways": engine.ways}
    if engine.use == "reference":
        settings = {}
    if engine.use == "ray":
        settings |= {"actors": engine.actors, "gpus": _gpus(engine), "address": engine.address}
    try:
        return Trainer(
            task,
            federation,
            watched(experiment.algorithm, experiment.evaluate),
            work=experiment.work,
            sampler=experiment.sampler,
            seed=experiment.seeds,
            engine=engine.use,
            device=_device(experiment),
            state=engine.state,  # type: ignore[arg-type]
            state_path=state_path if engine.state == "file" else None,
            private_key=engine.private_key,
            **settings,
        )
    except TaskError as error:
        assert isinstance(experiment.model, Choice)
        raise prefixed(error, f"model {experiment.model.use!r}") from error


def trained_on(experiment: Experiment, dealt: Dealt) -> Tensor | None:
    """Give the targets that clients train on, where class weights ask for them."""
    if experiment.task.class_weights != "balanced":
        return None
    return dealt.examples.train_y[torch.from_numpy(np.concatenate(dealt.parts))]


def _tell_idle(trainer: Trainer) -> None:
    """Tell of a policy that is given nothing to act on: the run is FedAdam's, and looks well."""
    policies = [p for p in trainer.algorithm.everything if isinstance(p, Steered) and p.policy]
    if any(p.pca == "clients" for p in policies) and trainer.roster.always_alone():
        log.warning("%s", ALONE.format(who="the policy"))


def _gpus(engine: EngineSettings) -> float | None:
    """Tell how many GPUs an actor gets; None leaves it to what the cluster has."""
    if engine.gpus is None and engine.device != "auto":
        return 0 if engine.device == "cpu" else 1
    return engine.gpus


def device_named(name: str) -> str:
    """Take "auto" for the GPU if there is one, for the CPU otherwise."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---------------------------------------------------------------------------------------- data
def load_data(
    data: Choice | str, home: Path | None = None, columns: Columns | None = None
) -> Examples:
    """Load the examples that an experiment names; the last ones are kept for the next run."""
    assert isinstance(data, Choice)
    paths = [v for n, v in data.settings if n in ("path", "test_path") and isinstance(v, str)]
    return _load(data, home, columns, tuple(map(_stamp, paths)))


def _stamp(path: str) -> tuple[int, int]:
    """Tell a file from what it was before: a cache must not hide an edit."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return (0, 0)
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=2)
def _load(
    data: Choice, home: Path | None, columns: Columns | None, stamps: tuple[tuple[int, int], ...]
) -> Examples:
    table = data.table()
    with own.scope(home):
        function = find(sections()["data"], table.pop("use"), "source", "data.use")
    if columns is not None:
        if "columns" not in parameters(function):
            raise ConfigError(f"[columns] says what a table's columns are; data {data.use!r} has "
                              "none: drop the section")  # fmt: skip
        table["columns"] = columns
    made = make(function, table, f"data {data.use!r}")
    if not isinstance(made, Examples):
        raise ConfigError(f"data.use: {data.use!r} gives {type(made).__name__}, not Examples")
    if not len(made.train_x):
        raise DataError(f"data {data.use!r} has no example to train on")
    names = made.info.class_names
    if names and len(names) < made.classes:
        raise DataError(f"data {data.use!r} names {len(names)} of its {made.classes} classes")
    return made


def examples_of(experiment: Experiment) -> Examples:
    """Load the examples of an experiment."""
    assert experiment.columns is None or isinstance(experiment.columns, Columns)
    return load_data(experiment.data, experiment.home, experiment.columns)


def deal(experiment: Experiment) -> Dealt:
    """Deal the examples to clients."""
    examples = examples_of(experiment)
    try:
        return Dealt(
            examples,
            *dealt_once("parts", experiment, examples, lambda: _deal(experiment, examples)),
        )
    except (ConfigError, DataError) as error:
        raise prefixed(error, "partition") from error


def _deal(
    experiment: Experiment, examples: Examples
) -> tuple[Parts, Parts | None, Ids | None, Tensor | None, Ids | None]:
    seed, keys = experiment.seeds.partition, _numbers(examples.train_clients)
    partition = experiment.partition
    if partition is None and keys is None:
        raise ConfigError(
            f"the data {examples.info.source!r} do not say who owns an example: add a [partition], "
            "e.g. use = 'dirichlet_client', clients = 100, alpha = 0.1"
        )
    partition = ByKey() if partition is None else partition
    parts: Parts = _split(partition, examples.train_y, seed, keys)
    names = partition.owners(keys, seed) if _natural(partition) and keys is not None else None
    chosen, validation = _hold_clients(experiment, parts)
    parts = [parts[i] for i in chosen]
    names = None if names is None else names[chosen]
    test_parts = None
    if experiment.hold.client_test:
        parts, test_parts = per_client_test(parts, experiment.hold.client_test, seed)
        if not any(len(part) for part in test_parts):
            raise DataError("hold.client_test: no client has two examples, so none can be tested")
    owner = None
    known = names is not None and examples.test_clients is not None
    if test_parts is None and (experiment.evaluate.clients or known):
        owner = _owners(experiment, examples, names, len(parts))
    return parts, test_parts, validation, owner, names


def _split(partition: Any, labels: Tensor, seed: int, keys: Any) -> Parts:
    """Ask the partition, which may be somebody else's."""
    try:
        parts = partition.split(labels.numpy(), seed, keys)
    except UndriftError:
        raise
    except Exception as error:
        raise ConfigError(f"{type(partition).__name__}.split fails: {told(error)}") from error
    if not isinstance(parts, list | tuple) or not all(hasattr(p, "__len__") for p in parts):
        raise ConfigError(
            f"{type(partition).__name__}.split gave {type(parts).__name__}: it must give a list "
            "with one array of example indices per client"
        )
    return [np.asarray(p) for p in parts]


def _natural(partition: Any) -> bool:
    return isinstance(partition, ByKey) and not partition.iid_control


def _numbers(values: Tensor | None) -> Any:
    return None if values is None else values.numpy()


def _hold_clients(experiment: Experiment, parts: Parts) -> tuple[list[int], Ids | None]:
    """Choose the clients that train, and the examples of those that do not."""
    share = experiment.hold.validation_clients
    if not share:
        return list(range(len(parts))), None
    singles = [np.array([i]) for i in range(len(parts))]
    kept, held = hold_out(singles, share, experiment.seeds.partition)
    examples = np.concatenate([parts[int(i[0])] for i in held])
    return [int(i[0]) for i in kept], examples


def _owners(experiment: Experiment, examples: Examples, names: Any, count: int) -> Tensor:
    """Tell whose each test example is: by its natural owner, or dealt as the training ones are."""
    owner = torch.full((len(examples.test_x),), -1)
    if names is not None and examples.test_clients is not None:
        for client, name in enumerate(names):
            owner[examples.test_clients == int(name)] = client
        return owner
    if names is not None or experiment.hold.validation_clients:
        raise ConfigError(
            "evaluate.clients needs test examples of every client: set hold.client_test = 0.2"
        )
    seed = experiment.seeds.partition
    try:
        parts = _like_training(experiment.partition, examples, seed)
    except (ConfigError, DataError) as error:
        raise DataError(
            f"evaluate.clients deals the test set like the training set, which fails ({error}); "
            "hold.client_test = 0.2 tests each client on its own examples instead"
        ) from error
    for client, rows in enumerate(parts):
        owner[torch.from_numpy(rows)] = client
    return owner


def _like_training(partition: Any, examples: Examples, seed: int) -> Parts:
    train, test = examples.train_y.numpy(), examples.test_y.numpy()
    if hasattr(partition, "split_like"):  # where the draw depends on the labels it is made for
        alike: Parts = partition.split_like(train, test, seed)
        return alike
    same: Parts = partition.split(test, seed, None)
    return same


# ---------------------------------------------------------------------------------------- task
def make_task(experiment: Experiment, examples: Examples, targets: Tensor | None = None) -> Task:
    """Make the task: the model, its first weights a function of the seed, and its loss.

    Balanced class weights are those of `targets`, the ones that clients train on.
    """
    settings = experiment.task
    options = {
        **loss_settings(experiment, examples, targets),
        "feature": settings.feature,
        "dtype": getattr(torch, settings.dtype),
    }
    augmentation = _augmentation(experiment, examples)
    if augmentation is not None:
        options["augment"] = augmentation
    function, name, given = model_choice(experiment, examples)
    seed = experiment.seeds.model
    try:
        if name in models.MODELS:
            return Task(models.build(name, seed, **given), **options)
        return Task.build(_own_model(function, given, name), seed, **options)
    except UndriftError as error:
        raise prefixed(error, f"model {name!r}") from error


def model_choice(
    experiment: Experiment, examples: Examples
) -> tuple[Callable[..., Any], str, dict[str, Any]]:
    """Find the function that makes the model, its name, and all of its settings."""
    choice = experiment.model
    assert isinstance(choice, Choice)
    with own.scope(experiment.home):
        function = find(models.MODELS, choice.use, "model", "model.use")
    given = {n: v for n, v in choice.table().items() if n != "use"}
    name = next((n for n, f in models.MODELS.items() if f is function), choice.use)
    return function, name, {**_from_data(function, examples), **given}


def _own_model(
    function: Callable[..., Any], settings: Mapping[str, Any], name: str
) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        module: nn.Module = make(function, settings, f"model {name!r}")
        return module

    return made


def _from_data(function: Callable[..., Any], examples: Examples) -> dict[str, Any]:
    """Fill in what the data decide: inputs, blocks, classes, channels, pixels, vectors of words."""
    shape = list(examples.train_x.shape[1:])
    known: dict[str, Any] = {"inputs": math.prod(shape), "classes": examples.classes or 1}
    if len(shape) == 3:
        known |= {"channels": shape[0], "pixels": shape[1]}
    if examples.embedding is not None:
        words, width = examples.embedding.shape
        known |= {"embedding": examples.embedding, "vocabulary": words, "width": width}
    if examples.info.preparation is not None:
        known["blocks"] = _blocks(examples.info.preparation)
    return {n: v for n, v in known.items() if n in parameters(function)}


def _blocks(preparation: Any) -> list[int]:
    """Count the inputs of each column; only a category's belong together as one-hot."""
    columns = zip(preparation.schema.features, preparation.blocks, strict=True)
    each = [[size] if kind.kind == "category" else [1] * size for (_, kind), size in columns]
    return [size for sizes in each for size in sizes if size]


def _augmentation(experiment: Experiment, examples: Examples) -> Any:
    task = experiment.task
    if not (task.flip or task.crop):
        return None
    if examples.train_x.dim() != 4:
        raise ConfigError(
            f"task.flip and task.crop need pictures; inputs are {list(examples.train_x.shape[1:])}"
        )
    return partial(augment, flip=task.flip, crop=task.crop, pad=task.pad)


def targets_of(experiment: Experiment, x: Tensor, training: bool, examples: Examples) -> Tensor:
    """Give the targets of training or of testing: labels, or the inputs themselves."""
    if experiment.task.target == "input":
        return x.flatten(1)
    return examples.train_y if training else examples.test_y


# --------------------------------------------------------------------------------------- exams
def _measure(experiment: Experiment, dealt: Dealt, examples: Examples, trainer: Trainer) -> Measure:
    evaluate, task = experiment.evaluate, trainer.task
    if evaluate.per_class and (not examples.classes or experiment.task.target == "input"):
        raise ConfigError("evaluate.per_class needs classes; these targets are numbers")
    train_y = targets_of(experiment, examples.train_x, True, examples)
    test_y = targets_of(experiment, examples.test_x, False, examples)
    papers = papers_of(evaluate, dealt, examples, (train_y, test_y))
    meaning = meaning_of(experiment, examples, task)
    exams = exams_of(task, papers, evaluate, meaning, trainer.engine.device)
    return Measure(trainer, evaluate, exams, meaning, sites_of(dealt, papers))
