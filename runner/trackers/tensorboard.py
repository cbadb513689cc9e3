"""tracker=tensorboard: event files for `tensorboard --logdir RUN_OR_SWEEP_DIR`, written with torch's SummaryWriter."""

import json
import time
from functools import partial
from textwrap import indent
from typing import Any

import yaml

from meshrunner.runner.figures import number, table_figures
from meshrunner.runner.rundir import StepRow
from meshrunner.runner.rundir.files import HPARAMS, TENSORBOARD
from meshrunner.runner.trackers.base import Sink, Tracker
from meshrunner.runner.trackers.description import RunRecord, settings

VERBATIM = "    "
"""Indentation that makes Markdown show a line unchanged."""
NO_CHART = ("step", "attempt", "time", "profiled")
"""Keys of a row of events.jsonl for which no curve is drawn. `time` is the wall time of the row's point in every curve."""


class TensorBoard(Tracker):
    """Event files in `RUN_DIR/tensorboard`, with a separate file for the HParams tab in `RUN_DIR/tensorboard/hparams`."""

    def open(self, run: RunRecord) -> Sink:
        # Each attempt writes all rows, so files of earlier attempts would draw steps twice.
        for earlier in (run.run_dir / TENSORBOARD).rglob("events.out.tfevents.*"):
            earlier.unlink()
        return TensorBoardRun(run)


class TensorBoardRun:
    """The event files of a run: curves and texts in `tensorboard`, settings and final figures in `tensorboard/hparams`.

    The files are separate because the HParams tab shows every scalar in the settings file as a metric.
    """

    def __init__(self, run: RunRecord) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._run = run
        self._writer: Any = partial(SummaryWriter, flush_secs=5)
        self._curves = self._writer(run.run_dir / TENSORBOARD)
        self._hparams: Any = None
        self._last_step = 0
        self._curves.add_text("config", indent(yaml.safe_dump(run.config, sort_keys=False), VERBATIM), 0)
        self._curves.add_text("tags", ", ".join(run.tags), 0)

    def log(self, row: StepRow) -> None:
        self._begin_hparams()
        self._last_step = row.step
        for key, value in row.items():
            if key not in NO_CHART and number(value) is not None:
                self._curves.add_scalar(key, value, row.step, row.get("time"))

    def finish(self, summary: dict[str, Any], state: str, reason: str) -> None:
        hparams = self._begin_hparams()  # a run may end before its first row
        for key in (figure.summary_keys[0] for figure in table_figures()):
            if number(summary.get(key)) is not None:
                hparams.add_scalar(key, summary[key], self._last_step)
        hparams.file_writer.add_summary(session_end(completed=state == "completed"), 0)
        self._curves.add_text("summary", indent(json.dumps(summary, indent=2), VERBATIM), self._last_step)
        self._curves.add_text("state", f"{state}: {reason}" if reason else state, self._last_step)
        for file in (self._curves, hparams):
            file.close()

    def _begin_hparams(self) -> Any:
        if self._hparams is None:
            self._hparams = self._writer(self._run.run_dir / HPARAMS)
            self._hparams.file_writer.add_summary(session_start(settings(self._run.describe())), 0)
        return self._hparams


def session_start(settings: dict[str, Any]) -> Any:
    """Return a summary that shows a run's settings in the HParams tab."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    plain = {
        key: value if isinstance(value, str | int | float) else json.dumps(value) for key, value in settings.items()
    }
    return hparams_pb(plain, trial_id="")  # without an id, the tab would merge runs with equal settings


def session_end(*, completed: bool) -> Any:
    """Return a summary that shows in the HParams tab how a run ended."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    info = SessionEndInfo(status=STATUS_SUCCESS if completed else STATUS_FAILURE, end_time_secs=time.time())
    about = metadata.create_summary_metadata(HParamsPluginData(session_end_info=info))
    value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about, tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
