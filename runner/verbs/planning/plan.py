"""`meshrunner plan`: whether a run fits and how fast it would be; with -m, every run of a grid. Starts nothing, needs no GPU."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.config.compose import Composer, parse
from meshrunner.runner.console import console, one_line, say
from meshrunner.runner.predict.search import A_WHOLE_NUMBER, MOST, largest_that_fits
from meshrunner.runner.predict.single import predicted
from meshrunner.runner.predict.verdict import BORDERLINE
from meshrunner.runner.process.forkserver import warm
from meshrunner.runner.process.garbage import collector_held_off
from meshrunner.runner.verbs.help import answered

if TYPE_CHECKING:
    from meshrunner.runner.predict.replay.timeline import Timeline

MULTIRUN = {"-m", "--multirun"}
JSON, ACTIVE, MAX, HTML = "--json", "--active", "--max", "--html"
"""
--json: one object, or with -m a list; --active: without what the allocator reserves, faster; --max KEY: the largest value
that fits; --html FILE: also a page with memory over a step, of a model that is rehearsed at full depth, with --active, too.
"""
VALUES = {
    MAX: A_WHOLE_NUMBER,
    HTML: "a file, such as --html plan.html",
}
"""Of flags that take one."""


def plan(arguments: list[str]) -> int:
    """Predict one run, or rank a grid; raises ConfigError as `run` does."""
    if MULTIRUN & set(arguments):
        warm()  # first: the forkserver imports torch while Hydra composes here
    with collector_held_off():  # imports create little garbage; without looking for it they are a fifth faster
        return _plan(arguments)


def _plan(arguments: list[str]) -> int:
    rest, key = _without(arguments, MAX)
    rest, file = _without(rest, HTML)
    flags = {each for each in rest if each in (JSON, ACTIVE)}
    overrides = [each for each in rest if each not in flags]
    composer = Composer(parse("plan", overrides))
    if answered(composer):
        return 0
    active_only = ACTIVE in flags
    composed = composer.single_run()
    if composed is None:
        for flag, value in ((MAX, key), (HTML, file)):
            if value is not None:
                raise ConfigError(f"plan: {flag} is of one run: leave out -m")
        _rank(composer, active_only, as_json=JSON in flags)
        return 0
    drawn = file is not None
    if key is None:
        found, over_time = predicted(composed.config, active_only=active_only, over_time=drawn)
    else:
        found, over_time = largest_that_fits(overrides, key, active_only=active_only, over_time=drawn)
    if JSON in flags:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    if file is not None:
        _write_page(Path(file), found, over_time, arguments)
    return 0


def _rank(composer: Composer, active_only: bool, *, as_json: bool) -> None:
    """Predict every combination, and print a table or a list of objects."""
    from meshrunner.runner.sweep.ranking import columns, rank

    ranked = rank(composer, active_only=active_only)
    if as_json:
        print(json.dumps([each.as_json() for each in ranked], indent=2))
        return
    cells = columns(ranked)
    table = Table(box=None, pad_edge=False)
    for title in cells:
        table.add_column(title, overflow="fold")
    for row in zip(*cells.values(), strict=True):
        table.add_row(*map(one_line, row))
    console().print(table)


def _without(arguments: list[str], flag: str) -> tuple[list[str], str | None]:
    """The arguments without `--flag VALUE` or `--flag=VALUE`, and the value."""
    rest: list[str] = []
    found, given = None, iter(arguments)
    for each in given:
        name, equals, value = each.partition("=")
        if name != flag:
            rest.append(each)
            continue
        found = value if equals else next(given, "")
        if not found or found.startswith("--"):
            raise ConfigError(f"plan: {flag} needs {VALUES[flag]}")
    return rest, found


def _show(found: dict[str, Any]) -> None:
    """The verdict first, then what it rests on."""
    screen = console()
    for said in _searched(found):
        screen.print(said, soft_wrap=False)
    screen.print(f"{found['verdict']}: {found['reason']}", soft_wrap=False)
    if found.get("memory/peak_active_gib") is None:
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for row in _rows(found):
        table.add_row(*row)
    screen.print(table)
    for remark in _remarks(found):
        screen.print(remark, soft_wrap=False)


def _write_page(file: Path, found: dict[str, Any], over_time: Timeline | None, arguments: Sequence[str]) -> None:
    from meshrunner.runner.predict.replay.page.write import write_page

    figures, remarks = (_rows(found), _remarks(found)) if over_time is not None else ([], [])
    findings = [*_searched(found), found["reason"]]
    write_page(
        file, shlex.join(["meshrunner", "plan", *arguments]), found["verdict"], findings, figures, remarks, over_time
    )
    say(f"page: {file}", to_stderr=True)


def _searched(found: dict[str, Any]) -> list[str]:
    """What was found of the key of --max."""
    said = []
    for key, value in found.get("max", {}).items():
        if value == MOST:
            said.append(f"{key}={value} fits, and the search ends there")
        elif value:
            said.append(f"{key}={value} is the largest that fits")
        else:
            certain = " for certain" if found["verdict"] == BORDERLINE else ""
            said.append(f"not even {key}={found['tried'][0]} fits{certain}")
    return said


def _remarks(found: dict[str, Any]) -> list[str]:
    return [*_on_speed(found), *found["remarks"]]


def _on_speed(found: dict[str, Any]) -> list[str]:
    if found["perf/wps"] is None:
        return []
    error = f"{found['perf/error_pct']:g}%"
    if found["perf/calibrated"]:
        return [
            f"speed: calibrated; of the runs that it rests on, one was predicted from the others to {error} at worst"
        ]
    return [
        "speed: uncalibrated, from the data sheet and shares of it that other devices of the kind reach; published runs differ "
        f"from it by up to {error}"
    ]


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    def memory(key: str) -> str:
        return f"{found[f'{key}_gib']:.2f} GiB ({found[f'{key}_pct']:.1f}%)"

    largest_first = sorted(found["memory/by_category_gib"].items(), key=lambda item: -item[1])
    rows = [
        ("peak active", f"{memory('memory/peak_active')} in {found['memory/phase']}, rank {found['rank']}"),
        ("of which", ", ".join(f"{name} {gib:.2f}" for name, gib in largest_first if gib >= 0.005) + " GiB"),
        ("start-up", f"{found['memory/startup_gib']:.2f} GiB"),
    ]
    if found["memory/peak_reserved_gib"] is not None:
        rows.insert(2, ("peak reserved", memory("memory/peak_reserved")))
    if (block := found["memory/block_gib"]) is not None:
        rows.insert(-1, ("a block adds", f"{1024 * block:,.2f} MiB of activations, from its forward to its backward"))
    if found["perf/wps"] is not None:
        mfu = "" if found["perf/mfu"] is None else f", MFU {found['perf/mfu']:.1f}%"
        parts = ", ".join(f"{part} {value:.3f}" for part, value in found["perf/seconds_by_part"].items() if value)
        rows += [
            ("speed", f"{found['perf/wps']:,.0f} WPS per device{mfu}, {found['perf/step_time_s']:.3f} s a step"),
            ("of which", f"{parts} s; exposed communication {found['perf/exposed_communication_s']:.3f} s"),
        ]
    return rows
