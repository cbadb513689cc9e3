"""`meshrunner compare`: print a comparison of runs as a table, Markdown, JSON or CSV, and optionally write a page."""

from __future__ import annotations

from meshrunner.runner.commands.parser import parse
from meshrunner.runner.compare.comparison import compare_folders
from meshrunner.runner.compare.select import select
from meshrunner.runner.console import say


def compare(arguments: list[str]) -> int:
    """Compare runs and print the result. Raise ConfigError if arguments are invalid or a directory has no runs."""
    given = parse("compare", arguments)
    comparison = compare_folders(given.directories, given.baseline)
    comparison = select(comparison, given.where, given.sort, given.top)
    if given.html:
        from meshrunner.runner.compare.page.write import write_page

        write_page(comparison, given.html)
        say(f"page: {given.html}", to_stderr=True)
    if given.json or given.csv:
        from meshrunner.runner.compare.export import as_csv, as_json

        print(as_json(comparison) if given.json else as_csv(comparison))
    else:
        from meshrunner.runner.compare.table import markdown, print_table

        print(markdown(comparison)) if given.markdown else print_table(comparison)
    return 0
