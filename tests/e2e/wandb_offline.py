"""Read what W&B wrote offline: a `.wandb` file is protocol buffers in leveldb's log format after a 7-byte header."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32768
HEADER = 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """The content of one segment."""

    id: str = ""
    project: str = ""
    name: str = ""
    group: str = ""
    job_type: str = ""
    tags: list[str] = field(default_factory=list)
    notes: str = ""
    axes: dict[str, str] = field(default_factory=dict)
    """Metric, or pattern of metrics -> the one over which it is drawn."""
    hidden: set[str] = field(default_factory=set)
    """Metrics without a chart."""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    preempting: bool = False
    exit_code: int | None = None


def read_offline_run(path: Path) -> OfflineRun:
    """Read one `.wandb` file; of a file that is still being written, what is there."""
    from wandb.proto import wandb_internal_pb2 as proto

    run = OfflineRun()
    for data in _records(path.read_bytes()):
        record = proto.Record()
        record.ParseFromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                run.id, run.project, run.name = record.run.run_id, record.run.project, record.run.display_name
                run.group, run.job_type, run.tags = record.run.run_group, record.run.job_type, list(record.run.tags)
                run.config |= _items(record.run.config.update)
                run.notes = record.run.notes
            case "metric":
                name = record.metric.name or record.metric.glob_name
                run.axes |= {name: record.metric.step_metric} if record.metric.step_metric else {}
                run.hidden |= {name} if record.metric.options.hidden else set()
            case "config":
                run.config |= _items(record.config.update)
            case "history":
                run.history.append(_items(record.history.item))
            case "summary":
                run.summary |= _items(record.summary.update)
            case "preempting":
                run.preempting = True
            case "exit":
                run.exit_code = record.exit.exit_code
    return run


def _items(items: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _records(log: bytes) -> Iterator[bytes]:
    if struct.unpack("<4sH", log[:6]) != (b":W&B", 0xBEE1):
        raise ValueError(f"not a W&B log: {log[:HEADER]!r}")
    at, parts = HEADER, b""
    while at + HEADER <= len(log):
        left = BLOCK - at % BLOCK
        crc, length, kind = struct.unpack("<IHB", log[at : at + HEADER])
        data = log[at + HEADER : at + HEADER + length]
        if left < HEADER or (kind == 0 and length == 0):
            at += left
            continue
        if len(data) < length:
            return
        if crc != zlib.crc32(data, zlib.crc32(bytes([kind]))):
            raise ValueError(f"damaged at byte {at}")
        at += HEADER + length
        parts = data if kind in (WHOLE, FIRST) else parts + data
        if kind in (WHOLE, LAST):
            yield parts
