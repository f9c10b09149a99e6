"""Training: resumed it is the same one, what is exported acts as what was trained."""

import json
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import fields
from dataclasses import replace as replace_settings

import numpy as np
import pytest
import torch

import undrift as fl
from undrift.agent import AgentSettings, Episodes, load_agent
from undrift.cli import main
from undrift.core.tree import replace
from undrift.errors import ChangedExperiment, CheckpointError, ConfigError
from undrift.experiment.folder import RunFolder
from undrift.interrupts import SIGNALS
from undrift.rules.policy import Policy, encode_policy, read_policy
from undrift.rules.steered import chosen
from undrift.state.checkpoint import CheckpointFolder

pytest.importorskip("gymnasium")
pytest.importorskip("stable_baselines3")

from undrift.agent.judging import Score, evaluate
from undrift.agent.making import make_policy
from undrift.agent.training import Training

from .test_environment import TABLE, small

BOLD = ((torch.zeros(2, 1), torch.tensor([-1.0, 1.0])),)  # always the same large action


def nothing(found):
    """Hear of a rollout."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    made = Training(*small(), tmp_path_factory.mktemp("whole"))
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(scratch := tmp_path_factory.mktemp("scratch")))
        assert made.run(nothing)
    assert not list(scratch.iterdir())  # stable-baselines3 would leave a folder for its log
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    return made


def weights(training):
    return {n: v.clone() for n, v in training.model.policy.state_dict().items()}


def without_seconds(history):
    return [{k: v for k, v in one.items() if k != "seconds"} for one in history]


def test_a_training_that_goes_on_is_the_one_that_was_never_stopped(trained, tmp_path):
    first = Training(*small(), tmp_path)
    assert not first.run(nothing, stop=lambda: True)
    assert len(first.history) == 1, "who has no time goes on all the same"
    second = Training(*small(), tmp_path)
    assert second.run(nothing)
    for name, value in weights(trained).items():
        assert torch.equal(value, weights(second)[name]), name
    assert without_seconds(trained.history) == without_seconds(second.history)
    longer = Training(*small("agent.rollouts=3"), tmp_path)
    assert not longer.done and longer.run(nothing) and len(longer.history) == 3
    with pytest.raises(ChangedExperiment, match="target"):
        Training(*small("agent.target=0.8"), tmp_path)
    with pytest.raises(ConfigError, match=r"has done 3 rollouts, agent\.rollouts = 2"):
        Training(*small(), tmp_path)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_a_rollout_is_saved_comes_after_it(tmp_path, monkeypatch, number):
    save = CheckpointFolder.save

    def noisy(*given):
        signal.raise_signal(number)
        return save(*given)

    before = signal.signal(number, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(CheckpointFolder, "save", noisy)
            Training(*small(), tmp_path).run(nothing)
    finally:
        signal.signal(number, before)
    assert len(Training(*small(), tmp_path).history) == 1


def test_episodes_in_which_nobody_would_act_are_refused():
    with pytest.raises(ConfigError, match=r"agent.rounds = 4: with pca = 'rounds' nobody acts"):
        small("algorithm.pca=rounds", "agent.rounds=4")
    small("algorithm.pca=rounds", "agent.rounds=10")
    alone = ("sampler.use=uniform", "sampler.count=1")
    with pytest.raises(ConfigError, match=r"^sampler: .* one client.*pca = 'rounds'"):
        Episodes(*small(*alone), [0, 1])
    Episodes(*small(*alone, "algorithm.pca=rounds", "agent.rounds=10"), [0])
    Episodes(*small("sampler.use=bernoulli", "sampler.fraction=0.01"), [0])  # now and then two


def test_nobody_else_trains_in_the_same_folder(tmp_path):
    with RunFolder(tmp_path).locked(), pytest.raises(CheckpointError, match="another process"):
        make_policy(TABLE, [], tmp_path, told=nothing)


def test_ppo_is_as_the_settings_say(trained):
    """By default stable-baselines3's own settings, but for the discount."""
    model, settings = trained.model, AgentSettings()
    assert (model.gamma, model.gae_lambda, model.n_epochs) == (0.9, 0.95, 10)
    assert (model.learning_rate, model.clip_range(1.0), model.ent_coef) == (3e-4, 0.2, 0.0)
    assert (model.n_steps, model.batch_size, model.normalize_advantage) == (4, 4, True)
    assert (settings.batch, settings.base, settings.spread) == (64, 64, 1)
    layers = list(model.policy.mlp_extractor.policy_net)
    assert [type(one).__name__ for one in layers] == ["Linear", "Tanh"] * 2
    assert [one.out_features for one in layers[::2]] == [64, 64]


