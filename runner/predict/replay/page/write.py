"""
The page of a prediction: one file with the verdict, its figures and memory over a step. It opens from disk and asks no network.

Style and drawing are those of the report page, and as there the scripts put text into the page as text alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from string import Template
from typing import Any

from meshrunner.runner.compare.page.run_list import escape
from meshrunner.runner.compare.page.write import PARTS as SHARED
from meshrunner.runner.compare.page.write import put
from meshrunner.runner.ledger.categories import CATEGORIES
from meshrunner.runner.predict.replay.timeline import Timeline
from meshrunner.runner.predict.verdict import GIB

PARTS = Path(__file__).parent
"""What the file is put together from, besides what it shares with the report page."""


def write_page(
    file: Path,
    command: str,
    verdict: str,
    findings: Sequence[str],
    figures: Sequence[tuple[str, str]],
    remarks: Sequence[str],
    over_time: Timeline | None,
) -> None:
    """
    Write the page, replacing an older one at once.

    Args:
        command: that predicted it.
        findings: sentences below the verdict.
        figures: of the terminal's table: what, and how much.
        remarks: sentences below the figures.
        over_time: None: nothing is drawn.

    Raises:
        ConfigError: the file cannot be written.
    """
    now = datetime.now().astimezone()
    page = Template((PARTS / "page.html").read_text()).substitute(
        verdict=escape(verdict),
        findings=_paragraphs(findings),
        command=escape(command),
        moment=now.isoformat(timespec="seconds"),
        written=f"{now:%Y-%m-%d %H:%M %Z}",
        figures="".join(f"<dt>{escape(title)}</dt><dd>{escape(value)}</dd>" for title, value in figures),
        remarks=_paragraphs(remarks),
        style=(SHARED / "page.css").read_text() + (PARTS / "page.css").read_text(),
        data=json.dumps(_drawn(over_time), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=(SHARED / "svg.js").read_text() + (PARTS / "memory.js").read_text(),
    )
    put(page, file)


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _drawn(over_time: Timeline | None) -> dict[str, Any] | None:
    """What the script draws, in GiB; of the categories those that hold anything."""
    if over_time is None or not over_time.points:
        return None
    points = over_time.points
    phases = {phase: place for place, phase in enumerate(dict.fromkeys(point.phase for point in points))}
    held = dict(zip(CATEGORIES, zip(*(point.by_category for point in points), strict=True), strict=True))
    reserved = [point.reserved for point in points if point.reserved is not None]
    return {
        "at": [point.at for point in points],
        "phase": [phases[point.phase] for point in points],
        "phases": list(map(str, phases)),
        "parts": over_time.parts,
        "categories": {name: list(map(_gib, values)) for name, values in held.items() if any(values)},
        "reserved": list(map(_gib, reserved)) or None,
        "capacity": _gib(over_time.capacity),
        "memory": _gib(over_time.memory),
    }


def _gib(nbytes: int) -> float:
    return float(f"{nbytes / GIB:.6g}")
