"""tracker=tensorboard, for `tensorboard --logdir RUN_OR_SWEEP_DIR`. Needs neither torch nor TensorFlow."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from meshrunner.runner.rundir.events import StepRow
from meshrunner.runner.rundir.files import TENSORBOARD
from meshrunner.runner.trackers.base import RunRecord, Sink, Tracker

FLUSH_S = 5
"""Seconds between flushes: the delay of a row."""


class TensorBoard(Tracker):
    """Event files in the folder `tensorboard` of the run directory."""

    def open(self, run: RunRecord) -> Sink:
        folder = run.run_dir / TENSORBOARD
        # Each attempt writes all rows: with a second file, repeated steps would be drawn twice.
        for earlier in folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        return EventFile(folder, run)


class EventFile:
    """An event file: scalars under the keys of events.jsonl, texts `config`, `tags`, `summary`, `state`."""

    def __init__(self, folder: Path, run: RunRecord) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)
        self._last_step = 0
        self._text("config", _as_code(yaml.safe_dump(run.config, sort_keys=False)))
        self._text("tags", ", ".join(run.tags))

    def log(self, row: StepRow) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._last_step = row["step"]
        figures = {key: value for key, value in row.items() if key != "step" and isinstance(value, int | float)}
        self._write(Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in figures.items()]))

    def finish(self, summary: dict[str, Any], state: str, reason: str) -> None:
        self._text("summary", _as_code(json.dumps(summary, indent=2)))
        self._text("state", f"{state}: {reason}" if reason else state)
        self._writer.close()

    def _text(self, tag: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._write(Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=plugin, tensor=tensor)]))

    def _write(self, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=self._last_step, summary=summary))


def _as_code(text: str) -> str:
    """Markdown that shows a text verbatim."""
    return "".join(f"    {line}\n" for line in text.splitlines())
