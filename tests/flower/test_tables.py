"""A real SuperLink over silos that read their own tables.

Slow: Flower starts a process for every message.
"""

import json
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="pip install 'undrift[flower]'")

import undrift as fl
from federated.clinics import (
    HEADER,
    SITES,
    assert_close,
    cells,
    experiment,
    furthest,
    loader_of,
    own_file,
    preparation,
    write,
)
from undrift.cli import main
from undrift.experiment.spec import load

pytestmark = [pytest.mark.slow, pytest.mark.reliability]


def test_a_try_over_own_tables_is_the_simulation_and_silos_predict(tmp_path):
    experiment(tmp_path)
    settings = [str(tmp_path / "clinics.toml"), "rounds=1"]
    place = tmp_path / "p"
    assert main(["deploy", "init", str(place), *settings]) == 0
    for client, name in enumerate(sorted(SITES)):
        rows = [row[1:] for row in cells() if row[0] == name]
        write(own_file(tmp_path, client), rows, HEADER[1:])
        loader_of(tmp_path, client)
    command = [sys.executable, "-m", "undrift", "deploy", "try", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.splitlines()
    for line in ("client 1 (north) is here with 48 examples", "preparing: question 1 of 3",
                 "preparing: question 3 of 3", "round 1: "):  # fmt: skip
        assert any(one.startswith(line) for one in told), told
    [made] = load(*settings[:1], settings[1:])
    fl.run(made, tmp_path / "simulated")
    run = place / "try" / "run"
    assert_close(preparation(run), preparation(tmp_path / "simulated"))
    assert furthest(run, tmp_path / "simulated") <= 1e-9
    assert not (run / "refused.jsonl").exists()
    assert sorted(json.loads((run / "handed.json").read_text())["clients"]) == [0, 1, 2, 3]
    alone = tmp_path / "alone"  # the silo's machine has nothing but its own folder
    shutil.copytree(place / "silos" / "client-0", alone)
    shutil.rmtree(place)
    [model] = alone.glob("state/*/model.safetensors")
    found = fl.load_model(model)(alone / "mine.csv")
    wanted = fl.load_model(tmp_path / "simulated")(alone / "mine.csv")
    assert abs(found.outputs - wanted.outputs).max() <= 1e-9
