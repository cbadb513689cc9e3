"""`meshrunner why`: explain the difference in speed and memory between two runs."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.parser import parse
from meshrunner.runner.compare.comparison import Comparison
from meshrunner.runner.compare.keys import Keys, row_name
from meshrunner.runner.compare.page.ledgers import group_of
from meshrunner.runner.compare.runs import Row, read_runs
from meshrunner.runner.compare.table import print_columns
from meshrunner.runner.compare.text_table import Column
from meshrunner.runner.console import say
from meshrunner.runner.explain.difference import Difference, explain, explain_prediction
from meshrunner.runner.explain.ledger import Line
from meshrunner.runner.explain.memory import MemoryDifference, explain_memory
from meshrunner.runner.rundir import repeat_of, run_names
from meshrunner.runner.rundir.files import is_run, is_sweep


def why(arguments: list[str]) -> int:
    """Explain the difference between two rows, or between a row and its prediction. Raise ConfigError if a directory is not a run
    directory or no data explains the difference."""
    given = parse("why", arguments)
    base = _row(given.baseline)
    if given.row is None:
        _print(explain_prediction(base, str(given.baseline)), None, as_json=given.json)
        return 0
    row = _row(given.row)
    if given.row.resolve() in [run.path.resolve() for run in base.runs]:
        raise ConfigError("why: both directories are runs of the same row; give runs of two different rows")
    keys = Keys([*base.runs, *row.runs])
    names = [row_name(keys.of(each.counted[0]), keys.names) for each in (base, row)]
    if names[0] == names[1]:
        names = [str(given.baseline), str(given.row)]
    both = names[0], names[1]
    _print(explain(base, row, both), explain_memory(base, row, both), as_json=given.json)
    return 0


def _print(found: Difference, memory: MemoryDifference | None, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.as_json() | {"memory": memory and memory.as_json()}, indent=2))
        return
    for sentence in _sentences(found, memory):
        say(sentence)
    if not found.traced:
        say(
            "The times below are predicted, because at least one row was not traced. "
            "sweep.explain=true traces the last steps of a run, unless the run has too few steps."
        )
    print()
    print_columns(_table(found))
    if memory:
        print()
        lines = [*memory.lines, memory.whole]
        print_columns(
            _columns("GiB at the peak", [(line.name, line) for line in lines], (found.base, found.own), ".3f")
        )


def reasons(comparison: Comparison) -> Iterator[str]:
    """Yield sentences that explain the difference between each row and its baseline. Raise ConfigError without a baseline."""
    if not any(comparison.against):
        raise ConfigError("--why: no row has a baseline; add --baseline KEY=VALUE")
    for row, against in zip(comparison.rows, comparison.against, strict=True):
        if against:
            names = (comparison.name(against.row), comparison.name(row))
            try:
                yield from _sentences(explain(against.row, row, names), explain_memory(against.row, row, names))
            except ConfigError as error:
                yield str(error)


def _sentences(found: Difference, memory: MemoryDifference | None) -> list[str]:
    sentences = [found.sentence(), found.modules_sentence(), memory.sentence() if memory else ""]
    return [sentence for sentence in sentences if sentence]


def _row(folder: Path) -> Row:
    """Return the row to which a run directory belongs: the run and its repeats in the same sweep. Raise ConfigError if
    `folder` is not a run directory."""
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
    columns = _columns("seconds per step", lines, (found.base, found.own), ".4f")
    if predicted:
        cells = [f"{predicted[title]:+.4f}" if title in predicted else "" for title, _ in lines]
        columns.append(Column("predicted difference", cells))
    return columns


def _columns(title: str, lines: Sequence[tuple[str, Line]], names: tuple[str, str], form: str) -> list[Column]:
    """Return the columns of a ledger. `lines`: (title, line) pairs. `names`: names of the baseline and of the other row."""
    return [
        Column(title, [name for name, _ in lines]),
        Column(names[0], [f"{line.base:{form}}" for _, line in lines]),
        Column(names[1], [f"{line.own:{form}}" for _, line in lines]),
        Column("difference", [f"{line.more:+{form}}" for _, line in lines]),
    ]


def _lines(found: Difference) -> Iterator[tuple[str, Line]]:
    """Yield (title, line) pairs: each group, followed by its lines if it has several, and at the end the whole step."""
    for group in found.groups():
        yield group.name, group
        own = [line for line in found.lines if group_of(line.name) == group.name]
        if len(own) > 1:
            yield from ((f"- {line.name}", line) for line in own)
    yield "step time", found.whole
