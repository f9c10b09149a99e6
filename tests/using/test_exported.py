"""One file holds all that a model needs, and what was changed in it is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

import undrift as fl
from guarded.test_mutations import mutated
from undrift.errors import DataError, UndriftError
from undrift.guarded.tensors import parse_tensors
from undrift.guarded.text import parse_json
from undrift.using import Predictor
from undrift.using.export import export
from undrift.using.exported import decode, digest, encode

from .making import packaged, spread, trained


def test_an_exported_file_predicts_what_the_run_predicts(tmp_path: Path) -> None:
    run = trained(tmp_path / "a")
    place, package = export(run, tmp_path / "a.safetensors")
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    model = fl.load_model(place)
    assert np.array_equal(model(x).probabilities, fl.load_model(run)(x).probabilities)
    assert model.about == parse_json(json.dumps(dict(package.about)))
    assert model.about["rounds"] == 2 and model.about["complete"] is True
    assert model.about["seed"] == 0 and model.about["undrift"] == fl.__version__
    assert fl.load_experiments  # the experiment is one that runs again
    again = fl.Experiment.from_toml(model.about["experiment"])
    assert again.rounds == 2 and again.label == "scaffold"


def test_a_table_goes_through_a_file_with_its_preparation() -> None:
    package = spread(packaged())
    found = decode(encode(package, "card"), "there")
    assert found.preparation == package.preparation
    assert found.blueprint == package.blueprint
    x = torch.randn(9, package.blueprint.shape[0])
    wanted = Predictor(package)(x).probabilities
    assert np.array_equal(Predictor(found)(x).probabilities, wanted)


def test_other_programs_read_the_weights_and_the_card() -> None:
    package = packaged()
    texts, tensors = parse_tensors(encode(package, "# the card"))
    assert texts["card"] == "# the card" and texts["format"] == "pt"
    assert tensors.keys() == package.tensors.keys()


def test_damaged_files_are_refused_by_an_error_of_ours() -> None:
    draw, good = random.Random(5), encode(spread(packaged()), "card")
    before = decode(good, "there").tensors
    refused = 0
    for _ in range(300):
        try:
            found = decode(mutated(good, draw), "there").tensors
        except DataError:
            refused += 1
        else:  # spaces in the header, or the same bytes
            assert all(torch.equal(found[n], t) for n, t in before.items())
    assert refused > 250


def test_a_changed_weight_and_a_changed_text_are_noticed() -> None:
    data = encode(packaged(), "card")
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    for bad in (flipped, data.replace(b"clinics", b"cliniks"), data.replace(b"card", b"cart")):
        with pytest.raises(UndriftError):
            decode(bad, "there")
    with pytest.raises(DataError, match="not as it was written, its SHA-256 differs"):
        decode(flipped, "there")


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("[]", "does not describe its model"),
        ("{}", "does not describe its model"),
        ("[" * 100, "does not describe its model"),
        ('{"blueprint": {"use": "mlp"}, "preparation": null, "origin": {}}', "describe a model"),
        ('{"blueprint": 3, "preparation": null, "origin": {}}', "does not describe"),
    ],
)
def test_a_file_whose_digest_fits_must_still_make_sense(about: str, message: str) -> None:
    tensors = {"w": torch.zeros(2)}
    texts = {"undrift-model": "1", "about": about, "sha256": digest(tensors, about, "")}
    with pytest.raises(DataError, match=message):
        decode(save(tensors, texts), "there")


@pytest.mark.parametrize(
    "change",
    [
        {"use": 3}, {"settings": []}, {"shape": [2, -1]}, {"shape": [True]}, {"whole": 1},
        {"gives": "votes"}, {"class_names": [1]}, {"scale": [1.0]}, {"clients": "3"}, {"more": 1},
    ],
)  # fmt: skip
def test_a_blueprint_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    package = packaged()
    told = {**package.blueprint.to_json(), **change}
    about = json.dumps({"blueprint": told, "preparation": None, "origin": {}})
    texts = {"undrift-model": "1", "about": about, "sha256": digest({}, about, "")}
    with pytest.raises(DataError, match=r"makes no sense|does not describe"):
        decode(save({}, texts), "there")


def test_weights_of_another_network_are_refused() -> None:
    package = packaged()
    tensors = {**package.tensors, "fc1.bias": torch.zeros(99)}
    with pytest.raises(DataError, match="weights do not fit its network"):
        Predictor(replace(package, tensors=tensors))


def test_paths_addresses_and_single_sites_stay_at_home(tmp_path: Path) -> None:
    run = trained(tmp_path / "secret" / "a")
    told = {
        "examples": 40,
        "kind": "classes",
        "metrics": {"auc": 0.8},
        "roc": [{"thresholds": [0.123456]}],
        "sites": [{"site": "small one", "auc": 0.5, "examples": 6}, {"site": "other", "auc": 0.9}],
    }
    (run / "evaluation.json").write_text(json.dumps(told))
    _, package = export(run, tmp_path / "a.safetensors")
    found = package.about["evaluation"]
    assert found["worst_site"] == {"site": "small one", "auc": 0.5} and found["examples"] == 40
    assert found["metrics"] == {"auc": 0.8} and found["judged_sites"] == 2
    data = (tmp_path / "a.safetensors").read_bytes()
    for secret in (b"0.123456", b'"other"', str(tmp_path).encode(), b"home"):
        assert secret not in data, secret


def test_a_path_to_data_is_cut_to_its_name() -> None:
    from undrift.using.runs import _shareable

    data = {"use": "table", "path": "/home/me/clinics.csv", "test_path": ["/x/y.csv"]}
    engine = {"address": "10.0.0.1:1", "private_key": "/keys/mine", "use": "ray"}
    made = _shareable({"data": data, "engine": engine})
    assert made["data"] == {"use": "table", "path": "clinics.csv", "test_path": ["y.csv"]}
    assert made["engine"] == {"use": "ray"}
