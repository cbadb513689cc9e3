"""Reads the state of a search for the fastest combination from the runs on disk, and chooses the next runs."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.comparison import Comparison, compare_sweep
from meshrunner.runner.compare.findings import undecided
from meshrunner.runner.compare.noise import REPEATS
from meshrunner.runner.compare.runs import Row, Run, glance
from meshrunner.runner.config.devices import expected_devices
from meshrunner.runner.config.resumable import check_existing
from meshrunner.runner.console import say
from meshrunner.runner.predict import DOES_NOT_FIT
from meshrunner.runner.rundir import CRASHED, RESULTS, Status, in_round, repeat_number, run_names
from meshrunner.runner.sweep.combinations import SweepBatch
from meshrunner.runner.sweep.tally import speed_of
from meshrunner.runner.tune.belief import Belief, Measured
from meshrunner.runner.tune.choose import Outlook, leaders, next_wave, outlook
from meshrunner.runner.tune.survey import Survey

WAVE = 4
"""Maximum number of runs in a wave (batch of runs) of the search."""
NOISE = {"cuda": 0.03, "cpu": 0.06}
"""Assumed standard deviation of the logarithm of a measured speed within a wave, by type of device."""
STEP = {"cuda": 0.08, "cpu": 0.02}
"""Largest error of memory predictions, as a fraction, for each type of device. A combination that is predicted not to fit may be
tried if its predicted memory exceeds that of a completed run by at most this fraction."""
UNLIKELY = 0.05
"""The search ends when the probability that another combination is more than tune.tolerance faster falls below this value."""


class Found(NamedTuple):
    """The measured runs of a cell (see `Survey.cells`), and the resulting distribution of the speeds."""

    belief: Belief
    outlook: Outlook
    runs: list[Measured]
    tried: Counter[int]
    """Number of measured runs, keyed by combination. Combinations without a measured run have no key."""


class Search:
    """A search for the fastest combination. A sweep directory holds its runs."""

    def __init__(self, sweep_dir: Path, survey: Survey) -> None:
        self.sweep_dir, self.survey, self.jobs, self.names = sweep_dir, survey, survey.jobs, survey.names
        self.numbers = {job.runs[0].run_dir.name: number for number, job in enumerate(survey.jobs)}
        """Number of each combination, keyed by the directory name that its run would have in the first wave."""
        experiment = survey.jobs[0].experiment
        self.settings, self.seed, self.max_repeat = experiment.tune, experiment.seed, experiment.sweep.max_repeat
        self.peaks = np.array([needed_gib(job.plan) for job in self.jobs])
        """Predicted memory of each combination, in GiB."""
        device_type = expected_devices(experiment).type
        self.step, self.noise = STEP[device_type], NOISE[device_type]

    def runs(self) -> list[tuple[int, int, Run]]:
        """Return (combination, wave, run) for each run on disk. Raise ConfigError if a run belongs to another sweep."""
        names = run_names(self.sweep_dir)
        if foreign := [name for name in names if in_round(name, 1) not in self.numbers]:
            raise ConfigError(
                f"{self.sweep_dir} holds runs of another sweep, such as {foreign[0]}. Choose another hydra.sweep.dir"
            )
        return [(self.numbers[in_round(n, 1)], repeat_number(n), glance(self.sweep_dir / n)) for n in names]

    def failed(self, runs: list[tuple[int, int, Run]]) -> dict[int, Run]:
        """Return the newest run of each combination that has runs but no measured speed. `runs`: result of `runs()`."""
        completed = {number for number, _, run in runs if speed_of(run)}
        return {number: run for number, _, run in runs if number not in completed}

    def cells(self, runs: list[tuple[int, int, Run]]) -> list[list[int]]:
        """Return the survey's cells, but leave out combinations that are predicted not to fit. Keep a combination that needs
        little more memory than a completed run: it may fit, despite its prediction. `runs`: result of `runs()`."""
        completed = max((self.peaks[run.combination] for run in _measured(runs)), default=0.0)
        fits = np.array([job.plan["verdict"] != DOES_NOT_FIT for job in self.jobs])
        fits |= self.peaks <= (1 + self.step) * completed
        return [[number for number in cell if fits[number]] for cell in self.survey.cells]

    def found(self, runs: list[tuple[int, int, Run]], cell: list[int]) -> Found | None:
        """Return a cell's measured runs and the posterior, or None without measured runs. `runs`: result of `runs()`."""
        belief = self._belief(runs, cell)
        own = [run for run in _measured(runs) if run.combination in cell]
        tried = Counter(run.combination for run in own)
        return Found(belief, outlook(belief, tried, self.settings.tolerance, self.seed), own, tried) if own else None

    def next_batch(self) -> SweepBatch | None:
        """Return the runs of the next wave, or the unfinished runs of the last wave. Return None if the search has ended."""
        runs = self.runs()
        last = max((wave for _, wave, _ in runs), default=0)
        if left := [number for number, wave, run in runs if wave == last and run.state not in RESULTS | CRASHED]:
            return self._batch(left, last)
        for cell in self.cells(runs):
            found = self.found(runs, cell)
            chosen = self._chosen(found, runs, cell)
            if found is not None and any(wave == last and number in cell for number, wave, _ in runs):
                best, chance, _ = found.outlook
                more = f"over {100 * self.settings.tolerance:g}% faster"
                say(f"best so far: {self.names[best]}; chance that another combination is {more}: {100 * chance:.0f}%")
            if chosen:
                break
        else:
            return None
        say(f"wave {last + 1}: {'; '.join(self.names[number] for number in chosen)}")
        random.Random(self.seed + last).shuffle(chosen)
        return self._batch(chosen, last + 1)

    def _chosen(self, found: Found | None, runs: list[tuple[int, int, Run]], cell: list[int]) -> list[int]:
        """Return the combinations of a cell to run next. The best combination so far comes first, if there is one."""
        own = [run for number, _, run in runs if number in cell]
        room = min(WAVE, self.settings.runs - len(own))
        spent = sum((s.ended or 0) - (s.started or 0) for run in own if (s := run.record(Status)).ended) / 60
        may_search = room > 0 and (self.settings.minutes is None or spent < self.settings.minutes)
        if found is None:
            belief, tried, chosen = self._belief(runs, cell), Counter[int](), list[int]()
        else:
            belief, tried, chosen = found.belief, found.tried, [found.outlook.best]
            if found.outlook.chance < UNLIKELY or room < 2 or not may_search:
                again = [self.number_of(row) for row in self.equal(found, compare_sweep(self.sweep_dir)[0])]
                # If a much faster combination is unlikely, further repeats are not worth their time.
                enough = REPEATS if found.outlook.bound <= self.settings.tolerance else self.max_repeat
                return again if again and min(found.tried[number] for number in again) < enough else []
        for number in next_wave(belief, tried, WAVE, self.noise) if may_search else ():
            if belief.mean[number] > -np.inf and number not in chosen and len(chosen) < room:
                chosen.append(number)
        return chosen

    def equal(self, found: Found, comparison: Comparison) -> list[Row]:
        """Return the fastest row and the rows that may be equally fast. Omit rows that are unlikely to be fastest, and rows
        that a test distinguishes from the fastest row. Keep rows with too few runs for a test. Return [] if only one row is
        left. `comparison`: the whole sweep."""
        ahead = leaders(found.belief, found.tried, self.seed)
        return undecided(comparison, [row for row in comparison.rows if self.number_of(row) in ahead])

    def number_of(self, row: Row) -> int:
        return self.numbers[in_round(row.runs[0].path.name, 1)]

    def _belief(self, runs: list[tuple[int, int, Run]], cell: list[int]) -> Belief:
        """Return the posterior after all runs. Rule out combinations that failed or are outside the cell. If a combination ran
        out of memory, also rule out combinations that are predicted to need at least as much memory."""
        measured, failed = _measured(runs), self.failed(runs)
        belief = self.survey.prior.after(measured, self.noise)
        least = min((self.peaks[number] for number, run in failed.items() if run.state == "oom"), default=np.inf)
        numbers, tried = np.arange(len(self.jobs)), [run.combination for run in measured]
        ruled_out = (
            (self.peaks >= least) & ~np.isin(numbers, tried) | np.isin(numbers, [*failed]) | ~np.isin(numbers, cell)
        )
        return belief._replace(mean=np.where(ruled_out, -np.inf, belief.mean))

    def _batch(self, numbers: list[int], wave: int) -> SweepBatch:
        jobs = []
        for job in (self.jobs[number] for number in numbers):
            run_dir = job.runs[0].run_dir
            run = replace(job.runs[0], run_dir=run_dir.with_name(in_round(run_dir.name, wave)))
            check_existing(run.run_dir, run.config)
            jobs.append(replace(job, runs=[run]))
        return SweepBatch(self.sweep_dir, jobs)


def needed_gib(plan: dict[str, Any]) -> float:
    """Return the predicted memory in plan.json that decides whether a run fits (see `predict._need`), or 0 if unknown."""
    keys = ("peak_reserved", "peak_active", "startup")
    reserved, active, startup = (plan.get(f"memory/{key}_gib") or 0.0 for key in keys)
    return float(reserved or max(active, startup))


def _measured(runs: list[tuple[int, int, Run]]) -> list[Measured]:
    return [Measured(number, float(np.log(speed)), wave) for number, wave, run in runs if (speed := speed_of(run))]
