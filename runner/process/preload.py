"""
The first module that the forkserver imports, for its side effects.

- Garbage collection is switched off: it would take 0.5 s of the 2.2 s that importing torch takes.
- A child ends without a traceback if its parent is interrupted before it sends the child's task: the child's stderr is still
  the user's terminal then.
- The forkserver removes the temporary files of a command that is killed.
"""

import atexit
import gc
import os
import shutil
from multiprocessing import spawn
from pickle import UnpicklingError

gc.disable()
if folder := os.environ.pop("MESHRUNNER_TEMPORARY", None):
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # children of the forkserver run no exit handlers
_main = spawn._main


def _main_of_parent(fd: int, parent_sentinel: int) -> int:
    """Run a child; return its exit code."""
    try:
        return int(_main(fd, parent_sentinel))
    except (EOFError, UnpicklingError):
        return 1


spawn._main = _main_of_parent
