"""The file of `undrift train-agent`: an experiment, and an [agent] that learns to steer it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from undrift.core.algorithm import Algorithm
from undrift.data.checks import check_whole
from undrift.errors import ConfigError, unknown_name
from undrift.experiment.names import make
from undrift.experiment.spec import Experiment, Source, load
from undrift.experiment.tables import override, read_table
from undrift.rules import Mean, Prox, Scaffold, Steered, Steering
from undrift.rules.choice import choice
from undrift.rules.local import local_of
from undrift.rules.policy import shipped_policies
from undrift.rules.steered import ROUNDS_TO_FIT

PLACEHOLDER = {"use": "fedavg"}  # of the algorithm, while an experiment is read


@dataclass(frozen=True)
class AgentSettings:
    """How an agent is trained; the defaults are FedRL's, and of PPO those of stable-baselines3.

    An episode ends where `metric` ("accuracy", or "loss") reaches `target`, after `patience`
    rounds without progress, or after `rounds`; with `ends` false only there, so that an agent
    learns what comes behind the target.  Each of `rollouts` trains `episodes` side by side.
    """

    target: float = 0.99
    metric: str = "accuracy"
    rounds: int = 50
    ends: bool = True
    patience: int = 20
    progress: float = 0.001  # of accuracy, or as a share of the loss
    base: float = 64.0  # of the reward
    judged: int | None = None  # held-out examples that it is judged on; None: all there are
    episodes: int = 16
    rollouts: int = 30
    knobs: tuple[str, ...] = ("alpha1", "alpha2")
    reach: tuple[float, ...] | float | None = None
    sees: tuple[str, ...] = ("pca",)
    scale: str = "run"
    action: str = "change"
    seed: int = 0
    lr: float = 3e-4
    discount: float = 0.9
    gae: float = 0.95
    clip: float = 0.2
    epochs: int = 10
    batch: int = 64
    entropy: float = 0.0
    spread: float = 1.0  # of the first actions: their standard deviation
    evaluation: int = 3  # episodes, on seeds that no training has seen

    def __post_init__(self) -> None:
        for name in ("rounds", "patience", "episodes", "rollouts", "epochs", "batch", "evaluation"):
            check_whole(f"agent.{name}", getattr(self, name))
        check_whole("agent.seed", self.seed, low=0)
        if self.batch < 2 or self.rounds * self.episodes < 2:
            raise ConfigError(
                f"agent.batch = {self.batch}, of rounds x episodes = {self.rounds} x "
                f"{self.episodes}: PPO compares actions, give both at least 2"
            )
        if self.judged is not None:
            check_whole("agent.judged", self.judged)
        if not isinstance(self.ends, bool):
            raise ConfigError(f"agent.ends = {self.ends!r} must be true or false")
        if self.metric not in ("accuracy", "loss"):
            raise unknown_name("metric", self.metric, ["accuracy", "loss"], "agent.metric")
        _check_target(self.target, self.metric)
        _check_base(self.base)
        ranges = {
            "progress": (0, 1), "lr": (0, 1), "discount": (0, 1), "gae": (0, 1), "clip": (0, 1),
            "entropy": (0, 1), "spread": (0.01, 10),
        }  # fmt: skip
        for name, (low, high) in ranges.items():
            check_number(f"agent.{name}", getattr(self, name), low, high)
        self.steering()  # refuses unknown knobs

    def steering(self) -> Steering:
        """Give what the agent sees and turns."""
        return Steering(self.knobs, self.reach, self.sees, self.scale, self.action)

    def table(self) -> dict[str, Any]:
        """Give the settings as a plain table."""
        found = {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(self).items()}
        return {n: v for n, v in found.items() if v is not None}


def check_number(place: str, value: Any, low: float, high: float) -> None:
    """Refuse what is no number between two others."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not low <= value <= high:
        raise ConfigError(f"{place} = {value!r} must be a number from {low:g} to {high:g}")


