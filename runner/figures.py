"""Rows as a person reads them."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from meshrunner.runner.console import console

UNKNOWN = "-"


def cell(summary: dict[str, Any], key: str, form: str = ".2f") -> str:
    """A figure, or a dash where it is not known."""
    value = summary.get(key)
    return UNKNOWN if value is None else format(value, form)


def columns(summary: dict[str, Any]) -> dict[str, str]:
    """Title -> text of the columns that one run has in a table."""
    wps = f"{cell(summary, 'perf/wps_median', ',.0f')}"
    if summary.get("perf/wps_p10") is not None:
        wps += f" ({cell(summary, 'perf/wps_p10', ',.0f')}-{cell(summary, 'perf/wps_p90', ',.0f')})"
    mfu = summary.get("perf/mfu_median")
    found = {
        "state": str(summary.get("state", UNKNOWN)),
        "WPS per device (p10-p90)": wps,
        "MFU": UNKNOWN if mfu is None else f"{mfu:.1f}%",
    }
    for name in ("active", "reserved"):
        if summary.get(f"memory/peak_{name}_gib") is not None:
            found[f"peak {name}"] = (
                f"{cell(summary, f'memory/peak_{name}_gib')} GiB ({cell(summary, f'memory/peak_{name}_pct')}%)"
            )
    if "peak active" not in found:
        found["peak RSS"] = f"{cell(summary, 'memory/peak_rss_gib')} GiB"
    found["step time"] = f"{cell(summary, 'perf/step_time_s_median', '.3f')} s"
    found["first step after"] = f"{cell(summary, 'perf/time_to_first_step_s', '.1f')} s"
    found["final loss"] = cell(summary, "train/final_loss", ".4f")
    return found


def print_row(choices: dict[str, str], summary: dict[str, Any]) -> None:
    """One run as a table of one row: what was chosen, then what was measured. On a narrow terminal one figure a line."""
    row = choices | columns(summary)
    screen = console()
    if screen.width < sum(max(len(title), len(text)) + 3 for title, text in row.items()) + 1:
        width = max(map(len, row))
        for title, text in row.items():
            screen.print(f"{title:{width}}  {text}", markup=False)
        return
    table = Table(box=box.MARKDOWN, pad_edge=True)
    for title in row:
        table.add_column(title, no_wrap=True)
    table.add_row(*row.values())
    screen.print(table)
