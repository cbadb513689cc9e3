"""Ctrl-C at any moment leaves the lock of status.json free, so that the final state can be written."""

from __future__ import annotations

import fcntl
import sys
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from meshrunner.recipes.errors import Interrupted
from meshrunner.runner.rundir.files import STATUS_LOCK
from meshrunner.runner.rundir.states import claim, update_status


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # opened, but not locked yet
@pytest.mark.parametrize("change", [lambda folder: update_status(folder, workers=[]), claim])
def test_an_interrupt_at_any_line_leaves_the_lock_free(change: Any, tmp_path: Path) -> None:
    for number in count():
        folder = tmp_path / str(number)
        folder.mkdir()
        error = interrupted_at(number, change, folder)  # the exception is alive, and refers to all frames
        with (folder / STATUS_LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if error is None:
            break
    assert number > 10


def interrupted_at(number: int, change: Any, folder: Path) -> BaseException | None:
    """Call `change(folder)`, and raise Interrupted at the `number`th line or return of the functions that it calls.

    Return the exception, or None if there are fewer lines. Python handles signals only after calls, so the end of a `with`
    statement in the function itself is no such moment.
    """
    events = count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        within = frame.f_code not in (update_status.__code__, claim.__code__)
        if within and event in ("line", "return") and next(events) == number:
            raise Interrupted("by SIGINT")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        change(folder)
    except BaseException as error:  # pydantic wraps exceptions of its callbacks
        return error
    finally:
        sys.settrace(before)
    return None
