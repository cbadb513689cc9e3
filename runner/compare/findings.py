"""Summarise a comparison in two to four sentences. Figures are of tested rows only, so that no sentence reports noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from meshrunner.runner.compare.causes import common
from meshrunner.runner.compare.comparison import Against, Comparison, Row
from meshrunner.runner.compare.keys import first_of, text
from meshrunner.runner.compare.noise import ALPHA, REPEATS, p_value
from meshrunner.runner.compare.parity import short
from meshrunner.runner.figures import figure_of

LISTED = 3
"""Rows, or reasons, that a sentence names."""
SAME_MEMORY = 1.02
"""Ratio of the highest peak to the lowest below which the rows count as equal in memory."""
WORKLOAD = ("model", "seq_len")
"""Sections and keys that decide how much work a token is. If rows differ in them, none is called the fastest."""
MEMORY = ("memory/peak_reserved_gib", "memory/peak_active_gib", "memory/peak_rss_gib")
"""Figures of memory. Rows are compared by the first that all of them have."""


def findings(comparison: Comparison) -> list[str]:
    """Return sentences for the top of a table. Untested differences are counted but never given as a figure."""
    shown = f"Shown: {comparison.selection}" if comparison.selection else ""
    found = [_best(comparison), *_against(comparison), _losses(comparison), _without_result(comparison), shown]
    return [f"{sentence}." for sentence in found if sentence]


def _best(comparison: Comparison) -> str:
    """Name the fastest row, the rows that are as fast within noise, and the row with the least memory."""
    speed = comparison.speed
    rows = [row for row in comparison.rows if len(row.measured(speed)) >= REPEATS]
    if sum(bool(row.completed) for row in comparison.rows) < 2:
        return ""
    if not rows:
        takes = f"{REPEATS} completed runs of a combination (sweep.repeat={REPEATS})"
        return f"No difference is tested: telling one from noise takes {takes}"
    if len(rows) < 2 or any(key.partition(".")[0] in WORKLOAD for key in comparison.keys):
        return ""
    rows.sort(key=lambda row: median(row.measured(speed)), reverse=True)
    fastest = rows[0]
    equal = [row for row in rows[1:] if (p_value(row.measured(speed), fastest.measured(speed)) or 0) >= ALPHA]
    if len(equal) == len(rows) - 1:
        sentence = f"No tested row is faster than another beyond noise ({speed.title})"
    else:
        sentence = f"Fastest: {comparison.name(fastest)} ({speed.text(median(fastest.measured(speed)))} {speed.title})"
        if equal:
            sentence += f"; within noise of it: {first_of([comparison.name(row) for row in equal], LISTED)}"
    return sentence + _leanest(rows, comparison)


def _leanest(rows: Sequence[Row], comparison: Comparison) -> str:
    """Name the row with the least memory; return "" if memory is unknown or about equal."""
    known = [figure for figure in map(figure_of, MEMORY) if all(figure.values(row.summaries)[0] for row in rows)]
    if not known:
        return ""
    figure = known[0]
    peaks = [figure.values(row.summaries)[0] or 0.0 for row in rows]
    if max(peaks) < SAME_MEMORY * min(peaks):
        return ""
    least = min(range(len(rows)), key=peaks.__getitem__)
    return f"; least memory: {comparison.name(rows[least])} ({figure.text(peaks[least])} {figure.title})"


def _against(comparison: Comparison) -> Iterator[str]:
    """Yield a sentence for each value of the baseline's key: the median gain, its range, and how many pairs are noise."""
    if comparison.baseline is None:
        return
    key, baseline = comparison.baseline
    values: dict[str, list[Against]] = {}
    for row, against in zip(comparison.rows, comparison.against, strict=True):
        if against is not None and against.speed_pct is not None:
            values.setdefault(text(row.values.get(key)), []).append(against)
    for value, pairs in values.items():
        tested = [each for each in pairs if each.p_value is not None]
        gains = [each.speed_pct for each in tested if each.speed_pct is not None]
        untested = len(pairs) - len(gains)
        if not gains:
            continue  # the first sentence says so
        noise = sum(bool(each.within_noise) for each in pairs)
        size = f"{median(gains):+.1f}%"
        if len(gains) > 1:
            size = f"{size} at the median, {min(gains):+.1f}% to {max(gains):+.1f}% over {len(gains)} pairs"
        sentence = f"{value} against {baseline}: "
        if noise == len(gains):
            repeats = min(each.repeats for each in tested)
            sentence += f"no difference in {comparison.speed.title} beyond the noise of {repeats} repeats ({size})"
        else:
            sentence += f"{comparison.speed.title} {size}" + (f", of which {noise} within noise" if noise else "")
        yield sentence + (f"; {_count(untested, 'more pair')} not tested" if untested else "")


def _losses(comparison: Comparison) -> str:
    """Return whether the losses of rows and baselines agree."""
    kinds: dict[str, list[tuple[Row, Against]]] = {}
    for row, against in zip(comparison.rows, comparison.against, strict=True):
        if against is not None and against.verdict.kind:
            kinds.setdefault(against.verdict.kind, []).append((row, against))
    pairs = sum(map(len, kinds.values()))
    if not pairs:
        return ""
    bad = {"differs": "Losses differ", "different data": "The data is not the same"}
    parts = [
        f"{words} in {len(kinds[kind])} of {_count(pairs, 'pair')}: "
        + first_of([comparison.name(row) for row, _ in kinds[kind]], LISTED)
        for kind, words in bad.items()
        if kind in kinds
    ]
    if parts:
        return "; ".join(parts)
    largest = max(each.verdict.difference or 0.0 for same in kinds.values() for _, each in same)
    how = "are identical" if set(kinds) == {"identical"} else f"agree (largest difference {short(f'{largest:.1e}')})"
    return f"Losses {how} in {'all ' * (pairs > 1)}{_count(pairs, 'pair')}"


def _without_result(comparison: Comparison) -> str:
    """Count the rows that failed or were skipped, with the settings that each group has in common."""
    parts = []
    for state in dict.fromkeys(filter(None, map(_trouble, comparison.rows))):
        rows = [row.values for row in comparison.rows if _trouble(row) == state]
        # Rows that were skipped or have not ended might have ended in the same state.
        never = () if state == "skipped" else ("skipped", "pending", "running")
        others = [row.values for row in comparison.rows if _trouble(row) != state and row.state not in never]
        causes = common(rows, others, comparison.keys)
        parts.append(", ".join(f"{count} {state}: {words}" for count, words in causes) or f"{len(rows)} {state}")
    return "; ".join(parts)


def _trouble(row: Row) -> str:
    """Return the state of a row's first run that ended without a result; "" if there is none."""
    return next((run.state for run in row.runs if run.state not in ("completed", "pending", "running")), "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
