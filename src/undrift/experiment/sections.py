"""The sections of an experiment that are no records yet: choices by name, task, evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from undrift.core.losses import LOSSES
from undrift.core.precision import PRECISIONS
from undrift.core.seam import WAYS
from undrift.data.checks import check_whole
from undrift.errors import ConfigError, unknown_name
from undrift.metrics import METRICS, metric_named

Plain = Any  # what a TOML value may be; lists are tuples here


@dataclass(frozen=True, init=False, repr=False)
class Choice:
    """Something by its name, with settings.

    >>> Choice("mlp", hidden=[32])
    Choice('mlp', hidden=(32,))
    """

    use: str
    settings: tuple[tuple[str, Plain], ...]

    def __init__(self, use: str, /, **settings: Plain) -> None:
        if not isinstance(use, str):
            raise ConfigError(f"a choice needs a name, got {use!r}")
        object.__setattr__(self, "use", use)
        object.__setattr__(self, "settings", tuple((n, _frozen(v)) for n, v in settings.items()))

    def __getitem__(self, name: str) -> Plain:
        return dict(self.settings)[name]

    def table(self) -> dict[str, Plain]:
        """Give name and settings as a table."""
        return {"use": self.use, **{n: _thawed(v) for n, v in self.settings}}

    def __repr__(self) -> str:
        given = "".join(f", {n}={v!r}" for n, v in self.settings)
        return f"Choice({self.use!r}{given})"


def choice(value: Any, place: str) -> Choice:
    """Accept a name, a table with `use`, or a choice."""
    if isinstance(value, Choice):
        return value
    if isinstance(value, str):
        return Choice(value)
    if isinstance(value, Mapping):
        settings = {str(k): v for k, v in value.items() if k != "use"}
        if "use" not in value:
            raise ConfigError(f"[{place}] needs `use`, the name of the {place}")
        return Choice(value["use"], **settings)
    raise ConfigError(
        f"{place} must be a name or a table, got {value!r}; own objects go to a Trainer, or are "
        "named as 'package.module:function'"
    )


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, Mapping):
        return Choice("", **{str(k): v for k, v in value.items()})
    return value


def _thawed(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_thawed(v) for v in value]
    return {k: v for k, v in value.table().items() if k != "use"} if _is_choice(value) else value


def _is_choice(value: Any) -> bool:
    return isinstance(value, Choice)


LOSS_NAMES = ("auto", *LOSSES)
MODELS_TO_JUDGE = ("cloud", "avg", "all")


@dataclass(frozen=True)
class TaskSettings:
    """What is learned: `loss` is "auto" (by the kind of targets), a name or `module:function`."""

    loss: str = "auto"
    target: str = "label"  # "input": reconstruct the input
    dtype: str = "float32"
    feature: str | None = None
    flip: float = 0.0  # augmentation of pictures: chance to mirror,
    crop: float = 0.0  # chance to shift,
    pad: int = 4  # by at most this many pixels
    class_weights: str | tuple[float, ...] | None = None  # "balanced", or one of each class
    gamma: float | None = None  # of the focal loss; None: 2
    quantile: float | None = None  # of the pinball loss; None: 0.5

    def __post_init__(self) -> None:
        if ":" not in str(self.loss) and self.loss not in LOSS_NAMES:
            raise unknown_name("loss", self.loss, list(LOSS_NAMES), "task.loss")
        _one_of("task.target", self.target, ("label", "input"))
        _one_of("task.dtype", self.dtype, ("float32", "float64"))
        if self.feature is not None and not isinstance(self.feature, str):
            raise ConfigError(f"task.feature must be the name of a layer, got {self.feature!r}")
        _share("task.flip", self.flip)
        _share("task.crop", self.crop)
        check_whole("task.pad", self.pad, low=0)
        self._check_loss_settings()

    def _check_loss_settings(self) -> None:
        """Refuse settings of a loss that is not chosen, and values that none can take."""
        belongs: dict[str, tuple[str, ...]] = {"gamma": ("focal",), "quantile": ("pinball",)}
        belongs["class_weights"] = ("auto", "cross_entropy", "focal")
        for name, losses in belongs.items():
            if getattr(self, name) is not None and self.loss not in losses:
                raise ConfigError(
                    f"task.{name} belongs to task.loss = {' or '.join(map(repr, losses))}, not to "
                    f"{self.loss!r}"
                )
        if self.gamma is not None:
            _number("task.gamma", self.gamma)
            if self.gamma < 0:
                raise ConfigError(f"task.gamma = {self.gamma!r} must not be below 0")
        if self.quantile is not None:
            _number("task.quantile", self.quantile)
            if not 0 < self.quantile < 1:
                raise ConfigError(f"task.quantile = {self.quantile!r} must lie between 0 and 1")
        if self.class_weights is not None:
            object.__setattr__(self, "class_weights", _class_weights(self.class_weights))


@dataclass(frozen=True)
class Evaluation:
    """What is measured, and how often.

    `models` chooses what is judged: the server's model ("cloud"), the mean of this round's client
    models ("avg"), the mean of every client's last model ("all").  The first is the one that
    `test_...` means.  `drift` measures how far the cohort's models spread.
    """

    every: int = 1
    models: tuple[str, ...] = ("cloud",)
    metrics: tuple[str, ...] = ()  # beyond loss and accuracy: undrift.metrics.METRICS
    per_class: bool = False
    clients: bool = False
    drift: bool = False
    batch: int = 1024
    target: float | None = None
    baselines: bool | str | None = None  # beside a comparison; None is "auto"

    def __post_init__(self) -> None:
        check_whole("evaluate.every", self.every)
        check_whole("evaluate.batch", self.batch)
        named = (self.models,) if isinstance(self.models, str) else tuple(self.models)
        object.__setattr__(self, "models", named)
        for name in named:
            _one_of("evaluate.models", name, MODELS_TO_JUDGE)
        if not named or len(set(named)) < len(named):
            raise ConfigError(f"evaluate.models = {list(named)}: name each model once")
        object.__setattr__(self, "metrics", _metric_names(self.metrics))
        for name in ("per_class", "clients", "drift"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"evaluate.{name} is true or false, got {getattr(self, name)!r}")
        if self.target is not None:
            _number("evaluate.target", self.target)
        if self.baselines == "auto":
            object.__setattr__(self, "baselines", None)
        if self.baselines is not None and not isinstance(self.baselines, bool):
            raise ConfigError(
                f"evaluate.baselines is 'auto', true or false, got {self.baselines!r}"
            )


@dataclass(frozen=True)
class EngineSettings:
    """Where and how it is computed; `device = "auto"` takes a GPU if there is one.

    `precision`, on a GPU, is that of the operands: tf32, float32 (strict), bf16 or fp16.
    `ways` names how layers multiply, all of them or by name: see `undrift.core.seam.WAYS`.
    `private_key` is the path of the key that secret noise is drawn from; it makes a simulation with
    noise reproducible.  Without it a run draws a key, and deletes it when it is complete.
    `actors`, `gpus` (of each) and `address` (of a cluster that is up) belong to Ray.
    """

    use: str = "vectorised"
    device: str = "auto"
    state: str = "device"
    chunk: int | None = None
    workers: int | None = None
    precision: str | None = None
    ways: str | dict[str, str] | None = None
    actors: int | None = None
    gpus: float | None = None
    address: str | None = None
    private_key: str | None = None

    def __post_init__(self) -> None:
        _one_of("engine.use", self.use, ("vectorised", "reference", "ray"))
        _one_of("engine.state", self.state, ("device", "host", "file"))
        if not isinstance(self.device, str):
            raise ConfigError(f"engine.device must be a name such as 'cuda', got {self.device!r}")
        for name in ("chunk", "workers", "actors"):
            if getattr(self, name) is not None:
                check_whole(f"engine.{name}", getattr(self, name))
        self._check_ray()
        if self.private_key is not None and not isinstance(self.private_key, str):
            raise ConfigError(f"engine.private_key must be a path, got {self.private_key!r}")
        if self.precision is not None:
            _one_of("engine.precision", self.precision, tuple(PRECISIONS))
        self._check_ways()
        if self.use == "reference" and (self.chunk or self.workers or self.precision):
            raise ConfigError(
                "engine.chunk, engine.workers and engine.precision belong to "
                "engine.use = 'vectorised'"
            )

    def _check_ways(self) -> None:
        for way in self.ways.values() if isinstance(self.ways, dict) else (self.ways,):
            if way is not None:
                _one_of("engine.ways", way, WAYS)
        if self.use != "vectorised" and self.ways is not None:
            raise ConfigError("engine.ways belongs to engine.use = 'vectorised'")

    def _check_ray(self) -> None:
        given = [n for n in ("actors", "gpus", "address") if getattr(self, n) is not None]
        if self.use != "ray" and given:
            raise ConfigError(f"engine.{given[0]} belongs to engine.use = 'ray'")
        if self.gpus is not None:
            _number("engine.gpus", self.gpus)
            if self.gpus < 0:
                raise ConfigError(f"engine.gpus = {self.gpus!r} must not be below 0")
        if self.address is not None and not isinstance(self.address, str):
            raise ConfigError(f"engine.address must be a text, got {self.address!r}")


@dataclass(frozen=True)
class Holding:
    """What is kept from training: whole clients, or a share of every client's own examples."""

    validation_clients: float = 0.0
    client_test: float = 0.0

    def __post_init__(self) -> None:
        for name in ("validation_clients", "client_test"):
            value = getattr(self, name)
            _number(f"hold.{name}", value)
            if not 0 <= value < 1:
                raise ConfigError(f"hold.{name} = {value!r} must lie in [0, 1)")


