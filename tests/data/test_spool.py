"""Examples in a file: they are what they were, and the file goes when nobody needs it."""

from __future__ import annotations

import copy
import errno
import gc
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from undrift.data import Federation, spool
from undrift.describe import describe
from undrift.errors import ConfigError, DataError
from undrift.state import disk

from_datasets = Federation.from_datasets


def clients(dtype: torch.dtype = torch.float32, targets: int = 0) -> list[TensorDataset]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for n in (5, 1, 8):
        x = (10 * torch.randn(n, 3, 2, generator=draw)).to(dtype)
        y = torch.randn(n, targets, generator=draw) if targets else torch.arange(n)
        made.append(TensorDataset(x, y))
    return made


def kept(place: Path) -> list[Path]:
    return sorted(p for p in place.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.bool, torch.int64, torch.complex64),
    ],
)
def test_a_file_gives_back_what_went_in(dtype: torch.dtype) -> None:
    held, streamed = (from_datasets(clients(dtype), keep=k) for k in ("memory", "disk"))
    rows = torch.tensor([13, 0, 5, 5])
    assert isinstance(streamed.x, spool.Streamed) and streamed.x.dtype == dtype
    assert torch.equal(streamed.x[rows], held.x[rows]) and torch.equal(streamed.x[2:7], held.x[2:7])
    assert torch.equal(streamed.y[rows.view(2, 2)], held.y[rows.view(2, 2)])
    assert (len(streamed.x), streamed.x.dim(), streamed.x.shape) == (14, 3, held.x.shape)
    assert streamed.x.is_complex() == held.x.is_complex()


def test_a_streamed_federation_says_so() -> None:
    made = from_datasets(clients(), keep="disk")
    shown = "Federation(3 clients, 14 examples, x [3, 2] float32, y [] int64, cpu, on disk)"
    assert repr(made) == shown


@pytest.mark.parametrize("keep", ["auto", "memory"])
def test_what_fits_stays_in_memory(keep: Any, tmp_path: Path) -> None:
    made = from_datasets(clients(), keep=keep, folder=tmp_path)
    assert isinstance(made.x, torch.Tensor) and not kept(tmp_path)


@pytest.mark.parametrize("free", [0, 200, 1000])
def test_what_does_not_fit_goes_to_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int
) -> None:
    monkeypatch.setattr(spool, "free_memory", lambda: free)
    made = from_datasets(clients(), folder=tmp_path)
    assert isinstance(made.x, spool.Streamed) and len(kept(tmp_path)) == 2
    held = from_datasets(clients(), keep="memory")
    assert torch.equal(made.x[made.members], held.x) and torch.equal(made.y[made.members], held.y)


def test_moving_neither_loads_nor_changes_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made = from_datasets(clients(targets=2), keep="disk")
    monkeypatch.setattr(spool.Streamed, "pieces", None)
    moved = made.to("cpu", torch.float64)
    assert isinstance(moved.x, spool.Streamed) and moved.x.dtype == torch.float64
    assert moved.x._rows.data_ptr() == made.x._rows.data_ptr()
    assert moved.client(2)[0].dtype == torch.float64 and made.client(2)[0].dtype == torch.float32
    assert moved.y.dtype == torch.float64 and moved.to().x.dtype == torch.float64
    assert from_datasets(clients(), keep="disk").to(dtype=torch.float64).y.dtype == torch.int64


def test_a_narrower_type_is_checked_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(9, 2)
    x[7, 1] = 1e9
    data = [TensorDataset(x[:4], torch.zeros(4)), TensorDataset(x[4:], torch.zeros(5))]
    monkeypatch.setattr(spool, "PIECE", 16)
    for keep in ("memory", "disk"):
        with pytest.raises(DataError, match="x of client 1, example 3, holds NaN or infinity"):
            from_datasets(data, keep=keep).to(dtype=torch.float16)
        assert from_datasets(data[:1], keep=keep).to(dtype=torch.float16).x.dtype == torch.float16


