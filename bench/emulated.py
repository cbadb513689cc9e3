"""Compare the CPU time of emulated ranks with the CPU time of real ranks.

Real ranks compute in the main thread and execute collectives in threads of gloo, so only the main thread's time is compared.
The profiler `Clocked` records the main thread's time: `profiler.kind=bench.emulated:Clocked`.
"""

from __future__ import annotations

import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.processes import measure
from meshrunner.runner.profiler.base import ProfiledRun, Profiler, Session

if TYPE_CHECKING:
    from meshrunner.runner.process.worker_context import WorkerContext

LAYOUTS = ("fsdp2", "fsdp1", "ddp", "tp")
ROUNDS = 7
STEPS, FIRST = 9, 4
"""Number of steps of a run, and the first step whose time is used."""


class Clocked(Profiler):
    """Writes the CPU time of each step of a worker's main thread to RUN/threads/RANK.json."""

    def session(self, run: ProfiledRun, run_dir: Path, context: WorkerContext) -> Session:
        return _Session(None, run, run_dir, context)


class _Session(Session):
    def step_begins(self) -> None:
        self._begin = time.thread_time()

    def step_done(self, step: int) -> None:
        self._times = [*getattr(self, "_times", []), time.thread_time() - self._begin]
        file = self.run_dir / "threads" / f"{self.rank}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(self._times))


def rounds(layout: str, command: list[str], folder: Path) -> list[tuple[list[float], list[float]]]:
    """Run two emulated ranks at the same time, then two real ranks. Repeat this ROUNDS times.

    Return a pair (emulated, real) for each round. Each element lists the seconds of CPU time per step of rank 0 and rank 1.
    """

    def times(run: list[str]) -> list[float]:
        place = Path(tempfile.mkdtemp(dir=folder)) / "run"
        measure([*command, f"parallelism={layout}", *run, f"hydra.run.dir={place}"], folder)
        return [median(json.loads(each.read_text())[FIRST - 1 :]) for each in sorted(place.glob("threads/*.json"))]

    found = []
    for _ in range(ROUNDS):
        with ThreadPoolExecutor(2) as pool:
            alone = [time for [time] in pool.map(times, (["launch.emulate=0"], ["launch.emulate=1"]))]
        found.append((alone, times([])))
    return found
