"""Build the JSON that the report page draws. A row holds the runs with equal settings, and a figure is a measured number."""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import median
from typing import Any

from meshrunner.recipes.config_keys import flatten
from meshrunner.recipes.secrets import is_secret
from meshrunner.runner.compare.cells import LONGEST_VALUE, facts, legend, reasons
from meshrunner.runner.compare.comparison import MEMORY, SCALES, WPS, Comparison
from meshrunner.runner.compare.findings import WORKLOAD, findings
from meshrunner.runner.compare.keys import text
from meshrunner.runner.compare.noise import REPEATS
from meshrunner.runner.compare.page.ledgers import group_of, live_memory, predicted_memory, traced
from meshrunner.runner.compare.runs import Row, Run
from meshrunner.runner.figures import FIGURES, PREDICTION, Figure, higher_is_better, number, table_figures
from meshrunner.runner.rundir import FITTING, StepRow

POINTS = 600
"""Maximum number of points in a curve. A run with 1200 steps is drawn at every second step."""
ALL_POINTS = 80_000
"""Number of points that all curves of a chart share. Each curve gets at least FEWEST_POINTS and at most POINTS."""
FEWEST_POINTS = 100
BINS = 24
"""Number of bins in a histogram. A row with fewer values than bins has no histogram."""
MAX_RANKS = 64
"""Maximum number of ranks shown per row. If a row has more ranks, the 32 lowest and the 32 highest values are shown."""
STEP_TIME = "perf/step_time_s"


