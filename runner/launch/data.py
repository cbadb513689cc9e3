"""Prepare the data of a run before its workers start. A background process tokenises large data while the workers train."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from meshrunner.recipes.data.base import Data, DataSpec, different_data
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.console import shown, warn
from meshrunner.runner.process import forkserver
from meshrunner.runner.rundir import Summary, last_lines
from meshrunner.runner.rundir.files import DATA_LOG, EVAL_DATA_LOG, SUMMARY

POLL_S = 0.05
PRODUCER_GRACE_S = 2.0
"""Seconds to wait for the background process to exit after it has recorded an error."""


@contextmanager
def prepare_data(
    experiment: Experiment, run_dir: Path, workers: int, doing: Callable[[str], object] = lambda _: None
) -> Iterator[None]:
    """Prepare the data of the first steps, and the held-out data. During the `with` block, a background process (the producer)
    prepares the rest of both. If another run prepares the same data, the producer waits, and both runs read the same files. A
    few times a second, call `doing` with the name of the current work. workers: number per node. Raise ConfigError if the data
    is missing or unusable."""
    with _prepared(experiment.data, experiment.data_spec, run_dir / DATA_LOG, doing):
        degrees = experiment.parallelism.degrees(experiment.launch.nodes, workers)
        held_out = experiment.held_out(degrees.data)
        if held_out is None:
            yield
            return
        with _prepared(held_out.data, held_out.spec, run_dir / EVAL_DATA_LOG, doing):
            if remark := held_out.remark(held_out.data.open(held_out.spec)):
                warn(remark)
            yield


@contextmanager
def _prepared(data: Data, spec: DataSpec, log: Path, doing: Callable[[str], object]) -> Iterator[None]:
    doing("preparing the data: tokenizer and packed tokens")
    if not data.prepare(spec):
        yield
        return
    producer = forkserver.child(log, os.environ, _produce, data, spec, name="data", daemon=True)
    producer.start()
    try:
        _wait_until_started(data, spec, producer, log, doing)
        yield
    finally:
        producer.kill()
        producer.join()
        producer.close()


def refuse_other_data(experiment: Experiment, run_dir: Path) -> None:
    """Raise ConfigError if a run's data has changed since the run last trained on it."""
    before = Summary.read(run_dir / SUMMARY).data
    now = experiment.data.open(experiment.data_spec).describe()
    if before is not None and (what := different_data(before, now)):
        raise ConfigError(
            f"data: the {what} has changed since this run last trained. Because the configuration is the same, the "
            f"data files must have changed. To continue with the new files: meshrunner resume {run_dir} --force"
        )


def _produce(data: Data, spec: DataSpec) -> int:
    try:
        data.produce(spec)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _wait_until_started(
    data: Data, spec: DataSpec, producer: BaseProcess, log: Path, doing: Callable[[str], object]
) -> None:
    while True:
        ended = producer.exitcode is not None  # read before the check, because the producer may end during the check
        checked_at = time.monotonic()
        doing(f"reading and tokenising the first sequences of the data; log: {shown(log)}")
        try:
            if data.started(spec):
                return
        except ConfigError:
            producer.join(PRODUCER_GRACE_S)  # the log is complete once the producer has ended
            raise
        if ended:
            tail = "\n  ".join([f"The end of {log}:", *lines]) if (lines := last_lines(log)) else f"{log} is empty"
            raise ConfigError(f"data: reading failed (exit status {producer.exitcode}). {tail}")
        # Wait longer after a slow check: it may list thousands of files.
        producer.join(max(POLL_S, 5 * (time.monotonic() - checked_at)))