def test_every_rollout_begins_with_new_episodes(trained):
    assert trained.vector.begun == len(trained.history) == 2
    assert trained.history[0]["return"] != trained.history[1]["return"]
    assert trained.history[0]["rounds"] == 4  # of first episodes alone, none reaches the target


def test_training_changes_the_policy(trained, tmp_path):
    fresh = Training(*small("agent.spread=0.2"), tmp_path)
    assert fresh.model.policy.log_std.detach().exp().tolist() == pytest.approx([0.2, 0.2])
    gaps = [float((a - b).abs().max()) for (a, _), (b, _) in
            zip(fresh.layers(), trained.layers(), strict=True)]  # fmt: skip
    assert min(gaps) > 1e-5
    assert all(h["return"] < 0 and h["episodes"] >= 3 for h in trained.history)


def test_the_exported_policy_acts_as_the_trained_one(trained):
    agent = decoded(trained)
    actor = [(w.double(), b.double()) for w, b in agent.layers]
    for seen in np.linspace(-10, 10, 41, dtype=np.float32):
        action, _ = trained.model.predict(np.array([[seen]]), deterministic=True)
        mine = chosen(actor, torch.tensor([float(seen)], dtype=torch.float64))
        assert np.abs(mine.numpy() - action[0]).max() < 1e-5


def decoded(training):
    from undrift.rules.policy import decode_policy

    data = encode_policy(training.layers(), training.settings.steering(), {})
    return decode_policy(data, "here")


def test_a_policy_from_its_file_repeats_the_episodes_it_was_judged_on(trained, tmp_path):
    """The deployed algorithm, on both engines, takes the rounds that `evaluate` took."""
    from undrift.agent.episodes import episode_seeds
    from undrift.experiment.world import build

    experiment, settings = small("agent.evaluation=1", "task.dtype=float64")
    score = evaluate(experiment, settings, trained.layers())["policy"]
    path = tmp_path / "policy.safetensors"
    path.write_bytes(encode_policy(trained.layers(), settings.steering(), {}))
    deployed = fl.fedrl(0.1, policy=str(path), server_lr=0.03)
    seeds = episode_seeds(settings.seed, 0, 0, "evaluation")
    for engine in ("reference", "vectorised"):
        made = fl.Experiment(
            experiment.data, experiment.model, deployed, experiment.partition, experiment.sampler,
            experiment.work, hold=experiment.hold, task=experiment.task, seed=seeds,
            engine=fl.EngineSettings(engine, "cpu"),
        )  # fmt: skip
        world = build(made)
        for knobs in score.knobs[0]:
            world.trainer.round()
            state = world.trainer.server.states[0]
            assert state.knobs.tolist() == pytest.approx(knobs, abs=1e-9)
        judged = world.measure.judged()["validation_accuracy"]
        assert judged == pytest.approx(score.values[0], abs=1e-12)


def test_the_three_ways_begin_alike_and_then_differ():
    experiment, settings = small("agent.evaluation=2", "agent.rounds=3")
    found = evaluate(experiment, settings, BOLD)
    assert [len(found[way].returns) for way in ("policy", "random", "default")] == [2, 2, 2]
    assert found["policy"].knobs[0][0] == pytest.approx([0.8, 0.9999])
    assert found["default"].knobs[1] == [[0.9, 0.99]] * 3
    assert found["random"].knobs[0] != found["random"].knobs[1]
    steps = np.diff([[[0.9, 0.99], *one] for one in found["random"].knobs], axis=1)
    assert steps[..., 0].min() < -0.01 and steps[..., 0].max() > 0.01
    assert found["policy"].returns != found["default"].returns


