from __future__ import annotations

import errno
import os

import pytest
from crashes import ENDS, MOMENTS, Death, Disk

from undrift.errors import CheckpointError
from undrift.state import disk


def test_a_file_is_synced_before_its_name_and_the_name_before_returning(tmp_path, monkeypatch):
    recorded = Disk(monkeypatch, tmp_path / "backup")
    disk.write_atomically(tmp_path / "a", [b"one", memoryview(b"two")])
    names = [name for name, _ in recorded.calls]
    assert names == ["write_all", "write_all", "fsync", "replace", "fsync_directory"]
    assert recorded.calls[-1][1] == (tmp_path,)
    assert (tmp_path / "a").read_bytes() == b"onetwo"


def test_fsync_reaches_the_operating_system_in_order(tmp_path, monkeypatch):
    seen = []
    for name in ("_os_fsync", "_os_replace"):
        real = getattr(disk, name)
        monkeypatch.setattr(
            disk, name, lambda *a, name=name, real=real: (seen.append((name, a)), real(*a))[1]
        )
    is_directory = []
    real_fsync = disk._os_fsync
    monkeypatch.setattr(
        disk,
        "_os_fsync",
        lambda fd: (is_directory.append(os.path.isdir(f"/proc/self/fd/{fd}")), real_fsync(fd))[1],
    )
    disk.write_atomically(tmp_path / "a", [b"x"])
    assert [name for name, _ in seen] == ["_os_fsync", "_os_replace", "_os_fsync"]
    assert is_directory == [False, True]


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_at_any_operation_leaves_the_old_or_the_new_file(tmp_path, how, moment):
    for n in range(1, 100):
        path = tmp_path / str(n) / "a"
        path.parent.mkdir()
        path.write_bytes(b"old")
        with pytest.MonkeyPatch.context() as patch:
            machine = Disk(patch, tmp_path / f"backup-{n}", n, moment)
            try:
                disk.write_atomically(path, [b"n", b"ew"])
            except Death:
                machine.end(how)
            else:
                break
        assert path.read_bytes() in (b"old", b"new")
        disk.sweep(path.parent)
        assert os.listdir(path.parent) == ["a"]
    assert n == 6  # 5 operations were tried: write, write, fsync, rename, fsync of the folder


@pytest.mark.parametrize("name", ["_os_open", "_os_write", "_os_fsync", "_os_replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EACCES, errno.EIO])
def test_an_error_of_the_disk_leaves_the_old_file_and_names_the_path(
    tmp_path, monkeypatch, name, code
):
    def fail(*args):
        raise OSError(code, os.strerror(code))

    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(disk, name, fail)
    with pytest.raises(CheckpointError, match="then resume") as caught:
        disk.write_atomically(tmp_path / "a", [b"new"])
    assert str(tmp_path / "a") in str(caught.value)
    assert os.strerror(code).lower() in str(caught.value)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_an_interrupt_leaves_no_temporary_file(tmp_path):
    def chunks():
        yield b"some"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        disk.write_atomically(tmp_path / "a", chunks())
    assert os.listdir(tmp_path) == []


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real_write, real_pwrite = os.write, os.pwrite
    monkeypatch.setattr(disk, "_os_write", lambda fd, data: real_write(fd, data[:3]))
    monkeypatch.setattr(disk, "_os_pwrite", lambda fd, data, at: real_pwrite(fd, data[:3], at))
    disk.write_atomically(tmp_path / "a", [bytes(range(100)), b"", memoryview(b"")])
    assert (tmp_path / "a").read_bytes() == bytes(range(100))
    fd = disk.open_rows(tmp_path / "new" / "b")
    disk.pwrite_all(fd, bytes(range(50)), 10)
    os.close(fd)
    assert (tmp_path / "new" / "b").read_bytes() == bytes(10) + bytes(range(50))


def test_sweep_takes_the_files_of_the_dead_only(tmp_path):
    ours, strange = [f"{disk.TEMPORARY}{n}-a" for n in (os.getpid(), 4194305, 1)], ["a", ".tmp-9-a"]
    strange += [f"{disk.TEMPORARY}x", f"{disk.TEMPORARY}9", f"b{disk.TEMPORARY}4194305-a"]
    for name in (*ours, *strange):
        (tmp_path / name).touch()
    assert [p.name for p in disk.sweep(tmp_path)] == sorted(ours[:2])
    assert sorted(os.listdir(tmp_path)) == sorted([ours[2], *strange])  # process 1 is alive
    assert [p.name for p in disk.sweep(tmp_path, alone=True)] == [ours[2]]
    assert sorted(os.listdir(tmp_path)) == sorted(strange)


def test_what_a_killed_process_left_of_a_file_goes_when_it_is_written(tmp_path):
    for name in ("4194305-a", "4194305-b-a", "1-a", "4194305-aa"):
        (tmp_path / f"{disk.TEMPORARY}{name}").touch()
    disk.write_atomically(tmp_path / "a", [b"new"])
    left = [f"{disk.TEMPORARY}{name}" for name in ("4194305-b-a", "1-a", "4194305-aa")]
    assert sorted(os.listdir(tmp_path)) == sorted(["a", *left])


def test_removing_twice_is_no_error(tmp_path):
    (tmp_path / "a").touch()
    disk.remove(tmp_path / "a")
    disk.remove(tmp_path / "a")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(CheckpointError, match="a/b"):
        disk.open_rows(tmp_path / "a" / "b" / "rows")
    with pytest.raises(CheckpointError, match="cannot open"):
        disk.open_rows(tmp_path)
