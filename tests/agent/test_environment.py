"""The environments: Gymnasium's own check, rewards, ends of episodes, and one against many."""

import math

import numpy as np
import pytest
import torch

from undrift.agent import AgentSettings, Episodes, load_agent, shipped_agents
from undrift.agent.episodes import episode_seeds, reward_of
from undrift.data import Everyone, Uniform
from undrift.errors import ConfigError

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("stable_baselines3")

from undrift.agent.environment import FederationEnv, FederationVecEnv  # noqa: E402

TABLE = {
    "data": {"use": "digits", "test_share": 0.3},
    "partition": {"use": "iid", "clients": 40},
    "hold": {"validation_clients": 0.9},
    "model": {"use": "mlp", "hidden": 4},
    "work": {"steps": 2, "batch": 8},
    "algorithm": {"lr": 0.1, "server_lr": 0.03},
    "agent": {"target": 0.9, "rounds": 4, "episodes": 3, "rollouts": 2, "batch": 4},
    "engine": {"device": "cpu"},
}


def small(*changes):
    return load_agent(TABLE, changes)


def test_gymnasium_and_stable_baselines_find_nothing_wrong():
    from gymnasium.utils.env_checker import check_env
    from stable_baselines3.common.env_checker import check_env as check_again

    check_env(FederationEnv(*small()), skip_render_check=True)
    check_again(FederationEnv(*small()))


def test_an_episode_is_cut_off_after_its_rounds():
    env = FederationEnv(*small())
    first, _ = env.reset(seed=3)
    ends = []
    for _ in range(4):
        seen, reward, over, cut, info = env.step(env.action_space.sample())
        assert env.observation_space.contains(seen) and -1 < reward <= 0
        ends.append((over, cut))
    assert ends == [(False, False)] * 3 + [(False, True)] and info["round"] == 4
    again, _ = env.reset(seed=3)
    other, _ = env.reset(seed=4)
    assert np.array_equal(first, again) and other.shape == first.shape


def test_an_episode_ends_at_its_target():
    env = FederationEnv(*small("agent.target=0.01"))
    env.reset(seed=0)
    _, reward, over, cut, info = env.step(np.zeros(2, np.float32))
    assert over and not cut and info["accuracy"] >= 0.01
    assert reward == pytest.approx(64 ** (info["accuracy"] - 0.01) - 1)


def test_it_may_go_on_behind_its_target_and_without_progress():
    goes_on = ("agent.target=0.01", "agent.ends=false", "agent.patience=1", "agent.progress=1.0")
    env = FederationEnv(*small(*goes_on))
    env.reset(seed=0)
    steps = [env.step(np.zeros(2, np.float32)) for _ in range(4)]
    assert [(over, cut) for _, _, over, cut, _ in steps] == [(False, False)] * 3 + [(False, True)]
    assert all(reward > 0 for _, reward, *_ in steps)  # better than the target

    vector = FederationVecEnv(Episodes(*small(*goes_on), range(3)))
    vector.reset()
    rewards = []
    for _ in range(4):
        vector.step_async(np.zeros((3, 2), np.float32))
        rewards.append(vector.step_wait()[1])
    assert np.allclose(vector.first, np.sum(rewards, 0))  # the whole episode counts
    assert vector.first_rounds.tolist() == [1, 1, 1]  # and how long it took to the target


def test_a_model_that_diverged_has_no_accuracy():
    env = FederationEnv(*small("algorithm.server_lr=1e300", "agent.ends=false"))
    env.reset(seed=0)
    _, reward, over, cut, info = env.step(np.zeros(2, np.float32))
    assert (reward, over, cut) == (-1.0, False, False)
    assert math.isnan(info["accuracy"]) and not info["reached"]


def test_steps_are_taken_in_an_episode():
    env = FederationEnv(*small("agent.target=0.01"))
    with pytest.raises(ConfigError, match="call reset"):
        env.step(np.zeros(2, np.float32))
    env.reset(seed=0)
    assert env.step(np.zeros(2, np.float32))[2]  # over
    with pytest.raises(ConfigError, match="it is over"):
        env.step(np.zeros(2, np.float32))


def test_without_progress_it_is_cut_off():
    env = FederationEnv(*small("agent.patience=2", "agent.progress=1.0", "agent.rounds=9"))
    env.reset(seed=0)
    cuts = [env.step(np.zeros(2, np.float32))[3] for _ in range(3)]
    assert cuts == [False, False, True]


def cut_after(values, *changes):
    """Tell after how many rounds with these values an episode is cut off; None if it is not."""
    episodes = Episodes(*small("agent.rounds=99", *changes), [0])
    episodes.begin(0, 0)
    cuts = [episodes._turned(0, value).stopped for value in values]
    return cuts.index(True) + 1 if True in cuts else None


