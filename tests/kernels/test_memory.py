"""What was found out about kernels is kept between processes."""

import json

import pytest
import torch

pytest.importorskip("triton")

from undrift.kernels import linear, memory, tuner


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    memory._known.clear()
    return tmp_path / "cache"


def test_what_is_remembered_is_recalled_by_another_process(folder):
    assert memory.recall("a") is None
    memory.remember("a", {"BM": 64})
    memory.remember("b", {"BM": 128})
    memory._known.clear()  # another process
    assert memory.recall("a") == {"BM": 64} and memory.recall("b") == {"BM": 128}
    (file,) = folder.iterdir()
    assert json.loads(file.read_text()) == {"a": {"BM": 64}, "b": {"BM": 128}}


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 3}'])
def test_a_damaged_file_is_as_good_as_none(folder, content):
    memory.remember("a", {"BM": 64})
    (file,) = folder.iterdir()
    file.write_text(content)
    memory._known.clear()
    assert memory.recall("a") is None
    memory.remember("a", {"BM": 32})
    assert memory.recall("a") == {"BM": 32}


def test_a_folder_that_cannot_be_written_is_no_trouble(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "file"))
    memory.remember("a", {"BM": 64})
    assert memory.recall("a") == {"BM": 64}  # this process knows it all the same


class Nothing:
    candidates = ()


def test_a_configuration_is_tried_once(folder, monkeypatch):
    class Problem:
        operations = 1e12

        def key(self):
            return "a problem"

    tried = []
    candidates = [{"BM": 64}, {"BM": 128}]

    def found(key, trial, small):
        tried.append(key)
        return candidates[1]

    monkeypatch.setattr(tuner, "_found", found)
    monkeypatch.setattr(tuner, "chosen", {})
    monkeypatch.setattr(tuner, "full_key", lambda name, key, device: f"{name}: {key}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(2):
        tuner.chosen.clear()  # as in another process
        args = ("a kernel", Problem(), torch.device("cuda"), candidates, Nothing)
        assert tuner.configuration(*args) == {"BM": 128}
    assert len(tried) == 1
    tuner.chosen.clear()
    tuner.configuration("a kernel", Problem(), torch.device("cuda"), [{"BM": 16}], Nothing)
    assert len(tried) == 2  # what was found is no candidate any more


def test_what_ships_is_known_until_this_machine_knows_better(folder, tmp_path, monkeypatch):
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / memory._file().name).write_text(json.dumps({"a": {"BM": 16}}))
    monkeypatch.setattr(memory, "SHIPPED", shipped)
    assert memory.recall("a") == {"BM": 16}
    memory.remember("a", {"BM": 32})
    assert memory.recall("a") == {"BM": 32}


def test_shipped_configurations_are_readable():
    files = list(memory.SHIPPED.glob("*.json"))
    assert files
    for file in files:
        known = json.loads(file.read_text())
        assert all(", NVIDIA" in key and "num_warps" in c for key, c in known.items())


def test_what_runs_seldom_takes_what_a_similar_problem_has(monkeypatch):
    monkeypatch.setattr(tuner, "chosen", {"linear: 64x16 9->4 bf16, a card": {"BM": 128}})
    tried = []

    def right(trial, candidate, timed):
        tried.append(candidate)
        return tuner.Timing(0.0, 0.0, candidate)

    monkeypatch.setattr(tuner, "_try", right)
    candidates = [{"BM": 64}, {"BM": 128}]
    trial = tuner.Trial(candidates, lambda c: [], [], lambda: 0.0, "bf16")
    for _ in range(2):
        found = tuner._hurried_choice("linear: 64x64 9->4 bf16, a card", lambda: trial)
        assert found == {"BM": 128}
    assert tried == [{"BM": 128}]
    assert tuner._hurried_choice("linear: 64x64 9->5 bf16, a card", lambda: trial) == {"BM": 64}


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("linear: 37x32 9->4 bf16, a card", {"BM": 64}),
        ("linear: 37x32 9->4 fp16, a card", {"BM": 64}),  # two bytes as well
        ("linear: 37x32 9->4 tf32, a card", None),
        ("linear: 37x32 9->4 bf16, another card", None),
        ("linear: 37x32 9->5 bf16, a card", None),
        ("linear: 80x32 9->4 bf16, a card", None),  # twice as many clients
        ("linear: 30x50 9->4 bf16, a card", {"BM": 32}),  # the nearest
        ("linear backward: 37x32 9->4 bf16, a card", None),
    ],
)
def test_what_serves_a_problem_of_nearly_the_same_size_is_taken(folder, monkeypatch, key, found):
    right = lambda trial, c, timed: tuner.Timing(0.0 if c in trial.right else float("inf"), 0, c)  # noqa: E731
    monkeypatch.setattr(tuner, "_try", right)
    monkeypatch.setattr(tuner, "chosen", {"linear: 32x48 9->4 bf16, a card": {"BM": 32}})
    memory.remember("linear: 36x32 9->4 bf16, a card", {"BM": 64})

    class Trial:
        candidates = ({"BM": 32}, {"BM": 64})
        right = candidates

    assert tuner._neighbours(key, Trial) == found
    Trial.right = ()
    assert tuner._neighbours(key, Trial) is None  # wrong here


def test_in_a_crowd_kernels_are_chosen_for_all_who_share_the_device(monkeypatch):
    p = linear.LinearProblem(2, 3, 8, 4, "float32")
    asked = []

    def chosen(name, problem, device, candidates, trial):
        asked.append((name, problem.clients))
        return candidates[0]

    monkeypatch.setattr(linear, "configuration", chosen)
    x, w = torch.ones(2, 3, 8), torch.ones(2, 4, 8)
    alone = linear.forward(p, x, w, None, torch.float32)
    with tuner.in_a_crowd(4):
        crowded = linear.forward(p, x, w, None, torch.float32)
        assert tuner.as_tuned(p).clients == 8
    assert torch.equal(alone, crowded) and tuner.as_tuned(p) is p
    assert asked == [("linear", 2), ("linear", 8)]
