"""`meshrunner calibrate`: measured runs in, a file of the `hardware` group out, from which `plan` predicts speeds."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.table import Table

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage.durable import replace_file
from meshrunner.runner.config.hardware import Calibrated
from meshrunner.runner.console import console, naming, one_line, say
from meshrunner.runner.process.garbage import collector_held_off
from meshrunner.runner.verbs.records.compare import Parser


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="meshrunner calibrate",
        description="Fit the constants of a device, from which `plan` predicts speeds, to runs that were measured on it.",
        allow_abbrev=False,
    )
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="run directories and sweep directories")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the device's file here: CONFIGS/hardware/NAME.yaml is chosen by --config-dir CONFIGS hardware=NAME",
    )
    parser.add_argument("--force", action="store_true", help="also where the runs cannot tell the constants apart")
    parser.add_argument("--json", action="store_true", help="one object: the runs, their errors and the file's content")
    return parser


def calibrate(arguments: list[str]) -> int:
    """Fit, print each run's error and write the file; raises ConfigError for wrong arguments and where runs say too little."""
    given = _parser().parse_args(arguments)
    with collector_held_off(), naming("rehearsing the runs, fitting the constants"):
        found = _calibrated(given.folders)
    if not found["tells_apart"] and not given.force:
        raise ConfigError(
            "calibrate: these runs do not tell how fast products are from how fast memory is: "
            f"{found['ratio_unknown_pct']:.0f}% of what was unknown about their ratio remains. Add runs in which one weighs "
            "more, such as compiled ones to eager ones, or other widths of the model; --force writes the file all the same"
        )
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    content = _as_yaml(found)
    if given.out:
        _write(given.out, content)
        say(f"wrote {given.out}{_how_to_use(given.out)}", to_stderr=True)
    elif not given.json:
        console().print()
        console().print(content.rstrip(), markup=False, highlight=False, soft_wrap=True)
    return 0


def _calibrated(folders: list[Path]) -> dict[str, Any]:
    """What --json prints."""
    from meshrunner.runner.calibrate.fit import fit, left_out_errors, predicted_wps
    from meshrunner.runner.calibrate.measured import measured

    known = measured(folders)
    observed = known.observed
    fitted = fit(known.hardware, observed)
    errors = left_out_errors(known.hardware, observed, fitted)
    # Rounded up: nothing is promised that was not seen.
    error_pct = math.ceil(10 * max(map(abs, errors))) / 10
    hardware = fitted.hardware.model_copy(update={"calibrated": Calibrated(runs=len(observed), error_pct=error_pct)})
    runs = [
        {
            "run": each.name,
            "perf/wps": each.wps,
            "plan/perf/wps": (predicted := predicted_wps(each.run, hardware)),
            "error_pct": 100 * (predicted / each.wps - 1),
            "left_out_error_pct": error,
        }
        for each, error in zip(observed, errors, strict=True)
    ]
    return {
        "runs": runs,
        "left_out": known.left_out,
        "tells_apart": fitted.tells_apart,
        "ratio_unknown_pct": 100 * fitted.ratio_unknown,
        "unknown_pct": {key: 100 * share for key, share in fitted.unknown.items()},
        "before": {key: _value(known.hardware, key) for key in fitted.unknown},
        "fitted": {key: _value(hardware, key) for key in fitted.unknown},
        "hardware": hardware.model_dump(mode="json"),
    }


def _value(hardware: Any, key: str) -> float:
    from meshrunner.runner.calibrate.fit import value

    return value(hardware, key)


def _show(found: dict[str, Any]) -> None:
    screen = console()
    table = Table(box=None, pad_edge=False)
    for title in ("run", "WPS per device", "fitted", "error", "predicted from the others"):
        table.add_column(title, overflow="fold", justify="left" if title == "run" else "right")
    for each in found["runs"]:
        table.add_row(
            one_line(each["run"]),
            f"{each['perf/wps']:,.0f}",
            f"{each['plan/perf/wps']:,.0f}",
            f"{each['error_pct']:+.1f}%",
            f"{each['left_out_error_pct']:+.1f}%",
        )
    screen.print(table)
    for name, why in found["left_out"].items():
        screen.print(f"left out: {one_line(name)}: {why}", markup=False, soft_wrap=False)
    screen.print()
    table = Table(box=None, pad_edge=False)
    for title in ("constant", "before", "fitted", "still unknown"):
        table.add_column(title, justify="left" if title == "constant" else "right")
    for key, value in found["fitted"].items():
        table.add_row(key, f"{found['before'][key]:.3g}", f"{value:.3g}", f"{found['unknown_pct'][key]:.0f}%")
    screen.print(table)


def _as_yaml(found: dict[str, Any]) -> str:
    """A file of the `hardware` group."""
    import yaml

    hardware = _rounded(found["hardware"])
    many, error = hardware["calibrated"]["runs"], hardware["calibrated"]["error_pct"]
    return (
        f"# Fitted to {many} measured combinations; each was predicted from the others to {error:g}%\n"
        + yaml.safe_dump(hardware, sort_keys=False, default_flow_style=None, width=120)
    )


def _rounded(value: Any) -> Any:
    """To four digits, which are more than runs tell."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _write(file: Path, content: str) -> None:
    if not file.name:
        raise ConfigError(f"--out: {file} is no file's name")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content.encode())
    except FileExistsError:
        raise ConfigError(f"--out: {file} cannot be written: {file.parent} is no folder") from None
    except OSError as error:
        raise ConfigError(f"--out: {file} cannot be written: {error.strerror}") from None


def _how_to_use(file: Path) -> str:
    if file.suffix != ".yaml" or file.absolute().parent.name != "hardware":
        return "; hardware=NAME finds it as DIR/hardware/NAME.yaml with --config-dir DIR"
    return f": --config-dir {file.parent.parent} hardware={file.stem}"
