"""Write the report page: one HTML file that a browser can open offline. Its table and list of runs work without JavaScript.

Scripts draw charts of the rows that the reader selects. They insert text only as text nodes, because the content security
policy of the page forbids scripts to parse strings as markup."""

import os
import shlex
from collections import Counter
from datetime import datetime
from html import escape as escape_markup
from pathlib import Path
from string import Template
from urllib.parse import quote

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.secrets import is_secret
from meshrunner.recipes.storage import replace_file
from meshrunner.runner.compare import best
from meshrunner.runner.compare.cells import UNTESTED, columns, facts, legend, reasons, row_label
from meshrunner.runner.compare.comparison import Comparison
from meshrunner.runner.compare.findings import findings
from meshrunner.runner.compare.keys import first_of, text
from meshrunner.runner.compare.page.charted import as_json
from meshrunner.runner.compare.runs import Run
from meshrunner.runner.console import printable
from meshrunner.runner.rundir import Failure, last_lines
from meshrunner.runner.rundir.files import CONFIG, SUMMARY, rank_log

PARTS = Path(__file__).parent
"""Directory of the page's template, style and scripts."""
SCRIPTS = ("svg", "select", "draw", "table", "charts", "settings", "curves", "main")
"""Names of the JavaScript files, in the order in which they are joined into one script."""
VALUES = 12
"""Maximum number of values that the section `What varies` of the page lists for a setting."""
UNFOLDED = 6
"""Maximum number of lines in an unfolded list of runs or reasons. The page shows a longer list only after a click."""


def escape(text: str) -> str:
    """Escape untrusted text for HTML, and show unprintable characters as escapes such as `\\x1b`."""
    return escape_markup(printable(text))


def write_page(comparison: Comparison, file: Path) -> None:
    """Write the page of a comparison to a file; raise ConfigError if the file cannot be written."""
    put(_page(comparison, file.absolute().parent), file)


def put(page: str, file: Path) -> None:
    """Write the HTML of a page to `file`. Replace a regular file atomically. Raise ConfigError if writing fails."""
    try:
        if file.is_symlink() or (file.exists() and not file.is_file()):  # replacing would destroy a link or /dev/stdout
            file.write_bytes(page.encode())
        else:
            replace_file(file, page.encode())
    except OSError as error:
        raise ConfigError(f"--html: {file} cannot be written: {error.strerror}") from None


def _page(comparison: Comparison, folder: Path) -> str:
    runs = comparison.runs
    states = Counter(run.state for run in runs)
    listed = ", ".join(f"{count} {state}" for state, count in states.items())
    now = datetime.now().astimezone()
    return Template((PARTS / "page.html").read_text()).substitute(
        title=escape(", ".join(comparison.keys) or runs[0].path.name),
        summary=escape(f"{len(runs)} runs in {len(comparison.rows)} rows: {listed}"),
        facts="".join(
            f"<dt>{escape(title)}</dt><dd>{escape(value)}</dd>" for title, value in facts(comparison).items()
        ),
        findings="".join(f"<p>{escape(line)}</p>" for line in findings(comparison)),
        moment=now.isoformat(timespec="seconds"),
        written=f"{now:%Y-%m-%d %H:%M %Z}",
        unfinished="; the page is updated until all runs have ended" if {"pending", "running"} & states.keys() else "",
        varying=_varying(comparison),
        best=_best(comparison),
        table=_table(comparison),
        legend="".join(f"<p>{escape(line)}</p>" for line in [*legend(comparison), *comparison.remarks]),
        reasons=_reasons(comparison),
        runs=_runs(comparison, folder),
        style=(PARTS / "page.css").read_text(),
        data=as_json(comparison),
        script="\n".join((PARTS / f"{name}.js").read_text() for name in SCRIPTS),
    )


def _varying(comparison: Comparison) -> str:
    found = []
    for key in comparison.keys:
        values = list(dict.fromkeys(text(row.values[key]) for row in comparison.rows if key in row.values))
        named, baseline = comparison.baseline or ("", "")
        remark = f"; the other values are compared with {baseline}" if key == named else ""
        found.append(f"<li><b>{escape(key)}</b>: {escape(first_of(values, VALUES) + remark)}</li>")
    return f"<ul>{''.join(found)}</ul>" if found else "<p>Nothing varies between these runs.</p>"


