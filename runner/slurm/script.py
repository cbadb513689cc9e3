"""The text that is submitted: slurm/*.sbatch with the settings filled in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshrunner.runner.slurm.settings import Slurm


def for_run(run_dir: Path, settings: Slurm, *, nodes: int, gpus: int | None) -> str:
    """The script of one run."""
    lines = [_quoted(f"--output={run_dir}/logs/slurm-%j.out"), *_options(settings, nodes, gpus)]
    return _filled("run.sbatch", settings, lines, {"overrides": f"({shlex.quote(str(run_dir))})"})


def for_sweep(sweep_dir: Path, tasks: Sequence[int], settings: Slurm, *, nodes: int, gpus: int | None) -> str:
    """
    The script of an array.

    Args:
        tasks: lines of runs.txt, counted from 0.
    """
    throttle = f"%{settings.max_parallel}" if settings.max_parallel is not None else ""
    lines = [f"--array={_ranges(tasks)}{throttle}", _quoted(f"--output={sweep_dir}/slurm-%A_%a.out")]
    lines += _options(settings, nodes, gpus)
    return _filled("sweep.sbatch", settings, lines, {"sweep_dir": shlex.quote(str(sweep_dir))})


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
    own = [_quoted(f"--{name}={value}") for name, value in given.items() if value is not None]
    return [*own, *settings.extra]  # those as they were written: `--mail-type END` is two words, `--comment='a b'` one


def _quoted(option: str) -> str:
    return shlex.quote(option) if " " in option else option


def _filled(name: str, settings: Slurm, options: list[str], variables: dict[str, str]) -> str:
    text = files("meshrunner.slurm").joinpath(name).read_text()
    replaced = [re.split("[= ]", option.strip("'"))[0] for option in options]
    kept = [
        line
        for line in text.splitlines()
        if not (line.startswith("#SBATCH ") and line.split()[1].partition("=")[0] in replaced)
    ]
    last = max(number for number, line in enumerate(kept) if line.startswith("#SBATCH "))
    kept[last + 1 : last + 1] = [f"#SBATCH {option}" for option in options]
    variables |= {
        "meshrunner": f"({settings.program})",
        "srun_args": f"({' '.join(map(shlex.quote, settings.srun))})",
        "max_requeues": str(settings.max_requeues),
    }
    lines = []
    for line in kept:
        variable = re.match(r"(\w+)=", line)
        if variable and variable[1] in variables:
            lines.append(f"{variable[1]}={variables.pop(variable[1])}")
        elif line.startswith("# preamble:"):
            lines += settings.preamble.rstrip().splitlines()
        else:
            lines.append(line)
    assert not variables, f"slurm/{name} has no line for {', '.join(variables)}"
    return "\n".join(lines) + "\n"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,7`: numbers as --array takes them; limits on the length of a line are near when each is written by itself."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
