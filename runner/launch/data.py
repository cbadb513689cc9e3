"""Data, before workers exist: what is missing or unusable stops a run here; what takes long is read by a producer."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from meshrunner.recipes.data.base import Data, DataSpec
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.process import forkserver
from meshrunner.runner.rundir.files import data_log
from meshrunner.runner.rundir.logs import last_lines

if TYPE_CHECKING:
    from meshrunner.runner.config.experiment import Experiment

POLL_S = 0.05
NOTICE_S = 3.0
"""Seconds after which a person is told what is waited for."""
GRACE_S = 2.0


@contextmanager
def data_prepared(experiment: Experiment, run_dir: Path) -> Iterator[None]:
    """
    Inside, the data can be opened by workers; a producer reads on in the background where there is more to read.

    One producer at a time writes to a cache entry. That of a second run on this node waits for the first to end and
    then takes over, while the readers of both use what is there.

    Raises:
        ConfigError: the data is missing, unusable, or does not fit the model.
    """
    data = experiment.data
    spec = DataSpec(experiment.model.vocab_size, experiment.seq_len, experiment.seed)
    if not data.prepare(spec):
        yield
        return
    log = data_log(run_dir)
    arguments = (data, spec, log, dict(os.environ), list(sys.path))
    producer = forkserver.context.Process(target=_produce, args=arguments, name="data", daemon=True)
    producer.start()
    try:
        _wait_until_started(data, spec, producer, log)
        yield
    finally:
        _end(producer)


def _produce(data: Data, spec: DataSpec, log: Path, environment: dict[str, str], path: list[str]) -> None:
    forkserver.enter(log, environment, path)
    signal.signal(forkserver.END, signal.SIG_DFL)  # no stack in the log: this is the normal end, the record is exact
    status = 1
    try:
        data.produce(spec)
        status = 0
    except ConfigError as error:
        print(error, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads of pyarrow and fsspec can hang or crash while the interpreter is taken down


def _wait_until_started(data: Data, spec: DataSpec, producer: BaseProcess, log: Path) -> None:
    began, told = time.monotonic(), False
    while True:
        ended = producer.exitcode is not None  # asked before looking: its last record was written before its end
        asked = time.monotonic()
        if data.started(spec):
            return
        if ended:
            raise ConfigError(f"data: reading failed (exit status {producer.exitcode}). {_end_of(log)}")
        now = time.monotonic()
        if now - began > NOTICE_S and not told:
            print(f"data: reading and tokenising the first sequences; log: {log}", file=sys.stderr, flush=True)
            told = True
        producer.join(max(POLL_S, 5 * (now - asked)))  # looking may mean listing thousands of files


def _end_of(log: Path) -> str:
    lines = last_lines(log)
    return "\n  ".join([f"The end of {log}:", *lines]) if lines else f"{log} is empty"


def _end(producer: BaseProcess) -> None:
    if producer.exitcode is None and producer.pid is not None:
        os.kill(producer.pid, forkserver.END)
        producer.join(GRACE_S)
    if producer.exitcode is None:
        producer.kill()
        producer.join()
    producer.close()
