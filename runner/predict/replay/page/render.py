"""Writes the HTML page of a forecast: one file with the verdict, the predicted values and a chart of memory over a step. The page
works offline. It shares style and drawing code with the report page. Its scripts insert strings as text, never as markup."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from string import Template
from typing import Any

from meshrunner.runner.compare.page.write import PARTS as SHARED
from meshrunner.runner.compare.page.write import escape, put
from meshrunner.runner.ledger.allocations import CATEGORIES
from meshrunner.runner.predict.allocator.segments import GIB
from meshrunner.runner.predict.replay.timeline import Timeline

PAGE = Path(__file__).parent


def write_page(
    file: Path,
    command: str,
    verdict: str,
    findings: Sequence[str],
    figures: Sequence[tuple[str, str]],
    remarks: Sequence[str],
    timeline: Timeline | None,
) -> None:
    """Write the page. Raise ConfigError if writing fails. figures: pairs (name, value). findings, remarks: paragraphs."""

    def paragraphs(lines: Sequence[str]) -> str:
        return "".join(f"<p>{escape(line)}</p>" for line in lines)

    now = datetime.now().astimezone()
    page = Template((PAGE / "page.html").read_text()).substitute(
        verdict=escape(verdict),
        findings=paragraphs(findings),
        command=escape(command),
        moment=now.isoformat(timespec="seconds"),
        written=f"{now:%Y-%m-%d %H:%M %Z}",
        figures="".join(f"<dt>{escape(title)}</dt><dd>{escape(value)}</dd>" for title, value in figures),
        remarks=paragraphs(remarks),
        style=(SHARED / "page.css").read_text() + (PAGE / "page.css").read_text(),
        data=json.dumps(_chart(timeline), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=(SHARED / "svg.js").read_text() + (PAGE / "memory.js").read_text(),
    )
    put(page, file)


def _chart(timeline: Timeline | None) -> dict[str, Any] | None:
    """Return the chart's data in GiB without empty categories, or None if there are no points."""

    def gib(nbytes: int) -> float:
        return float(f"{nbytes / GIB:.6g}")

    if timeline is None or not timeline.points:
        return None
    points = timeline.points
    phases = {phase: index for index, phase in enumerate(dict.fromkeys(point.phase for point in points))}
    held = dict(zip(CATEGORIES, zip(*(point.by_category for point in points), strict=True), strict=True))
    reserved = [point.reserved for point in points if point.reserved is not None]
    return {
        "at": [point.at for point in points],
        "phase": [phases[point.phase] for point in points],
        "phases": list(map(str, phases)),
        "parts": timeline.parts,
        "categories": {name: list(map(gib, values)) for name, values in held.items() if any(values)},
        "reserved": list(map(gib, reserved)) or None,
        "capacity": gib(timeline.capacity),
        "memory": gib(timeline.memory),
    }
