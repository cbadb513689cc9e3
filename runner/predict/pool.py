"""Predicts many configurations in several processes, which are forked by a forkserver that imports torch only once."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.devices import cores, expected_devices
from meshrunner.runner.config.experiment import check
from meshrunner.runner.config.hardware import CPU, GPU
from meshrunner.runner.console import one_line
from meshrunner.runner.predict.forecast import Forecast, not_planned, why
from meshrunner.runner.process import forkserver

MOST = 8
"""Maximum number of prediction processes at a time. Each process takes a few hundred MiB of host memory."""
REPLACED_AFTER = 40
"""Number of predictions after which a process is replaced, because each prediction leaves about 2 MiB in torch's caches."""
NOT_IN_TIME = not_planned("the time limit for predictions was reached")


def predict_all(
    configs: Sequence[dict[str, Any]],
    *,
    active_only: bool,
    variants: Sequence[GPU | CPU] = (),
    within_s: float | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[Forecast]:
    """Return a forecast for each run. All runs must have passed `consistency.fit`. Stop after `within_s` seconds in total; the
    forecast of a run without a prediction is then NOT_IN_TIME. After each prediction, call `progress` with the number of
    predicted runs and the number of all runs. `active_only`, `variants`: see `predict`."""
    found = [NOT_IN_TIME] * len(configs)
    deadline = None if within_s is None else time.monotonic() + within_s
    numbers, done = iter(range(len(configs))), 0
    children: dict[Connection, BaseProcess] = {}
    busy: dict[Connection, int] = {}

    def hand_over(connection: Connection | None = None) -> None:
        """Send the next configuration, if any, to the process at `connection`, or to a new process if `connection` is None."""
        if (number := next(numbers, None)) is None:
            return
        if connection is None:
            connection, process = _start(number, {"active_only": active_only, "variants": variants})
            children[connection] = process
        busy[connection] = number
        with suppress(OSError):  # if the process has exited, `recv` below fails
            connection.send(configs[number])

    forkserver.warm()
    try:
        for _ in range(min(cores(), MOST)):
            hand_over()
        while busy:
            ready = wait(list(busy), None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in [each for each in busy if each in ready]:
                number, process = busy.pop(connection), children[connection]
                try:
                    found[number], last = connection.recv()
                    hand_over(None if last else connection)
                except (EOFError, OSError):
                    process.join()
                    found[number] = not_planned(f"the prediction process ended with exit status {process.exitcode}")
                    hand_over()
                done += 1
                progress(done, len(configs))
    finally:
        for connection, process in children.items():
            process.kill()
            process.join()
            connection.close()
    return found


def _start(number: int, options: dict[str, Any]) -> tuple[Connection, BaseProcess]:
    ours, theirs = forkserver.context.Pipe()
    log = Path(forkserver.temporary_folder()) / f"plan{number}.log"
    process = forkserver.child(log, os.environ, _answer, theirs, options, name="plan", daemon=True)
    process.start()
    theirs.close()  # if this copy stayed open, the child's exit would go unnoticed
    return ours, process


def _answer(connection: Connection, options: dict[str, Any]) -> int:
    for left in reversed(range(REPLACED_AFTER)):
        connection.send((_predicted(connection.recv(), **options), left == 0))
    return 0


def _predicted(config: dict[str, Any], **options: Any) -> Forecast:
    from meshrunner.runner.predict.predict import predict

    try:
        experiment = check(config)
        return predict(experiment, expected_devices(experiment), **options)
    except ConfigError as error:
        return not_planned(one_line(str(error)))
    except Exception as error:  # a user's model may raise anything
        return not_planned(why(error))
