"""A process that has imported torch and is cheap to fork: where runs are killed for the tests.

Started by `ask`; forking the process of pytest itself would be unsafe, for torch has threads there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

TESTS = Path(__file__).parent.parent
OLD_AGE = 240  # seconds until a process that hangs is given up


def ask(module, place, *words, main="main", hash_seed=None, patience=OLD_AGE):
    """Run a function of a module of this folder in a new process; give its answer."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
    env |= {} if hash_seed is None else {"PYTHONHASHSEED": str(hash_seed)}
    code = f"from reliability import forked, {module}; forked.answer({module}.{main})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(place), *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=patience,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def answer(main):
    import torch

    torch.set_num_threads(1)  # before any parallel work: a forked child has no thread pool
    place, *words = sys.argv[1:]
    print(json.dumps(main(Path(place), *words)))


def start(work):
    """Fork a child that does `work` and ends without a clean-up; give its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def finish(child):
    """Wait for a child; give its exit status, negative for the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
