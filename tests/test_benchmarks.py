"""The benchmarks run on little work, and what they write down is whole.  No timing is judged."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name):
    """Import a benchmark's script, whose own processes are then the only ones to start."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER / "peers"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def call(monkeypatch, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    load(name).main()


@pytest.mark.slow
def test_peers_agree_and_are_measured(tmp_path, monkeypatch):
    out = tmp_path / "peers.json"
    call(monkeypatch, "peers", "--tiny", "--work", "emnist_mlp", "--out", out)
    found = json.loads(out.read_text())["works"]["emnist_mlp"]
    assert set(found["peers"]) == {"undrift", "hand_loop"}
    check = found["peers"]["undrift"]["check"]
    assert 0 < check["furthest_weight"] < 1e-5 and check["loss_after"] < check["loss_before"]
    assert found["peers"]["undrift"]["versions"]["torch"] != "not installed"
    for one in found["threads"]["1"].values():
        assert one["cpu_seconds"] > 0 and one["wall_seconds"] > 0
        assert one["loss_after"][0] < found["loss_before"]
    assert found["against_undrift"]["cpu_seconds"]["best"]["undrift"] == 1


def test_tables_are_read_beside_pandas(tmp_path, monkeypatch):
    for extra in ("pandas", "pyarrow"):
        pytest.importorskip(extra)
    out = tmp_path / "tables.json"
    call(monkeypatch, "tables", "--tiny", "--out", out)
    found = json.loads(out.read_text())
    assert found["tiny"] and found["ways"]["pandas"]["shape"] == [20_000, 32]
    # 25 numbers with an indicator each, 5 categories of 10 levels and a missing one
    assert found["ways"]["columns"]["shape"] == [20_000, 105]
    assert found["ways"]["inferred"]["shape"] == found["ways"]["columns"]["shape"]
    assert found["ways"]["careful"]["shape"] == [200, 105]
    assert all(one["seconds"] > 0 < one["peak_mb"] for one in found["ways"].values())


def test_a_peer_that_trains_otherwise_is_refused(tmp_path):
    driver, works = load("peers"), sys.modules["works"]
    job = works.make_job("emnist_mlp", tmp_path, 1, 1, True, True)
    works.write_data(works.small(works.WORKS["emnist_mlp"]), tmp_path)
    weights = works.start(job.work)
    with pytest.raises(RuntimeError, match="loss from"):
        driver.check(job, weights, weights)  # nothing was learnt
    moved = {name: value + 1e-3 for name, value in weights.items()}
    with pytest.raises(RuntimeError, match=r"differs by 0\.00"):
        driver.check(job, moved, weights)


@pytest.mark.slow
def test_the_work_of_pfl_runs_beside_a_hand_written_loop(tmp_path):
    out = tmp_path / "cifar.json"
    command = [sys.executable, FOLDER / "peers" / "cifar.py", "--tiny", "--device", "cpu"]
    command += ["--json", out, "--peers", "hand", "undrift", "pfl"]
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads(out.read_text())["peers"]
    for name in ("hand", "undrift"):
        first, *_, last = found[name]["evaluations"]
        assert last[0] < first[0] and found[name]["rounds_timed"] == 10
    assert "error" in found["pfl"] or found["pfl"]["versions"]["pfl"] == "0.6.0"


@pytest.mark.slow
def test_populations_of_two_sizes_are_compared(tmp_path, monkeypatch):
    out = tmp_path / "scale.json"
    call(monkeypatch, "scale", "--tiny", "--algorithms", "scaffold", "--out", out)
    found = json.loads(out.read_text())["algorithms"]["scaffold"]["populations"]
    assert set(found) == {"10", "100"}
    for one in found.values():
        assert len(one["cpu_seconds_by_round"]) == 3 and one["cpu_seconds"] > 0
        assert one["peak_resident_bytes"] > 1e7 and one["state_bytes_on_disk"] > 0
        assert one["clients_seen"] > 3 and one["parameters"] == 8 * 6 + 6 + 6 * 4 + 4
    assert found["10"]["against_smallest"]["cpu_seconds"] == 1


def test_the_least_time_of_a_round():
    rounds = load("rounds")
    work = rounds.WORKS["feddyn_100"]
    most = {"bf16": 1e15, "bytes": 4e12}
    least = rounds.floor(work, "fedavg", 1_000_000, 80e6, "bf16", most)
    samples = work.cohort * work.steps * work.batch
    assert least["operations"] == pytest.approx(80e6 * samples / 1e15 * 1e3)
    assert least["bytes"] > 0
    assert rounds.floor(work, "fedavg", 1_000_000, 80e6, "float32", most) is None
