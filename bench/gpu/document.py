"""Write the results of the GPU bench as Markdown: the machine, speed and memory, the tested options, and the rows not run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu import emulate
from bench.gpu.figures import FIRST, READ_EVERY, REST, STEPS, middle, overrides, ratios, subjects
from bench.gpu.results import Call, Result
from bench.gpu.rows import STEPS as ROW_STEPS
from bench.gpu.rows import Small
from bench.published_rows import SOURCES
from meshrunner.recipes.storage import replace_file

FIGURES = """\
All rows use bf16, fused AdamW, the plain loss and random tokens. The columns *loop* show the results of a hand-written loop,
`bench/gpu/loops/plain_loop.py`, with the recomputation and compilation of the row. meshrunner and the loop run alternately,
each in its own process. Each run has {steps} steps and reads metrics every {every} steps. WPS is the median over all steps
except the first {every}. The column *ratio* shows meshrunner's WPS divided by the loop's WPS in each pair of runs. MFU is
relative to {peak}. The models are
"""
ONE_SHARD = """\
\\* With one shard, FSDP2 casts every weight and copies it into the gathered buffer. FSDP2 also copies every fp32 gradient. The
hand-written loop only casts the weights, so a ratio slightly below 1 is expected.
"""
TITAN = """\
`bench/gpu/loops/titan.py` trains the same model with torchtitan {version}: the same batch size and optimizer, random tokens, and
FlexAttention. *Ratio* is meshrunner's WPS, with `parallelism=fsdp2`, divided by torchtitan's.
"""
PLANS = "`meshrunner plan` predicts each measured run. *Stated* is the error that `plan` states for the predicted WPS."
EMULATED = """\
The table shows rank 0 of published runs on many GPUs, emulated on one device. Each row is a `meshrunner run` with
`launch.workers=8`, `{settings}` and the published run's overrides from `bench/published_rows.py`. Reserved memory and the compute
time of a step are measured. WPS is computed from the sum of the compute time and the predicted exposed communication. The columns
*plan* show predictions for the GPU of the published run, which may be faster or slower than the GPU that emulates the run.
"""
GRID = """\
Each row is a `meshrunner run` of {steps} steps of a small model. A row works if the loss and gradient norm of every step agree
with those of the reference, an eager fp32 run on one device. The relative tolerances (loss and gradient norm) are
{tolerance}.
Any two compatible options of parallelism, precision, compilation, recomputation and loss occur together in at least one row.
"""
WITHOUT = ("skipped", "not run")
"""States of rows without a result."""
LISTED = 60
"""Maximum length of the list of rows that were not run."""


class Document:
    """The Markdown file that shows all results so far. `write` replaces the file after each new result."""

    def __init__(self, path: Path, ended: bool = False) -> None:
        self.path, self.ended = path, ended

    def write(self, calls: list[Call], results: list[Result]) -> None:
        self.machine = calls[-1].machine
        parts = [self._head(calls, results), self._figures(results), self._titan(results), self._plans(results)]
        parts += [self._emulated(results), self._start(results), self._rows(results)]
        parts += [self._not_run(results), self._commands()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, ("\n".join(part for part in parts if part)).encode())

    def _head(self, calls: list[Call], results: list[Result]) -> str:
        counts = Counter(each.state for each in results)
        states = ("works", "refused", "failed", "skipped", "not run")
        summary = ", ".join(f"{counts[state]} {state}" for state in states)
        device = "GPUs" if self.machine.gpus else "a CPU, with toy models"
        lines = [f"# Options on {device}, {calls[-1].date.split()[0]}", "", f"Machine: {self.machine.describe()}.", ""]
        for call in calls:
            lines.append(f"- {call.date}: `{call.command}`" + (f" at commit {call.commit}" if call.commit else ""))
        lines += ["", f"Numbers of rows by result: {summary}."]
        if not self.ended:
            lines += ["", "The bench has not ended: it is still running, or it was stopped."]
        return "\n".join(lines) + "\n"

    def _figures(self, results: list[Result]) -> str:
        cases = _shown(results, "figures")
        if not cases:
            return ""
        peaks = {each.figures.get("peak_tflops") for each in results} - {None}
        peak = " or ".join(f"{value:,.1f} TFLOP/s" for value in sorted(peaks)) or "an unknown peak"
        titles = "; ".join(f"{key}, which is {self._subject(key)}" for key in subjects(self.machine))
        lines = ["## Speed and memory", "", FIGURES.format(steps=STEPS, every=READ_EVERY, peak=peak) + titles + ".", ""]
        head = ["", "WPS", "loop", "ratio", "MFU", "loop", "peak active, GiB", "loop"]
        rows = []
        for what in cases:
            ours, loop = _of(results, "figures", what), _loop_of(results, what)
            ratio = _spread(ratios(ours, loop), ".3f") + " \\*" * (bool(loop) and "parallelism=fsdp2" in what.split())
            row = [f"`{what}`", _speed(ours), _speed(loop), ratio]
            row += [_number(middle(each, "mfu"), ".1f", "%") for each in (ours, loop)]
            row += [_number(middle(each, "peak_active_gib"), ".2f") for each in (ours, loop)]
            rows.append(row)
        remarks = [f"- `{each.what}`: {each.reason}" for each in results if each.part == "figures" and _remark(each)]
        return "\n".join([*lines, *_table(head, rows), ONE_SHARD, *remarks, *[""] * bool(remarks)])

    def _subject(self, key: str) -> str:
        subject = subjects(self.machine)[key]
        return f"{subject.title} with sequence length {subject.seq_len:,} and micro batch {subject.micro_batch}"

    def _titan(self, results: list[Result]) -> str:
        rows = []
        for what in _shown(results, "torchtitan"):
            theirs = _of(results, "torchtitan", what)
            ours = _of(results, "figures", f"{what.rpartition(' ')[0]} parallelism=fsdp2")
            row = [f"`{what}`", _speed(theirs), _spread(ratios(ours[:1], theirs), ".3f")]
            rows.append([*row, _number(middle(theirs, "peak_active_gib"), ".2f")])
        if not rows:
            return ""
        head = ["", "WPS", "ratio", "peak active, GiB"]
        text = TITAN.format(version=self.machine.version("torchtitan"))
        return "\n".join(["## torchtitan", "", text, *_table(head, rows)])

    def _plans(self, results: list[Result]) -> str:
        rows = []
        for what in _shown(results, "plan"):
            plan, run = _of(results, "plan", what), _of(results, "figures", what)
            error = middle(plan, "wps_error_pct")
            row = [f"`{what}`", _number(middle(run, "wps"), ",.0f"), _speed(plan)]
            row += [
                _number(error, ".0f", "%"),
                *(_number(middle(each, "peak_active_gib"), ".2f") for each in (run, plan)),
            ]
            rows.append(row)
        if not rows:
            return ""
        head = ["", "WPS", "plan", "stated", "peak active, GiB", "plan"]
        return "\n".join(["## Predictions", "", PLANS, "", *_table(head, rows)])

    def _emulated(self, results: list[Result]) -> str:
        shown, sources, rows = _shown(results, "emulate"), dict[str, None](), []
        for published in emulate.ROWS:
            if (what := emulate.what(published)) not in shown:
                continue
            sources[published.source] = None
            run = _of(results, "emulate", what)
            row = [what, _spread([*{*published.wps}], ",.0f"), _number(middle(run, "plan_wps"), ",.0f"), _speed(run)]
            row += [_number(middle(run, key), ".2f", " s") for key in ("compute_s", "communication_s")]
            row.append(_number(published.reserved_gib, ".2f"))
            row += [_number(middle(run, key), ".2f") for key in ("plan_reserved_gib", "reserved_gib")]
            rows.append(row)
        if not rows:
            return ""
        head = ["", "WPS, published", "plan", "emulated", "compute", "communication"]
        head += ["reserved, GiB, published", "plan", "emulated"]
        text = EMULATED.format(settings=" ".join(emulate.SETTINGS))
        places = [f"- {source}: {SOURCES[source]}" for source in sources]
        return "\n".join(["## Published runs, emulated", "", text, *_table(head, rows), *places, ""])

    def _start(self, results: list[Result]) -> str:
        rows = []
        for what in _shown(results, "figures"):
            ours = _of(results, "figures", what)
            times = [
                [each.figures["first_step_s"] for each in side if each.figures.get("first_step_s")]
                for side in (ours, _loop_of(results, what))
            ]
            if not any(times):
                continue
            row = [f"`{what}`", *(", ".join(f"{value:.1f}" for value in side) or "-" for side in times)]
            rows.append([*row, _number(middle(ours, "startup_active_gib"), ".2f")])
        if not rows:
            return ""
        text = "The table lists the seconds from the command to the end of the first step of each run. Each call of the"
        text += " bench starts with an empty cache of compiled code."
        head = ["", "meshrunner", "loop", "peak active during start-up, GiB"]
        return "\n".join(["## Start", "", text, "", *_table(head, rows)])

    def _rows(self, results: list[Result]) -> str:
        found = [each for each in results if each.part in ("grid", "proofs") and each.state not in WITHOUT]
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
        left = [each for each in results if each.state in WITHOUT]
        if not left:
            return ""
        names = {"grid": "", "proofs": "", "figures": ""}
        lines = [f"- {names.get(each.part, f'{each.part}: ')}`{each.what}`: {each.reason}" for each in left]
        lines = [*dict.fromkeys(lines)]
        more = [f"- and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
        return "\n".join(["## Not run", "", *lines[:LISTED], *more, ""])

    def _commands(self) -> str:
        common = " ".join(Small.on(self.machine).common)
        command = f"meshrunner run {common} launch.workers={self.machine.pair} ROW"
        grid_row = f"Each row of the section *What works* runs `{command}`."
        case = FIRST[0]
        words = " ".join(overrides(case, subjects(self.machine)[case.subject], self.machine))
        return f"## Commands\n\n{grid_row}\n\nThe row `{case.what}` runs `meshrunner run {words}`.\n"


def _shown(results: list[Result], part: str) -> list[str]:
    """Return the names of those rows of a part that have run."""
    return [*dict.fromkeys(each.what for each in results if each.part == part and each.state not in WITHOUT)]


def _remark(result: Result) -> bool:
    return result.state == "works" and bool(result.reason)


def _of(results: list[Result], part: str, what: str) -> list[Result]:
    return sorted((each for each in results if (each.part, each.what) == (part, what)), key=lambda each: each.round)


def _loop_of(results: list[Result], what: str) -> list[Result]:
    """Return the results of the hand-written loop for the same work as a case."""
    case = next((each for each in (*FIRST, *REST) if each.what == what), None)
    return _of(results, "loop", case.loop) if case else []


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