def _reasons(comparison: Comparison) -> str:
    lines = reasons(comparison)
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    shown = " hidden" if not lines else " open" if len(lines) <= UNFOLDED else ""
    return f'<details id="reasons"{shown}><summary>{len(lines)} reasons</summary><ul>{listed}</ul></details>'


def _table(comparison: Comparison) -> str:
    """Return the table as HTML. On a narrow screen, scripts show a row's name instead of its settings and state."""
    table = columns(comparison)
    keys = [column.title for column in table[: len(comparison.keys) or 1]] + ["state"]
    kinds = ["key" if column.title in keys else "leads" if column.leads else "" for column in table]
    head = "".join(
        f'<th scope="col" class="{kind}"><button type="button">{escape(column.title)}</button></th>'
        for column, kind in zip(table, kinds, strict=True)
    )
    lines = []
    for i, row in enumerate(comparison.rows):
        cells = "".join(_cell(column.cells[i], kind) for column, kind in zip(table, kinds, strict=True))
        number = f'<a href="#row-{i + 1}">{i + 1}</a> <span class="name">{escape(row_label(comparison, row))}</span>'
        lines.append(f'<tr data-row="{i}"><th scope="row">{number}</th>{cells}</tr>')
    first = '<th scope="col"><button type="button">#</button></th>'
    return f"<thead><tr>{first}{head}</tr></thead><tbody>{''.join(lines)}</tbody>"


def _best(comparison: Comparison) -> str:
    """Return the table of the best rows as HTML, hidden if `best_by` is empty."""
    table = best.columns(comparison) if comparison.best_by else []
    head = "".join(f'<th scope="col">{escape(column.title)}</th>' for column in table)
    lines = zip(*(column.cells for column in table), strict=True)
    body = "".join(f"<tr>{''.join(_cell(cell, '') for cell in line)}</tr>" for line in lines)
    title = escape(" and ".join(comparison.best_by))
    return (
        f'<section id="best"{" hidden" * (not table)}><h2>Best rows by {title}</h2>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>'
    )


def _cell(cell: str, kind: str) -> str:
    return f'<td class="{kind}{" untested" * (UNTESTED in cell)}">{escape(cell)}</td>'


def _runs(comparison: Comparison, folder: Path) -> str:
    """Return the list of all runs as HTML, grouped by row. Links are relative to `folder`, the page's directory."""
    found = []
    for i, row in enumerate(comparison.rows):
        inside = "".join(_run(run, folder) for run in row.runs)
        found.append(f'<section id="row-{i + 1}" data-row="{i}">{inside}</section>')
    opened = " open" if len(comparison.runs) <= UNFOLDED else ""
    return f'<details id="runs" class="all"{opened}><summary><h2>Runs</h2></summary>{"".join(found)}</details>'


def _run(run: Run, folder: Path) -> str:
    """Return a run as HTML, with the end of a log: the log of the failed rank or, if no rank failed, the log of rank 0."""
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
    tail = escape("\n".join(last_lines(log)))
    end = f"<p>the end of {escape(log.name)}:</p><pre>{tail}</pre>" if tail else ""
    return (
        f"<details><summary><b>{escape(run.path.name)}</b> {escape(run.state)}</summary>"
        f"<p>{_links(run, log, folder)}</p><dl>{lines}</dl>{end}</details>"
    )


def _links(run: Run, log: Path, folder: Path) -> str:
    """Return links to a run's files as HTML. Relative links still work if the page and the runs are copied together."""
    files = [("directory", run.path), *((file.name, file) for file in (run.path / CONFIG, run.path / SUMMARY, log))]
    return " ".join(
        f'<a href="./{escape(quote(Path(os.path.relpath(file.absolute(), folder)).as_posix()))}">{escape(name)}</a>'
        for name, file in files
        if os.path.lexists(file)
    )
