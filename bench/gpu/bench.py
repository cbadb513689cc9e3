"""
Test options on GPUs and measure their speed, for --minutes minutes. Each test or measurement becomes a row of a Markdown file.
"""

from __future__ import annotations

import argparse
import queue
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench.gpu import figures, grid
from bench.gpu.commands import Commands
from bench.gpu.document import Document
from bench.gpu.machine import Machine, this_machine
from bench.gpu.results import Result, Results
from bench.gpu.rows import Small, grid_row, out_of_memory_row, resumed_row

MINUTES, QUICK_MINUTES = 8.0, 3.8
RESERVE_S = 20.0
"""Seconds that must be left for a row to start. A row that started later could hardly finish."""
LIMIT_S, CPU_LIMIT_S = 240.0, 1200.0
"""Time limits of one command on GPUs and on a CPU, in seconds. A command that takes longer seems to hang and is stopped."""
RESUMED = ("dcp", "dcp_async")


class Job(NamedTuple):
    """A test or measurement to run, which becomes a row of the document. part: the row's table; what: the row's name."""

    part: str
    what: str
    devices: int
    run: Callable[[dict[str, str]], Result]
    """Function that runs the row. Its argument contains environment variables to set, such as CUDA_VISIBLE_DEVICES."""


class Bench:
    """All jobs of the bench on one machine, and the earlier results that later jobs need."""

    def __init__(self, machine: Machine, commands: Commands, results: Results) -> None:
        self.machine, self.commands, self.results = machine, commands, results
        self.small = Small.on(machine)
        self.references: dict[str, grid.Steps] = {}
        """Loss and gradient norm of each step of the rows REFERENCE and EXPERT_REFERENCE of `grid`, once these rows have run."""
        self.peak_tflops: float | None = None
        self.number = 0

    def stages(self, every_combination: bool) -> list[tuple[list[Job], bool]]:
        """Return the stages of the bench in order. Each stage is a pair: its jobs, and whether they may run at the same time."""
        return [
            ([self._row(grid.REFERENCE), self._row(grid.EXPERT_REFERENCE)], False),
            ([*map(self._row, grid.FIRST), *map(self._resumed, RESUMED)], True),
            ([self._out_of_memory()], False),
            ([job for case in figures.FIRST for job in self._pair(case)], False),
            ([self._row(row, devices) for row, devices in grid.SEVERAL.items()], False),
            ([*map(self._row, [*grid.REST, *grid.EXPERTS, *grid.REFUSED])], True),
            ([job for case in figures.REST[:4] for job in self._pair(case)], False),
            ([self._measured(case) for case in figures.SEVERAL if case.devices <= self.machine.devices], False),
            ([job for case in figures.REST[4:] for job in self._pair(case)], False),
            ([job for case in figures.FIRST * 2 for job in self._pair(case)], False),
            ([self._row(row) for row in grid.all_combinations()] if every_combination else [], True),
        ]

    def run(self, jobs: list[Job], side_by_side: bool) -> None:
        """Run the jobs of a stage. Record a job as not run if too little time is left or the machine has too few devices."""
        lanes: queue.Queue[dict[str, str]] = queue.Queue()
        for lane in self.machine.lanes() if side_by_side else [{}]:
            lanes.put(lane)

        def one(job: Job) -> None:
            lane = lanes.get()
            try:
                self.results.add(self._done(job, lane))
            finally:
                lanes.put(lane)

        pool = ThreadPoolExecutor(lanes.qsize())
        try:
            list(pool.map(one, jobs))  # raises a job's exception
        except BaseException:
            self.commands.stop()  # otherwise the shutdown below waits for running commands
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _done(self, job: Job, lane: dict[str, str]) -> Result:
        if job.devices > self.machine.devices:
            return Result(job.part, job.what, "not run", f"it needs {job.devices} GPUs")
        if time.monotonic() > self.commands.until - RESERVE_S:
            return Result(job.part, job.what, "not run", "the time was up")
        try:
            return job.run(lane)
        except Exception as error:  # a fault of the bench itself must not lose the other rows
            return Result(job.part, job.what, "failed", f"error in the bench: {type(error).__name__}: {error}")

    def _row(self, row: str, devices: int | None = None) -> Job:
        self.number += 1
        number = self.number

        def run(lane: dict[str, str]) -> Result:
            reference = grid.reference_of(row)
            steps_of_it = self.references.get(reference, [])
            result, steps = grid_row(row, number, self.small, self.commands, lane, steps_of_it, devices)
            if row == reference:
                self.references[row] = steps
            return result

        return Job("grid", row, devices or 1, run)

    def _resumed(self, kind: str) -> Job:
        return Job(
            "proofs",
            f"resume, checkpoint={kind}",
            1,
            lambda lane: resumed_row(kind, self.small, self.commands, lane, self.references.get(grid.REFERENCE, [])),
        )

    def _out_of_memory(self) -> Job:
        return Job("proofs", "out of memory", 1, lambda _: out_of_memory_row(self.small, self.commands))

    def _measured(self, case: figures.Case) -> Job:
        self.number += 1
        number = self.number

        def run(_: dict[str, str]) -> Result:
            result = figures.measured(case, number, self.machine, self.commands)
            self.peak_tflops = result.figures["peak_tflops"] or self.peak_tflops
            return result

        return Job("figures", case.what, case.devices, run)

    def _pair(self, case: figures.Case) -> list[Job]:
        ours = self._measured(case)
        number = self.number

        def run(_: dict[str, str]) -> Result:
            return figures.measured_plain(case, number, self.machine, self.commands, self.peak_tflops)

        return [ours, Job("figures", f"{case.what}, loop", 1, run)]


def gpu(arguments: list[str]) -> int:
    """Run `python -m bench gpu`. Return the exit status: 1 if a row failed, else 0."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"only as much as fits in {QUICK_MINUTES:g} minutes")
    parser.add_argument(
        "--minutes", type=float, help=f"minutes to run; default {MINUTES:g}, or {QUICK_MINUTES:g} with --quick"
    )
    parser.add_argument("--product", action="store_true", help="then also run all combinations of the grid's options")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/measurements/gpu.md"), help="Markdown file to write; default %(default)s"
    )
    parser.add_argument("--folder", type=Path, help="folder for runs and logs; default runs/gpu-DATE-TIME")
    args = parser.parse_args(arguments)
    folder = (args.folder or Path("runs") / time.strftime("gpu-%Y-%m-%d-%H-%M-%S")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    machine = this_machine()
    minutes = args.minutes or (QUICK_MINUTES if args.quick else MINUTES)
    print(f"{machine.describe()}; {minutes:g} minutes, runs and logs in {folder}", flush=True)
    commands = Commands(folder, began + 60 * minutes, LIMIT_S if machine.gpus else CPU_LIMIT_S)
    flags = "".join(f" --{name}" for name in ("quick", "product") if getattr(args, name))
    flags += f" --minutes {args.minutes:g}" if args.minutes else ""
    document = Document(args.out, machine, f"python -m bench gpu{flags}")
    results = Results(folder / "results.jsonl", document.write)
    bench = Bench(machine, commands, results)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for jobs, side_by_side in bench.stages(args.product):
            bench.run(jobs, side_by_side)
    finally:
        commands.stop()
    document.ended = True
    document.write(results.all)
    print(f"wrote {args.out} after {time.monotonic() - began:.0f} s", flush=True)
    return int(any(each.state == "failed" for each in results.all))


if __name__ == "__main__":
    sys.exit(gpu(sys.argv[1:]))
