"""A steered federation as a Gymnasium environment, and many of them as one vector of SB3's.

Observations are what the policy inside the server will see; actions lie in [-1, 1], one for each
knob.  Both kinds are the same `Episodes`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from undrift.agent.episodes import Episodes, Numbers, Turned
from undrift.agent.settings import AgentSettings
from undrift.errors import ConfigError, MissingExtra
from undrift.experiment.spec import Experiment
from undrift.rules.steered import FARTHEST

try:
    import gymnasium
    from gymnasium.spaces import Box
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise MissingExtra(
        f"training an agent needs gymnasium and stable-baselines3 ({error}): "
        "pip install 'undrift[rl]'"
    ) from error

__all__ = ["PPO", "FederationEnv", "FederationVecEnv", "Logger"]

Observation = np.ndarray[Any, np.dtype[np.float32]]


def spaces(episodes: Episodes) -> tuple[Any, Any]:
    """Give the spaces of observations and actions."""
    seen = Box(-FARTHEST, FARTHEST, (episodes.inputs,), np.float32)
    return seen, Box(-1.0, 1.0, (episodes.actions,), np.float32)


def told(turned: Turned, metric: str) -> dict[str, Any]:
    """Tell what an environment says beside the reward."""
    return {metric: turned.value, "round": turned.round, "reached": turned.reached}


class FederationEnv(gymnasium.Env[Observation, Observation]):
    """One federation: every step is a round, whose server step the action decides on.

    An episode ends at the target, unless `agent.ends` is false; it is cut off (`truncated`) where
    it makes no progress or has no rounds left.  Then the last observation is repeated: no client
    trains for it.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own declaration

    def __init__(self, experiment: Experiment, settings: AgentSettings) -> None:
        self.episodes = Episodes(experiment, settings, [0])
        self.observation_space, self.action_space = spaces(self.episodes)
        self._seen = np.zeros(self.episodes.inputs, np.float32)
        self._goes_on = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode; its model, batches and cohorts follow from the seed."""
        super().reset(seed=seed)
        self.episodes.begin(0, int(self.np_random.integers(1, 2**31)))
        self._seen, self._goes_on = self._observed(), True
        return self._seen, {"round": 0}

    def step(self, action: Observation) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Act on this round's update, then let clients train on the next one."""
        if not self._goes_on:
            raise ConfigError("no episode has begun, or it is over: call reset() before step()")
        turned = self.episodes.act(np.asarray(action, np.float64).reshape(1, -1))[0]
        self._goes_on = not (turned.over or turned.stopped)
        if self._goes_on:
            self._seen = self._observed()
        info = told(turned, self.episodes.settings.metric)
        return self._seen, turned.reward, turned.over, turned.stopped, info

    def _observed(self) -> Observation:
        return self.episodes.observe()[0].astype(np.float32)


class FederationVecEnv(VecEnv):
    """Many federations whose rounds train as one batch; an episode that ends begins again.

    Where an episode is cut off, its last observation stands in for the next one.
    """

    def __init__(self, episodes: Episodes) -> None:
        self.episodes = episodes
        self.begun = 0  # how often all of them were begun; with a slot it decides an episode's seed
        self.numbers = [0] * len(episodes)  # of the episodes within
        self._totals = np.zeros(len(episodes))
        self.first = np.zeros(len(episodes))  # return of every slot's first episode since `reset`
        self.first_rounds = np.zeros(len(episodes))  # and its rounds, at most those to the target
        self._there = np.zeros(len(episodes), bool)  # whether that one has come to the target
        self._seen = np.zeros((len(episodes), episodes.inputs), np.float32)
        self._actions: Numbers = np.zeros((len(episodes), episodes.actions))
        super().__init__(len(episodes), *spaces(episodes))

    def reset(self) -> Observation:
        """Begin all episodes."""
        self.begun += 1
        self.numbers = [0] * self.num_envs
        self.first, self.first_rounds = np.zeros(self.num_envs), np.zeros(self.num_envs)
        self._there = np.zeros(self.num_envs, bool)
        for slot in range(self.num_envs):
            self._begin(slot)
        self._seen = self._observed()
        return self._seen

    def _begin(self, slot: int) -> None:
        self.episodes.begin(slot, self.begun * 100_000 + self.numbers[slot])
        self.numbers[slot] += 1
        self._totals[slot] = 0.0

    def step_async(self, actions: Observation) -> None:
        """Take the actions."""
        self._actions = np.asarray(actions, np.float64)

    def step_wait(self) -> Any:
        """Act, and train everybody's next round."""
        turned = self.episodes.act(self._actions)
        rewards = np.array([t.reward for t in turned], np.float32)
        self._totals += rewards
        still = np.array(self.numbers) == 1
        self.first += still * rewards
        self.first_rounds += still & ~self._there
        self._there |= still & np.array([t.reached for t in turned])
        ended = np.array([t.over or t.stopped for t in turned])
        infos = [self._info(slot, one) for slot, one in enumerate(turned)]
        for slot in np.flatnonzero(ended):
            self._begin(int(slot))
        self._seen = self._observed()
        return self._seen, rewards, ended, infos

    def _info(self, slot: int, turned: Turned) -> dict[str, Any]:
        info = told(turned, self.episodes.settings.metric)
        if turned.over or turned.stopped:
            info["terminal_observation"] = self._seen[slot]
            info["TimeLimit.truncated"] = turned.stopped
            info["episode"] = {"r": float(self._totals[slot]), "l": turned.round, "t": 0.0}
        return info

    def _observed(self) -> Observation:
        return self.episodes.observe().astype(np.float32)

    # -- what stable-baselines3 wants of every vector --------------------------------------------
    def close(self) -> None:
        """Nothing has to be closed."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Give an attribute of this vector, once for each environment."""
        return [getattr(self, attr_name, None) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of this vector."""
        setattr(self, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of this vector, once for each environment."""
        call = getattr(self, method_name)
        return [call(*method_args, **method_kwargs) for _ in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Say that nothing is wrapped."""
        return [False for _ in self._get_indices(indices)]
