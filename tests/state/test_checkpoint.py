from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import resource
import struct
import warnings

import pytest
import safetensors.torch
import torch
from crashes import ENDS, MOMENTS, Death, Disk

from undrift.errors import ChangedExperiment, CheckpointError, ConfigError, CorruptCheckpoint
from undrift.state import checkpoint, disk
from undrift.state.checkpoint import CheckpointFolder, read, verify

CONFIG = {
    "undrift": "0.1.0",
    "seed": 7,
    "algorithm": {"name": "scaffold", "lr": 0.1, "server": {"use": "yogi", "beta": [0.9, 0.99]}},
    "data": {"name": "digits", "alpha": 0.3, "clients": 100, "shuffle": True},
    "limits": {"low": -math.inf, "high": math.inf, "unknown": math.nan, "none": None},
}


def tensors(salt=0):
    return {"w": torch.arange(30.0) + salt, "round": torch.tensor(salt)}


def filled(path, rounds=(1, 2)):
    folder = CheckpointFolder(path)
    for r in rounds:
        folder.save(r, tensors(r), {"at": r}, CONFIG)
    return folder


def test_what_is_saved_comes_back(tmp_path):
    w = torch.randn(6, 4)
    given = {
        "plain": w,
        "transposed": w.t(),
        "every other": w[::2, 1:3],
        "expanded": torch.ones(1).expand(5),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "nothing": torch.zeros(0, 3),
        "ids": torch.tensor([2**62, -1]),
        "flags": torch.tensor([True, False]),
        "odd": torch.tensor([1, 2, 3], dtype=torch.int8),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "bits": torch.tensor([math.nan, math.inf, -0.0]),
        "one of a column": w[:1, 1],
        "grad": torch.ones(2, requires_grad=True),
        "negative": torch.imag(torch.tensor([1 + 2j]).conj()),
    }
    meta = {"nan": math.nan, "big": 10**30, "tiny": 5e-324, "text": "é\ud800\n", "none": [None, {}]}
    path = CheckpointFolder(tmp_path / "new" / "folder").save(3, given, meta, CONFIG)
    found = CheckpointFolder(tmp_path / "new" / "folder").load(CONFIG)
    assert path.name == "round-00000003.undrift" and found.round == 3
    for name, tensor in given.items():
        got = found.tensors[name]
        assert got.dtype == tensor.dtype and got.shape == tensor.shape, name
        assert torch.equal(bits(got), bits(tensor)), name
    assert math.isnan(found.meta.pop("nan")) and math.isnan(meta.pop("nan"))
    assert found.meta == meta
    payload = path.read_bytes()[checkpoint._HEADER_SIZE :]
    assert torch.equal(safetensors.torch.load(payload)["transposed"], w.t())


def bits(tensor):
    fresh = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return fresh.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert CheckpointFolder(tmp_path).load(CONFIG) is None
    assert CheckpointFolder(tmp_path / "missing").load() is None
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".undrift-tmp-3-round-00000001.undrift").touch()
    assert CheckpointFolder(tmp_path).load() is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, keep):
    folder = CheckpointFolder(tmp_path, keep=keep)
    for r in (1, 5, 9, 100_000_000, 100_000_001):
        folder.save(r, tensors(r), {}, {})
    assert folder.rounds == [5, 9, 100_000_000, 100_000_001][-keep:]
    assert [c.round for c in folder.kept()] == folder.rounds[::-1]
    assert CheckpointFolder(tmp_path).load().round == 100_000_001


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_at_any_operation_leaves_the_old_or_the_new(tmp_path, caplog, moment, how):
    for n in range(1, 100):
        path = tmp_path / str(n)
        filled(path)
        with pytest.MonkeyPatch.context() as patch:
            machine = Disk(patch, tmp_path / f"backup-{n}", n, moment)
            folder = CheckpointFolder(path)
            folder.load(CONFIG)
            try:
                folder.save(3, tensors(3), {"at": 3}, CONFIG)
            except Death:
                machine.end(how)
            else:
                break
        found = CheckpointFolder(path).load(CONFIG)
        assert found.round in (2, 3) and found.meta == {"at": found.round}
        assert torch.equal(found.tensors["w"], tensors(found.round)["w"])
    assert n >= 9 and not caplog.records


