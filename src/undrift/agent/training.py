"""Train an agent by PPO, rollout after rollout, and keep what a killed process would lose.

Every rollout begins with new episodes and its own seed, so that all there is between two of them is
the policy and its optimizer: a training that went on is the one that was never interrupted.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from undrift.agent.environment import PPO, FederationVecEnv, Logger
from undrift.agent.episodes import Episodes
from undrift.agent.settings import AgentSettings
from undrift.core.random import host_fold
from undrift.errors import ConfigError
from undrift.experiment.spec import Experiment
from undrift.interrupts import Shield
from undrift.state.checkpoint import CheckpointFolder

Layers = tuple[tuple[Tensor, Tensor], ...]
Told = Callable[[dict[str, Any]], None]  # is told of every rollout
KEPT = "checkpoints"
FREE = ("rollouts", "evaluation")  # more of them are no other training, nor is another judgement


class Training:
    """An agent in training: `run` goes on from where the folder stands."""

    def __init__(self, experiment: Experiment, settings: AgentSettings, folder: Path) -> None:
        self.experiment, self.settings, self.folder = experiment, settings, folder
        self.episodes = Episodes(experiment, settings, range(settings.episodes))
        self.vector = FederationVecEnv(self.episodes)
        with _own_chance(settings.seed, 0):
            self.model = _ppo(self.vector, settings)
        self.history: list[dict[str, Any]] = []
        self._saved = 0  # rollouts that a checkpoint holds
        self._checkpoints = CheckpointFolder(folder / KEPT)
        self._resume()

    @property
    def done(self) -> bool:
        """Whether all rollouts are done."""
        return len(self.history) >= self.settings.rollouts

    def run(self, told: Told, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train until all rollouts are done, or `stop` says so between two; tells whether.

        One is taken in any case: who has little time goes on all the same.
        """
        begun = self._saved = len(self.history)
        with Shield(lambda: self._saved < len(self.history)) as shield:
            while not self.done and not (len(self.history) > begun and stop()):
                started = time.perf_counter()
                number = len(self.history) + 1
                with _own_chance(self.settings.seed, number):
                    found = self._rollout(number)
                found["seconds"] = time.perf_counter() - started
                self.history.append(found)
                self._save(number)
                self._saved = number
                told(found)
                shield.release()
        return self.done

    def _rollout(self, number: int) -> dict[str, Any]:
        self.vector.begun = number - 1
        self.model._last_obs = None  # begins all episodes again
        steps = self.settings.rounds * self.settings.episodes
        self.model.learn(steps, reset_num_timesteps=False)
        return {
            "rollout": number,
            # of every slot's first episode, whose end, if it came, is worth 0 a round
            "return": float(self.vector.first.mean()),
            "rounds": float(self.vector.first_rounds.mean()),
            "episodes": int(sum(self.vector.numbers)),
            "spread": float(self.model.policy.log_std.detach().exp().mean()),
        }

    def layers(self) -> Layers:
        """Give the actor's weights: what a policy file holds."""
        return actor_of(self.model.policy)

    # -- going on --------------------------------------------------------------------------------
    def _config(self) -> dict[str, Any]:
        agent = {n: v for n, v in self.settings.table().items() if n not in FREE}
        if agent["ends"]:  # as all did before it could be set
            del agent["ends"]
        return {"agent": agent, "experiment": self.experiment.to_table()}

    def _save(self, number: int) -> None:
        policy = self.model.policy
        tensors = {f"policy.{n}": v.detach().cpu() for n, v in policy.state_dict().items()}
        for i, state in policy.optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{i}.{n}": torch.as_tensor(v).cpu() for n, v in state.items()}
        self._checkpoints.save(number, tensors, {"history": self.history}, self._config())

    def _resume(self) -> None:
        found = self._checkpoints.load(self._config())
        if found is None:
            return
        self._checkpoints.tidy()
        policy, kept = self.model.policy, found.tensors
        policy.load_state_dict({n: kept[f"policy.{n}"] for n in policy.state_dict()})
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in kept.items():
            kind, _, rest = name.partition(".")
            if kind == "adam":
                place, _, what = rest.partition(".")
                state.setdefault(int(place), {})[what] = value
        policy.optimizer.load_state_dict({**policy.optimizer.state_dict(), "state": state})
        self.history = list(found.meta["history"])
        if len(self.history) > self.settings.rollouts:
            raise ConfigError(
                f"{self.folder} has done {len(self.history)} rollouts, agent.rollouts = "
                f"{self.settings.rollouts}: give at least as many, or another --out"
            )
        self.model.num_timesteps = found.round * self.settings.rounds * self.settings.episodes


def _ppo(vector: FederationVecEnv, settings: AgentSettings) -> PPO:
    """Make PPO: two hidden layers of 64 for the actor and for the critic, apart."""
    shape = {
        "net_arch": [64, 64],
        "activation_fn": nn.Tanh,
        "log_std_init": float(np.log(settings.spread)),
    }
    how: dict[str, Any] = {
        "learning_rate": settings.lr,
        "n_steps": settings.rounds,
        "batch_size": settings.batch,
        "n_epochs": settings.epochs,
        "gamma": settings.discount,
        "gae_lambda": settings.gae,
        "clip_range": settings.clip,
        "ent_coef": settings.entropy,
    }
    with warnings.catch_warnings():
        # a rollout is rounds x episodes, whatever the batch: its last one may be shorter
        warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
        made = PPO("MlpPolicy", vector, **how, policy_kwargs=shape, device="cpu")
    made.set_logger(Logger(folder=None, output_formats=[]))  # its own leaves a folder behind
    return made


def actor_of(policy: Any) -> Layers:
    """Take the mean action's layers out of a policy of stable-baselines3."""
    hidden = [m for m in policy.mlp_extractor.policy_net if isinstance(m, nn.Linear)]
    linear = [*hidden, policy.action_net]
    return tuple((m.weight.detach().clone(), m.bias.detach().clone()) for m in linear)


@contextmanager
def _own_chance(seed: int, number: int) -> Iterator[None]:
    """Seed the generators that PPO draws from, and give them back as they were."""
    word = host_fold(seed, "ppo", number) & (2**32 - 1)
    before = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(word)
        np.random.seed(word)
        random.seed(word)
        try:
            yield
        finally:
            np.random.set_state(before[0])
            random.setstate(before[1])