def test_many_small_steps_are_progress_and_a_rest_is_counted_from_the_last():
    patient = ("agent.patience=3", "agent.progress=0.001")
    climbing = [0.5 + 0.0004 * r for r in range(20)]  # 0.1 % in three rounds
    assert cut_after(climbing, *patient) is None
    assert cut_after([0.5 + 0.0002 * r for r in range(20)], *patient) == 4
    assert cut_after([0.5, 0.4, 0.4, 0.501, 0.5, 0.5, 0.5], *patient) == 7
    loss = ("agent.metric=loss", "agent.target=0.01", *patient)
    assert cut_after([2.0 * 0.9996**r for r in range(20)], *loss) is None
    assert cut_after([2.0 * 0.9998**r for r in range(20)], *loss) == 4
    assert cut_after([math.nan] * 5, *loss) == cut_after([math.inf] * 5, *loss) == 3
    assert cut_after([math.nan, math.nan, 2.0, 1.0], *loss) is None


def test_a_vector_is_its_environments_one_by_one():
    experiment, settings = small("task.dtype=float64")
    many = Episodes(experiment, settings, range(3))
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 3, 2))
    for slot in range(3):
        many.begin(slot, 5)
    seen, turned = [], []
    for action in actions:
        seen.append(many.observe())
        turned.append(many.act(action))
    for slot in range(3):
        one = Episodes(experiment, settings, [slot])
        one.begin(0, 5)
        for r in range(3):
            assert np.abs(one.observe()[0] - seen[r][slot]).max() < 1e-9
            (found,) = one.act(actions[r, slot : slot + 1])
            assert found.value == pytest.approx(turned[r][slot].value, abs=1e-12)
    assert len({t.value for t in turned[-1]}) > 1


def test_the_reference_engine_plays_the_same_episodes():
    played = {}
    for engine in ("reference", "vectorised"):
        episodes = Episodes(*small("task.dtype=float64", f"engine.use={engine}"), range(2))
        for slot in range(2):
            episodes.begin(slot, 5)
        seen = []
        for action in np.random.default_rng(0).uniform(-1, 1, (3, 2, 2)):
            seen += [episodes.observe(), [[t.value] for t in episodes.act(action)]]
        played[engine] = np.array([np.asarray(one) for one in seen])
    assert np.abs(played["reference"] - played["vectorised"]).max() < 1e-9


def test_every_episode_is_another_one_and_one_number_always_the_same():
    episodes = Episodes(*small(), [0])
    found = []
    for number in (1, 2, 1):
        episodes.begin(0, number)
        found.append((episodes.trainers[0].server.w, episodes.trainers[0].seeds))
    (w, seeds), (other, others), (again, same) = found
    assert (w == again).all() and seeds == same and not (w == other).any()
    assert seeds.run != others.run and seeds.partition == others.partition
    own, tried = (episode_seeds(0, 3, 0, purpose) for purpose in ("train", "evaluation"))
    assert not set(own) & set(tried)


@pytest.mark.parametrize("judged", [None, 50])
def test_it_is_judged_on_clients_that_do_not_train(judged):
    changes = [] if judged is None else [f"agent.judged={judged}"]
    episodes = Episodes(*small(*changes), range(2))
    for world, exam in zip(episodes.worlds, episodes._jury.exams, strict=True):
        held = world.dealt.validation
        trains = np.concatenate(world.dealt.parts)
        assert len(world.dealt.parts) == 4 and not set(held) & set(trains)
        rows = held if judged is None else held[:judged]
        assert torch.equal(exam.paper.x.cpu(), world.dealt.examples.train_x[rows])


def test_a_vector_begins_again_where_an_episode_ends():
    vector = FederationVecEnv(Episodes(*small("agent.rounds=2"), range(2)))
    vector.reset()
    still = np.zeros((2, 2), np.float32)
    _, _, ended, _ = vector.step(still)
    assert not ended.any()
    last = vector._seen.copy()
    seen, rewards, ended, infos = vector.step(still)
    assert ended.all() and rewards.shape == (2,)
    for slot, info in enumerate(infos):
        assert info["TimeLimit.truncated"] and info["episode"]["l"] == 2
        assert np.array_equal(info["terminal_observation"], last[slot])
    assert not seen.any()  # the first state of an episode is its own mean
    assert [t.rounds_done for t in vector.episodes.trainers] == [1, 1]
    first = vector.first.copy()
    assert (first < 0).all() and (vector.first_rounds == 2).all()
    vector.step(still)  # of the second episode: not counted among the first ones
    assert (vector.first == first).all() and (vector.first_rounds == 2).all()


