"""Declarative experiments for distributed LLM training: compose, check, run, compare.

    import meshrunner
    sweep = meshrunner.sweep(["parallelism=fsdp1,fsdp2", "steps=20"])      # as `meshrunner run -m ...`
    runs = meshrunner.load("sweeps/layouts", baseline="parallelism=fsdp1")
    runs.rows, runs.events      # pandas DataFrames: a row per combination, a row per step

The directories next to this file are links to directories at the top of the repository: `meshrunner.runner` is `runner/`.
Only this package is installed, editable or as a wheel.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing it from `typing` would slow down every command
if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from meshrunner.runner.frames import Loaded, Run, Sweep

__version__ = "0.2.0"
__all__ = ["__version__", "load", "run", "sweep"]


def load(*folders: str | os.PathLike[str], baseline: str | None = None) -> Loaded:
    """
    Return runs as pandas DataFrames `.rows` (a row per combination) and `.events` (a row per step), and as text `.findings`.

    Args:
        folders: run directories and sweep directories.
        baseline: `key=value` of the rows that the other rows are compared with.

    Raises:
        meshrunner.recipes.errors.ConfigError: a directory holds no run, or the baseline's key does not vary.
    """
    from meshrunner.runner.frames import load_runs  # not at the top, because every command imports this package

    return load_runs(folders, baseline)


def run(overrides: Sequence[str] = ()) -> Run:
    """
    Execute a single run as `meshrunner run` does, in separate processes, and return the run. Its output is printed as usual.

    A failed run is returned, too. Its `state` and `reason` describe the failure.

    Args:
        overrides: settings such as `["model=llama_tiny", "steps=20"]`, and flags such as `--config-dir=DIR`.

    Raises:
        meshrunner.recipes.errors.ConfigError: the configuration is wrong. The message is that of `meshrunner run`.
        KeyboardInterrupt: the run was interrupted. The message names the command that continues the run.
    """
    from meshrunner.runner.frames import execute

    return execute("--run", overrides).runs[0]


def sweep(overrides: Sequence[str] = ()) -> Sweep:
    """Execute a sweep as `meshrunner run -m` does and return it. Arguments and errors are those of `run`."""
    from meshrunner.runner.frames import execute

    return execute("-m", overrides)
