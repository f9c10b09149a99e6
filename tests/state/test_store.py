from __future__ import annotations

import errno
import os
import tempfile

import pytest
import torch
from crashes import ENDS, MOMENTS, Death, Disk
from hypothesis import given, settings
from hypothesis import strategies as st
from states import PLACES, Memory, digest, flat, make, some_states, template

from undrift.core.tree import tree_map
from undrift.errors import (
    ChangedExperiment,
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    DataError,
)
from undrift.state import disk
from undrift.state.checkpoint import CheckpointFolder
from undrift.state.rows import HEADER
from undrift.state.store import ClientStateStore

IDS = st.lists(st.integers(0, 40), max_size=9, unique=True)
ACTIONS = st.lists(st.tuples(st.sampled_from(["stage", "commit", "rollback", "restart"]), IDS))


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS)
def test_every_tier_is_a_dict_of_trees(place, actions):
    with tempfile.TemporaryDirectory() as path:
        store = make(place, path)
        visible, staged = {}, {}
        for salt, (action, ids) in enumerate(actions):
            ids = [i for i in ids if i not in staged]
            if action == "stage":
                states = some_states(ids, salt)
                store.stage(ids, states)
                staged |= {i: digest(states, k) for k, i in enumerate(ids)}
            elif action == "restart":
                snapshot, store = store.snapshot(), make(place, path)
                store.restore(*snapshot)
                staged = {}
            else:
                getattr(store, action)()
                visible |= staged if action == "commit" else {}
                staged = {}
            everybody = list(range(45))
            got = store.gather(everybody)
            fresh = digest(template(), None)
            assert [digest(got, i) for i in everybody] == [visible.get(i, fresh) for i in everybody]
            assert store.seen == sorted(visible)


def test_a_gathered_tree_has_the_dtypes_and_shapes_of_its_template(store):
    states = store.gather(torch.tensor([3, 9]))
    assert states["m"].c.shape == (2, 3, 5) and states["m"].c.dtype == torch.float32
    assert states["m"].step.shape == (2,) and states["m"].step.dtype == torch.int64
    assert states["wide"].dtype == torch.float64 and states["flags"].dtype == torch.bool
    assert states["number"].dtype == torch.float32 and states["empty"].shape == (2, 0, 4)
    assert states["none"] is None
    assert all(v.is_contiguous() for v in flat(states))
    assert store.gather([])["m"].c.shape == (0, 3, 5)


def test_a_gathered_tree_is_a_copy(store):
    store.gather([1])["m"].c.fill_(9)
    assert (store.gather([1])["m"].c == 0.5).all()


def test_unseen_clients_cost_nothing(store):
    before = store.num_bytes
    store.gather(list(range(0, 10**6, 10**4)))
    assert store.num_bytes == before and store.seen == []
    assert store.row_floats == 15 + 1 + 2 + 3 + 3 + 0 + 1


def test_rows_are_used_again(store):
    for salt in range(40):
        store.stage([1, 2, 3], some_states([1, 2, 3], salt))
        store.commit() if salt % 2 else store.rollback()
    assert store.num_bytes <= 8 * 8 * 14 or store.num_bytes <= 3 * 4096  # in memory, on disk


def test_ids_may_be_far_apart(store):
    far = [2**31, 5, 10**9]  # 500 GB apparent in the file
    store.stage(far, some_states(far, 1))
    store.commit()
    assert digest(store.gather([10**9]), 0) == digest(some_states(far, 1), 2)
    assert store.num_bytes < 10**6


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("empty", [(), {"a": ()}, None])
def test_a_store_without_state_works_the_same(place, empty, tmp_path):
    store = make(place, tmp_path) if empty is None else make(place, tmp_path, like=empty)
    like = some_states([4, 2], 1) if empty is None else empty
    store.stage([4, 2], like)
    store.commit()
    store.seal()
    tensors, meta = store.snapshot()
    store.retain([tensors])
    store.restore(tensors, meta)
    assert store.seen == ([2, 4] if empty is None else []), "there is nothing to keep"
    if empty is not None:
        assert store.gather([1, 2]) == empty and store.row_floats == 0


