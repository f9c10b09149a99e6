"""One experiment: a frozen object that is a TOML file, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from undrift import own
from undrift.core.algorithm import Algorithm
from undrift.core.random import Seeds, host_fold
from undrift.data import Arrival, Everyone, Explicit, Work
from undrift.data.checks import check_whole
from undrift.data.partitions import PARTITIONS
from undrift.errors import ConfigError, unknown_name
from undrift.experiment.family import setting_table
from undrift.experiment.folder import RunFolder
from undrift.experiment.names import (
    SAMPLERS,
    decode_algorithm,
    encode,
    encode_algorithm,
    encode_fields,
    find,
    make,
)
from undrift.experiment.sections import (
    Choice,
    EngineSettings,
    Evaluation,
    Holding,
    TaskSettings,
    choice,
    section_table,
)
from undrift.experiment.shipped import find_experiment
from undrift.experiment.sweep import algorithm_label, expand
from undrift.experiment.tables import Table, override, parse_table, read_table, write_table
from undrift.tabular.schema import Columns

_NAME = re.compile(r"\w[\w .,=+@()\[\]-]{0,99}")


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run.

    `data` and `model` are names (or `Choice`s with settings); own ones are named as
    'package.module:function'.  Without a partition, clients are those that the data come with.

    >>> from undrift.rules import fedavg
    >>> made = Experiment("digits", "mlp", fedavg(lr=0.1), rounds=3)
    >>> Experiment.from_toml(made.to_toml()) == made
    True
    """

    data: Choice | str
    model: Choice | str
    algorithm: Algorithm
    partition: Any = None
    sampler: Any = field(default_factory=Everyone)
    work: Work = field(default_factory=Work)
    rounds: int = 100
    seed: int | Seeds = 0
    name: str = "experiment"
    label: str = "run"
    task: TaskSettings = field(default_factory=TaskSettings)
    evaluate: Evaluation = field(default_factory=Evaluation)
    hold: Holding = field(default_factory=Holding)
    arrival: Arrival | None = None
    engine: EngineSettings = field(default_factory=EngineSettings)
    columns: Columns | Mapping[str, Any] | None = None  # of a table: what each column is
    home: Path | None = field(default=None, compare=False, repr=False)  # where own parts lie

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", choice(self.data, "data"))
        object.__setattr__(self, "model", choice(self.model, "model"))
        object.__setattr__(self, "columns", _columns(self.columns, self.data))
        _check_kinds(self)
        check_whole("rounds", self.rounds)
        for part in self.seed if isinstance(self.seed, Seeds) else (self.seed,):
            check_whole("seed", part, low=0)
            if part >= 2**63:
                raise ConfigError(f"seed = {part} needs more than 63 bits")
        check_name("name", self.name)
        check_name("label", self.label)

    @property
    def seeds(self) -> Seeds:
        """Give the three seeds: of the partition, the first model and the run."""
        return self.seed if isinstance(self.seed, Seeds) else Seeds.of(self.seed)

    @property
    def seed_number(self) -> int:
        """Give one number that tells this run from its repetitions."""
        if not isinstance(self.seed, Seeds):
            return self.seed
        partition, model, run = self.seed
        same = partition == model == run
        return run if same else host_fold(partition, "seeds", model, run) & (2**53 - 1)

    @property
    def folder(self) -> str:
        """Name the run's folder below the experiment's: LABEL/seed-N."""
        parts = self.seed if isinstance(self.seed, Seeds) else (self.seed,)
        return f"{self.label.replace(' ', '_')}/seed-{'-'.join(map(str, parts))}"

    # -- files -------------------------------------------------------------------------------
    @classmethod
    def from_table(
        cls, table: Mapping[str, Any], *, trust: bool = False, home: Path | None = None
    ) -> Experiment:
        """Make an experiment from plain tables, without sweeps.

        Own parts, named as 'package.module:function', are imported from the folder `home` or the
        current one, which runs their code: only with `trust`.
        """
        return experiment_from(table, trust, home)

    @classmethod
    def from_toml(
        cls,
        text: str,
        place: str = "experiment",
        *,
        trust: bool = False,
        home: Path | None = None,
    ) -> Experiment:
        """Make an experiment from TOML text, without sweeps, as `from_table` does."""
        return cls.from_table(parse_table(text, place), trust=trust, home=home)

    def to_table(self) -> Table:
        """Give everything as plain tables, the algorithm as a sentence of its parts."""
        return table_of(self)

    def to_toml(self) -> str:
        """Write the file that makes this experiment again."""
        return write_table(self.to_table())


def load(
    path: str | Path | Mapping[str, Any] | Source,
    changes: Sequence[str] = (),
    *,
    trust: bool | None = None,
    **fixed: Any,
) -> list[Experiment]:
    """Read a file, or the shipped experiment of that name, and write out its sweeps.

    Own parts that it names are imported, which runs their code.  A file is taken for the caller's
    own unless `trust` says otherwise; a run's folder and plain tables need `trust=True`.

    >>> [e.label for e in load("digits", ["rounds=3", "algorithm.use=fedavg,scaffold"])]
    ['fedavg', 'scaffold']
    """
    source = read_source(path)
    source = source._replace(table={**source.table, **fixed})
    tables = variants_of(source, changes, source.trusted if trust is None else trust)
    made = [experiment_from(table, True, source.home) for table in tables]
    check_apart(made)
    return made


