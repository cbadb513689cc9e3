"""The layouts that the attempts of a run were executed under: figures of different ones are never mixed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from meshrunner.recipes.config_diff import differences, flatten, outside
from meshrunner.runner.rundir.events import StepRow
from meshrunner.runner.rundir.files import LAYOUTS, read_json, write_json

UNMEASURED = (
    "tracker", "sweep", "objective", "progress", "seed", "checkpoint", "steps", "measure_after", "log_every", "lr_schedule",
    "launch.port", "launch.start_timeout_minutes", "launch.timeout_minutes",
)  # fmt: skip
"""Keys, or sections, that a run may be resumed with other values of, and its speed and memory stay the same."""


class Layout(NamedTuple):
    """What figures depend on, from an attempt on."""

    attempt: int
    """The first attempt under it."""
    settings: dict[str, Any]
    """Flat: keys of the configuration, and what it does not say: devices, versions."""


def add_layout(run_dir: Path, attempt: int, config: dict[str, Any], facts: dict[str, Any]) -> None:
    """Record an attempt's layout, unless it is that of the attempt before."""
    settings = outside(flatten(config), UNMEASURED) | facts
    known = read_layouts(run_dir)
    if not known or known[-1].settings != settings:
        layouts = [layout._asdict() for layout in [*known, Layout(attempt, settings)]]
        write_json(run_dir / LAYOUTS, {"layouts": layouts})


def read_layouts(run_dir: Path) -> list[Layout]:
    """The layouts on record, in order; [] where there are none, or they are damaged."""
    try:
        return [
            Layout(int(each["attempt"]), dict(each["settings"])) for each in read_json(run_dir / LAYOUTS)["layouts"]
        ]
    except (KeyError, TypeError, ValueError):
        return []


def split_by_layout(
    rows: Sequence[StepRow], layouts: Sequence[Layout]
) -> tuple[Sequence[StepRow], list[dict[str, Any]]]:
    """
    The rows of the last layout that has any, and what the steps before them were measured under.

    Returns:
        The rows, and for each earlier layout `steps`, its first and last step, and `settings`, what was different from the
        last one; null where it is not on record.
    """

    def place(row: StepRow) -> int:
        return sum(layout.attempt <= row["attempt"] for layout in layouts)  # 0: not on record

    groups = [(number, list(each)) for number, each in groupby(rows, key=place)]
    if len(groups) < 2:
        return rows, []
    last, current = groups.pop()
    earlier = []
    for number, before in groups:
        settings = None
        if number:
            changed = differences(layouts[number - 1].settings, layouts[last - 1].settings)
            settings = {key: None if value is ... else value for key, value, _ in changed}
        earlier.append({"steps": [before[0]["step"], before[-1]["step"]], "settings": settings})
    return current, earlier
