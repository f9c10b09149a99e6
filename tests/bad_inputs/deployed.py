"""Federations of machines."""

from __future__ import annotations

from .case import command, left_no, ran

SILOS = "Federations of machines"
OPEN = ran("undrift deploy init silos my.toml --insecure")

CASES = [
    command(
        SILOS,
        "a folder that is no federation",
        "undrift deploy check silos",
        r"silos is no federation: `undrift deploy init silos digits`",
    ),
    command(
        SILOS,
        "a folder that is there already",
        "undrift deploy init silos my.toml --insecure",
        r"silos exists already: choose another folder",
        before=OPEN,
    ),
    command(
        SILOS,
        "a sweep",
        "undrift deploy init silos my.toml algorithm.lr=0.1,0.2 --insecure",
        r"one experiment, not 2: no sweeps",
        after=left_no("silos"),
    ),
    command(
        SILOS,
        "measurements that need everybody's examples",
        "undrift deploy init silos my.toml evaluate.drift=true --insecure",
        r"need everybody's examples in one place",
        after=left_no("silos"),
    ),
    command(
        SILOS,
        "a server that cannot be",
        "undrift deploy init silos my.toml --port 70000 --insecure",
        r"127\.0\.0\.1:70000 is no address of a server",
        after=left_no("silos"),
    ),
    command(
        SILOS,
        "keys of nobody",
        "undrift deploy keys silos",
        r"key\.pub is no public key: `ssh-keygen -t ecdsa -b 384` makes one",
        before=OPEN,
        needs=("cryptography",),
    ),
]
