"""`meshrunner why`: explain the difference in speed between two runs."""

import json
from collections.abc import Iterator
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.parser import parse
from meshrunner.runner.compare.keys import Keys, row_name
from meshrunner.runner.compare.runs import Row, read_runs
from meshrunner.runner.compare.table import print_columns
from meshrunner.runner.compare.text_table import Column
from meshrunner.runner.console import say
from meshrunner.runner.explain.difference import Difference, Line, explain, group_of
from meshrunner.runner.rundir import repeat_of, run_names
from meshrunner.runner.rundir.files import is_run, is_sweep


def why(arguments: list[str]) -> int:
    """Explain the difference between two runs or rows. Raise ConfigError if a directory is no run or nothing explains it."""
    given = parse("why", arguments)
    base, row = _row(given.baseline), _row(given.row)
    if given.row.resolve() in [run.path.resolve() for run in base.runs]:
        raise ConfigError("why: both directories are runs of the same row; give runs of two different rows")
    keys = Keys([*base.runs, *row.runs])
    names = [row_name(keys.of(each.counted[0]), keys.names) for each in (base, row)]
    if names[0] == names[1]:
        names = [str(given.baseline), str(given.row)]
    found = explain(base, row, (names[0], names[1]))
    if given.json:
        print(json.dumps(found.as_json(), indent=2))
        return 0
    say(found.sentence())
    if not found.traced:
        say(
            "The ledger is predicted, because at least one row was not traced. "
            "sweep.explain=true traces runs that are long enough."
        )
    print()
    print_columns(_table(found))
    return 0


def _row(folder: Path) -> Row:
    """Return the row to which a run directory belongs: the run and its repeats in the same sweep. Raise ConfigError if it is no
    run directory."""
    if not is_run(folder):
        raise ConfigError(
            f"why: {folder} is not a run directory; for a row of a sweep, give the directory of one of the row's runs"
        )
    sweep_dir, name = folder.resolve().parent, folder.resolve().name
    folders = [folder]
    if is_sweep(sweep_dir):
        job = name.removesuffix(repeat_of(name))
        names = [each for each in run_names(sweep_dir) if each.removesuffix(repeat_of(each)) == job]
        folders = [sweep_dir / each for each in names if is_run(sweep_dir / each)] or folders
    return Row({}, read_runs(folders))


def _table(found: Difference) -> list[Column]:
    lines = list(_lines(found))
    predicted = {line.name: line.more for line in found.predicted}
    columns = [
        Column("seconds per step", [title for title, _ in lines]),
        Column(found.base, [f"{line.base:.4f}" for _, line in lines]),
        Column(found.own, [f"{line.own:.4f}" for _, line in lines]),
        Column("difference", [f"{line.more:+.4f}" for _, line in lines]),
    ]
    if predicted:
        cells = [f"{predicted[title]:+.4f}" if title in predicted else "" for title, _ in lines]
        columns.append(Column("predicted difference", cells))
    return columns


def _lines(found: Difference) -> Iterator[tuple[str, Line]]:
    """Yield (title, line) for each group, followed by its lines if it has several, and for the whole step."""
    for group in found.groups():
        yield group.name, group
        own = [line for line in found.lines if group_of(line.name) == group.name]
        if len(own) > 1:
            yield from ((f"- {line.name}", line) for line in own)
    yield "step time", found.whole