def test_the_old_one_is_deleted_after_the_new_one_is_durable(tmp_path, monkeypatch):
    folder = filled(tmp_path)
    recorded = Disk(monkeypatch, tmp_path / "backup")
    folder.save(3, tensors(3), {}, CONFIG)
    names = [name for name, _ in recorded.calls if name != "write_all"]
    assert names == ["fsync", "replace", "fsync_directory", "remove"]


def test_every_damage_is_found_and_the_previous_one_is_used(tmp_path, caplog):
    folder = filled(tmp_path)
    path = tmp_path / "round-00000002.undrift"
    sound, chance = path.read_bytes(), random.Random(1)
    places = [*range(8 * checkpoint._HEADER_SIZE)]  # every bit of the header, and 1000 anywhere
    places += [chance.randrange(8 * len(sound)) for _ in range(1000)]
    damaged = [flipped(sound, bit) for bit in places]
    damaged += [sound[: chance.randrange(len(sound))] for _ in range(199)] + [b""]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match="round-00000002"):
            verify(path)
        caplog.clear()
        assert folder.load(CONFIG).meta == {"at": 1}
        assert [r.name for r in caplog.records] == ["undrift"] and path.name in caplog.text


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_when_all_are_corrupt_each_is_named(tmp_path):
    folder = filled(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CorruptCheckpoint) as caught:
        folder.load()
    assert all(p.name in str(caught.value) for p in tmp_path.iterdir())


def sealed(payload, format=1, length=None):
    lead = struct.pack(
        "<8sIQ", checkpoint.MAGIC, format, len(payload) if length is None else length
    )
    return lead + hashlib.sha256(lead + payload).digest() + payload


def with_table(table, body=b""):
    text = json.dumps(table).encode()
    return sealed(struct.pack("<Q", len(text)) + text + body)