@pytest.mark.parametrize("piece", [1, 100, 10**9])
def test_the_digest_is_that_of_the_same_examples_in_memory(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(spool, "PIECE", piece)
    held, streamed = (from_datasets(clients(), keep=k) for k in ("memory", "disk"))
    assert describe(held) == describe(streamed) == describe(streamed)
    wide = [describe(f.to(dtype=torch.float64)) for f in (held, streamed)]
    assert wide[0] == wide[1] != describe(held)
    assert describe(Federation.of([c.tensors for c in clients()])) == describe(held)


def test_the_file_is_read_for_its_digest_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = from_datasets(clients(), keep="disk")
    first = describe(made)
    monkeypatch.setattr(spool.Streamed, "pieces", None)
    assert describe(made) == first


# ---- how long the file lives -------------------------------------------------------------------
def test_the_file_goes_with_the_last_who_needs_it(tmp_path: Path) -> None:
    made = from_datasets(clients(), keep="disk", folder=tmp_path / "new")
    assert [p.name for p in kept(tmp_path)] == ["x", "y"]
    moved = made.to(dtype=torch.float64)
    del made
    gc.collect()
    assert len(kept(tmp_path)) == 2
    rows = moved.client(0)[0]
    del moved
    gc.collect()
    assert list((tmp_path / "new").iterdir()) == [] and rows.sum().isfinite()


PROGRAM = """
import os, sys, torch
from torch.utils.data import TensorDataset
from undrift import Federation
data, place = TensorDataset(torch.zeros(4, 2), torch.zeros(4)), sys.argv[1]
made = Federation.from_datasets([data], keep="disk", folder=place)
pid = os.fork()
if not pid:
    sys.exit()
os.waitpid(pid, 0)
print(sum(len(files) for _, _, files in os.walk(place)))
"""


def test_the_file_goes_when_the_process_that_wrote_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    # a process that was forked off has ended before and left the file alone
    assert (done.stdout, done.stderr) == ("2\n", "") and not list(tmp_path.iterdir())


def test_another_process_reads_the_same_file(tmp_path: Path) -> None:
    made = from_datasets(clients(), keep="disk", folder=tmp_path).to(dtype=torch.float64)
    sent = pickle.dumps(made)
    assert len(sent) < 4000
    for twin in (pickle.loads(sent), copy.deepcopy(made)):
        assert torch.equal(twin.client(2)[0], made.client(2)[0])
        del twin
        gc.collect()
    assert len(kept(tmp_path)) == 2
    del made
    gc.collect()
    with pytest.raises(DataError, match="are gone: the process that wrote them"):
        pickle.loads(sent)


def test_what_was_fetched_is_a_copy() -> None:
    made = from_datasets(clients(), keep="disk")
    before = made.client(0)[0]
    made.client(0)[0].zero_()
    made.x[0:3].zero_()
    assert torch.equal(made.client(0)[0], before)


# ---- what can go wrong ---------------------------------------------------------------------------
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_is_named_and_nothing_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk, "_os_pwrite", full)
    with pytest.raises(DataError, match=f"(?i)cannot write .*{os.strerror(number)}.*folder=") as e:
        from_datasets(clients(), keep="disk", folder=tmp_path)
    assert isinstance(e.value.__cause__, OSError) and not list(tmp_path.iterdir())
    assert "resume" not in str(e.value)


def test_a_folder_that_may_not_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*given: Any, **options: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(spool.tempfile, "mkdtemp", refuse)
    with pytest.raises(DataError, match=r"permission denied.*folder writable"):
        from_datasets(clients(), keep="disk", folder=tmp_path)


def test_a_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot create the folder"):
        from_datasets(clients(), keep="disk", folder=tmp_path / "file" / "below")


@pytest.mark.parametrize("keep", ["dsik", None, ["disk"]])
def test_an_unknown_place_is_refused(keep: Any) -> None:
    with pytest.raises(ConfigError, match=r"no place named .*Known: auto, memory, disk"):
        from_datasets(clients(), keep=keep)


def test_a_bad_example_is_found_before_it_is_written(tmp_path: Path) -> None:
    bad = clients()
    bad[2].tensors[0][6, 1, 1] = math.nan
    with pytest.raises(DataError, match="x of client 2, example 6, holds NaN"):
        from_datasets(bad, keep="disk", folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_rows_without_anything_in_them() -> None:
    made = from_datasets([TensorDataset(torch.zeros(3, 0), torch.arange(3))], keep="disk")
    assert made.client(0)[0].shape == (3, 0)


# ---- how much is free ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ({}, sys.maxsize),
        ({"max": "max", "current": "5", "stat": ""}, sys.maxsize),
        ({"max": "900", "current": "500", "stat": "anon 300\nfile 200\n"}, 400),
        ({"max": "900", "current": "500", "stat": "active_file 50\ninactive_file 150\n"}, 600),
        ({"max": "900", "current": "950", "stat": "active_file 0\n"}, 0),
    ],
)
def test_a_container_s_limit_counts_without_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], allowed: int
) -> None:
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(spool, "CONTAINER", tmp_path)
    assert spool._allowed() == allowed
    assert spool._available() > 0 and spool.free_memory() <= max(allowed, 0)
