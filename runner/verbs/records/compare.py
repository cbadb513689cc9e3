"""`meshrunner compare`: arguments in, table out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.rows import compare_runs
from meshrunner.runner.compare.runs import read_runs
from meshrunner.runner.compare.select import select
from meshrunner.runner.console import say


class Parser(argparse.ArgumentParser):
    """Wrong arguments are a ConfigError with the usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}\n{self.format_usage().rstrip()}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="meshrunner compare",
        description="Which settings vary between runs, and what they change: one row per combination, repeats merged.",
        allow_abbrev=False,
    )
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="run directories and sweep directories")
    parser.add_argument(
        "--baseline", metavar="KEY=VALUE", help="compare each row with the row that differs in KEY alone"
    )
    parser.add_argument(
        "--where",
        metavar="EXPR",
        action="append",
        default=[],
        help="only rows of which this is true: "
        "parallelism=fsdp2,ddp, 'wps>5000', state!=oom; once more: and of which that is true, too",
    )
    parser.add_argument(
        "--sort", metavar="KEY", help="by a figure, the best first, or by a key; -KEY: the other way round"
    )
    parser.add_argument("--top", metavar="N", type=int, help="only the first N rows, by --sort, else the fastest")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the table, for a pull request")
    form.add_argument("--json", action="store_true", help="a list of rows with raw figures")
    form.add_argument("--csv", action="store_true", help="the same, one line per row")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write a page with the table and charts")
    return parser


def compare(arguments: list[str]) -> int:
    """Print the table of some runs; raises ConfigError for wrong arguments and directories without runs."""
    given = _parser().parse_args(_joined(arguments))
    comparison = compare_runs(read_runs(given.folders), given.baseline)
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


def _joined(arguments: list[str]) -> list[str]:
    """`--sort -mfu` as `--sort=-mfu`: argparse would take -mfu for a flag."""
    found: list[str] = []
    for argument in arguments:
        if found[-1:] == ["--sort"] and argument.startswith("-") and not argument.startswith("--"):
            found[-1] = f"--sort={argument}"
        else:
            found.append(argument)
    return found
