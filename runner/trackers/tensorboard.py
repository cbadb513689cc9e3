"""tracker=tensorboard: event files for `tensorboard --logdir RUN_OR_SWEEP_DIR`, written without torch or TensorFlow."""

import json
import time
from pathlib import Path
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
"""Keys of a row of events.jsonl for which no curve is drawn. TensorBoard stores `time` with each point of every curve."""


class TensorBoard(Tracker):
    """Event files in `RUN_DIR/tensorboard`, with a separate file for the HParams tab in `RUN_DIR/tensorboard/hparams`."""

    def open(self, run: RunRecord) -> Sink:
        # Each attempt writes all rows. With the files of earlier attempts, TensorBoard would draw these steps twice.
        for earlier in (run.run_dir / TENSORBOARD).rglob("events.out.tfevents.*"):
            earlier.unlink()
        return TensorBoardRun(run)


class TensorBoardRun:
    """The event files of a run: curves and texts in `tensorboard`, settings and final figures in `tensorboard/hparams`. The files
    are separate because the HParams tab shows every scalar in the file with the settings as a metric."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run
        self._curves = EventFile(run.run_dir / TENSORBOARD)
        self._hparams: EventFile | None = None
        self._last_step = 0
        self._curves.text("config", indent(yaml.safe_dump(run.config, sort_keys=False), VERBATIM))
        self._curves.text("tags", ", ".join(run.tags))

    def log(self, row: StepRow) -> None:
        self._begin_hparams()
        self._last_step = row.step
        figures = {key: value for key, value in row.items() if key not in NO_CHART and number(value) is not None}
        self._curves.scalars(figures, row.step, row.get("time"))

    def finish(self, summary: dict[str, Any], state: str, reason: str) -> None:
        hparams = self._begin_hparams()  # a run may end before its first row
        results = {figure.summary_keys[0]: number(summary.get(figure.summary_keys[0])) for figure in table_figures()}
        hparams.scalars({key: value for key, value in results.items() if value is not None}, self._last_step)
        hparams.session_end(completed=state == "completed")
        self._curves.text("summary", indent(json.dumps(summary, indent=2), VERBATIM), self._last_step)
        self._curves.text("state", f"{state}: {reason}" if reason else state, self._last_step)
        for file in (self._curves, hparams):
            file.close()

    def _begin_hparams(self) -> "EventFile":
        if self._hparams is None:
            self._hparams = EventFile(self._run.run_dir / HPARAMS)
            self._hparams.session_start(settings(self._run.describe()))
        return self._hparams


class EventFile:
    """A TensorBoard event file: scalars, Markdown texts, and the start and end of a session for the HParams tab."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder), flush_secs=5)

    def scalars(self, figures: dict[str, Any], step: int, at: float | None = None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=value) for key, value in figures.items()]
        self._write(Summary(value=values), step, at)

    def text(self, tag: str, text: str, step: int = 0) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._write(text_pb(f"{tag}/text_summary", text), step)

    def session_start(self, settings: dict[str, Any]) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        plain = {
            key: value if isinstance(value, str | int | float) else json.dumps(value) for key, value in settings.items()
        }
        self._write(hparams_pb(plain, trial_id=""), 0)  # the default id would merge runs with equal settings

    def session_end(self, *, completed: bool) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        info = SessionEndInfo(status=STATUS_SUCCESS if completed else STATUS_FAILURE, end_time_secs=time.time())
        about = metadata.create_summary_metadata(HParamsPluginData(session_end_info=info))
        value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about, tensor=metadata.NULL_TENSOR)
        self._write(Summary(value=[value]), 0)

    def close(self) -> None:
        self._writer.close()

    def _write(self, summary: Any, step: int, at: float | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=at or time.time(), step=step, summary=summary))