def test_bad_calls_are_refused_and_change_nothing(store):
    good = some_states([1, 2], 1)
    store.stage([5], some_states([5], 1))
    for ids, states, told in [
        ([1, 1], good, "twice"),
        ([5, 6], good, "twice"),
        ([1, -2], good, "2\\^63"),
        ([1, 2**63], good, "2\\^63"),
        ([1.5, 2.5], good, "integers"),
        ([1, 2, 3], good, "expected"),
        ([1, 2], {**good, "wide": good["wide"].float()}, "'wide'.*float32.*expected.*float64"),
        ([1, 2], {"m": good["m"]}, "structure"),
    ]:
        with pytest.raises(DataError, match=told):
            store.stage(ids, states)
    store.commit()
    assert store.seen == [5]


def test_bad_settings_are_refused(tmp_path):
    for more, told in [
        ({"place": "moon"}, "moon"),
        ({"place": "file"}, "path"),
        ({"place": "file", "path": tmp_path / "a", "num_slots": 1}, "num_slots"),
    ]:
        with pytest.raises(ConfigError, match=told):
            ClientStateStore(template(), dtype=torch.float32, **more)
    with pytest.raises(ConfigError, match="too wide"):
        make("device", tmp_path, like=torch.zeros(1, dtype=torch.complex128))


def test_a_snapshot_of_another_kind_of_state_is_refused(tmp_path):
    tensors, meta = make("device", tmp_path).snapshot()
    make("host", tmp_path).restore(tensors, meta)
    with pytest.raises(ChangedExperiment, match="kind"):
        make("file", tmp_path).restore(tensors, meta)
    with pytest.raises(ChangedExperiment, match="layout"):
        make("device", tmp_path, like=torch.zeros(3)).restore(tensors, meta)


# ---------------------------------------------------------------------------- the file


def written(path, ids=(0, 1, 2), **more):
    store = make("file", path, **more)
    store.stage(list(ids), some_states(ids, 3))
    store.commit()
    return store


