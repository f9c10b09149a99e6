"""Policies and the agents that make them."""

from __future__ import annotations

from pathlib import Path

from undrift.errors import PolicyError
from undrift.rules.policy import shipped_policies

from .case import Case, Step, command, left_no, python, setting

AGENTS = "Policies and agents"
NOTHING = left_no("runs")
RL = ("gymnasium", "stable_baselines3")
FEDRL = "undrift run my.toml algorithm.use=fedrl algorithm.policy=own.safetensors"


def policy(change: Step) -> Step:
    """Put a policy of the package beside `my.toml`, and do something to it."""

    def do(folder: Path) -> None:
        (folder / "own.safetensors").write_bytes(shipped_policies()["still"].read_bytes())
        change(folder / "own.safetensors")

    return do


def one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def agent(folder: Path) -> None:
    """Give `my.toml` an agent."""
    path = folder / "my.toml"
    text = path.read_text().replace('use = "fedavg", ', "").replace("rounds = 2\n", "")
    path.write_text(text + "agent = { target = 0.9 }\nhold = { client_test = 0.2 }\n")


CASES: list[Case] = [
    setting(
        AGENTS,
        "a policy that is not there",
        "algorithm.use=fedrl algorithm.policy=digit",
        r"algorithm 'fedrl': no policy named 'digit'\. Did you mean 'digits'\?",
        after=NOTHING,
    ),
    setting(
        AGENTS,
        "a policy file that is not there",
        "algorithm.use=fedrl algorithm.policy=none.safetensors",
        r"no policy file FOLDER/none\.safetensors: train one with `undrift train-agent`",
        after=NOTHING,
    ),
    command(
        AGENTS,
        "a policy file with one changed byte",
        FEDRL,
        r"is not as it was written, its digest differs",
        before=policy(one_byte),
        after=NOTHING,
    ),
    command(
        AGENTS,
        "a policy file that was cut off",
        FEDRL,
        r"is no policy file, or it was cut off",
        before=policy(half),
        after=NOTHING,
    ),
    python(
        AGENTS,
        "a policy for other knobs",
        'fl.rules.Steered(fl.Policy("still"), steering=fl.rules.Steering(("server_lr",)))',
        PolicyError,
        r"policy 'still' was trained with .*leave `steering` to it",
    ),
    command(
        AGENTS,
        "an experiment without an agent",
        "undrift train-agent my.toml",
        r"has no \[agent\]: say at least its target",
        after=NOTHING,
        needs=RL,
    ),
    command(
        AGENTS,
        "an agent's target out of range",
        "undrift train-agent my.toml agent.target=99",
        r"agent\.target = 99 must be a number from 0 to 1",
        before=agent,
        needs=RL,
    ),
    command(
        AGENTS,
        "an agent's knob",
        "undrift train-agent my.toml \"agent.knobs=['alpha3']\"",
        r"no knobs named 'alpha3'\. Did you mean 'alpha",
        before=agent,
        needs=RL,
    ),
    command(
        AGENTS,
        "an agent's batch",
        "undrift train-agent my.toml agent.batch=1",
        r"agent\.batch = 1, of rounds x episodes = .*: PPO compares actions, give both at least 2",
        before=agent,
        needs=RL,
    ),
    command(
        AGENTS,
        "rewards that are all 0",
        "undrift train-agent my.toml agent.base=1",
        r"agent\.base = 1: every reward would be 0; give one above 1",
        before=agent,
        needs=RL,
    ),
    command(
        AGENTS,
        "an agent that could never act",
        "undrift train-agent my.toml sampler.count=1",
        r"sampler: every cohort is one client.* an agent will never act; "
        r"ask for cohorts of at least two, or set algorithm\.pca = 'rounds'",
        before=agent,
        needs=RL,
    ),
    command(
        AGENTS,
        "what an agent sees and turns, in the wrong place",
        "undrift train-agent my.toml algorithm.steering=x",
        r"algorithm 'fedrl': no setting named 'steering'",
        before=agent,
        needs=RL,
    ),
    setting(
        AGENTS,
        "a policy that is a folder",
        "algorithm.use=fedrl algorithm.policy=/",
        r"/ is no file: give the path of a policy",
        after=NOTHING,
    ),
    command(
        AGENTS,
        "an agent that is not there",
        "undrift train-agent digit",
        r"no agent file or shipped agent named 'digit'\. Did you mean 'digits'\?",
        after=NOTHING,
        needs=RL,
    ),
]
