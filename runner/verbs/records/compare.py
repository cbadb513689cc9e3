"""`meshrunner compare`: print a comparison of runs as a table, Markdown, JSON or CSV, and optionally write an HTML page."""

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.parser import parse
from meshrunner.runner.compare.best import by
from meshrunner.runner.compare.comparison import compare_folders
from meshrunner.runner.compare.select import select
from meshrunner.runner.console import say
from meshrunner.runner.verbs.records.fail_if import checked, figures, parsed


def compare(arguments: list[str]) -> int:
    """Compare runs and print the result. Return 3 if a rule of --fail-if fails, else 0. Wrong arguments raise ConfigError."""
    given = parse("compare", arguments)
    if given.history:
        from meshrunner.runner.verbs.records.history import history

        return history(given.directories)
    rules = [parsed(each) for each in given.fail_if]
    if given.strict and not rules:
        raise ConfigError("--strict: there is no rule; add --fail-if RULE")
    comparison = compare_folders(given.directories, given.baseline, figures(rules), with_first=bool(rules))
    failed, lines = checked(rules, select(comparison, given.where), strict=given.strict) if rules else (False, [])
    comparison = by(select(comparison, given.where, given.sort, given.top), given.best_by)
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
    if given.why:
        from meshrunner.runner.verbs.records.why import reasons

        lines += reasons(comparison)
    for line in lines:
        say(line, to_stderr=given.json or given.csv or given.markdown)
    return 3 if failed else 0
