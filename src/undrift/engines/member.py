"""The owner of some shards: a vectorised engine over their clients, and the files of their rows."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undrift.core.algorithm import Algorithm, Broadcast, Client
from undrift.core.round import finite_rows
from undrift.core.tree import EMPTY, Tree, leaves, tree_map
from undrift.engines.crew import (
    Brief,
    Common,
    Parcel,
    Part,
    Probed,
    failed,
    pack,
    unpack,
)
from undrift.engines.engine import Assignment, by_client
from undrift.engines.shard_rows import ShardFiles, entries_of, written
from undrift.engines.shards import ShardSum
from undrift.engines.vectorised import Vectorised
from undrift.state.rows import NOWHERE
from undrift.state.store import ClientStateStore

PREFIX = "undrift-rows-"
STALE = 3600.0  # seconds after which a folder of rows that nobody holds is swept


class Member:
    """Answers questions about its own clients; holds nothing that is not in its files."""

    def __init__(self, brief: Brief, device: torch.device | str = "cpu") -> None:
        self.number, self.device = brief.number, torch.device(device)
        task = brief.task.to(self.device)
        federation = brief.federation.to(self.device, task.dtype)
        self._scratch = None if brief.folder is not None else Scratch(brief.name)
        folder = brief.folder if self._scratch is None else self._scratch.path
        assert folder is not None
        store = ClientStateStore(
            brief.template,
            dtype=task.dtype,
            device=self.device,
            tier=lambda fresh: ShardFiles(fresh, folder, brief.num_slots),
        )
        tier = store.tier
        assert isinstance(tier, ShardFiles)
        self.tier = tier
        self.engine = Vectorised(task, federation, store, **brief.options)
        if brief.plan is not None:
            self.engine.use_plan(dict(brief.plan))
        self._answers: dict[str, tuple[Any, Any]] = {}  # the last one of each kind
        self._probes: tuple[Any, tuple[Tree, ...]] | None = None

    def ask(self, what: str, common: Any, own: Any) -> Any:
        """Answer a question; an error is an answer too."""
        try:
            return getattr(self, f"_{what}")(common, own)
        except Exception as error:  # whatever it is: who asked has to know
            return failed(error)

    # -- rounds --------------------------------------------------------------------------------
    def _probe(self, common: Any, own: Any) -> Any:
        return self._once("probe", common, own, self._probe_anew)

    def _train(self, common: Any, own: Any) -> Any:
        return self._once("train", common, own, self._train_anew)

    def _look(self, common: Any, own: Any) -> Any:
        return self._once("look", common, own, self._look_anew)

    def _once(self, what: str, common: Any, own: Any, answer: Callable[[Common, Part], Any]) -> Any:
        """Answer a question, or give the answer that it had before."""
        if self._answers.get(what, (None, None))[0] != common.key:
            self._answers.pop(what, None)  # before the new one: both may be large
            broadcast = unpack(common.broadcast, self.device)
            made = answer(common._replace(broadcast=broadcast), unpack(own))
            self._answers[what] = (common.key, pack(made))
            if self._scratch is not None:
                self._scratch.touch()
        return self._answers[what][1]

    def _probe_anew(self, common: Common, own: Part) -> Probed:
        clients, work = self._opened(common, own)
        probes = self._measure_probes(common.algo, common.broadcast, clients, work)
        self._probes = (common.key, probes)
        return Probed(tuple(shared_sums(common.algo, probes, work)))

    def _measure_probes(
        self, algo: Algorithm, broadcast: Broadcast, clients: Client, work: Assignment
    ) -> tuple[Tree, ...]:
        plain = broadcast._replace(cohort=tuple(EMPTY for _ in algo.parts))
        return self.engine.measure_clients("probe", algo, plain, clients, work)

    def _train_anew(self, common: Common, own: Part) -> Parcel:
        algo, broadcast = common.algo, common.broadcast
        clients, work = self._opened(common, own)
        if algo.uses("probe"):
            known, self._probes = self._probes, None
            if known is None or known[0] != common.key:
                known = (common.key, self._measure_probes(algo, broadcast, clients, work))
            clients = clients._replace(probe=known[1])
        total = ShardSum()
        rows = self.engine.add_clients(total, algo, broadcast, clients, work)
        after = self.engine.store.merged()
        self.engine.store.rollback()  # who asked decides what counts
        kept = [i for i, ok in zip(work.ids, rows.accepted.tolist(), strict=True) if ok]
        slots, marks = written([after.get(i, NOWHERE) for i in kept]).values()
        return Parcel(total.sums(), own.clients, rows, slots, marks, self.engine.plan())

    def _look_anew(self, common: Common, own: Part) -> tuple[Tree, ...]:
        clients, work = self._opened(common, own)
        return self.engine.measure_clients(
            "after_round", common.algo, common.broadcast, clients, work
        )

    def _opened(self, common: Common, own: Part) -> tuple[Client, Assignment]:
        """Put together what each client has and gets."""
        algo, ids = common.algo, own.clients.tolist()
        entries = entries_of(own.slots, own.fingerprints)
        found = zip(ids, entries, strict=True)
        self.engine.store.show({i: entry for i, entry in found if entry.place >= 0})
        device, dtype = self.device, self.engine.task.dtype
        info, notes = tree_map(lambda v: v.to(device), (own.info, own.notes))
        order = own.order.to(device)
        seed, round, steps = common.seed, common.key[1], own.steps
        work = Assignment(own.clients, info, order, steps, own.sizes, seed, round, common.plan)
        nothing = tuple(EMPTY for _ in algo.parts)
        state = self.engine.store.gather(ids)
        counted = steps.to(device, dtype)
        return Client(info, notes, state, nothing, nothing[:-1], counted), work

    # -- rows ----------------------------------------------------------------------------------
    def _read(self, common: Any, own: Any) -> Any:
        told = unpack(own)
        entries = entries_of(told["slots"], told["fingerprints"])
        return pack({"rows": self.tier.read(told["ids"].tolist(), [*entries])})

    def _write(self, common: Any, own: Any) -> Any:
        told = unpack(own)
        entries = self.tier.write(told["ids"].tolist(), told["rows"], {})
        return pack(written(entries))

    def _restore(self, common: Any, own: Any) -> None:
        told = unpack(own)
        self.tier.restore(told["ids"].tolist(), told)

    def _template(self, common: Any, own: Any) -> None:
        self.tier.fresh = unpack(common["template"])

    def _retain(self, common: Any, own: Any) -> None:
        self.tier.retain(unpack(common["tables"]))

    def _claim(self, common: Any, own: Any) -> None:
        self.tier.claim(Path(common["folder"]))

    def _seal(self, common: Any, own: Any) -> None:
        self.tier.seal()

    def _num_bytes(self, common: Any, own: Any) -> int:
        return self.tier.num_bytes

    def _use_plan(self, common: Any, own: Any) -> None:
        self.engine.use_plan(own)

    def _about(self, common: Any, own: Any) -> dict[str, Any]:
        threads, folder = torch.get_num_threads(), str(self.tier.folder)
        told = {"process": os.getpid(), "device": str(self.device)}
        return {**told, "threads": threads, "folder": folder}

    def _close(self, common: Any, own: Any) -> None:
        self.tier.close()
        if self._scratch is not None:
            self._scratch.remove()


def shared_sums(
    algo: Algorithm, probes: tuple[Tree, ...], work: Assignment
) -> Iterator[tuple[Any, Tensor]]:
    """Add up the probes that are shared, by size; what is not finite is left out."""
    for part, probe in zip(algo.parts, probes, strict=True):
        if not (part.shares_probe and leaves(probe)):
            yield EMPTY, torch.zeros((), dtype=torch.float64)
            continue
        size = work.info.size
        weighted = tree_map(lambda v, size=size: by_client(size, v) * v, probe)
        sound = finite_rows(weighted)
        total = ShardSum()
        total.add(work.ids, weighted, sound.tolist())
        yield total.sums(), size.double()[sound].sum()


class Scratch:
    """A folder for rows that outlives this process, and is swept when nobody holds it any more."""

    def __init__(self, name: str) -> None:
        self.path = self._place(name)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _place(self, name: str) -> Path:
        """Take shared memory if there is much, else the folder of temporary files."""
        memory, disk = Path("/dev/shm"), Path(tempfile.gettempdir())
        for base in (memory, disk):
            sweep(base)
            if (base / f"{PREFIX}{name}").is_dir():
                return base / f"{PREFIX}{name}"
        roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2**32
        return (memory if roomy else disk) / f"{PREFIX}{name}"

    def touch(self) -> None:
        """Say that the folder is in use."""
        os.utime(self._lock)

    def remove(self) -> None:
        """Delete the folder."""
        os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)


def remove_scratch(path: str) -> None:
    """Delete the folder of an owner that is gone, if it is on this machine."""
    if Path(path).name.startswith(PREFIX):
        shutil.rmtree(path, ignore_errors=True)


def sweep(base: Path) -> None:
    """Delete the folders of runs that were killed."""
    for path in base.glob(f"{PREFIX}*"):
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # somebody else's, or just being made
        try:
            if time.time() - os.fstat(lock).st_mtime > STALE:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # in use
        finally:
            os.close(lock)
