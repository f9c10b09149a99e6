"""Saves under a limit on the size of files, which the kernel enforces (bar B4)."""

from __future__ import annotations

import resource

from undrift.errors import CheckpointError

from . import tiny


def limit(size):
    # Python ignores SIGXFSZ, so the limit shows up as EFBIG.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def main(place):
    folder = place / "run"
    run = tiny.train(tiny.trainer(), folder, 2)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    size = len(before["round-00000002.undrift"])
    told = {"refused": 0, "unchanged": 0}
    for k in range(20):
        run.round()
        limit(k * size // 20)
        try:
            run.save(folder)
        except CheckpointError as error:
            told["refused"] += f"{folder}/round-" in str(error) and "ulimit -f" in str(error)
        told["unchanged"] += {p.name: p.read_bytes() for p in folder.iterdir()} == before
    limit(resource.RLIM_INFINITY)
    run.save(folder)
    again = tiny.trainer()
    told["same after"] = again.load(folder) and tiny.fingerprint(again) == tiny.fingerprint(run)
    return told
