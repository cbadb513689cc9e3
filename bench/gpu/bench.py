"""
Test options on GPUs and measure their speed. Each test or measurement becomes a row of the file gpu.md in a folder.

Each call has a time limit, and starts no row that is expected to exceed it. Run the remaining rows with --resume FOLDER.
"""

from __future__ import annotations

import argparse
import queue
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from bench.gpu.commands import REPOSITORY, Commands
from bench.gpu.document import Document
from bench.gpu.jobs import EXPECTED_S, PARTS, Job, Jobs, Stage
from bench.gpu.machine import Machine, this_machine
from bench.gpu.results import FILE, Call, Result, Results, merged, read

MINUTES = 9.0
LIMIT_S, CPU_LIMIT_S = 360.0, 1200.0
"""Time limits of one command on GPUs and on a CPU, in seconds. The bench stops a command that takes longer."""


class Bench:
    """Runs jobs until the time is up."""

    def __init__(self, machine: Machine, commands: Commands, results: Results, repeat_failed: bool = False) -> None:
        self.machine, self.commands, self.results, self.repeat_failed = machine, commands, results, repeat_failed
        self.longest: dict[tuple[str, str], float] = {}
        """Longest time of a job that worked, keyed by its part and kind."""

    def run(self, stage: Stage) -> None:
        """Run the jobs of a stage that have no result yet. Record a job as not run if too little time is left."""
        lanes: queue.Queue[dict[str, str]] = queue.Queue()
        for lane in self.machine.lanes() if stage.side_by_side else [{}]:
            lanes.put(lane)

        def one(job: Job) -> None:
            lane = lanes.get()
            try:
                self.results.add(replace(self._done(job, lane), part=job.part, what=job.what, round=job.round))
            finally:
                lanes.put(lane)

        pool = ThreadPoolExecutor(lanes.qsize())
        try:
            list(pool.map(one, filter(self._remains, stage.jobs)))  # raises a job's exception
        except BaseException:
            self.commands.stop()  # otherwise the shutdown below waits for running commands
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _remains(self, job: Job) -> bool:
        found = self.results.find(*job.key)
        return found is None or found.state == "not run" or (self.repeat_failed and found.state == "failed")

    def _done(self, job: Job, lane: dict[str, str]) -> Result:
        if job.missing:
            return Result(job.part, job.what, "skipped", job.missing)
        if self.commands.left < self.longest.get((job.part, job.kind), EXPECTED_S[job.kind]):
            return Result(job.part, job.what, "not run", "the bench had too little time left for this row")
        try:
            result = job.run(lane)
        except Exception as error:  # an error in the bench must not stop the other rows
            return Result(job.part, job.what, "failed", f"error in the bench: {type(error).__name__}: {error}")
        if result.state == "works":
            kind = job.part, job.kind
            self.longest[kind] = max(result.seconds, self.longest.get(kind, 0.0))
        return result


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="run only this part; default: all parts")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit of this call; default %(default)g")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--folder", type=Path, help="new folder for the results; default runs/gpu-DATE-TIME")
    where.add_argument("--resume", type=Path, metavar="FOLDER", help="run the rows that have no result in FOLDER yet")
    parser.add_argument("--repeat-failed", action="store_true", help="with --resume: run failed rows again")
    parser.add_argument("--scratch", type=Path, help="folder for runs, logs and caches; default: FOLDER/runs")
    parser.add_argument("--product", action="store_true", help="also run all combinations of the grid's options")
    parser.add_argument("--cpu", action="store_true", help="test the bench on a CPU, with toy models")
    where.add_argument(
        "--document", type=Path, nargs="+", metavar="FOLDER", help="run nothing; write the document of these folders"
    )
    parser.add_argument(
        "--out", type=Path, help="with --document: Markdown file to write; default gpu.md in the folder"
    )
    args = parser.parse_args(arguments)
    if args.out and not args.document:
        parser.error("--out: only with --document; otherwise the document is gpu.md in the folder")
    return args