def test_every_flipped_bit_of_a_row_is_found_and_its_client_named(tmp_path):
    store = written(tmp_path)
    path = tmp_path / "clients.rows"
    fd = os.open(path, os.O_RDWR)
    row = os.pread(fd, 8 * len(store.snapshot()[0]["template"]), HEADER)  # client 0, slot 0
    for bit in range(8 * len(row)):
        data = bytearray(row)
        data[bit // 8] ^= 1 << bit % 8
        os.pwrite(fd, data, HEADER)
        with pytest.raises(CorruptCheckpoint, match=r"client 0 .*not what was written") as caught:
            store.gather([1, 0])
        assert str(path) in str(caught.value)
    assert len(store.gather([1, 2])["wide"]) == 2
    os.close(fd)


def test_a_lost_or_shortened_row_file_is_found(tmp_path):
    store = written(tmp_path)
    snapshot = store.snapshot()
    os.truncate(tmp_path / "clients.rows", 40)
    with pytest.raises(CorruptCheckpoint, match="missing"):
        store.gather([0])
    with pytest.raises(CorruptCheckpoint, match="Put the file"):
        make("file", tmp_path).restore(*snapshot)


def test_kept_checkpoints_keep_their_rows(tmp_path):
    store, tables, states = written(tmp_path), [], []
    for salt in range(12):
        store.stage([0, 1, 2], some_states([0, 1, 2], salt))
        store.commit()
        if salt % 3 == 0:
            tables, states = [*tables[-1:], store.snapshot()], [*states[-1:], salt]
            store.retain([tensors for tensors, _ in tables])
        for snapshot, then in zip(tables, states, strict=True):
            old = make("file", tmp_path)
            old.restore(*snapshot)
            assert digest(old.gather([1]), 0) == digest(some_states([0, 1, 2], then), 1)


def test_a_restored_snapshot_keeps_its_rows_at_once(tmp_path):
    snapshot, store = written(tmp_path).snapshot(), make("file", tmp_path)
    store.restore(*snapshot)
    for salt in range(4):
        store.stage([1], some_states([1], salt))
        store.commit()
    store.restore(*snapshot)
    assert digest(store.gather([1]), 0) == digest(some_states([0, 1, 2], 3), 1)


def test_running_out_of_slots_says_what_to_do(tmp_path):
    store = written(tmp_path, num_slots=2)
    store.retain([store.snapshot()[0]])
    store.stage([1], some_states([1], 1))
    store.commit()
    with pytest.raises(CheckpointError, match="retain"):
        store.stage([1], some_states([1], 2))


def test_a_full_disk_leaves_every_row_as_it_was(tmp_path, monkeypatch):
    store = written(tmp_path)
    before = digest(store.gather([0, 1, 2]), slice(None))
    real, room = os.pwrite, [100]

    def pwrite(fd, data, offset):
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(fd, data[: room[0]], offset)
        room[0] -= count
        return count

    for room[0] in range(0, 336, 16):
        monkeypatch.setattr(disk, "_os_pwrite", pwrite)
        with pytest.raises(CheckpointError, match=r"clients.rows: no space left.*Free some space"):
            store.stage([0, 1, 2], some_states([0, 1, 2], 8))
        store.rollback()
        monkeypatch.undo()
        assert digest(store.gather([0, 1, 2]), slice(None)) == before
    store.stage([0, 1, 2], some_states([0, 1, 2], 8))
    store.commit()
    assert digest(store.gather([0, 1, 2]), slice(None)) != before


def test_ids_beyond_any_file_are_refused(tmp_path):
    store = make("file", tmp_path)
    for client in (2**62, 2**56):
        with pytest.raises(CheckpointError, match=r"clients\.rows"):
            store.stage([client], some_states([client], 1))


def test_a_failed_sync_is_not_forgotten(tmp_path, monkeypatch):
    def fail(fd):
        raise OSError(errno.EIO, "Input/output error")

    store = written(tmp_path)
    monkeypatch.setattr(disk, "_os_fsync", fail)
    with pytest.raises(CheckpointError, match="input/output"):
        store.seal()
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="earlier sync failed"):
        store.seal()


# ---------------------------------------------------------------------------- with checkpoints


def table_of(tensors):
    return {k.removeprefix("clients."): v for k, v in tensors.items() if k.startswith("clients.")}


CONFIG = {"rounds": 6}


def run(path, place, num_clients=4, rounds=6, every=2):
    """A run as a driver must write it; picks up where the last one died."""
    folder = CheckpointFolder(path / "checkpoints")
    like = {"c": torch.full((3,), 0.1), "n": torch.tensor(0)}
    store = make(place, path, like=like)
    w, start, tables = torch.zeros(3), 0, {}
    found = folder.load(CONFIG)
    if found:
        w, start = found.tensors["w"], found.round
        tables = {c.round: table_of(c.tensors) for c in folder.kept()}
        store.restore(tables[start], found.meta["clients"])
        store.retain(tables.values())
    for round in range(start, rounds):
        ids = [(round * 5 + k * k) % num_clients for k in range(3)]
        ids = sorted(set(ids))
        for chunk in (ids[:2], ids[2:]):
            old = store.gather(chunk)
            store.stage(chunk, {"c": old["c"] * 1.1 + w + round, "n": old["n"] + 1})
        w = w * 0.9 + store.gather(ids)["c"].sum(0)
        store.commit()
        if (round + 1) % every == 0:
            store.seal()
            table, meta = store.snapshot()
            tensors = {"w": w, **{f"clients.{k}": v for k, v in table.items()}}
            folder.save(round + 1, tensors, {"clients": meta}, CONFIG)
            tables = dict(sorted({**tables, round + 1: table}.items())[-folder.keep :])
            store.retain(tables.values())
    everybody = store.gather(list(range(num_clients)))
    return w, everybody["c"], everybody["n"]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# "after" operation n is "before" operation n + 1: the two moments here are all there are.
DEATHS = [("file", moment, how) for moment in ("before", "half") for how in ENDS]


