"""The report page: one HTML file with the table, the charts and every run. It opens from disk and asks no network."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from datetime import datetime
from html import escape as escape_markup
from pathlib import Path
from statistics import median
from string import Template
from typing import Any
from urllib.parse import quote

from meshrunner.recipes.config_diff import flatten
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.secrets import is_secret
from meshrunner.runner.compare.cells import UNTESTED, columns, legend, reasons
from meshrunner.runner.compare.facts import facts
from meshrunner.runner.compare.findings import findings
from meshrunner.runner.compare.keys import text
from meshrunner.runner.compare.rows import Comparison, Row
from meshrunner.runner.compare.runs import Run
from meshrunner.runner.console import printable
from meshrunner.runner.figures import figure_of, number
from meshrunner.runner.rundir.files import ERROR, rank_log, read_json
from meshrunner.runner.rundir.logs import last_lines
from meshrunner.runner.rundir.states import is_count

PARTS = Path(__file__).parent
"""What the file is put together from."""
CHARTED = {
    "wps": "perf/wps",
    "mfu": "perf/mfu",
    "active": "memory/peak_active_gib",
    "reserved": "memory/peak_reserved_gib",
    "rss": "memory/peak_rss_gib",
}
"""Name in page.js -> figure."""
UNTESTED_CLASS = ' class="untested"'
POINTS = 600
"""Of a curve; a longer one is thinned out evenly."""
LOG_LINES = 15


def escape(text: str) -> str:
    """Text from anywhere as text in HTML."""
    return escape_markup(printable(text))


def write_page(comparison: Comparison, file: Path) -> None:
    """Write the page; raises ConfigError when the file cannot be written."""
    page = _page(comparison, file.absolute().parent)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: {file} cannot be written: {error.strerror}") from None


def _page(comparison: Comparison, folder: Path) -> str:
    from plotly.offline import get_plotlyjs

    runs = [run for row in comparison.rows for run in row.runs]
    states = ", ".join(f"{count} {state}" for state, count in Counter(run.state for run in runs).items())
    return Template((PARTS / "page.html").read_text()).substitute(
        title=escape(", ".join(comparison.keys) or runs[0].path.name),
        summary=escape(f"{len(runs)} runs in {len(comparison.rows)} rows: {states}"),
        facts="".join(
            f"<dt>{escape(title)}</dt><dd>{escape(value)}</dd>" for title, value in facts(comparison).items()
        ),
        findings="".join(f"<p>{escape(line)}</p>" for line in findings(comparison)),
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        varying=_varying(comparison),
        table=_table(comparison),
        legend="".join(f"<p>{escape(line)}</p>" for line in [*legend(comparison), *comparison.remarks]),
        reasons="".join(f"<li>{escape(line)}</li>" for line in reasons(comparison)),
        runs="\n".join(_run(row, run, runs[0], folder) for row in comparison.rows for run in row.runs),
        style=(PARTS / "page.css").read_text(),
        data=json.dumps(_data(comparison), allow_nan=False).replace("<", "\\u003c"),
        plotly=get_plotlyjs(),
        script=(PARTS / "page.js").read_text(),
    )


def name_of(row: Row, keys: list[str]) -> str:
    """A row in the charts: its values, separated by dots."""
    return " · ".join(text(row.values[key]) for key in keys if key in row.values) or row.runs[0].path.name


def _varying(comparison: Comparison) -> str:
    found = []
    for key in comparison.keys:
        values = dict.fromkeys(text(row.values[key]) for row in comparison.rows if key in row.values)
        named, baseline = comparison.baseline or ("", "")
        remark = f"; the others are compared with {baseline}" if key == named else ""
        found.append(f"<li><b>{escape(key)}</b>: {escape(', '.join(values) + remark)}</li>")
    return f"<ul>{''.join(found)}</ul>" if found else "<p>Nothing varies between these runs.</p>"


def _table(comparison: Comparison) -> str:
    """Every cell carries what it is sorted by: its first number, where it begins with one."""
    table = columns(comparison)
    head = "".join(f'<th scope="col"><button type="button">{escape(column.title)}</button></th>' for column in table)
    lines = []
    for row in zip(*(column.cells for column in table), strict=True):
        cells = "".join(
            f'<td data-by="{escape(_sorted_by(cell))}"{UNTESTED_CLASS * (UNTESTED in cell)}>{escape(cell)}</td>'
            for cell in row
        )
        lines.append(f"<tr>{cells}</tr>")
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"


def _sorted_by(cell: str) -> str:
    found = re.match(r"(agrees \()?([-+]?[\d,]*\.?\d+(e[-+]?\d+)?)", cell)
    return found[2].replace(",", "") if found else cell


def _data(comparison: Comparison) -> dict[str, Any]:
    """What the charts are drawn from."""
    charted = {name: figure_of(key) for name, key in CHARTED.items()}
    places = {id(row): i for i, row in enumerate(comparison.rows)}
    rows = []
    for row, against in zip(comparison.rows, comparison.against, strict=True):
        figures = row.figures if row.completed else {}  # a run that broke off may have been the fastest till then
        steps, losses = _curve(row)
        limits = [limit for run in row.runs if (limit := run.figure("device_memory_gib")) is not None]
        rows.append(
            {
                "name": escape(name_of(row, comparison.keys)),
                "state": row.state,
                "completed": bool(row.completed),
                **{name: figures.get(figure.summary_keys[0]) for name, figure in charted.items()},
                "wps": [figures.get(key) for key in charted["wps"].summary_keys],  # with its range
                "limit": min(limits, default=None),
                "steps": steps,
                "losses": losses,
                "baseline": places.get(id(against.row))
                if against
                else None,  # it may be among the rows that are left out
            }
        )
    baseline = "=".join(comparison.baseline) if comparison.baseline else None
    return {"rows": rows, "baseline": baseline, "titles": {name: figure.title for name, figure in charted.items()}}


def _curve(row: Row) -> tuple[list[int], list[float | None]]:
    """Step by step the median loss of the completed runs; of all, where none is."""
    found: dict[int, list[float]] = {}
    for run in row.completed or row.runs:
        for event in run.events:
            if (loss := number(event.get("train/loss"))) is not None:
                found.setdefault(event["step"], []).append(loss)
    steps = sorted(found)
    kept = steps[:: max(1, -(-len(steps) // POINTS))]
    kept += steps[-1:] if steps and kept[-1] != steps[-1] else []
    return kept, [median(found[step]) for step in kept]


def _run(row: Row, run: Run, first: Run, folder: Path) -> str:
    """Everything about one run, folded: state, reason, command, environment, how its configuration differs, its log."""
    link = os.path.relpath(run.path.absolute(), folder)
    environment = run.environment
    packages = environment.get("packages")
    command = environment.get("command")
    facts = {
        "state": run.state,
        "reason": run.reason,
        "directory": run.path,
        "command": shlex.join(map(str, command)) if isinstance(command, list) else "",
        "overrides": " ".join(run.task),
        "device": run.summary.get("device"),
        "devices": run.summary.get("world_size"),
        "host": environment.get("host"),
        "system": environment.get("system"),
        "commit": environment.get("git_commit"),
        "versions": ", ".join(f"{k} {v}" for k, v in packages.items() if v) if isinstance(packages, dict) else "",
        "python": environment.get("python"),
        "environment": _assignments(environment.get("launch.env")) + _assignments(environment.get("environment")),
    }
    lines = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items() if v not in (None, ""))
    return (
        f"<details><summary><b>{escape(run.path.name)}</b> {escape(run.state)}</summary>"
        f'<p><a href="./{escape(quote(Path(link).as_posix()))}">its folder</a></p><dl>{lines}</dl>'
        f"{_difference(run, first)}{_log(run)}</details>"
    )


def _assignments(variables: Any) -> str:
    known = variables if isinstance(variables, dict) else {}
    return "".join(f"{name}={value} " for name, value in known.items() if not is_secret(str(name)))


def _difference(run: Run, first: Run) -> str:
    """The configuration against that of the first run."""
    mine, theirs = flatten(run.config), flatten(first.config)
    names = [name for name in mine | theirs if mine.get(name, ...) != theirs.get(name, ...)]
    if run is first or not names:
        return ""
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in (name, _shown(mine, name), _shown(theirs, name)))}</tr>"
        for name in names
    )
    head = f"<tr><th>key</th><th>here</th><th>in {escape(first.path.name)}</th></tr>"
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{lines}</tbody></table></div>'


def _shown(flat: dict[str, Any], name: str) -> str:
    return text(flat[name]) if name in flat else "-"


def _log(run: Run) -> str:
    """The end of the log of the rank that failed, or of rank 0."""
    try:
        rank = read_json(run.path / ERROR).get("rank") or 0
        log = rank_log(run.path, rank if is_count(rank) else 0)
        lines = last_lines(log)[-LOG_LINES:]
    except OSError:
        return ""
    return f"<p>the end of {escape(log.name)}:</p><pre>{escape(chr(10).join(lines))}</pre>" if lines else ""
