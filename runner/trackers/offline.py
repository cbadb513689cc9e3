"""Finds W&B runs that were recorded offline, and uploads them with `wandb sync`."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from meshrunner.runner.console import one_line
from meshrunner.runner.rundir.files import WANDB, is_run, is_sweep

POLL_S = 0.2


@dataclass(frozen=True)
class OfflineRun:
    """A W&B run that was recorded offline: `folder`, the run or sweep directory, and `record`, the `.wandb` file inside it."""

    folder: Path
    record: Path

    @property
    def uploaded(self) -> bool:
        """Whether the whole `.wandb` file is uploaded. If so, W&B's `.synced` file is at least as new as the `.wandb` file."""
        try:
            return self.record.with_suffix(".wandb.synced").stat().st_mtime_ns >= self.record.stat().st_mtime_ns
        except FileNotFoundError:
            return False


def find_offline_runs(folder: Path) -> list[OfflineRun]:
    """Return the offline runs in all run and sweep directories at or below a directory, sorted by path."""
    found = []
    for path, below, _ in os.walk(folder):
        here = Path(path)
        if is_run(here) or is_sweep(here):
            found += [OfflineRun(here, record) for record in sorted((here / WANDB).glob("offline-run-*/*.wandb"))]
        # A run directory contains no other run, but its checkpoints may contain thousands of files, so skip its contents.
        below[:] = [] if is_run(here) else sorted(name for name in below if name != WANDB)
    return found


def server() -> str:
    """Return the URL of the W&B server, as set in the environment or in wandb's settings."""
    import wandb

    return str(wandb.setup().settings.base_url)


def silence(url: str) -> str:
    """Return the reason why a server does not answer, or "" if it answers. Without this check, wandb would retry for hours."""
    try:
        urlopen(Request(url, method="HEAD"), timeout=10).close()
    except HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", None) or error)
    return ""


def upload(runs: Sequence[OfflineRun], done: Callable[[OfflineRun], None]) -> str:
    """Upload runs with `wandb sync`. Call `done(run)` after each upload. Return the last line that `wandb sync` printed."""
    command = [sys.executable, "-m", "wandb", "sync", *(str(run.record.parent) for run in runs)]
    environment = os.environ | {"WANDB_ERROR_REPORTING": "false"}
    left = list(runs)
    with TemporaryFile() as output:
        # No stdin: the command would prompt for a key.
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            running = True
            while running:
                running = process.poll() is None  # checked before `uploaded`, so that no upload is missed
                for run in [run for run in left if run.uploaded]:
                    left.remove(run)
                    done(run)
                time.sleep(POLL_S if running else 0)
        finally:
            process.kill()  # needed after Ctrl-C; wandb-core then ends by itself
            process.wait()
        output.seek(0)
        lines = [one_line(line) for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("wandb: ") if lines else f"`wandb sync` ended with exit status {process.returncode}"