def _check_target(target: Any, metric: str) -> None:
    most = 1.0 if metric == "accuracy" else 1e9
    check_number("agent.target", target, 0.0, most)
    if not target:
        raise ConfigError(f"agent.target = {target!r}: the {metric} to reach is above 0")


def _check_base(base: Any) -> None:
    check_number("agent.base", base, 1.0, 1e9)
    if base == 1:
        raise ConfigError(f"agent.base = {base!r}: every reward would be 0; give one above 1")


def steered(
    steering: Steering,
    lr: float | None = None,
    *,
    client: str = "sgd",
    mu: float = 0.01,
    server_lr: float = 0.01,
    alpha1: float = 0.9,
    alpha2: float = 0.99,
    tau: float = 1e-3,
    pca: str = "clients",
) -> Algorithm:
    """Build `fedrl` without a policy: it waits, after every round, for somebody to act."""
    clients: dict[str, Any] = {"sgd": (), "prox": (Prox(mu),), "scaf": (Scaffold(),)}
    own = choice("client", client, clients, "algorithm.client")
    rule = Steered(None, server_lr, alpha1, alpha2, tau, pca, steering)
    return Algorithm((*own, rule), local_of(lr, None), Mean(by_size=False))


def shipped_agents() -> dict[str, Path]:
    """List the files that trained the policies in the package."""
    known = {name: path.with_suffix(".toml") for name, path in shipped_policies().items()}
    folder = Path(__file__).parent.parent / "policies"
    return {p.stem: p for p in sorted({*known.values(), *folder.glob("*.toml")}) if p.is_file()}


def load_agent(
    source: str | Path | Mapping[str, Any], changes: Sequence[str] = ()
) -> tuple[Experiment, AgentSettings]:
    """Read a file, or a shipped one by its name: the federation to steer, and the agent."""
    table, stem, home = _read(source)
    table = override(table, changes)
    told = table.pop("agent", None)
    if not isinstance(told, dict):
        raise ConfigError(
            "this experiment has no [agent]: say at least its target, e.g. [agent] target = 0.9"
        )
    if "rounds" in table:
        raise ConfigError(
            f"rounds = {table['rounds']!r}: an agent's episodes have agent.rounds; leave rounds out"
        )
    given = {n: tuple(v) if isinstance(v, list) else v for n, v in told.items()}
    for name in given:
        if name not in (known := [f.name for f in fields(AgentSettings)]):
            raise unknown_name("setting", name, known, "agent")
    settings = make(AgentSettings, given, "agent")
    own = dict(table.pop("algorithm", {}))
    if own.pop("use", "fedrl") != "fedrl":
        raise ConfigError("algorithm.use: an agent steers 'fedrl'; leave it out")
    fixed = {"rounds": settings.rounds, "algorithm": PLACEHOLDER, "label": "agent"}
    found = load(Source({"name": stem, **table, **fixed}, home, trusted=True))  # the caller's own
    if len(found) != 1:
        raise ConfigError("an agent is trained on one experiment: give no lists of values")
    # what it sees and turns is said in [agent]: `steering` is no setting here
    algorithm = make(partial(steered, settings.steering()), own, "algorithm 'fedrl'")
    if own.get("pca") == "rounds" and settings.rounds < ROUNDS_TO_FIT:
        raise ConfigError(
            f"agent.rounds = {settings.rounds}: with pca = 'rounds' nobody acts before round "
            f"{ROUNDS_TO_FIT}; give more, or pca = 'clients'"
        )
    return replace(found[0], algorithm=algorithm), settings


def _read(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str, Path | None]:
    if isinstance(source, Mapping):
        return dict(source), "agent", None
    known, path = shipped_agents(), Path(source)
    if str(source) in known:
        path = known[str(source)]
    elif path.suffix != ".toml" and not path.is_file():
        raise unknown_name("agent file or shipped agent", str(source), list(known), "train-agent")
    return read_table(path), path.stem, path.parent.absolute()
