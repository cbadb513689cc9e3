"""The text that is submitted: slurm/run.sbatch with the settings filled in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from meshrunner.runner.rundir.files import LOGS, SLURM_OUTPUT, SLURM_TASK_OUTPUT
from meshrunner.runner.slurm.settings import Slurm


def for_run(run_dir: Path, settings: Slurm, *, nodes: int, gpus: int | None) -> str:
    """The script of one run."""
    return _filled(run_dir, settings, [f"--output={run_dir / LOGS / SLURM_OUTPUT}"], nodes, gpus)


def for_sweep(sweep_dir: Path, tasks: Sequence[int], settings: Slurm, *, nodes: int, gpus: int | None) -> str:
    """
    The script of an array over the runs of a sweep.

    Args:
        tasks: lines of runs.txt, counted from 0.
    """
    throttle = f"%{settings.max_parallel}" if settings.max_parallel is not None else ""
    own = [f"--array={_ranges(tasks)}{throttle}", f"--output={sweep_dir / SLURM_TASK_OUTPUT}"]
    return _filled(sweep_dir, settings, own, nodes, gpus)


def _filled(folder: Path, settings: Slurm, own: list[str], nodes: int, gpus: int | None) -> str:
    """slurm/run.sbatch for a run or sweep directory; `own`: options that depend on which of the two it is."""
    variables = {
        "meshrunner": f"({settings.program})",
        "srun_args": f"({' '.join(map(shlex.quote, settings.srun))})",
        "max_requeues": str(settings.max_requeues),
        "arguments": f"({shlex.quote(str(folder))})",
    }
    lines = []
    for line in _with_options(own + _options(settings, nodes, gpus), settings.extra):
        variable = re.match(r"(\w+)=", line)
        if variable and variable[1] in variables:
            lines.append(f"{variable[1]}={variables.pop(variable[1])}")
        elif line.startswith("# preamble:"):
            lines += settings.preamble.rstrip().splitlines()
        else:
            lines.append(line)
    assert not variables, f"slurm/run.sbatch has no line for {', '.join(variables)}"
    return "\n".join(lines) + "\n"


def _options(settings: Slurm, nodes: int, gpus: int | None) -> list[str]:
    given = {
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "nodes": nodes,
        "gpus-per-node": gpus,
        "cpus-per-task": settings.cpus_per_task,
        "time": settings.time,
        "signal": f"B:USR1@{settings.notice_s}",
    }
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def _with_options(options: list[str], extra: list[str]) -> list[str]:
    """
    The lines of slurm/run.sbatch with these options after its own; an option that is given replaces its own.

    Args:
        extra: options as the user wrote them: `--mail-type END` is two words, `--comment='a b'` one.
    """
    given = {re.split("[= ]", option.strip("'"))[0] for option in [*options, *extra]}
    lines = [
        line
        for line in files("meshrunner.slurm").joinpath("run.sbatch").read_text().splitlines()
        if not (line.startswith("#SBATCH ") and line.split()[1].partition("=")[0] in given)
    ]
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH "))
    quoted = [shlex.quote(option) if " " in option else option for option in options]
    lines[last + 1 : last + 1] = [f"#SBATCH {option}" for option in [*quoted, *extra]]
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as --array takes them, `0-3,7`. Written one by one they would come near the limits on the length of a line."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