@pytest.mark.parametrize(("place", "moment", "how"), [*DEATHS, ("device", "before", "power")])
def test_a_death_at_any_operation_does_not_change_the_result(
    tmp_path, caplog, monkeypatch, place, moment, how
):
    monkeypatch.setattr(disk, "_os_fsync", lambda fd: None)  # `Disk` plays what is lost
    (tmp_path / "whole").mkdir()
    expected = run(tmp_path / "whole", place)
    for n in range(1, 200):
        path = tmp_path / str(n)
        path.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            machine = Disk(patch, path / "backup", n, moment)
            try:
                finished = run(path, place)
            except Death:
                machine.end(how)
            else:
                assert equal(finished, expected)
                break
        assert equal(run(path, place), expected), n
        assert not list(path.rglob(f"{disk.TEMPORARY}*"))
    assert n > (40 if place == "file" else 25) and not caplog.records


@pytest.mark.parametrize("how", ENDS)
def test_dying_again_and_again_still_arrives(tmp_path, how):
    (tmp_path / "whole").mkdir()
    expected = run(tmp_path / "whole", "file", rounds=8)
    path = tmp_path / "often"
    path.mkdir()
    for life in range(100):
        with pytest.MonkeyPatch.context() as patch:
            machine = Disk(patch, path / f"backup-{life}", 20 + life % 9, MOMENTS[life % 3])
            try:
                finished = run(path, "file", rounds=8)
                break
            except Death:
                machine.end(how)
    assert life > 2 and equal(finished, expected)


@pytest.mark.parametrize("place", ["file", "device"])
def test_a_corrupt_newest_checkpoint_costs_rounds_and_not_results(tmp_path, caplog, place):
    expected = run(tmp_path, place)
    newest = tmp_path / "checkpoints" / "round-00000006.undrift"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    assert equal(run(tmp_path, place), expected)
    assert [str(newest) in r.getMessage() for r in caplog.records] == [True]
    newest.write_bytes(data)
    assert equal(run(tmp_path, place), expected)  # the fallback is still there


@pytest.mark.parametrize("place", PLACES)
def test_a_hundred_clients_survive_a_restart(tmp_path, place):
    before = run(tmp_path, place, num_clients=100)
    after = run(tmp_path, place, num_clients=100)
    assert equal(before, after)
    never = (after[2] == 0).sum()
    assert never > 80 and (after[1][after[2] == 0] == 0.1).all()


def test_a_restart_keeps_the_template_that_unseen_clients_had(store, tmp_path):
    tensors, meta = store.snapshot()
    other = make("file" if meta["kind"] == "file" else "host", tmp_path, like=some_one())
    other.restore(tensors, meta)
    assert digest(other.gather([3]), 0) == digest(template(), None)


def some_one():
    states = some_states([0], 5)
    return {
        k: None if v is None else Memory(*(x[0] for x in v)) if k == "m" else v[0]
        for k, v in states.items()
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("place", PLACES)
def test_states_on_a_device_come_back_there(tmp_path, place):
    store, ids = make(place, tmp_path, device="cuda"), list(range(50))
    for salt in range(3):
        states = some_states(ids, salt)
        store.stage(ids, tree_map(lambda v: None if v is None else v.cuda(), states))
        store.commit()
        got = store.gather(torch.tensor(ids, device="cuda"))
        assert got["m"].c.device.type == "cuda" and store.gather([77])["m"].c.is_cuda
        back = tree_map(lambda v: None if v is None else v.cpu(), got)
        assert digest(back, slice(None)) == digest(states, slice(None))
    folder = CheckpointFolder(tmp_path / "checkpoints")
    tensors, meta = store.snapshot()
    folder.save(1, {**tensors, "w": torch.ones(3, device="cuda")}, meta, {})
    found, other = folder.load(), make(place, tmp_path, device="cuda")
    other.restore(found.tensors, found.meta)
    assert torch.equal(other.gather(ids)["flags"], got["flags"])
    assert torch.equal(found.tensors["w"], torch.ones(3))