def gpu(arguments: list[str]) -> int:
    """Run `python -m bench gpu`. Return the exit status: 2 if the bench cannot start, 1 if a row failed, else 0."""
    began, args = time.monotonic(), parsed(arguments)
    if args.document:
        return document(args.document, args.out)
    machine = this_machine()
    folder = (args.resume or args.folder or Path("runs") / time.strftime("gpu-%Y-%m-%d-%H-%M-%S")).absolute()
    writer = Document(folder / "gpu.md")
    results = Results(folder / FILE, writer.write)
    if wrong := _refused(args, machine, results.calls):
        print(f"python -m bench gpu: {wrong}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    results.begin(Call(time.strftime("%Y-%m-%d %H:%M"), _command(args), _commit(), machine))
    scratch = (args.scratch or folder / "runs").absolute() / f"call-{len(results.calls)}"
    scratch.mkdir(parents=True)
    print(
        f"{machine.describe()}; {args.minutes:g} minutes, results in {folder}, runs and logs in {scratch}", flush=True
    )
    commands = Commands(scratch, began + 60 * args.minutes, LIMIT_S if machine.gpus else CPU_LIMIT_S)
    bench = Bench(machine, commands, results, args.repeat_failed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for stage in Jobs(machine, commands, results, folder).stages([args.part] if args.part else PARTS, args.product):
            bench.run(stage)
    finally:
        commands.stop()
    writer.ended = True
    results.write()
    left = sum(each.state == "not run" for each in results.all)
    more = f"; {left} rows are left, run them with --resume {folder}" if left else ""
    print(f"wrote {writer.path} after {time.monotonic() - began:.0f} s{more}", flush=True)
    # A failed row of torchtitan does not count, because the interface of torchtitan changes often.
    return int(any(each.state == "failed" and each.part != "torchtitan" for each in results.all))


def document(folders: list[Path], out: Path | None) -> int:
    """Write one document of the results in all folders. Refuse folders with results of different GPUs or software."""
    found = [read(folder / FILE) for folder in folders]
    calls = [call for each, _ in found for call in each]
    wrong = next(
        (f"{folder}: no {FILE} with results" for folder, each in zip(folders, found, strict=True) if not each[0]), ""
    )
    if not wrong and (different := next(filter(None, (calls[0].machine.differs(each.machine) for each in calls)), "")):
        wrong = f"the folders have results of different machines or versions: {different}; write one for each folder"
    if wrong:
        print(f"python -m bench gpu: {wrong}", file=sys.stderr)
        return 2
    writer = Document(out or folders[0] / "gpu.md", ended=True)
    writer.write(calls, merged(result for _, results in found for result in results))
    print(f"wrote {writer.path}")
    return 0


def _refused(args: argparse.Namespace, machine: Machine, calls: list[Call]) -> str:
    """Return why the bench cannot start, or ""."""
    if not machine.gpus and not args.cpu:
        return "torch finds no GPU on this machine; --cpu tests the bench itself with toy models"
    if machine.gpus and args.cpu:
        return "--cpu: this machine has a GPU; leave --cpu out, or hide the GPU with CUDA_VISIBLE_DEVICES="
    if args.resume and not calls:
        return f"--resume: {args.resume} has no {FILE} with results; start with --folder {args.resume}"
    if calls and not args.resume:
        return f"--folder: {args.folder} has results already; use --resume {args.folder}"
    if calls and (different := calls[-1].machine.differs(machine)):
        return f"--resume: {args.resume} has results of another machine or version: {different}; use a new --folder"
    return ""


def _command(args: argparse.Namespace) -> str:
    words = [f"--part {args.part}"] * bool(args.part) + [f"--minutes {args.minutes:g}"] * (args.minutes != MINUTES)
    words += [f"--{name}".replace("_", "-") for name in ("repeat_failed", "product", "cpu") if getattr(args, name)]
    return " ".join(["python -m bench gpu", *words])


def _commit() -> str:
    """Return the git commit of the working tree, with `-dirty` if files are changed; "" outside a repository."""
    try:
        words = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, check=False).stdout.strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(gpu(sys.argv[1:]))
