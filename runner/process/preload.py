"""
The forkserver's first import: what must be so before the others.

Garbage collection is off: it would take 0.5 s of the 2.2 s of importing torch. A child whose parent is interrupted before it
has said what to do ends without a traceback: until then its stderr is the user's terminal. The temporary
files of a command that is killed are removed.
"""

import gc
from multiprocessing import spawn
from pickle import UnpicklingError

from meshrunner.runner.process.temporary import remove_with_forkserver

gc.disable()
remove_with_forkserver()
_main = spawn._main


def _main_of_parent(fd: int, parent_sentinel: int) -> int:
    """Exit code of a child."""
    try:
        return int(_main(fd, parent_sentinel))
    except (EOFError, UnpicklingError):
        return 1


spawn._main = _main_of_parent