def as_json(comparison: Comparison) -> str:
    """Return the JSON for the page. Each `<` is escaped, because `</script>` in a setting would end the script element."""
    return json.dumps(_charted(comparison), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _charted(comparison: Comparison) -> dict[str, Any]:
    rows = comparison.rows
    runs = comparison.runs
    figures = [each for each in table_figures() if any(_known(row, each) for row in rows)]
    shown = [figure.key for figure in figures]
    memory = next((key for key in (*MEMORY, *(PREDICTION + key for key in MEMORY)) if key in shown), None)
    names, texts, settings = _settings(runs)
    places = {id(run): i for i, run in enumerate(runs)}
    row_places = {id(row): i for i, row in enumerate(rows)}
    # The baseline of a row may not be among the selected rows.
    against = [row_places.get(id(each.row)) if each else None for each in comparison.against]
    axes: dict[tuple[int, ...], int] = {}
    charted = [
        _row(row, comparison, figures, axes) | {"baseline": base, "runs": [places[id(run)] for run in row.runs]}
        for row, base in zip(rows, against, strict=True)
    ]
    return {
        "keys": comparison.keys,
        "baseline": "=".join(comparison.baseline) if comparison.baseline else None,
        "workload": [key for key in comparison.keys if key.partition(".")[0] in WORKLOAD],
        "scales": SCALES,
        "speed": comparison.speed.key if any(row.completed for row in rows) else PREDICTION + WPS.key,
        "memory": memory,
        "best_by": comparison.best_by,
        "figures": [_figure(figure) for figure in figures],
        "by_rank": [_figure(each) for each in FIGURES if each.by_rank and any(_ranks(row, each) for row in rows)],
        "rows": charted,
        "steps": [list(steps) for steps in axes],
        "groups": {line: group_of(line) for row in charted for line in row["ledgers"].get("seconds per step", ())},
        "runs": settings,
        "settings": names,
        "texts": texts,
        "verdict": findings(comparison),
        "below": [*legend(comparison), *comparison.remarks],
        "notes": [*reasons(comparison), *(f"{name}: {value}" for name, value in facts(comparison).items())],
    }


def _row(
    row: Row, comparison: Comparison, figures: Sequence[Figure], axes: dict[tuple[int, ...], int]
) -> dict[str, Any]:
    points = max(FEWEST_POINTS, min(POINTS, ALL_POINTS // len(comparison.rows)))
    return {
        "name": comparison.name(row),
        "state": row.state,
        "completed": bool(row.completed),
        "tested": len(row.measured(comparison.speed)) >= REPEATS,
        "values": {key: value if number(value) is not None else text(value) for key, value in row.values.items()},
        "figures": {each.key: _with_range(row, each) for each in figures if _known(row, each)},
        "devices": row.counted[0].summary.world_size,
        "limit": min((gib for run in row.runs if (gib := run.summary.device_memory_gib) is not None), default=None),
        "ranks": {each.key: found for each in FIGURES if each.by_rank and (found := _ranks(row, each))},
        "ledgers": _ledgers(row),
        **_curves(row, points, axes),
    }


def _ledgers(row: Row) -> dict[str, dict[str, float]]:
    """Return a row's ledgers, keyed by title: the step time divided into lines, and the memory peak divided into categories."""
    found = {"seconds per step": traced(row), "GiB at the peak": live_memory(row) or predicted_memory(row)}
    return {title: {line: round(each, 6) for line, each in lines.items()} for title, lines in found.items() if lines}


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "key": figure.key,
        "title": figure.title or figure.key.rpartition("/")[2].removesuffix("_s").replace("_", " "),
        "column": figure.heading,
        "unit": figure.unit if len(figure.unit) <= len("percent") else "",
        "better": 1 if higher_is_better(figure.key) else -1,
    }


def _known(row: Row, figure: Figure) -> bool:
    """Return whether charts show a figure of a row. Speeds of crashed runs and of runs that do not fit are not comparable."""
    shown = row.completed or (figure.key.startswith(PREDICTION) and row.counted[0].summary.verdict in FITTING)
    return bool(shown) and figure.values(row.summaries)[0] is not None


def _with_range(row: Row, figure: Figure) -> list[float | None]:
    """Return a figure's value and its range over the runs: lowest and highest value, or lowest p10 and highest p90."""
    single = figure._replace(over_steps="last") if figure.over_steps == "last best" else figure
    ranged = single._replace(over_repeats="median min max")
    return figure.values(row.summaries)[:1] + ranged.values(row.summaries)[1:]


def _settings(runs: Sequence[Run]) -> tuple[list[str], list[str], list[list[int]]]:
    """Return (keys that differ between runs, texts, indices). `texts[indices[run][key]]` is the value of a key in a run.
    An index of -1 means that the run does not have the key."""
    flat = [flatten(run.config) for run in runs]
    texts: dict[str, int] = {}
    found: dict[str, list[int]] = {}
    for name in dict.fromkeys(name for each in flat for name in each):
        values = [text(each[name])[:LONGEST_VALUE] if name in each else None for each in flat]
        if len(set(values)) > 1 and not is_secret(name):
            found[name] = [-1 if each is None else texts.setdefault(each, len(texts)) for each in values]
    columns = list(found.values())
    return list(found), list(texts), [[column[i] for column in columns] for i in range(len(runs))]


def _curves(row: Row, points: int, axes: dict[tuple[int, ...], int]) -> dict[str, Any]:
    """Return curves of a row's loss, held-out loss and step time, and a histogram of its step times. A curve has about `points`
    points. A point is the median over the completed runs of the row, or over all runs of the row if no run completed. Step
    times exclude warm-up steps, profiled steps and compilation. `axes` maps each distinct list of steps to an index. A
    curve stores this index instead of the steps."""
    losses = _medians((run.events for run in row.counted), "train/loss")
    measured = [run.measured for run in row.counted]
    times = _medians(measured, STEP_TIME)
    found: dict[str, Any] = {}
    held_out = _medians((run.evals for run in row.counted), "eval/loss")
    for name, values, digits in (("losses", losses, 7), ("held_out", held_out, 7), ("times", times, 4)):
        steps = sorted(values)
        kept = steps[:: max(1, -(-len(steps) // points))]
        kept += steps[-1:] if steps and kept[-1] != steps[-1] else []
        place = axes.setdefault(tuple(kept), len(axes)) if kept else None
        found[name] = [place, [float(f"{values[step]:.{digits}g}") for step in kept]] if kept else None
    all_times = [each for row in chain(*measured) if (each := number(row.get(STEP_TIME))) is not None]
    return found | {"histogram": _histogram(all_times)}


def _medians(runs: Iterable[Iterable[StepRow]], key: str) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for rows in runs:
        for row in rows:
            if (value := number(row.get(key))) is not None:
                found.setdefault(row.step, []).append(value)
    return {step: values[0] if len(values) == 1 else median(values) for step, values in found.items()}


def _histogram(values: Sequence[float]) -> list[Any] | None:
    """Return [lowest value, highest value, fraction of values in each bin]; None for equal values or fewer than BINS values."""
    if len(values) < BINS or (low := min(values)) >= (high := max(values)):
        return None
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, math.floor(BINS * (value - low) / (high - low)))] += 1
    return [low, high, [round(count / len(values), 4) for count in counts]]


def _ranks(row: Row, figure: Figure) -> list[tuple[int, float]]:
    """Return (rank, value) pairs of the first completed run that has the figure, sorted by value; at most MAX_RANKS pairs."""
    values = next((each for run in row.completed if (each := run.summary.by_rank(figure.key))), [])
    known = [(rank, value) for rank, value in enumerate(values) if value is not None]
    known.sort(key=lambda pair: pair[1])
    return known if len(known) <= MAX_RANKS else known[: MAX_RANKS // 2] + known[-MAX_RANKS // 2 :]