def section_table(section: Any) -> dict[str, Plain]:
    """Write a section as a table."""
    values = {f.name: getattr(section, f.name) for f in fields(section)}
    told = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
    return {n: v for n, v in told.items() if v is not None and v != []}


def _class_weights(value: Any) -> str | tuple[float, ...]:
    """Take "balanced", or a list of numbers that are not below 0."""
    if value == "balanced":
        return "balanced"
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ConfigError(
            f"task.class_weights = {value!r}: write 'balanced', or a list with a number for each "
            "class"
        )
    for weight in value:
        _number("task.class_weights", weight)
    if not value or min(value) < 0 or not any(value):
        raise ConfigError(
            f"task.class_weights = {list(value)}: weights are 0 or more, at least one above 0"
        )
    return tuple(float(weight) for weight in value)


def _metric_names(value: Any) -> tuple[str, ...]:
    """Take names of metrics; which of them the targets have is known with the data."""
    named = (value,) if isinstance(value, str) else value
    if not isinstance(named, list | tuple):
        raise ConfigError(f"evaluate.metrics must be a list of names, got {value!r}")
    found = [metric_named(name) if isinstance(name, str) else None for name in named]
    for name, metric in zip(named, found, strict=True):
        if metric is None:
            raise unknown_name("metric", name, list(METRICS), "evaluate.metrics")
    made = tuple(metric.name for metric in found if metric is not None)
    if len(set(made)) < len(made):
        raise ConfigError(f"evaluate.metrics = {list(named)}: name each metric once")
    return made


def _one_of(place: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise unknown_name("choice", value, list(known), place)


def _number(place: str, value: Any) -> None:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not math.isfinite(value):
        raise ConfigError(f"{place} must be a number, got {value!r}")


def _share(place: str, value: Any) -> None:
    _number(place, value)
    if not 0 <= value <= 1:
        raise ConfigError(f"{place} = {value!r} must lie in [0, 1]")
