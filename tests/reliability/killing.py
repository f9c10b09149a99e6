"""Many kills: the process that does them (bar B1)."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import time

from undrift.state import disk

from . import forked, tiny

ROUNDS = 6
OPERATIONS = ("_os_write", "_os_pwrite", "_os_fsync", "_os_replace", "_os_remove")
OF_A_SAVE = 4  # at the least: its bytes, their sync, its name, the sync of the folder


class Watch:
    """One page shared with the child: how many saves it has begun and ended, where it is to die."""

    def __init__(self):
        self.page = mmap.mmap(-1, 4096)

    begun = property(lambda self: self.page[0])
    ended = property(lambda self: self.page[1])

    def aim(self, save=0, operation=0):
        """Begin anew; let the child die before this operation of this save, or nowhere."""
        self.page[:5] = bytes((0, 0, 0, save, operation))

    def over(self, run):
        """Let a trainer note its saves here, and die where it is told to."""
        save = run.save

        def watched(folder):
            self.page[0] += 1
            self.page[2] = 0
            save(folder)
            self.page[1] += 1

        run.save = watched
        for name in OPERATIONS:
            setattr(disk, name, self._counted(getattr(disk, name)))
        return run

    def _counted(self, real):
        def operation(*given):
            if self.begun > self.ended:
                self.page[2] += 1
                if (self.begun, self.page[2]) == (self.page[3], self.page[4]):
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*given)

        return operation


def run_to_the_end(place, store, every, watch):
    run = tiny.trainer(**tiny.stored(store, place))
    tiny.train(watch.over(run), place / "checkpoints", ROUNDS, every)
    (place / "fingerprint").write_text(tiny.fingerprint(run))


def killed(place, work, watch, *, after=None, save=0, operation=0):
    """Start a run that is killed after some seconds, or before an operation of a save.

    Tells where it was, or None if it was done before.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    watch.aim(save, operation)
    child = forked.start(work)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    code = forked.finish(child)
    assert code in (0, -signal.SIGKILL), f"the run failed by itself: {code}"
    found = None if code == 0 else (watch.ended, watch.begun > watch.ended)
    watch.aim()
    return found


def timed(work):
    start = time.monotonic()
    assert forked.finish(forked.start(work)) == 0
    return time.monotonic() - start


def timed_anew(place, work):
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    return timed(work)


def warm(place):
    """Import here, once, what torch imports late: every child would do it again."""
    run = tiny.trainer()
    run.round()
    run.save(place / "warm")


PARTS = [("device", 1), ("device", 2), ("file", 1), ("file", 2)]  # the store, rounds per save


def main(place, kills):
    warm(place)
    each, more = divmod(int(kills), len(PARTS))
    return [
        kill_some(place / f"{store}-{every}", store, every, each + (i < more))
        for i, (store, every) in enumerate(PARTS)
    ]


def kill_some(place, store, every, kills):
    """Kill a run, saved every so many rounds, so many times; resume each, and compare its end.

    Every second kill is aimed at a save, from the first one to the last; the others come when
    chance wants, and then nobody knows what they hit.
    """
    watch, chance = Watch(), random.Random(f"{store} {every}")

    def work():
        run_to_the_end(place, store, every, watch)

    length = min(timed_anew(place, work) for _ in range(2))
    expected = (place / "fingerprint").read_text()
    told = {"kills": 0, "same": 0, "finished before": 0, "in a save": 0, "after saves": []}
    while (number := told["kills"]) < kills:
        if number % 2 == 0:
            save = 1 + number * (ROUNDS // every) // (kills + kills % 2)
            found = killed(place, work, watch, save=save, operation=chance.randint(1, OF_A_SAVE))
        else:
            share = (number + chance.random()) / kills  # spread over the whole run
            found = killed(place, work, watch, after=share * length)
        if found is None:
            told["finished before"] += 1
            length *= 0.97  # the machine has become faster
            continue
        told["kills"] += 1
        told["after saves"].append(found[0])
        told["in a save"] += found[1]
        timed(work)
        told["same"] += (place / "fingerprint").read_text() == expected
    return told
