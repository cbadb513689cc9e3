"""tracker=wandb: Weights & Biases. The default mode, offline, needs neither an account nor a network. The W&B runs of a sweep
form a W&B group. When the sweep ends, an additional W&B run of job type `comparison` stores the comparison table."""

import os
import shutil
from collections.abc import Callable
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from meshrunner.recipes.secrets import is_secret
from meshrunner.runner.rundir import StepRow
from meshrunner.runner.rundir.files import WANDB
from meshrunner.runner.trackers.base import Sink, Tracker
from meshrunner.runner.trackers.description import RunRecord, SweepRecord

COMPARISON = "comparison"
"""Job type of the W&B run that holds a sweep's comparison table. The table's key in this W&B run is the same word."""
NO_CHART = ("train/tokens", "step", "time", "attempt", "profiled")
"""Keys of a row of events.jsonl for which W&B draws no chart."""


class Wandb(Tracker):
    """Weights & Biases: one W&B run for each run directory, with files in `RUN_DIR/wandb`. All attempts share one W&B id."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    """offline: upload later with `meshrunner sync DIR`; online: needs `wandb login` or WANDB_API_KEY; disabled: no tracking."""
    project: str = Field(default="meshrunner", pattern=r"^[^/\\#?%:]{1,128}$")
    """The W&B project."""
    entity: str | None = None
    """W&B user or team; null: the account's default."""
    group: str | None = None
    """W&B group; null: the title of the run's sweep (`2026-01-31 14:05 parallelism x lr`), or no group for a single run."""
    job_type: str | None = "train"
    """W&B job type of the run."""
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = []
    """Additional tags. A run always has a tag for each option that is not its group's default, such as `parallelism=fsdp1`."""
    name: str | None = None
    """Name of the W&B run; null: name of the run directory."""

    @property
    def active(self) -> bool:
        return self.mode != "disabled"

    def remarks(self) -> list[str]:
        if self.mode != "online" or logged_in():
            return []
        return [
            "tracker.mode=online: not logged in to W&B, so nothing will be tracked; run `wandb login`, or use "
            "tracker.mode=offline"
        ]

    def open(self, run: RunRecord) -> Sink:
        """Open a W&B run. With mode=online, raise wandb.errors.Error if no API key is set or no server answers within 90 s."""
        started = self._start(run, run.run_dir, job_type=self.job_type, name=self.name or run.name, config=run.config)
        started.define_metric("train/*", step_metric="train/tokens")  # tokens are comparable across batch sizes
        for key in NO_CHART:
            started.define_metric(key, hidden=True)
        return WandbRun(started, run.describe)

    def compare(self, sweep: SweepRecord) -> None:
        """Log the comparison table of a sweep to a separate W&B run. Raise the same errors as `open`."""
        name, notes = f"{COMPARISON} {self.group or sweep.group}", "\n".join(sweep.findings) or None
        started = self._start(sweep, sweep.sweep_dir, job_type=COMPARISON, name=name, notes=notes, config=sweep.shared)
        import wandb  # after `_start` has set wandb's environment variables

        cells = [row | {"runs": ", ".join(Path(run["directory"]).name for run in row["runs"])} for row in sweep.rows]
        data = [list(row.values()) for row in cells]
        started.log({COMPARISON: wandb.Table(columns=list(cells[0]), data=data, allow_mixed_types=True)})
        WandbRun(started, lambda: sweep.shared).finish({"findings": sweep.findings}, "completed", "")

    def _start(self, record: RunRecord | SweepRecord, folder: Path, **settings: Any) -> Any:
        """Start or resume the W&B run of a run or sweep, with its files in `folder`. Return the result of `wandb.init`."""
        if self.mode == "offline":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # else, wandb-core sends reports of its crashes
        for name in [name for name in os.environ if name.startswith("SLURM_") and is_secret(name)]:
            del os.environ[name]  # W&B records all SLURM variables, even secrets
        import wandb

        group = self.group or record.group
        started = wandb.init(
            id=record.run_id,
            mode=self.mode,
            project=self.project,
            entity=self.entity,
            dir=folder,
            resume="allow" if self.mode == "online" else None,
            group=group and group[:128],  # W&B accepts at most 128 characters
            tags=list(dict.fromkeys([*record.tags, *self.tags])),
            **settings,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
            ),
        )
        # Each attempt records all rows in its own segment. During a sync, segments with the same id overwrite each other.
        for segment in (folder / WANDB).glob(f"offline-run-*-{record.run_id}"):
            if segment.resolve() != Path(started.dir).parent.resolve():
                shutil.rmtree(segment)
        return started


def logged_in() -> bool:
    """Return whether an API key for W&B is in the environment, or in the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host in netrc(os.environ.get("NETRC") or Path.home() / ".netrc").hosts
    except (OSError, ValueError, NetrcParseError):
        return False


class WandbRun:
    """An open W&B run. `describe` returns the run's settings and the facts known so far, such as the device."""

    def __init__(self, run: Any, describe: Callable[[], dict[str, Any]]) -> None:
        # Not at the top: psutil is slow to import, and `--help` imports this module.
        from meshrunner.runner.process.tree import descendants, process_name

        self._run = run
        self._describe = describe
        self._described = False
        self._core = [process for process in descendants(os.getpid()) if process_name(process).startswith("wandb-core")]
        self._last_step = self._sent = run.starting_step - 1  # last step on the server; -1 for a new run
        if self._last_step >= 0:
            print(f"W&B already has rows up to step {self._last_step}; sending only later rows")

    def log(self, row: StepRow) -> None:
        added = "eval/loss" in row and row.step == self._last_step > self._sent  # W&B adds figures to its newest row
        if row.step <= self._last_step and not added:
            return  # W&B cannot replace rows
        self._last_step = row.step
        self._check()
        if not self._described:
            self._run.config.update(self._describe(), allow_val_change=True)
            self._described = True
        kept = {key: value for key, value in row.items() if value is not None and not (added and key == "time")}
        self._run.log(kept, step=row.step)

    def finish(self, summary: dict[str, Any], state: str, reason: str) -> None:
        import wandb

        self._check()
        self._run.config.update(self._describe(), allow_val_change=True)
        known = {key: value for key, value in summary.items() if value is not None}
        self._run.summary.update(known | {"state": state, "reason": reason})
        if state == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if state == "completed" else 1)
        self._check()
        wandb.teardown()  # waits for wandb-core to end

    def _check(self) -> None:
        """Raise RuntimeError if wandb-core has ended. Without this check, wandb would hang or fail later with a socket error."""
        from meshrunner.runner.process.tree import is_alive

        if not all(map(is_alive, self._core)):
            raise RuntimeError("wandb-core, the process that writes and sends W&B's data, ended before the run did")