ABOUT = {"round": "2", "meta": "{}", "config": "{}"}
W = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
FORGED = {
    "a pickle": b"\x80\x04\x95" * 40,
    "another file": safetensors.torch.save({"w": torch.ones(30)}),
    "a huge length": sealed(b"x" * 20, length=2**63),
    "a huge table": sealed(struct.pack("<Q", 2**63) + b"{}"),
    "no table": sealed(b""),
    "no json": sealed(struct.pack("<Q", 2) + b"??"),
    "a list": with_table([1]),
    "no round": with_table({"__metadata__": {}}),
    "a wrong round": with_table({"__metadata__": {**ABOUT, "round": "3"}}),
    "a huge shape": with_table({"__metadata__": ABOUT, "w": {**W, "shape": [2**60]}}, b"1234"),
    "offsets outside": with_table({"__metadata__": ABOUT, "w": {**W, "data_offsets": [0, 2**40]}}),
    "an unknown type": with_table({"__metadata__": ABOUT, "w": {**W, "dtype": "F2"}}, b"1234"),
    "no tensor": with_table({"__metadata__": ABOUT, "w": 5}),
    "deep json": with_table({"__metadata__": {**ABOUT, "meta": "[" * 100_000}}),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_foreign_file_is_refused(tmp_path, name):
    filled(tmp_path)
    path = tmp_path / "round-00000002.undrift"
    path.write_bytes(FORGED[name])
    with pytest.raises(CorruptCheckpoint, match="round-00000002"):
        verify(path)
    assert CheckpointFolder(tmp_path).load().round == 1


def test_a_newer_format_is_not_taken_for_damage(tmp_path):
    folder = filled(tmp_path)
    (tmp_path / "round-00000002.undrift").write_bytes(sealed(b"of the future", format=2))
    with pytest.raises(CheckpointError, match="format 2") as caught:
        folder.load()
    assert not isinstance(caught.value, CorruptCheckpoint)


def test_a_file_that_the_disk_cannot_read_is_a_corrupt_one(tmp_path, monkeypatch):
    """Then an older one serves; a folder that cannot be listed is an error of its own."""
    folder = filled(tmp_path)

    def broken(path, file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_checked_payload", broken)
        with pytest.raises(CorruptCheckpoint, match="the disk cannot read it"):
            read(tmp_path / "round-00000002.undrift")
    monkeypatch.setattr(type(tmp_path), "iterdir", lambda self: broken(self, None))
    with pytest.raises(CheckpointError, match="list"):
        _ = folder.rounds


def test_an_unreadable_file_is_an_error_and_not_a_fallback(tmp_path):
    folder = filled(tmp_path)
    (tmp_path / "round-00000003.undrift").mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        folder.load()


def hashes(path):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.iterdir()}


LARGE = {"w": torch.arange(50_000.0)}
SIZES = [1 + 10_000 * k for k in range(20)]


def test_a_full_disk_at_twenty_sizes(tmp_path, monkeypatch):
    folder, real = filled(tmp_path), os.write
    before = hashes(tmp_path)
    for room in SIZES:
        left = [room]

        def write(fd, data, left=left):
            if not left[0]:
                raise OSError(28, os.strerror(28))
            count = real(fd, data[: left[0]])
            left[0] -= count
            return count

        monkeypatch.setattr(disk, "_os_write", write)
        with pytest.raises(CheckpointError, match=r"round-00000003.undrift: no space left"):
            folder.save(3, LARGE, {}, CONFIG)
        assert hashes(tmp_path) == before
    monkeypatch.undo()
    assert folder.save(3, LARGE, {}, CONFIG).exists()


def test_a_file_size_limit_at_twenty_sizes(tmp_path):
    folder = filled(tmp_path)
    before = hashes(tmp_path)
    assert in_a_child(lambda: [save_with_limit(folder, size) for size in SIZES]) == ""
    assert hashes(tmp_path) == before


def save_with_limit(folder, size):
    # Python ignores SIGXFSZ, so the limit shows up as EFBIG.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match=r"round-00000003.undrift: file too large.*ulimit"):
        folder.save(3, LARGE, {}, CONFIG)


def in_a_child(work):
    """Run in a forked process; returns what went wrong there."""
    out, into = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads
        child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(into, repr(error).encode()[:4000] or b"?")
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


CHANGES = {
    "undrift": "0.2.0",
    "seed": 8,
    "algorithm.name": "fedavg",
    "algorithm.lr": 0.1 + 1e-17 + 1e-16,
    "algorithm.server.use": "adam",
    "algorithm.server.beta.1": 0.999,
    "data.alpha": math.nan,
    "data.clients": "100",
    "data.shuffle": 1,
    "limits.low": math.inf,
    "limits.unknown": None,
    "limits.none": {},
}


@pytest.mark.parametrize("key", CHANGES)
def test_another_experiment_is_refused_with_the_difference(tmp_path, key):
    filled(tmp_path)
    other = json.loads(json.dumps(CONFIG))
    *parents, last = key.split(".")
    inner = other
    for name in parents:
        inner = inner[name]
    last = int(last) if last.isdigit() else last
    stored, inner[last] = inner[last], CHANGES[key]
    with pytest.raises(ChangedExperiment) as caught:
        CheckpointFolder(tmp_path).load(other)
    expected = f"\n  {key}: stored {stored!r}, given {CHANGES[key]!r}\n"
    assert expected in str(caught.value) and str(caught.value).count("stored") == 2
    assert CheckpointFolder(tmp_path).load(None).round == 2


def test_added_and_removed_settings_are_differences(tmp_path):
    filled(tmp_path)
    other = {k: v for k, v in CONFIG.items() if k != "seed"} | {"new": {"a": 1}}
    with pytest.raises(ChangedExperiment) as caught:
        CheckpointFolder(tmp_path).load(other)
    assert "  seed: stored 7, given (absent)" in str(caught.value)
    assert "  new.a: stored (absent), given 1" in str(caught.value)


def test_the_same_settings_written_otherwise_are_no_difference(tmp_path):
    filled(tmp_path)
    server = {"beta": (0.9, 0.99), "use": "yogi"}
    same = {**CONFIG, "seed": 7.0, "algorithm": {**CONFIG["algorithm"], "server": server}}
    assert CheckpointFolder(tmp_path).load(same).round == 2


def test_what_cannot_come_back_is_not_saved(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for given, meta, told in [
        ({}, {"a": {1: 2}}, r"meta\.a has the key 1"),
        ({}, {"a": [{"$float": "nan"}]}, r"meta\.a\.0"),
        ({}, {"a": {"b": torch.ones(1)}}, r"meta\.a\.b is tensor"),
        ({"__metadata__": torch.ones(1)}, {}, "__metadata__"),
        ({"\ud800": torch.ones(1)}, {}, "cannot be named"),
        ({"w": torch.ones(1, dtype=torch.complex64)}, {}, "'w' is torch.complex64"),
        ({"w": torch.eye(2).to_sparse()}, {}, "sparse"),
    ]:
        with pytest.raises(CheckpointError, match=told):
            folder.save(1, given, meta, {})
    assert list(tmp_path.iterdir()) == []


def test_a_header_too_large_for_other_readers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDRIFT_LIMITS", "names_bytes=1000")
    with pytest.raises(CheckpointError, match="Put large values into `tensors`"):
        CheckpointFolder(tmp_path).save(1, {}, {"a": "x" * 1000}, {})


def test_the_checkpoints_of_another_run_are_not_overwritten(tmp_path):
    filled(tmp_path, (7, 8))
    with pytest.raises(CheckpointError, match="round 8 that this run did not load"):
        CheckpointFolder(tmp_path).save(1, {}, {}, {})
    with pytest.raises(CheckpointError, match="did not load"):
        CheckpointFolder(tmp_path).save(9, {}, {}, {})
    folder = CheckpointFolder(tmp_path)
    folder.load()
    with pytest.raises(ConfigError, match="round 3"):
        folder.save(3, {}, {}, {})
    folder.save(8, tensors(), {}, {})  # again the same round: replaced
    with pytest.raises(ConfigError, match="keep"):
        CheckpointFolder(tmp_path, keep=0)


def test_after_a_fallback_corrupt_files_make_room(tmp_path):
    filled(tmp_path, (1, 2, 3))
    (tmp_path / "round-00000003.undrift").write_bytes(b"")
    folder = CheckpointFolder(tmp_path)
    assert folder.load().round == 2
    (tmp_path / "round-00000003.undrift").write_bytes(b"")
    for r in (3, 4, 5):
        folder.save(r, tensors(r), {}, CONFIG)
        assert [c.round for c in folder.kept()] == [r, r - 1]


def test_a_failed_sync_of_the_folder_does_not_lock_the_run_out(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error")

    folder = filled(tmp_path)
    monkeypatch.setattr(disk, "fsync_directory", fail)
    with pytest.raises(CheckpointError, match="may not survive"):
        folder.save(3, tensors(3), {}, CONFIG)
    assert folder.rounds == [1, 2, 3]
    monkeypatch.undo()
    folder.save(4, tensors(4), {}, CONFIG)
    assert folder.rounds == [3, 4] and read(tmp_path / "round-00000003.undrift").round == 3


def test_an_old_file_that_cannot_be_deleted_is_only_a_warning(tmp_path, monkeypatch, caplog):
    def fail(path):
        raise OSError(13, "Permission denied")

    folder = filled(tmp_path)
    monkeypatch.setattr(disk, "_os_remove", fail)
    folder.save(3, tensors(3), {}, CONFIG)
    assert "round-00000001" in caplog.text and folder.load().round == 3
    assert folder.rounds == [1, 2, 3] and [c.round for c in folder.kept()] == [3, 2]


def test_a_save_sweeps_what_killed_processes_left(tmp_path):
    (tmp_path / ".undrift-tmp-4194305-round-00000001.undrift").touch()
    filled(tmp_path, (1,))
    assert os.listdir(tmp_path) == ["round-00000001.undrift"]


def test_after_a_load_what_a_killed_save_had_to_delete_is_deleted(tmp_path, monkeypatch):
    folder = filled(tmp_path, (1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_prune", lambda: None)  # killed before it
        folder.save(3, tensors(3), {}, CONFIG)
    again = CheckpointFolder(tmp_path)
    assert again.load(CONFIG).round == 3 and again.rounds == [1, 2, 3]
    again.tidy()
    assert again.rounds == [2, 3]
    (tmp_path / "round-00000003.undrift").write_bytes(b"torn")
    folder.save(3, tensors(3), {}, CONFIG)
    (tmp_path / "round-00000003.undrift").write_bytes(b"torn")
    other = CheckpointFolder(tmp_path)
    assert other.load(CONFIG).round == 2
    other.tidy()
    assert other.rounds == [2, 3], "nothing has taken its place yet"