def test_a_model_that_diverged_can_be_written_down():
    found = Score([-1.0, -2.0], [None, 3], [float("inf"), 0.5], [[], []]).table()
    assert json.loads(json.dumps(found, allow_nan=False))["values"] == [None, 0.5]
    experiment, settings = small("agent.metric=loss", "agent.target=0.01", "algorithm.lr=1e30")
    played = evaluate(experiment, replace_settings(settings, evaluation=1, rounds=2), BOLD)
    json.dumps([score.table() for score in played.values()], allow_nan=False)


def test_the_command_trains_stops_goes_on_and_writes_its_record(tmp_path, capsys):
    from undrift.experiment.tables import write_table

    file = tmp_path / "mine.toml"
    file.write_text(write_table(TABLE))
    out = tmp_path / "out"
    command = ["train-agent", str(file), "agent.evaluation=1", "--out", str(out)]
    assert main([*command, "--minutes", "1e-9"]) == 3
    assert "goes on" in capsys.readouterr().out and not (out / "policy.safetensors").exists()
    assert main(command) == 0
    said = capsys.readouterr()
    assert "rollout 2" in said.err and "rounds to target" in said.out
    record = json.loads((out / "record.json").read_text())
    agent = read_policy(out / "policy.safetensors")
    assert record["digest"] == agent.digest == Policy(str(out / "policy.safetensors")).digest
    assert set(record["evaluation"]) == {"policy", "random", "default"}
    assert [h["rollout"] for h in record["rollouts"]] == [1, 2]
    assert agent.about["name"] == "mine"
    assert main([*command[:2], "agent.target=7"]) == 2
    assert "agent.target = 7" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['stable_baselines3'] = sys.modules['gymnasium'] = None\n"
        "import undrift; undrift.fedrl(0.1)  # a policy runs without it\n"
        "from undrift.cli import main; sys.exit(main(['train-agent', 'digits']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2 and "pip install 'undrift[rl]'" in done.stderr


def test_knobs_may_be_listed(tmp_path):
    made = Training(*small('agent.knobs=["server_lr"]', "agent.rollouts=1"), tmp_path)
    made.run(nothing)
    assert made.layers()[-1][0].shape == (1, 64)
    data = encode_policy(made.layers(), made.settings.steering(), {})
    (tmp_path / "lr.safetensors").write_bytes(data)
    algorithm = fl.fedrl(0.1, policy=str(tmp_path / "lr.safetensors"))
    assert replace(algorithm.rules[0], lr=0.5).steering.knobs == ("server_lr",)


def test_the_page_is_true():
    from pathlib import Path

    from undrift.experiment.tables import parse_table

    text = (Path(__file__).parents[2] / "docs/fedrl.md").read_text("utf-8")
    (table,) = re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    experiment, settings = load_agent(parse_table(table, "docs"))
    assert experiment.algorithm.rules[0].lr == 0.03 and settings.episodes == 48
    for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(compile(code, "fedrl.md", "exec"), {})
    named = re.findall(r"^\| (`.+?`) \| ", text, re.MULTILINE)
    told = {name for cell in named for name in re.findall(r"`(\w+)`", cell)}
    assert {f.name for f in fields(AgentSettings)} - {"base"} <= told


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_policy(tmp_path):
    """`kill -9` in the middle of a rollout."""
    from undrift.experiment.tables import write_table

    (tmp_path / "mine.toml").write_text(write_table(TABLE))
    call = [sys.executable, "-m", "undrift", "train-agent", "mine.toml", "agent.rollouts=6"]
    call += ["agent.evaluation=1", "--out"]
    whole = subprocess.run([*call, "whole"], cwd=tmp_path, check=True, capture_output=True)
    assert b"rollout 6" in whole.stderr
    begun = subprocess.Popen([*call, "parts"], cwd=tmp_path, stderr=subprocess.PIPE)
    for line in begun.stderr:
        if b"rollout 2" in line:
            break
    begun.kill()
    begun.communicate()
    rest = subprocess.run([*call, "parts"], cwd=tmp_path, check=True, capture_output=True)
    assert b"rollout 1:" not in rest.stderr and b"rollout 6" in rest.stderr
    digests = [
        json.loads((tmp_path / part / "record.json").read_text())["digest"]
        for part in ("whole", "parts")
    ]
    assert digests[0] == digests[1]
