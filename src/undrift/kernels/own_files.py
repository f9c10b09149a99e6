"""Files that nobody else can have written: they are executed, or decide what is.

A path is judged from its top: once a folder can only be changed by its owner or root, what lies in
it cannot be exchanged between this look and the next.  A file is opened once, and what was opened
is what is judged and read.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from functools import cache
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotOurs(PermissionError):
    """Somebody else could have written a file, or could exchange it."""


def make_own_folder(path: Path) -> Path:
    """Make a folder with those above it, or find it; gives its true path, or refuses it."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    check_folder(missing[-1].parent if missing else path)
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
    return check_folder(path)


def check_folder(path: Path) -> Path:
    """Give the true path of a folder; refuse one where others could exchange what lies in it."""
    whole = path.resolve()
    for one in (*reversed(whole.parents), whole):
        found = one.lstat()
        if not stat.S_ISDIR(found.st_mode) or not _is_safe(found, in_sticky=one != whole):
            raise NotOurs(f"{one} may be written by others: remove it, or set UNDRIFT_CACHE")
    return whole


def open_ours(path: Path) -> int:
    """Open a file for reading that is ours, in a folder that is; nothing else is ever read."""
    place = check_folder(path.parent) / path.name
    opened = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or not _is_safe(found, in_sticky=False):
            raise NotOurs(f"{path} may be written by others: remove it, or set UNDRIFT_CACHE")
    except BaseException:
        os.close(opened)
        raise
    return opened


def _is_safe(found: os.stat_result, *, in_sticky: bool) -> bool:
    """Whether only we and root may write; in a folder as /tmp, names belong to their makers."""
    if found.st_uid not in (os.geteuid(), 0):
        return False
    writers = found.st_mode & OTHERS
    if writers == stat.S_IWGRP and _is_own_group(found.st_gid):
        return True
    return not writers or (in_sticky and bool(found.st_mode & stat.S_ISVTX))


@cache
def _is_own_group(group: int) -> bool:
    """Whether a group has this user alone, as many systems make one for each."""
    try:
        name, told = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return told.gr_name == name and not set(told.gr_mem) - {name}


__all__ = ["NotOurs", "check_folder", "make_own_folder", "open_ours"]
