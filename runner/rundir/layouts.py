"""The layouts that the attempts of a run were executed with. Figures of different layouts are never mixed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from meshrunner.recipes.config_keys import affecting, differences, flatten
from meshrunner.recipes.option import Affects
from meshrunner.runner.rundir.events import StepRow
from meshrunner.runner.rundir.files import LAYOUTS
from meshrunner.runner.rundir.records import Count, JsonFile


class Layout(JsonFile):
    """The settings that figures depend on, in force from an attempt on."""

    attempt: Count
    """The first attempt with this layout."""
    settings: dict[str, Any]
    """Flat keys of the configuration, and facts that it does not contain: devices and versions."""


class Layouts(JsonFile):
    """The content of `layouts.json`, in order."""

    layouts: list[Layout] = []


class EarlierLayout(JsonFile):
    """The steps that a run completed under an earlier layout. Its figures leave them out."""

    steps: tuple[Count, Count]
    """First and last step."""
    settings: dict[str, Any] | None = None
    """The settings that were different; null if they are not on record."""


def add_layout(run_dir: Path, attempt: int, config: dict[str, Any], facts: dict[str, Any]) -> None:
    """Record the layout of an attempt, unless the attempt before has the same."""
    settings = affecting(flatten(config), Affects.SPEED) | facts
    known = read_layouts(run_dir)
    if not known or known[-1].settings != settings:
        Layouts(layouts=[*known, Layout(attempt=attempt, settings=settings)]).write(run_dir / LAYOUTS)


def read_layouts(run_dir: Path) -> list[Layout]:
    """Return the recorded layouts in order; [] if there are none or they are damaged."""
    return Layouts.read(run_dir / LAYOUTS).layouts


def split_by_layout(
    rows: Sequence[StepRow], layouts: Sequence[Layout]
) -> tuple[Sequence[StepRow], list[EarlierLayout]]:
    """Return the rows of the last layout that has any, and the layouts of the steps before them."""

    def place(row: StepRow) -> int:
        return sum(layout.attempt <= row.attempt for layout in layouts)  # 0: not on record

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
        earlier.append(EarlierLayout(steps=(before[0].step, before[-1].step), settings=settings))
    return current, earlier
