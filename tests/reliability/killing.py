"""Many kills: the process that does them (bar B1)."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import time

from . import forked, tiny

ROUNDS = 6


class Watch:
    """One page shared with the child: how many saves it has begun and ended."""

    def __init__(self):
        self.page = mmap.mmap(-1, 4096)

    begun = property(lambda self: self.page[0])
    ended = property(lambda self: self.page[1])

    def over(self, run):
        """Let a trainer note its saves here."""
        save = run.save

        def watched(folder):
            self.page[0] += 1
            save(folder)
            self.page[1] += 1

        run.save = watched
        return run

    def reset(self):
        self.page[:2] = b"\0\0"


def run_to_the_end(place, store, every, watch):
    run = tiny.trainer(**tiny.stored(store, place))
    tiny.train(watch.over(run), place / "checkpoints", ROUNDS, every)
    (place / "fingerprint").write_text(tiny.fingerprint(run))


def at_a_moment(seconds):
    return lambda watch: time.sleep(seconds)


def in_a_save(number, seconds):
    """Wait until save `number` has begun, then a little."""

    def wait(watch):
        end = time.monotonic() + 5
        while watch.begun < number and time.monotonic() < end:
            pass
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            pass

    return wait


def killed(place, work, watch, wait):
    """Start a run and kill it; tell where it was, or None if it was done before."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    watch.reset()
    child = forked.start(work)
    wait(watch)
    os.kill(child, signal.SIGKILL)
    code = forked.finish(child)
    assert code in (0, -signal.SIGKILL), f"the run failed by itself: {code}"
    return None if code == 0 else (watch.ended, watch.begun > watch.ended)


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
    """Kill that many runs that save every so many rounds; resume each, and compare its end."""
    watch, chance = Watch(), random.Random(f"{store} {every}")

    def work():
        run_to_the_end(place, store, every, watch)

    length = min(timed_anew(place, work) for _ in range(2))
    expected = (place / "fingerprint").read_text()
    told = {"kills": 0, "same": 0, "finished before": 0, "in a save": 0, "after saves": []}
    while told["kills"] < kills:
        share = (told["kills"] + chance.random()) / kills  # spread over the whole run
        number = 1 + int(share * (ROUNDS // every))
        moments = [at_a_moment(share * length), in_a_save(number, chance.random() * 0.003)]
        found = killed(place, work, watch, moments[told["kills"] % 2])
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