class Source(NamedTuple):
    """An experiment as it is written: sweeps and names of own parts are still what they are."""

    table: Table
    home: Path | None  # the folder of its file
    trusted: bool  # a file that the caller named is the caller's own; a run's folder may not be

    def changed(self, changes: Sequence[str]) -> Table:
        """Give the table with some values set; paths among them start from the current folder."""
        return _paths(override(self.table, _checked(changes)), Path())

    def strangers(self, changes: Sequence[str] = ()) -> list[str]:
        """List the own parts that it names itself; those of `changes` are the caller's word."""
        said = [
            name for one in _checked(changes) for name in own.foreign_names(override({}, [one]))
        ]
        return [n for n in own.foreign_names(self.changed(changes)) if n not in said]


def _checked(changes: Any) -> Sequence[str]:
    if isinstance(changes, str) or not all(isinstance(c, str) for c in changes):
        raise ConfigError(f"changes are a list of texts such as 'rounds=10', got {changes!r}")
    checked: Sequence[str] = changes
    return checked


def read_source(path: str | Path | Mapping[str, Any] | Source) -> Source:
    """Read a file, a shipped experiment or a setting of a paper's table."""
    if isinstance(path, Source):
        return path
    if isinstance(path, Mapping):
        return Source({"name": "experiment", **path}, None, trusted=False)
    setting = setting_table(path) if isinstance(path, str) else None
    if setting is not None:
        return Source({"name": str(path), **setting}, None, trusted=True)
    found = find_experiment(path)
    table = {"name": found.stem, **_paths(read_table(found), found.parent)}
    if Path(path).is_dir():
        return Source(table, RunFolder(path).home(), trusted=False)
    return Source(table, found.parent.absolute(), trusted=True)


def variants_of(source: Source, changes: Sequence[str] = (), trust: bool = False) -> list[Table]:
    """Write out the sweeps of a source, as tables; what it may not import is refused."""
    strangers = source.strangers(changes)
    if strangers and not trust:
        raise ConfigError(own.not_trusted(strangers))
    with own.scope(source.home):
        found = expand(source.changed(changes))
    return [{**variant.table, "label": variant.label} for variant in found]


def _paths(table: Table, base: Path) -> Table:
    """Make paths to data absolute: those in a file start from it, others from here."""
    data = table.get("data")
    if not isinstance(data, dict):
        return table

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(v) for v in value]
        plain = isinstance(value, str) and "\0" not in value and value
        return str((base / value).absolute()) if plain else value

    named = {n: whole(v) for n, v in data.items() if n in ("path", "test_path")}
    return {**table, "data": {**data, **named}}


def check_apart(made: Sequence[Experiment]) -> None:
    """Refuse two runs that would share a folder."""
    seen: set[str] = set()
    for one in made:
        if one.folder in seen:
            raise ConfigError(
                f"{one.label!r} with seed {one.seed_number} is there twice: name every value of "
                "a list once"
            )
        seen.add(one.folder)


def check_name(place: str, name: Any) -> None:
    """Refuse a name that could leave its folder or that nobody could type."""
    if not isinstance(name, str):
        raise ConfigError(f"{place} = {name!r} must be a text: put it in quotes")
    if not _NAME.fullmatch(name) or name.endswith((".", " ")):
        raise ConfigError(
            f"{place} = {name!r} cannot name a folder: use up to 100 letters, digits and "
            "spaces . , = + @ ( ) [ ] - _, a letter or digit first"
        )


def _columns(given: Any, data: Choice | str) -> Columns | None:
    """Check `[columns]` against the target that `[data]` names."""
    if given is None:
        return None
    assert isinstance(data, Choice)
    settings = dict(data.settings)
    return Columns.of(given, settings.get("target"), settings.get("missing"))


def _check_kinds(experiment: Experiment) -> None:
    kinds: dict[str, tuple[type, ...]] = {
        "algorithm": (Algorithm,),
        "work": (Work,),
        "task": (TaskSettings,),
        "evaluate": (Evaluation,),
        "hold": (Holding,),
        "engine": (EngineSettings,),
        "arrival": (Arrival, type(None)),
    }
    for name, kind in kinds.items():
        value = getattr(experiment, name)
        if not isinstance(value, kind):
            raise ConfigError(f"Experiment.{name}: {value!r} is no {kind[0].__name__}")
    for name, method in (("partition", "split"), ("sampler", "sample")):
        value = getattr(experiment, name)
        absent = value is None and name == "partition"
        if not absent and (isinstance(value, type | str) or not hasattr(value, method)):
            raise ConfigError(
                f"Experiment.{name} must be an object with a method `{method}`, got {value!r}"
            )
    sampler = experiment.sampler
    if isinstance(sampler, Explicit) and len(sampler.rounds) < experiment.rounds:
        raise ConfigError(
            f"sampler.rounds lists {len(sampler.rounds)} cohorts for {experiment.rounds} rounds: "
            "give one list per round"
        )


