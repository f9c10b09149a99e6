"""Keep the folders of programs out of `sys.path`, where `python -m undrift` puts the current one.

There a file of the user's (`statistics.py`, `random.py`) would stand for the module of that name.
The installed command `undrift` never has it there.  This runs before undrift imports anything.
"""

import os
import sys

ALONE = frozenset("bBdEiIOPqRsSuvx")  # options of Python that take no word


def _leave_current_folder() -> None:
    """Drop what `-m` has put first; a program that only imports undrift keeps its path."""
    if sys.flags.safe_path or sys.argv[:1] != ["-m"] or not _is_ours():
        return  # `-m` stands in the place of the program while its module is looked for
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


def _is_ours() -> bool:
    """Whether undrift is what `-m` names, as the next word or in the same one."""
    for word, following in zip(sys.orig_argv[1:], [*sys.orig_argv[2:], ""], strict=True):
        options, m, name = word[1:].partition("m")
        if word.startswith("-") and m and ALONE.issuperset(options):
            return (name or following).partition(".")[0] == "undrift"
    return False


def program_folder() -> str | None:
    """Name the folder of the program that runs, which Python puts first; None if there is none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None else os.path.dirname(os.path.abspath(file))


def shared_path() -> list[str]:
    """Give what a process of ours may import from: all that this one may, but no such folder."""
    own = {"", os.getcwd(), program_folder()} - {package_root()}
    return [entry for entry in sys.path if entry not in own]


def package_root() -> str:
    """Name the folder that has undrift in it."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _driver_folders_last() -> None:
    """In a worker of Ray, let the driver's folders, which Ray puts first, stand last.

    Classes of the driver's own modules are found there, but no file stands for an installed one.
    """
    ray = sys.modules.get("ray._private.worker")
    worker = getattr(ray, "global_worker", None)
    if ray is None or worker is None or worker.mode != ray.WORKER_MODE:
        return
    folders = {os.path.abspath(f) for f in worker.core_worker.get_job_config().py_driver_sys_path}
    folders -= {package_root()}
    sys.path.sort(key=lambda entry: os.path.abspath(entry) in folders)


_leave_current_folder()
_driver_folders_last()
