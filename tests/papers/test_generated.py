"""Rows whose data are not free to have run on generated files of the official format."""

from __future__ import annotations

import json

import pytest

from sources import people, small
from undrift.cli import main
from undrift.sources.sent140 import CSV


def reproduced(folder, monkeypatch, name: str, method: str, *settings: str) -> dict:
    monkeypatch.setenv("UNDRIFT_DATA", str(folder / "data"))
    out, records = folder / "runs", folder / "records"
    short = ["--rounds", "1", "--seeds", "1", "--only", method, "--device", "cpu", "--jobs", "1"]
    places = ["--out", str(out), "--records", str(records), "--quiet"]
    assert main(["reproduce", name, *settings, *short, *places]) == 0
    (file,) = records.rglob("*.json")
    (entry,) = json.loads(file.read_text())["cells"]
    return entry


@pytest.mark.slow
def test_adabest_s_row_of_letters(tmp_path, monkeypatch):
    pixels = people.emnist_pixels("letters", per_class=120, tested=5)
    small.write(tmp_path / "data/emnist", people.emnist_idx("letters", pixels))
    name = "adabest-table2-emnist-10pc-iid"
    entry = reproduced(tmp_path, monkeypatch, name, "FedAvg", "data.verify=false")
    assert entry["data"] == {"name": "emnist", "form": "idx files, not verified", "real": False}
    assert entry["kind"] != "full" and entry["rounds"] == 1 and 0 <= entry["ours"]["value"] <= 100


@pytest.mark.slow
def test_fedrl_s_auto_encoder(tmp_path, monkeypatch):
    pixels = people.emnist_pixels("digits", per_class=120, tested=5)
    small.write(tmp_path / "data/emnist", people.emnist_idx("digits", pixels))
    entry = reproduced(tmp_path, monkeypatch, "fedrl-fig3-emnist", "FedAvg", "data.verify=false")
    assert not entry["data"]["real"] and entry["rounds"] == 1


@pytest.mark.slow
def test_rfedavg_s_row_of_tweets(tmp_path, monkeypatch):
    counts = {f"user{k}": 12 + k for k in range(24)}
    people.tweet_csv(tmp_path / "data/sent140" / CSV, counts)
    vectors = {word: [0.1 * k] * 300 for k, word in enumerate(people.GOOD.split(), 1)}
    people.glove(tmp_path / "data/glove.6B.300d.txt", vectors)
    name = "rfedavg-table1-sent140-noniid"
    entry = reproduced(tmp_path, monkeypatch, name, "rFedAvg", "data.verify=false")
    assert entry["data"]["name"] == "sent140" and not entry["data"]["real"]


@pytest.mark.slow
def test_rfedavg_s_figure_of_writers(tmp_path, monkeypatch):
    counts = [36 + k for k in range(12)]
    people.leaf(tmp_path / "data/femnist/all_data/all_data_0.json", people.writers(counts))
    name = "rfedavg-fig8-n100-low-noniid"
    entry = reproduced(
        tmp_path, monkeypatch, name, "rFedAvg+", "partition.max_clients=10", "work.epochs=1"
    )
    assert entry["data"]["name"] == "femnist" and entry["data"]["real"] is None
    assert "no checksum known" in entry["data"]["form"] and entry["rounds"] == 1