def test_rewards_lie_between_minus_one_and_zero_up_to_the_target():
    settings = AgentSettings(target=0.8)
    values = [reward_of(v, settings) for v in np.linspace(0, 0.8, 9)]
    assert values == sorted(values) and values[0] > -1 and values[-1] == 0
    assert all(v < 0 for v in values[:-1])
    assert reward_of(0.9, settings) > 0
    loss = AgentSettings(target=0.005, metric="loss")
    assert reward_of(0.005, loss) == 0 and -1 < reward_of(0.1, loss) < 0
    assert reward_of(math.inf, loss) == reward_of(math.nan, loss) == -1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["agent.target=1.5"], "agent.target = 1.5 must be a number from 0 to 1"),
        (["agent.target=0"], "to reach is above 0"),
        (["agent.target=high"], "agent.target"),
        (["agent.metric=acuracy"], "Did you mean 'accuracy'"),
        (["agent.knobs=['alpha1','beta']"], "no knobs named 'beta'"),
        (["agent.rollout=3"], "Did you mean 'rollouts'"),
        (["agent.rounds=0"], "agent.rounds"),
        (["agent.discount=2"], "agent.discount"),
        (["agent.base=1"], "agent.base = 1: every reward would be 0"),
        (["agent.base=0.5"], "agent.base = 0.5 must be"),
        (["agent.batch=1"], "PPO compares actions"),
        (["agent.rounds=1", "agent.episodes=1"], "rounds x episodes = 1 x 1"),
        (["agent.reach=2"], "one number in"),
        (["agent.reach=[0.1]"], "one number in"),
        (["agent.reach=far"], "one number in"),
        (["agent.scale=none"], "no scale named 'none'"),
        (["algorithm.use=fedavg"], "leave it out"),
        (["algorithm.client=proxx"], "Did you mean 'prox'"),
        (['algorithm.client=[["prox"]]'], r"no client named \[\['prox'\]\].* Known: sgd, prox"),
        (["algorithm.policy=digits"], "policy"),
        (["algorithm.steering=x"], r"no setting named 'steering'.* Known: lr, client,"),
        (["agent.ends=1"], "ends is true or false, got 1"),
        (["rounds=3"], "agent.rounds"),
        (["agent.knobs=3"], "Steering.knobs = 3: give names"),
        (["agent.reach=true"], "Steering.reach = True"),
        (["seed=0,1"], "give no lists"),
    ],
)
def test_bad_settings_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        small(*changes)


def test_what_an_agent_may_do_and_sees_is_set_by_name():
    said = ["agent.reach=0.05", "agent.scale=fit", "agent.sees=['pca','knobs']", "agent.rollouts=9"]
    said += ["agent.action=offset"]
    experiment, settings = small(*said)
    steering = experiment.algorithm.rules[0].steering
    assert (steering.reach, steering.scale) == ((0.05, 0.05), "fit")
    assert steering.action == "offset"
    assert steering.sees == ("pca", "knobs") and settings.rollouts == 9


@pytest.mark.parametrize("name", shipped_agents())
def test_shipped_agents_train_on_iid_data_that_is_no_test_set(name):
    experiment, settings = load_agent(name)
    assert type(experiment.partition).__name__ == "Iid" and experiment.hold.validation_clients
    assert experiment.sampler in (Everyone(), Uniform(count=10))  # ten clients in a round
    assert settings.knobs == ("alpha1", "alpha2")


def test_listed_cohorts_need_be_as_many_as_an_episode_has_rounds():
    """The experiment's own 100 rounds are nothing to an agent."""
    listed = {"use": "explicit", "rounds": [[0, 1], [2, 3], [0, 2], [1, 3]]}
    experiment, settings = load_agent({**TABLE, "sampler": listed})
    assert experiment.rounds == settings.rounds == 4
    FederationEnv(experiment, settings).reset(seed=0)
    with pytest.raises(ConfigError, match="4 cohorts for 5 rounds"):
        load_agent({**TABLE, "sampler": listed}, ["agent.rounds=5"])


def test_rounds_of_the_experiment_are_refused_in_a_file_too():
    with pytest.raises(ConfigError, match=r"agent.rounds"):
        load_agent({**TABLE, "rounds": 7})


def test_what_cannot_be_rewarded_is_refused():
    with pytest.raises(ConfigError, match="no \\[agent\\]"):
        load_agent({k: v for k, v in TABLE.items() if k != "agent"})
    with pytest.raises(ConfigError, match="Did you mean 'digits'"):
        load_agent("digit")
    experiment, settings = small('task={target="input"}', 'model={use="autoencoder"}')
    with pytest.raises(ConfigError, match="has no accuracy"):
        Episodes(experiment, settings, [0])
    with pytest.raises(ConfigError, match="actions of shape"):
        Episodes(*small(), [0]).act(np.zeros((1, 3)))
    with pytest.raises(ConfigError, match="NaN or infinite"):
        Episodes(*small(), [0]).act(np.array([[0.0, math.nan]]))
