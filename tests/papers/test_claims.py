"""Claims are decided from records, and from nothing where there are none."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from undrift.experiment.family import paper_settings

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def claims() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("reproductions_claims")
    sys.path.remove(str(ROOT / "scripts"))


class Folder:
    """Writes records with little more than what claims read."""

    def __init__(self, path: Path) -> None:
        self.path, self.cells = path, dict[tuple[str, str], dict[str, Any]]()

    def put(self, setting: str, method: str, value: float | None, **more: Any) -> None:
        ours = {"value": value, "std": 0.1, **more.pop("ours", {})}
        made = {"setting": setting, "method": method, "kind": "full", "rounds": 500, "seeds": [0]}
        self.cells[setting, method] = {**made, "ours": ours, **more}

    def verdicts(self, claims: Any) -> dict[str, str]:
        text = json.dumps({"table": "t", "cells": list(self.cells.values())})
        (self.path / "t.json").write_text(text)
        return {row[1]: row[3] for row in claims.claim_rows(self.path)}


def verdict(found: Mapping[str, str], words: str) -> str:
    (one,) = (v for says, v in found.items() if words in says)
    return one


HOLDS, FAILS, OPEN = "holds", "**does not hold**", "not yet recorded"


def test_without_records_only_what_is_counted_is_decided(claims, tmp_path) -> None:
    found = [row[3] for row in claims.claim_rows(tmp_path)]
    assert found == [OPEN] * 11 + [HOLDS]


def test_every_claim_is_about_settings_that_exist(claims, tmp_path) -> None:
    """Records of every cell with the same number decide every claim."""
    flat = {"rounds": [500], "mean": [10.0], "std": [0.0]}
    names = ("norm_model", "client_accuracy_worst10")
    folder = Folder(tmp_path)
    for setting in paper_settings().values():
        for method in setting.cells:
            columns = [{"round": 100, "value": 10.0}]
            folder.put(
                setting.name, method, 10.0, seconds=5.0, curves=dict.fromkeys(names, flat),
                ours={"columns": columns, "rounds_to": [{"on_mean": 7}]},
            )  # fmt: skip
    found = folder.verdicts(claims)
    assert OPEN not in found.values()
    assert verdict(found, "insensitive to mu") == HOLDS
    assert verdict(found, "Noise up to") == HOLDS
    assert verdict(found, "worst clients") == FAILS
    assert verdict(found, "about half the time") == FAILS


def papers_own(folder: Folder, setting: str) -> None:
    for method, cell in paper_settings()[setting].cells.items():
        columns = [{"round": 100 * i, "value": v} for i, v in enumerate(cell, 1)]
        folder.put(setting, method, float(cell[-1]), ours={"columns": columns})


def test_combinations(claims, tmp_path) -> None:
    folder = Folder(tmp_path)
    papers_own(folder, "comfed-table4")
    words = "A combination helps"
    assert verdict(folder.verdicts(claims), words) == HOLDS
    folder.cells["comfed-table4", "proxyogi"]["ours"]["columns"][0]["value"] = 20.0
    assert verdict(folder.verdicts(claims), words) == FAILS
    del folder.cells["comfed-table4", "novayogi"]
    assert verdict(folder.verdicts(claims), words) == OPEN


def test_speed_of_d_and_what_a_brings(claims, tmp_path) -> None:
    folder = Folder(tmp_path)
    for d, rounds in zip((1, 2, 5, 10, 20), (None, 300, 150, 100, 95), strict=True):
        folder.put("fedvra-fig2-d", f"d={d}", 60.0, ours={"rounds_to": [{"on_mean": rounds}]})
    for a, value in zip((1, 3, 5, 7, 9), (50.0, 55.0, 60.0, 61.0, 62.0), strict=True):
        folder.put("fedvra-fig2-a", f"a={a}", value)
    found = folder.verdicts(claims)
    assert verdict(found, "larger d") == verdict(found, "larger a") == HOLDS
    folder.put("fedvra-fig2-d", "d=2", 60.0, ours={"rounds_to": [{"on_mean": None}]})
    folder.put("fedvra-fig2-a", "a=9", None)
    found = folder.verdicts(claims)
    assert verdict(found, "larger d") == verdict(found, "larger a") == FAILS


def test_feddyn_explodes_or_not(claims, tmp_path) -> None:
    folder = Folder(tmp_path)

    def norm(value: float) -> dict[str, Any]:
        return {"norm_model": {"rounds": [10], "mean": [value], "std": [0.0]}}

    folder.put("adabest-fig1", "adabest", 50.0, curves=norm(20.0))
    folder.put("adabest-fig1", "feddyn", 40.0, curves=norm(50.0))
    assert verdict(folder.verdicts(claims), "FedDyn explodes") == FAILS
    folder.put("adabest-fig1", "feddyn", 40.0, curves=norm(90.0))
    assert verdict(folder.verdicts(claims), "FedDyn explodes") == HOLDS
    folder.put("adabest-fig1", "feddyn", None, curves=norm(50.0), ours={"diverged": 3})
    assert verdict(folder.verdicts(claims), "FedDyn explodes") == HOLDS


def test_noise_that_costs_more_than_luck(claims, tmp_path) -> None:
    folder = Folder(tmp_path)
    for data in ("mnist", "cifar10"):
        setting = f"rfedavg-fig12-{data}-s0"
        folder.put(setting, "rfedavg_plus", 90.0)
        for sigma in (1, 2, 5):
            folder.put(setting, f"sigma2={sigma}", 89.5)
    assert verdict(folder.verdicts(claims), "Noise up to") == HOLDS
    folder.put("rfedavg-fig12-mnist-s0", "sigma2=5", 87.0)
    assert verdict(folder.verdicts(claims), "Noise up to") == FAILS
