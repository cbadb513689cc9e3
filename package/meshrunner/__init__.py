"""Declarative experiments for distributed LLM training: compose, check, run, compare.

    from meshrunner import load
    runs = load("sweeps/layouts", baseline="parallelism=fsdp1")
    runs.rows, runs.events      # pandas DataFrames: a row per combination, a row per step

The folders beside this file are links to those at the top of the repository: `meshrunner.runner` is `runner/`. What is
installed, editable or as a wheel, is this one package.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what `typing` calls so need not be imported for it: every command begins here
if TYPE_CHECKING:
    import os

    from meshrunner.runner.frames import Loaded

__version__ = "0.2.0"
__all__ = ["__version__", "load"]


def load(*folders: str | os.PathLike[str], baseline: str | None = None) -> Loaded:
    """
    Runs as pandas DataFrames: `.rows`, a row per combination, and `.events`, a row per step; `.findings` is what they show.

    Args:
        folders: run directories and sweep directories.
        baseline: `key=value` of the rows that the others are compared with.

    Raises:
        meshrunner.recipes.errors.ConfigError: a folder holds no run, or the baseline does not vary.
    """
    from meshrunner.runner.frames import load_runs  # here: the command line imports this package first

    return load_runs(folders, baseline)