# ----------------------------------------------------------------------------- table -> object
SECTIONS = (
    *("name", "label", "rounds", "seed", "data", "columns", "partition", "arrival", "hold"),
    *("model", "task", "algorithm", "work", "sampler", "evaluate", "engine"),
)


def experiment_from(
    table: Mapping[str, Any], trust: bool = False, home: Path | None = None
) -> Experiment:
    """Make an experiment from plain tables, without sweeps."""
    found = own.foreign_names(table)
    if found and not trust:
        raise ConfigError(own.not_trusted(found))
    with own.scope(home, trust):
        return _experiment_from(table, home)


def _experiment_from(table: Mapping[str, Any], home: Path | None) -> Experiment:
    for name in table:
        if name not in SECTIONS:
            raise unknown_name("section", name, list(SECTIONS), "experiment")
    for name in ("data", "model", "algorithm"):
        if name not in table:
            raise ConfigError(f"the experiment has no [{name}]: every one needs data, a model and "
                              "an algorithm")  # fmt: skip
    algorithm = _named_table(table, "algorithm")
    label = table.get("label", algorithm_label(algorithm))
    bare = {k: v for k, v in algorithm.items() if k != "label"}
    plain = {k: table[k] for k in ("name", "rounds", "data", "model", "columns") if k in table}
    return Experiment(
        **plain,
        label=label,
        seed=_seed(table.get("seed", 0)),
        algorithm=decode_algorithm(bare),
        partition=_by_name(table, "partition", PARTITIONS),
        sampler=_by_name(table, "sampler", SAMPLERS) or Everyone(),
        work=make(Work, _ranges(_table(table, "work")), "work"),
        arrival=make(Arrival, _table(table, "arrival"), "arrival") if "arrival" in table else None,
        task=make(TaskSettings, _table(table, "task"), "task"),
        evaluate=make(Evaluation, _table(table, "evaluate"), "evaluate"),
        hold=make(Holding, _table(table, "hold"), "hold"),
        engine=make(EngineSettings, _table(table, "engine"), "engine"),
        home=home,
    )


def _table(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = table.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a table of settings, got {value!r}")
    return dict(value)


def _named_table(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A bare text stands for the table that only names something."""
    value = table.get(name, {})
    return {"use": value} if isinstance(value, str) else _table(table, name)


def _by_name(table: Mapping[str, Any], section: str, names: Mapping[str, Any]) -> Any:
    given = _named_table(table, section)
    if not given:
        return None
    if "use" not in given:
        raise ConfigError(f"[{section}] needs `use`, one of: {', '.join(names)}")
    kind = find(names, given.pop("use"), section, f"{section}.use")
    settings = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
    return make(kind, settings, section)


def _seed(value: Any) -> int | Seeds:
    if not isinstance(value, Mapping):
        return value
    if set(value) != set(Seeds._fields):
        raise ConfigError(
            f"seed = {dict(value)!r}: give one whole number, or all of partition, model and run"
        )
    return Seeds(**value)


def _ranges(table: Mapping[str, Any]) -> dict[str, Any]:
    """`{low = 1, high = 5}` is a number drawn per client and round."""
    made = dict(table)
    for name in ("epochs", "steps"):
        value = made.get(name)
        if isinstance(value, Mapping):
            if set(value) != {"low", "high"}:
                raise ConfigError(f"work.{name} = {dict(value)!r}: a range has `low` and `high`")
            made[name] = (value["low"], value["high"])
    if made.get("batch") == "all":
        made["batch"] = None
    return made


# ----------------------------------------------------------------------------- object -> table
def table_of(made: Experiment) -> Table:
    """Write an experiment as plain tables."""
    partition = None if made.partition is None else encode(made.partition, "partition")
    arrival = None if made.arrival is None else encode_fields(made.arrival, "arrival")
    seed = made.seed._asdict() if isinstance(made.seed, Seeds) else made.seed
    assert isinstance(made.data, Choice) and isinstance(made.model, Choice)
    assert made.columns is None or isinstance(made.columns, Columns)
    return {
        "name": made.name,
        "label": made.label,
        "rounds": made.rounds,
        "seed": seed,
        "data": made.data.table(),
        **({} if made.columns is None else {"columns": made.columns.table()}),
        **({} if partition is None else {"partition": partition}),
        **({} if arrival is None else {"arrival": arrival}),
        "hold": section_table(made.hold),
        "model": made.model.table(),
        "task": section_table(made.task),
        "algorithm": encode_algorithm(made.algorithm),
        "work": _work_table(made.work),
        "sampler": encode(made.sampler, "sampler"),
        "evaluate": section_table(made.evaluate),
        "engine": section_table(made.engine),
    }


def _work_table(work: Work) -> Table:
    made = encode_fields(work, "work")
    for name in ("epochs", "steps"):
        if isinstance(made[name], list):
            made[name] = dict(zip(("low", "high"), made[name], strict=True))
    made["batch"] = "all" if made["batch"] is None else made["batch"]
    return {n: v for n, v in made.items() if v is not None}
