"""Declarative experiments for distributed LLM training: compose, check, run, compare.

    from meshrunner import load
    runs = load("sweeps/layouts", baseline="parallelism=fsdp1")
    runs.rows, runs.events      # pandas DataFrames: a row per combination, a row per step

The directories next to this file link to those at the top of the repository: `meshrunner.runner` is `runner/`. Only this
package is installed, editable or as a wheel.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing it from `typing` would slow down every command
if TYPE_CHECKING:
    import os

    from meshrunner.runner.frames import Loaded

__version__ = "0.2.0"
__all__ = ["__version__", "load"]


def load(*folders: str | os.PathLike[str], baseline: str | None = None) -> Loaded:
    """
    Return runs as pandas DataFrames: `.rows` has a row per combination, `.events` a row per step, `.findings` sentences.

    Args:
        folders: run directories and sweep directories.
        baseline: `key=value` of the rows that the other rows are compared with.

    Raises:
        meshrunner.recipes.errors.ConfigError: a directory holds no run, or the baseline's key does not vary.
    """
    from meshrunner.runner.frames import load_runs  # here, because the command line imports this package

    return load_runs(folders, baseline)
