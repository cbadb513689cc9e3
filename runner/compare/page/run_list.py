"""The runs of a comparison as HTML, each folded: state, reason, links, command, environment, the end of its log."""

from __future__ import annotations

import os
import shlex
from html import escape as escape_markup
from pathlib import Path
from typing import Any
from urllib.parse import quote

from meshrunner.recipes.secrets import is_secret
from meshrunner.runner.compare.rows import Comparison
from meshrunner.runner.compare.runs import Run
from meshrunner.runner.console import printable
from meshrunner.runner.rundir.files import CONFIG, ERROR, SUMMARY, rank_log, read_json
from meshrunner.runner.rundir.logs import last_lines
from meshrunner.runner.rundir.states import is_count

UNFOLDED = 12
"""Runs whose list is open from the beginning; a longer one is opened by the number of a row."""
LOG_LINES = 15


def escape(text: str) -> str:
    """Text from anywhere as text in HTML."""
    return escape_markup(printable(text))


def runs_section(comparison: Comparison, folder: Path) -> str:
    """All runs, under their rows' numbers; folder: where the page lies."""
    found = []
    for i, row in enumerate(comparison.rows):
        inside = "".join(_run(run, folder) for run in row.runs)
        found.append(f'<section id="row-{i + 1}" data-row="{i}">{inside}</section>')
    count = sum(len(row.runs) for row in comparison.rows)
    opened = " open" if count <= UNFOLDED else ""
    return f'<details id="runs" class="all"{opened}><summary><h2>Runs</h2></summary>{"".join(found)}</details>'


def _run(run: Run, folder: Path) -> str:
    packages = run.environment.get("packages")
    command = run.environment.get("command")
    facts = {
        "state": run.state,
        "reason": run.reason,
        "directory": run.path,
        "command": shlex.join(map(str, command)) if isinstance(command, list) else "",
        "overrides": " ".join(run.task),
        "device": run.summary.get("device"),
        "devices": run.summary.get("world_size"),
        "host": run.environment.get("host"),
        "system": run.environment.get("system"),
        "commit": run.environment.get("git_commit"),
        "versions": ", ".join(f"{k} {v}" for k, v in packages.items() if v) if isinstance(packages, dict) else "",
        "python": run.environment.get("python"),
        "environment": _assignments(run.environment.get("launch.env"))
        + _assignments(run.environment.get("environment")),
    }
    lines = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items() if v not in (None, ""))
    log, end = _log(run)
    return (
        f"<details><summary><b>{escape(run.path.name)}</b> {escape(run.state)}</summary>"
        f"<p>{_links(run, log, folder)}</p><dl>{lines}</dl>{end}</details>"
    )


def _links(run: Run, log: Path, folder: Path) -> str:
    """Relative ones, so that they hold where page and runs were copied to."""
    files = [("its folder", run.path), *((file.name, file) for file in (run.path / CONFIG, run.path / SUMMARY, log))]
    return " ".join(
        f'<a href="./{escape(quote(Path(os.path.relpath(file.absolute(), folder)).as_posix()))}">{escape(name)}</a>'
        for name, file in files
        if os.path.lexists(file)
    )


def _assignments(variables: Any) -> str:
    known = variables if isinstance(variables, dict) else {}
    return "".join(f"{name}={value} " for name, value in known.items() if not is_secret(str(name)))


def _log(run: Run) -> tuple[Path, str]:
    """The log of the rank that failed, or of rank 0, and its end as HTML."""
    try:
        rank = read_json(run.path / ERROR).get("rank") or 0
    except OSError:
        rank = 0
    log = rank_log(run.path, rank if is_count(rank) else 0)
    try:
        lines = last_lines(log)[-LOG_LINES:]
    except OSError:
        lines = []
    text = "\n".join(lines)
    return log, f"<p>the end of {escape(log.name)}:</p><pre>{escape(text)}</pre>" if text else ""
