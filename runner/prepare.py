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
from typing import Protocol

from recipes.data.base import Data, Needs
from recipes.option import ConfigError
from runner import child

POLL_S = 0.05
NOTICE_S = 3.0
"""After so long a person is told what is waited for."""
GRACE_S = 2.0


class HasVocabulary(Protocol):
    @property
    def vocab_size(self) -> int: ...


class WantsData(Protocol):
    """What of an experiment matters here."""

    @property
    def data(self) -> Data: ...
    @property
    def model(self) -> HasVocabulary: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def seed(self) -> int: ...


@contextmanager
def prepared(experiment: WantsData, run_dir: Path) -> Iterator[None]:
    """
    Inside, the data can be opened by workers; a producer reads on in the background where there is more to read.

    One producer at a time writes to a cache entry. That of a second run on this node waits for the first to end and
    then takes over, while the readers of both use what is there.

    Raises:
        ConfigError: the data is missing, unusable, or does not fit the model.
    """
    data = experiment.data
    needs = Needs(experiment.model.vocab_size, experiment.seq_len, experiment.seed)
    if not data.prepare(needs):
        yield
        return
    log = run_dir / "logs" / "data.log"
    arguments = (data, needs, log, dict(os.environ), list(sys.path))
    producer = child.context.Process(target=_produce, args=arguments, name="data", daemon=True)
    producer.start()
    try:
        _wait_until_started(data, needs, producer, log)
        yield
    finally:
        _end(producer)


def _produce(data: Data, needs: Needs, log: Path, environment: dict[str, str], path: list[str]) -> None:
    child.enter(log, environment, path)
    signal.signal(child.END, signal.SIG_DFL)  # no stack in the log: this is the normal end, the record is exact
    status = 1
    try:
        data.produce(needs)
        status = 0
    except ConfigError as error:
        print(error, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads of pyarrow and fsspec can hang or crash while the interpreter is taken down


def _wait_until_started(data: Data, needs: Needs, producer: BaseProcess, log: Path) -> None:
    began, told = time.monotonic(), False
    while True:
        ended = producer.exitcode is not None  # asked before looking: its last record was written before its end
        asked = time.monotonic()
        if data.started(needs):
            return
        if ended:
            raise ConfigError(f"data: reading failed (exit status {producer.exitcode}). {_last_lines(log)}")
        now = time.monotonic()
        if now - began > NOTICE_S and not told:
            print(f"data: reading and tokenising the first sequences; log: {log}", file=sys.stderr, flush=True)
            told = True
        producer.join(max(POLL_S, 5 * (now - asked)))  # looking may mean listing thousands of files


def _last_lines(log: Path, count: int = 5) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    return "\n  ".join([f"The end of {log}:", *lines[-count:]]) if lines else f"{log} is empty"


def _end(producer: BaseProcess) -> None:
    if producer.exitcode is None and producer.pid is not None:
        os.kill(producer.pid, child.END)
        producer.join(GRACE_S)
    if producer.exitcode is None:
        producer.kill()
        producer.join()
    producer.close()
