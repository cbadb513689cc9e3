"""Generates sbatch scripts: slurm/run.sbatch with the settings of `hydra/launcher=slurm` filled in."""

import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from meshrunner.runner.rundir.files import LOGS, SLURM_OUTPUT, SLURM_TASK_OUTPUT
from meshrunner.runner.slurm.settings import Nodes, Slurm

CPUS_AND_MEMORY = {"--exclusive", "--oversubscribe", "-s", "--cpus-per-task", "-c", "--cpus-per-gpu", "--mincpus"}
CPUS_AND_MEMORY |= {"--mem", "--mem-per-cpu", "--mem-per-gpu"}
"""sbatch options that request CPUs or memory."""
GPUS = {"--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"}
"""sbatch options that request GPUs."""


def sbatch_script(folder: Path, settings: Slurm, nodes: Nodes, tasks: Sequence[int] = ()) -> str:
    """Return the sbatch script for one run or, if `tasks` is not empty, for a job array. Task 0 is the first run in runs.txt."""
    if not tasks:
        own = [f"--output={folder / LOGS / SLURM_OUTPUT}"]
    else:
        throttle = f"%{settings.max_parallel}" if settings.max_parallel is not None else ""
        own = [f"--array={_ranges(tasks)}{throttle}", f"--output={folder / SLURM_TASK_OUTPUT}"]
    variables = {
        "meshrunner": f"({settings.program})",
        "srun_args": f"({' '.join(map(shlex.quote, settings.srun))})",
        "max_requeues": str(settings.max_requeues),
        "arguments": f"({shlex.quote(str(folder))})",
    }
    lines = []
    for line in _with_options(own + _options(settings, nodes), settings.extra):
        variable = re.match(r"(\w+)=", line)
        if variable and variable[1] in variables:
            lines.append(f"{variable[1]}={variables.pop(variable[1])}")
        elif line.startswith("# preamble:"):
            lines += settings.preamble.rstrip().splitlines()
        else:
            lines.append(line)
    assert not variables, f"slurm/run.sbatch has no line for {', '.join(variables)}"
    return "\n".join(lines) + "\n"


def _options(settings: Slurm, nodes: Nodes) -> list[str]:
    # `--gres` can also request other resources, such as local disks.
    gres = any("--gres" in _names([each]) and "gpu" in each for each in settings.extra)
    asks_for_gpus = gres or GPUS & _names(settings.extra)
    given = {
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "nodes": nodes.number,
        "gpus-per-node": None if asks_for_gpus else nodes.gpus,
        **_cpus_and_memory(settings, nodes),
        "time": settings.time,
        "signal": f"B:USR1@{settings.notice_s}",
    }
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items() if value is not None]


def _cpus_and_memory(settings: Slurm, nodes: Nodes) -> dict[str, int | None]:
    """Return the options that request CPUs and memory. Without them, SLURM may give a job one core and part of the memory."""
    if settings.cpus_per_task is not None or nodes.gpus is None:
        return {"cpus-per-task": settings.cpus_per_task}
    if CPUS_AND_MEMORY & _names(settings.extra):
        return {}
    return {"exclusive": True, "mem": 0} if nodes.whole else {"cpus-per-gpu": settings.cpus_per_gpu}


def _names(options: list[str]) -> set[str]:
    """Return the names of sbatch options: `--mem` for `--mem=0`, `--mem 0` and `'--mem=0'`."""
    return {re.split("[= ]", option.strip("'"))[0] for option in options}


def _with_options(options: list[str], extra: list[str]) -> list[str]:
    """Return the lines of slurm/run.sbatch, with #SBATCH lines for `options` and `extra` added or replaced. Quote an element of
    `options` if it contains a space. Never quote elements of `extra`: `--mail-type END` must stay two words."""
    given = _names([*options, *extra])
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
    """Format task numbers for --array as ranges, such as `0-3,7`, because SLURM may reject a list of thousands of numbers."""
    # Consecutive numbers differ from their indices by the same amount.
    groups = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
