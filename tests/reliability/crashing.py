"""Dies before, amid and after single operations on the disk, every one or some (bar B2)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil

from undrift.data import Work
from undrift.state import disk

from . import forked, tiny
from .killing import OPERATIONS, warm

ROUNDS = 3
MOST = 1000  # operations of a run, by far
DEAD = 77  # how a child ends that died where it should


class Dying:
    """Counts the operations of `disk` and ends the process at the n-th."""

    def __init__(self, n, moment):
        self.n, self.moment, self.count = n, moment, 0
        names = OPERATIONS[:2] if moment == "half" else OPERATIONS  # only bytes have halves
        for name in names:
            setattr(disk, name, self.wrapped(getattr(disk, name)))

    def wrapped(self, real):
        def operation(first, *rest):
            self.count += 1
            here = self.count == self.n
            if here and self.moment == "before":
                os._exit(DEAD)
            if here and self.moment == "half":
                real(first, bytes(rest[0])[: len(rest[0]) // 2], *rest[1:])
                os._exit(DEAD)
            done = real(first, *rest)
            if here:
                os._exit(DEAD)
            return done

        return operation


def run_to_the_end(place, store):
    run = tiny.trainer(work=Work(steps=1, batch=4), **tiny.stored(store, place))
    tiny.train(run, place / "checkpoints", ROUNDS)
    (place / "fingerprint").write_text(tiny.fingerprint(run))


def died(place, store, n, moment):
    """Train in a child that dies at operation n; False if there was no such operation."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()

    def work():
        Dying(n, moment)
        run_to_the_end(place, store)

    code = forked.finish(forked.start(work))
    assert code in (0, DEAD), f"operation {n}, {moment}: the run failed by itself: {code}"
    return code == DEAD


def left_behind(place):
    """Digest all names and bytes; a temporary file carries the number of its process."""
    made = hashlib.sha256()
    for path in sorted(p for p in place.rglob("*") if p.is_file()):
        name = re.sub(rf"^{re.escape(disk.TEMPORARY)}\d+", "temporary", path.name)
        made.update(repr((name, path.read_bytes())).encode())
    return made.hexdigest()


def check_resumes(place, store, expected, where):
    resumed = forked.finish(forked.start(lambda: run_to_the_end(place, store)))
    assert resumed == 0, f"{where}: cannot be resumed"
    assert (place / "fingerprint").read_text() == expected, f"{where}: the run ended otherwise"
    left = [p.name for p in (place / "checkpoints").iterdir()]
    assert not any(name.startswith(disk.TEMPORARY) for name in left), left


def main(place, step, *moments):
    """Die at every step-th operation."""
    warm(place)
    told = {}
    for first, store in enumerate(("device", "file"), 1):
        at = range(first if int(step) > 1 else 1, MOST, int(step))
        told[store] = die_everywhere(place / store, store, at, moments)
    return told


def die_everywhere(place, store, at, moments):
    assert not died(place, store, 0, "before")
    expected = (place / "fingerprint").read_text()
    told, seen = {}, set()
    for moment in moments:
        told[moment] = 0
        for n in at:
            if not died(place, store, n, moment):
                break
            state = left_behind(place)
            if state not in seen:  # what was resumed from the same bytes would do the same
                check_resumes(place, store, expected, f"{store}, operation {n}, {moment}")
            seen.add(state)
            told[moment] += 1
        else:
            raise AssertionError(f"{store}: {MOST} operations are not all")
    return {**told, "states": len(seen)}
