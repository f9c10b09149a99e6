"""What was found out about kernels is kept between processes."""

import json

import pytest
import torch

pytest.importorskip("triton")

from undrift.kernels import memory, tuner


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
        args = ("a kernel", Problem(), torch.device("cuda"), candidates, lambda: None)
        assert tuner.configuration(*args) == {"BM": 128}
    assert len(tried) == 1
    tuner.chosen.clear()
    tuner.configuration("a kernel", Problem(), torch.device("cuda"), [{"BM": 16}], lambda: None)
    assert len(tried) == 2  # what was found is no candidate any more
