"""Policy files: what is written is what is read, and everything else is refused by name."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as write_tensors

import undrift as fl
from undrift.agent import load_agent
from undrift.errors import ConfigError, PolicyError
from undrift.experiment.folder import RunFolder
from undrift.rules import Policy, Steered, Steering
from undrift.rules.policy import (
    _digest,
    decode_policy,
    encode_policy,
    policy_named,
    read_policy,
    shipped_policies,
)


def layers(inputs: int = 1, knobs: int = 2, width: int = 5, seed: int = 0):
    made = torch.Generator().manual_seed(seed)
    shapes = [(width, inputs), (width, width), (knobs, width)]
    return tuple(
        (torch.randn(*s, generator=made), torch.randn(s[0], generator=made)) for s in shapes
    )


def test_a_policy_is_read_as_it_was_written(tmp_path):
    steering = Steering(("alpha2", "server_lr"), (0.05, 0.2), ("pca", "knobs"), "fit")
    told = {"name": "mine", "rounds": 7}
    path = tmp_path / "mine.safetensors"
    path.write_bytes(encode_policy(layers(3), steering, told))
    agent = read_policy(path)
    assert agent.steering == steering and agent.about == told
    for (w, b), (mine, own) in zip(layers(3), agent.layers, strict=True):
        assert torch.equal(w, mine) and torch.equal(b, own)
    assert Policy(str(path)).digest == agent.digest


def test_shipped_policies_are_whole():
    assert {"still", "digits"} <= set(shipped_policies())
    for name in shipped_policies():
        assert fl.fedrl(0.1, policy=name).rules[-1].policy.digest == read_policy(name).digest


@pytest.mark.parametrize("name", [n for n in shipped_policies() if n != "still"])
def test_a_shipped_policy_has_the_record_and_the_file_that_made_it(name):
    path = shipped_policies()[name]
    record = json.loads(path.with_suffix(".json").read_text("utf-8"))
    assert record["digest"] == read_policy(name).digest
    assert record["command"][:3] == ["undrift", "train-agent", name]
    _, settings = load_agent(name)
    assert {**settings.table(), **record["agent"]} == settings.table()
    scores = {way: score["mean_return"] for way, score in record["evaluation"].items()}
    assert scores["policy"] > scores["random"]


@pytest.mark.parametrize("at", [0, 9, 60, 300, -1])
def test_a_changed_byte_is_found(at):
    data = bytearray(encode_policy(layers(), Steering(), {"a": 1}))
    data[at] ^= 1
    with pytest.raises(PolicyError):
        decode_policy(bytes(data), "here")


@pytest.mark.parametrize("keep", [0, 5, 100, -4])
def test_a_file_that_was_cut_off_is_found(keep):
    data = encode_policy(layers(), Steering(), {})
    with pytest.raises(PolicyError, match="cut off"):
        decode_policy(data[:keep], "here")


def test_another_description_is_found():
    data = encode_policy(layers(), Steering(), {})
    (length,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + length])
    head["__metadata__"]["about"] = head["__metadata__"]["about"].replace("0.1", "0.9")
    text = json.dumps(head).encode()
    changed = struct.pack("<Q", len(text)) + text + data[8 + length :]
    with pytest.raises(PolicyError, match="digest differs"):
        decode_policy(changed, "here")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: encode_policy(layers(2), Steering(), {}), "layer 0 has weight"),
        (lambda: encode_policy(layers(1, 3), Steering(), {}), "3 numbers for 2 knobs"),
        (lambda: encode_policy((), Steering(), {}), "layers were left out"),
        (lambda: Steering(("alpha3",)), "Did you mean 'alpha"),
        (lambda: Steering(("alpha1", "alpha1")), "each once"),
        (lambda: Steering(("alpha1",), (0.1, 0.1)), "one number in"),
        (lambda: Steering(reach=(0.1, 2.0)), "one number in"),
        (lambda: Steering(action="chang"), "Did you mean 'change'"),
        (lambda: Steering(reach=0.1, action="value"), "leave reach out"),
        (lambda: fl.fedrl(0.1, policy="digit"), "Did you mean 'digits'"),
        (lambda: fl.fedrl(0.1, policy="none/such.safetensors"), "no policy file"),
        (lambda: fl.fedrl(0.1, policy=""), "give the name"),
        (lambda: fl.fedrl(0.1, client="scaff"), "Did you mean 'scaf'"),
        (lambda: Policy("still", "0" * 64), "another policy of that name"),
        (lambda: Steered(Policy("still"), steering=Steering(("alpha1",))), "was trained with"),
    ],
)
def test_what_does_not_fit_is_refused(made, says):
    with pytest.raises(ConfigError, match=says):
        made()


def test_numbers_that_are_none_are_refused():
    (w, b), *rest = layers()
    with pytest.raises(PolicyError, match="NaN"):
        encode_policy(((w * float("nan"), b), *rest), Steering(), {})


def crafted(tensors, about):
    """Write a policy file by hand, its digest right."""
    found = {"undrift-policy": "1", "about": about, "sha256": _digest(tensors, about)}
    return write_tensors(tensors, found)


def test_a_file_with_the_right_digest_is_not_trusted_either():
    about = json.dumps({"knobs": ["alpha1"], "reach": [0.1], "sees": ["pca"], "scale": "run"})
    good = {"0.weight": torch.zeros(1, 1), "0.bias": torch.zeros(1)}
    assert decode_policy(crafted(good, about), "here").steering.knobs == ("alpha1",)
    half = {name: value.half() for name, value in good.items()}
    with pytest.raises(PolicyError, match="written as float32"):
        decode_policy(crafted(half, about), "here")
    with pytest.raises(PolicyError, match="layer 0 has weight"):
        decode_policy(crafted({**good, "0.bias": torch.zeros(())}, about), "here")
    for strange in ("[" * 100_000, "null", "[]", json.dumps({"knobs": 3})):
        with pytest.raises(PolicyError):
            decode_policy(crafted(good, strange), "here")


def test_what_is_no_file_is_not_read(tmp_path):
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(PolicyError, match="is no file"):
            read_policy(path)
    with pytest.raises(PolicyError, match="give the name"):
        fl.fedrl(0.1, policy=None)


def test_a_file_that_was_written_again_is_another_policy(tmp_path):
    path = tmp_path / "mine.safetensors"
    path.write_bytes(encode_policy(layers(), Steering(), {}))
    policy = Policy(str(path))
    path.write_bytes(encode_policy(layers(seed=1), Steering(), {"more": 1}))
    with pytest.raises(PolicyError, match="has changed"):
        _ = policy.agent


def test_the_same_policy_is_the_same_bytes():
    data = [encode_policy(layers(), Steering(), {"name": "mine"}) for _ in range(20)]
    assert len(set(data)) == 1 and decode_policy(data[0], "mine").about == {"name": "mine"}


def test_a_file_of_any_name_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_bytes(encode_policy(layers(), Steering(), {}))
    monkeypatch.chdir(tmp_path)
    assert policy_named("mine.txt").source == str(tmp_path / "mine.txt")
    (tmp_path / "still").write_bytes(b"no policy")
    assert policy_named("still").source == "still", "a shipped one comes first"


def test_a_run_keeps_its_policy(tmp_path):
    """What became of the file changes nothing for it; and a damaged copy is not believed."""
    path, out = tmp_path / "mine.safetensors", tmp_path / "run"
    path.write_bytes(encode_policy(layers(), Steering(), {}))
    made = fl.Experiment("digits", "mlp", fl.fedrl(0.1, policy=str(path)), rounds=2)
    out.mkdir()
    RunFolder(out).begin(made.to_table())
    digest = read_policy(path).digest
    (copy,) = out.glob("policy-*")
    for change in (lambda: path.write_bytes(encode_policy(layers(seed=1), Steering(), {})),
                   path.unlink):  # fmt: skip
        change()
        again = fl.Experiment.from_table(RunFolder(out).table())
        assert again == made and again.algorithm.rules[-1].policy.agent.digest == digest
    copy.write_bytes(copy.read_bytes()[:-1])
    with pytest.raises(PolicyError, match="no policy file"):
        fl.Experiment.from_table(RunFolder(out).table())


def test_a_policy_outlives_an_experiment_file():
    made = fl.Experiment("digits", "mlp", fl.fedrl(0.1, policy="still"), rounds=3)
    again = fl.Experiment.from_toml(made.to_toml())
    assert again == made
    assert again.algorithm.rules[-1].policy.digest == read_policy("still").digest


def test_policies_side_by_side_are_called_by_their_folders():
    from undrift.experiment.sweep import expand

    files = ["runs/one/policy.safetensors", "runs/two/policy.safetensors", "mine/three.safetensors"]
    made = expand({"algorithm": {"use": "fedrl", "policy": files}})
    named = ["fedrl policy=one", "fedrl policy=two", "fedrl policy=three"]
    assert [variant.label for variant in made] == named
