"""Write the results of the GPU bench as Markdown: the machine, speed and memory, the tested options, and the rows not run."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu.figures import FIRST, READ_EVERY, STEPS, middle, overrides, ratios, subjects
from bench.gpu.machine import Machine
from bench.gpu.results import Result
from bench.gpu.rows import STEPS as ROW_STEPS
from bench.gpu.rows import Small
from meshrunner.recipes.storage import replace_file

FIGURES = """\
bf16, fused AdamW, plain loss, random tokens. *Loop* is `bench/gpu/plain_loop.py` with the same recomputation, compiled by block
in rows with `per_block`. Both run alternately, each in its own process. Each run has {steps} steps and reads metrics every
{every}. The first {every} steps are not measured, and WPS is the median over the rest. Ratios are taken pair by pair. MFU is
relative to {peak}.
"""
GRID = """\
Each row is a `meshrunner run` of {steps} steps of a small Llama. It works if the loss and gradient norm of every step agree with
the reference (fp32, eager, one device), within {tolerance}.
Every pair of options of parallelism, precision, compilation, recomputation and loss occurs in a row.
"""


LISTED = 60
"""Maximum length of the list of rows that were not run."""


class Document:
    """The Markdown file that shows all results so far. It is rewritten for each new result."""

    def __init__(self, path: Path, machine: Machine, command: str) -> None:
        self.path, self.machine, self.command = path, machine, command
        self.ended = False

    def write(self, results: list[Result]) -> None:
        parts = [self._head(results), self._figures(results), self._start(results)]
        parts += [self._rows(results), self._not_run(results), self._commands()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, ("\n".join(part for part in parts if part)).encode())

    def _head(self, results: list[Result]) -> str:
        counts = Counter(each.state for each in results)
        summary = ", ".join(f"{counts[state]} {state}" for state in ("works", "refused", "failed", "not run"))
        lines = [
            f"# Options on {'GPUs' if self.machine.gpus else 'a CPU, with toy models'}, {time.strftime('%B %Y')}",
            "",
        ]
        lines += [f"{self.machine.describe()}: `{self.command}`.", "", f"Rows: {summary}."]
        if not self.ended:
            lines += ["", "The bench has not ended: it is still running, or it was stopped."]
        return "\n".join(lines) + "\n"

    def _figures(self, results: list[Result]) -> str:
        cases = dict.fromkeys(each.what for each in results if each.part == "figures" and each.state != "not run")
        if not cases:
            return ""
        peaks = {each.figures.get("peak_tflops") for each in results} - {None}
        peak = " or ".join(f"{value:,.1f} TFLOP/s" for value in sorted(peaks)) or "an unknown peak"
        titles = "; ".join(f"{key}: {self._subject(key)}" for key in subjects(self.machine))
        lines = ["## Speed and memory", "", FIGURES.format(steps=STEPS, every=READ_EVERY, peak=peak) + titles + ".", ""]
        head = ["", "WPS", "loop", "ratio", "MFU", "loop", "peak active, GiB", "loop"]
        rows = []
        for what in cases:
            ours, loop = (_of(results, what, side) for side in ("meshrunner", "loop"))
            found = ratios(ours, loop)
            row = [f"`{what}`", _speed(ours), _speed(loop), _spread(found, ".3f")]
            row += [_number(middle(each, "mfu"), ".1f", "%") for each in (ours, loop)]
            row += [_number(middle(each, "peak_active_gib"), ".2f") for each in (ours, loop)]
            rows.append(row)
        return "\n".join([*lines, *_table(head, rows)])

    def _subject(self, key: str) -> str:
        subject = subjects(self.machine)[key]
        return f"{subject.title}, sequence length {subject.seq_len:,}, micro batch {subject.micro_batch}"

    def _start(self, results: list[Result]) -> str:
        cases = dict.fromkeys(each.what for each in results if each.part == "figures" and each.state == "works")
        rows = []
        for what in cases:
            ours, loop = (_of(results, what, side) for side in ("meshrunner", "loop"))
            times = [
                [each.figures["first_step_s"] for each in side if each.figures.get("first_step_s")]
                for side in (ours, loop)
            ]
            row = [f"`{what}`", *(", ".join(f"{value:.1f}" for value in side) or "-" for side in times)]
            rows.append([*row, _number(middle(ours, "startup_active_gib"), ".2f")])
        if not rows:
            return ""
        text = "Seconds from the command to the end of the first step, for each run. Before the first run nothing is compiled."
        head = ["", "meshrunner", "loop", "peak active during start-up, GiB"]
        return "\n".join(["## Start", "", text, "", *_table(head, rows)])

    def _rows(self, results: list[Result]) -> str:
        found = [each for each in results if each.part != "figures" and each.state != "not run"]
        if not found:
            return ""
        tolerance = "1e-4 and 1e-3 in fp32, 1e-2 and 5e-2 in bf16 and TF32, 5e-2 and 2e-1 in float8"
        lines = ["## What works", "", GRID.format(steps=ROW_STEPS, tolerance=tolerance)]
        rows = [
            [f"`{each.what}`", each.state, _reason(each), _number(each.figures.get("memory/peak_active_gib"), ".2f")]
            for each in found
        ]
        return "\n".join([*lines, *_table(["", "result", "reason", "peak active, GiB"], rows)])

    def _not_run(self, results: list[Result]) -> str:
        left = [each for each in results if each.state == "not run"]
        if not left:
            return ""
        lines = [*dict.fromkeys(f"- `{each.what}`: {each.reason}" for each in left)]
        more = [f"- and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
        return "\n".join(["## Not run", "", *lines[:LISTED], *more, ""])

    def _commands(self) -> str:
        common = " ".join(Small.on(self.machine).common)
        grid_row = f"Rows of the grid: `meshrunner run {common} launch.workers={self.machine.pair} ROW`."
        case = FIRST[0]
        words = " ".join(overrides(case, subjects(self.machine)[case.subject], self.machine))
        return f"## Commands\n\n{grid_row}\n\n`{case.what}`: `meshrunner run {words}`.\n"


def _of(results: list[Result], what: str, side: str) -> list[Result]:
    return [each for each in results if each.what == what and each.figures.get("side") == side]


def _speed(results: list[Result]) -> str:
    """Return the median and range of tokens per second, or the reason why no speed was measured."""
    known = [each.figures["wps"] for each in results if each.figures.get("wps")]
    return _spread(known, ",.0f") if known else "; ".join(f"{each.state}: {_reason(each)}" for each in results) or "-"


def _spread(values: list[float], form: str) -> str:
    if not values:
        return "-"
    middle_one = f"{median(values):{form}}"
    return middle_one if len(values) == 1 else f"{middle_one} ({min(values):{form}}-{max(values):{form}})"


def _number(value: Any, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _reason(result: Result) -> str:
    reason = result.reason.replace("|", "\\|").replace("\n", " ")
    return reason + (f" (`{result.log}`)" if result.log else "")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)] + [""]
