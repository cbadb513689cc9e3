"""A table of the combinations of options that cannot work, with the reason and an alternative for each combination. Checks
that need arithmetic are methods of the options, such as whether the degrees of parallelism fit the devices."""

from meshrunner.recipes.compatibility import evaluations, pipelines, rows
from meshrunner.recipes.parallelism.base import Degrees
from meshrunner.recipes.recipe import Recipe

TABLE = [*rows.ROWS, *pipelines.ROWS, *evaluations.ROWS]


def problems(recipe: Recipe, degrees: Degrees) -> list[str]:
    """Return a sentence for each conflict in TABLE that the recipe contains."""
    return [
        f"{row.where}: {row.reason}; use {row.instead}"
        for row in TABLE
        if row.when(recipe, recipe.parallelism, degrees)
    ]


def markdown_table() -> str:
    """Return the page that `python -m meshrunner.recipes.compatibility > docs/compatibility.md` writes."""
    lines = ["# What cannot be combined", "", "| setting | why | what works |", "|---|---|---|"]
    lines += [f"| `{row.where}` | {row.reason} | {row.instead} |" for row in TABLE]
    return "\n".join(lines)
