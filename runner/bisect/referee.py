"""Decide whether a variant of a run is like the good or the bad variant. Run as many rounds of runs as the noise requires.

A round executes the good, the tested and the bad variant in random order, so that drift of the machine affects all three alike.
The decision is Wald's sequential probability ratio test. It compares two hypotheses: the tested variant's figure is normally
distributed around the good variant's figure, or around the bad variant's figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import NamedTuple

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.compare.runs import read_run
from meshrunner.runner.console import counted, one_line, say, shown
from meshrunner.runner.figures import figure_of
from meshrunner.runner.process.receipt import run_command
from meshrunner.runner.rundir.files import is_run

DECIDED = math.log(200)
"""Logarithm of the likelihood ratio at which the test decides. One of 200 decisions may be wrong."""
DIFFERENT = 0.001
"""Two-sided p-value below which the good and the bad variant differ."""
FEWEST = 3
"""Minimum number of rounds from which noise is estimated."""
LEAST_NOISE = 0.35
"""Least noise that the test assumes, relative to the difference between good and bad, so that no single outlier decides."""
OUTPUT = "output.log"
"""File with the output of all runs."""
FIGURES = {
    "speed": ("perf/tokens_per_cpu_s", "perf/wps"),
    "memory": ("memory/peak_live_gib", "memory/peak_active_gib"),
    "loss": ("train/loss",),
}
"""Figures for each value of `--by`. The first figure that the runs have is used."""


TRACED = ("profiler=memory", "profiler.start=0", "profiler.steps=1")
"""Overrides with which runs on CPUs measure the exact peak of live tensors."""


class Variant(NamedTuple):
    """A configuration or a version of the code that can be run."""

    name: str
    overrides: Sequence[str]
    directory: Path | None = None
    """Current directory of the runs, from which they import the user's code. None: this process's current directory."""


class Referee:
    """Runs variants and decides which of them are bad."""

    def __init__(self, good: Variant, bad: Variant, *, by: str, most: int, folder: Path) -> None:
        """Run the good and the bad variant until they differ beyond noise. Raise ConfigError if they cannot run or do not differ.

        by: a key of FIGURES. most: maximum number of rounds for a decision. folder: directory of the run directories; runs that
        an earlier, interrupted bisection completed here are not repeated.
        """
        self.good, self.bad, self.most, self.folder = good, bad, most, folder
        self.figures = list(FIGURES[by])
        self.extra = TRACED if by == "memory" else ()
        self.pairs: list[tuple[float, float]] = []
        """Figures of the good and the bad variant in each round."""
        self.runs = 0
        self.problem = ""
        """Why the last run did not complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        say(f"the runs and their output ({OUTPUT}) are in {shown(self.folder)}")
        while not self._differ():
            if len(self.pairs) >= most:
                raise ConfigError(
                    f"bisect: {good.name} and {bad.name} do not differ beyond noise after "
                    f"{counted(most, 'round')}: {self.difference()}; use more steps or a larger --rounds"
                )
            self._round()
        say(f"{good.name} is good, {bad.name} is bad: {self.difference()} in {counted(len(self.pairs), 'round')}")

    @property
    def gap(self) -> float:
        """Mean difference between the bad and the good variant's figure within a round."""
        return fmean(bad - good for good, bad in self.pairs)

    @property
    def spread(self) -> float:
        """Standard deviation of the difference between the bad and the good variant's figure over the rounds."""
        return stdev(bad - good for good, bad in self.pairs)

    def difference(self) -> str:
        """Return the difference between the good and the bad variant as text."""
        good, bad = (fmean(values) for values in zip(*self.pairs, strict=True))
        figure = figure_of(self.figures[0])
        return f"{figure.heading} {figure.text(good)} -> {figure.text(bad)} ({100 * self.gap / good:+.3g}%)"

    def is_bad(self, variant: Variant) -> bool | None:
        """Return and print whether a variant is like the bad one. Return None if it cannot run."""
        verdict = self._decide(variant)
        skipped = f"skipped, because it cannot run: {self.problem}"
        say(f"{variant.name}: {skipped if verdict is None else 'bad' if verdict else 'good'}")
        return verdict

    def _decide(self, variant: Variant) -> bool | None:
        evidence = 0.0
        for _ in range(self.most):
            # standard deviation of `share`, in which one run is compared with the mean of two
            noise = math.sqrt(0.75) * self.spread / abs(self.gap)
            found = self._round(variant) if noise else self._measure(variant)
            if found is None:
                return None
            share = (found - fmean(self.pairs[-1])) / self.gap
            if not noise:
                return share > 0
            evidence += min(0.5, max(-0.5, share)) / max(noise, LEAST_NOISE) ** 2
            if abs(evidence) >= DECIDED:
                break
        return evidence > 0

    def _differ(self) -> bool:
        from scipy.special import stdtrit

        if len(self.pairs) < FEWEST:
            return False
        least = self.spread / math.sqrt(len(self.pairs)) * float(stdtrit(len(self.pairs) - 1, 1 - DIFFERENT / 2))
        return abs(self.gap) > least

    def _round(self, tested: Variant | None = None) -> float | None:
        """Run the good, the bad and the tested variant. Return the figure of the tested variant; None if it cannot run."""
        variants = [self.good, self.bad, *([tested] if tested else [])]
        found: dict[str, float] = {}
        for variant in Random(self.runs).sample(variants, len(variants)):
            value = self._measure(variant)
            if value is None and variant is tested:
                return None
            if value is None:
                raise ConfigError(f"bisect: {variant.name} cannot run: {self.problem}")
            found[variant.name] = value
        self.pairs.append((found[self.good.name], found[self.bad.name]))
        return found[tested.name] if tested else None

    def _measure(self, variant: Variant) -> float | None:
        """Run a variant. Return its figure; None if the run fails or has none of the figures."""
        self.runs += 1
        path = self.folder / f"{self.runs:03}_{re.sub('[^A-Za-z0-9.-]+', '-', variant.name)[:80]}"
        self.problem = "it recorded no figure that --by can compare"
        if not (is_run(path) and read_run(path).state == "completed"):
            overrides = [*variant.overrides, *self.extra, f"hydra.run.dir='{path}'"]
            with (self.folder / OUTPUT).open("a") as output:
                try:
                    run_command("--run", overrides, output=output, directory=variant.directory)
                except (ConfigError, RuntimeError) as error:
                    self.problem = one_line(error)
                    return None
        run = read_run(path)
        if run.state != "completed":
            self.problem = one_line(f"{run.state}: {run.reason}")
            return None
        values = {key: run.figures.get(figure_of(key).summary_keys[0]) for key in self.figures}
        self.figures = [key for key, value in values.items() if value is not None] or self.figures
        return values[self.figures[0]]
