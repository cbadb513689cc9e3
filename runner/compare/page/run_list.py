"""List the runs of a comparison as folded HTML: state, reason, links, command, environment, the end of the log."""

from __future__ import annotations

import os
import shlex
from html import escape as escape_markup
from pathlib import Path
from urllib.parse import quote

from meshrunner.recipes.secrets import is_secret
from meshrunner.runner.compare.comparison import Comparison
from meshrunner.runner.compare.runs import Run
from meshrunner.runner.console import printable
from meshrunner.runner.rundir import Failure, last_lines
from meshrunner.runner.rundir.files import CONFIG, SUMMARY, rank_log

UNFOLDED = 12
"""Largest number of runs whose list is unfolded at first. A click on a row's number unfolds a longer one."""
LOG_LINES = 15
"""Last lines of a log that are shown."""


def escape(text: str) -> str:
    """Return untrusted text escaped for HTML."""
    return escape_markup(printable(text))


def runs_section(comparison: Comparison, folder: Path) -> str:
    """Return the list of all runs, by row; `folder`: the page's directory, to which links are relative."""
    found = []
    for i, row in enumerate(comparison.rows):
        inside = "".join(_run(run, folder) for run in row.runs)
        found.append(f'<section id="row-{i + 1}" data-row="{i}">{inside}</section>')
    opened = " open" if len(comparison.runs) <= UNFOLDED else ""
    return f'<details id="runs" class="all"{opened}><summary><h2>Runs</h2></summary>{"".join(found)}</details>'


def _run(run: Run, folder: Path) -> str:
    """Return a run; the end of the log is that of the rank that failed, or else of rank 0."""
    environment = run.environment
    variables = {**environment.launch_env, **environment.environment}
    facts = {
        "state": run.state,
        "reason": run.reason,
        "directory": run.path,
        "command": shlex.join(environment.command),
        "overrides": " ".join(run.task),
        "device": run.summary.device,
        "devices": run.summary.world_size,
        "host": environment.host,
        "system": environment.system,
        "commit": environment.git_commit,
        "versions": ", ".join(f"{name} {version}" for name, version in environment.packages.items() if version),
        "python": environment.python,
        "environment": " ".join(f"{name}={value}" for name, value in variables.items() if not is_secret(name)),
    }
    lines = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items() if v not in (None, ""))
    log = rank_log(run.path, run.record(Failure).rank or 0)
    tail = escape("\n".join(last_lines(log)[-LOG_LINES:]))
    end = f"<p>the end of {escape(log.name)}:</p><pre>{tail}</pre>" if tail else ""
    return (
        f"<details><summary><b>{escape(run.path.name)}</b> {escape(run.state)}</summary>"
        f"<p>{_links(run, log, folder)}</p><dl>{lines}</dl>{end}</details>"
    )


def _links(run: Run, log: Path, folder: Path) -> str:
    """Return links to a run's files. They are relative, so that page and runs can be copied together."""
    files = [("directory", run.path), *((file.name, file) for file in (run.path / CONFIG, run.path / SUMMARY, log))]
    return " ".join(
        f'<a href="./{escape(quote(Path(os.path.relpath(file.absolute(), folder)).as_posix()))}">{escape(name)}</a>'
        for name, file in files
        if os.path.lexists(file)
    )
