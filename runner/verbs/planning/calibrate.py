"""`meshrunner calibrate`: fit the constants of a `hardware` file, such as the matmul speed, to the speeds of measured runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage import replace_file
from meshrunner.runner.commands.parser import parse
from meshrunner.runner.console import console, naming, one_line, say, table_of

if TYPE_CHECKING:
    from meshrunner.runner.calibrate import Calibration


def calibrate(arguments: list[str]) -> int:
    """Fit constants to runs, print each run's error, and print or write a `hardware` file. Raise ConfigError if the fit fails."""
    given = parse("calibrate", arguments)
    with naming("tracing the runs, fitting the constants"):
        from meshrunner.runner.calibrate import as_yaml, calibrate_device

        calibration = calibrate_device(given.directories)
    fitted = calibration.fitted
    if not fitted.tells_apart and not given.force:
        raise ConfigError(
            "calibrate: the runs cannot separate matmul speed from memory bandwidth. After the fit, the ratio of "
            f"matmul speed to memory bandwidth is still {100 * fitted.ratio_unknown:.0f}% as uncertain as before. Add runs "
            "limited only by matmul speed or only by memory bandwidth, for example with another compile option or "
            "model.dim. --force writes the file anyway"
        )
    if given.json:
        print(json.dumps(calibration.as_json(), indent=2))
    else:
        _show(calibration)
    content = as_yaml(calibration)
    if given.out:
        _write(given.out, content)
    elif not given.json:
        say(f"\n{content.rstrip()}")
    return 0


def _show(calibration: Calibration) -> None:
    screen = console()
    figures, rows = calibration.as_json(), []
    for run in figures["runs"]:
        speeds = f"{run['perf/wps']:,.0f}", f"{run['plan/perf/wps']:,.0f}"
        rows.append([one_line(run["run"]), *speeds, f"{run['error_pct']:+.1f}%", f"{run['left_out_error_pct']:+.1f}%"])
    titles = ("run", "WPS per device", "fitted", "error", "predicted from the others")
    screen.print(table_of(rows, titles, numbers=True))
    for name, reason in calibration.left_out.items():
        screen.print(f"not used for the fit: {one_line(name)}: {reason}", markup=False, soft_wrap=False)
    screen.print()
    rows = [
        [key, f"{figures['before'][key]:.3g}", f"{value:.3g}", f"{figures['unknown_pct'][key]:.0f}%"]
        for key, value in figures["fitted"].items()
    ]
    screen.print(table_of(rows, ("constant", "before", "fitted", "still unknown"), numbers=True))


def _write(file: Path, content: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content.encode())
    except OSError as error:
        raise ConfigError(f"--out: {file} cannot be written: {error}") from None
    usage = "; to use it, move it to DIR/hardware/NAME.yaml and add --config-dir DIR hardware=NAME"
    if file.suffix == ".yaml" and file.absolute().parent.name == "hardware":
        usage = f"; to use it, add --config-dir {file.parent.parent} hardware={file.stem}"
    say(f"wrote {file}{usage}", to_stderr=True)
