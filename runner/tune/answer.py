"""Prints the result of `meshrunner tune`, and writes the best combination and the fitted hardware as config options."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import DictConfig

from meshrunner.recipes.config_keys import differences, with_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage import replace_file
from meshrunner.runner import shipped
from meshrunner.runner.calibrate import as_yaml, calibrate_device
from meshrunner.runner.compare.comparison import Comparison, compare_sweep
from meshrunner.runner.config.compose import resolve_config, typed
from meshrunner.runner.console import console, naming, one_line, say, shown, table_of, warn
from meshrunner.runner.figures import figure_of, speed_figure
from meshrunner.runner.rundir import key_of
from meshrunner.runner.tune.search import UNLIKELY, Found, Search
from meshrunner.runner.tune.survey import SET_BY_TUNE

MFU = figure_of("perf/mfu")
TUNED = "hardware/tuned.yaml"
"""Path, in the sweep directory, of the file that holds the fitted constants of the device."""


def report(loader: Any, config: DictConfig, search: Search) -> None:
    """Print the result of a search that has ended. Write files for the best combinations and the fitted hardware."""
    runs = search.runs()
    for number, run in search.failed(runs).items():
        say(
            one_line(f"no speed measured for {search.names[number]}: {run.state}{f': {run.reason}' * bool(run.reason)}")
        )
    possible = [cell for cell in search.cells(runs) if cell]
    cells = [(cell, found) for cell in possible if (found := search.found(runs, cell)) is not None]
    if not cells:
        raise ConfigError("tune: no run has completed")
    comparison, _ = compare_sweep(search.sweep_dir)
    space = "this space" if len(possible) == 1 else "this cell"
    for cell, found in cells:
        _answer(config, search, comparison, found, len(cell), space)
        _table(search, found)
    _write_hardware(search.sweep_dir)
    for number, (_, found) in enumerate(cells, 1):
        _write_best(loader, config, search, found.outlook.best, f"best_{number}" if len(cells) > 1 else "best")


def _answer(config: DictConfig, search: Search, comparison: Comparison, found: Found, size: int, space: str) -> None:
    """Print the best combination of a cell (`Search.cells`), and how much faster others may be. `size`: size of the cell."""
    best, chance, bound = found.outlook
    rows = {search.number_of(row): row for row in comparison.rows}
    summaries = rows[best].summaries
    figures = [
        f"{figure.text(value)} {figure.title}"
        for figure in (speed_figure(summaries), MFU)
        if (value := rows[best].figures.get(figure.summary_keys[0])) is not None
    ]
    say(f"\n{search.names[best]}: {', '.join(figures)}.")
    equal = map(search.number_of, search.equal(found, comparison))
    if others := [search.names[number] for number in equal if number != best]:
        say(f"Equally fast within noise: {', '.join(others)}.")
    faster = f"more than {100 * bound:.1f}% faster" if bound >= 0.0005 else "faster"
    say(f"No combination of {space} is {faster} (95%); {len(found.tried)} of {size:,} were run.")
    if chance >= UNLIKELY:
        command = ["meshrunner", "tune", *typed(config.hydra.overrides.task), f"hydra.sweep.dir={search.sweep_dir}"]
        say(
            f"The search has used its budget. With a probability of {100 * chance:.0f}%, another combination is more than "
            f"{100 * search.settings.tolerance:g}% faster. To continue, raise tune.runs or tune.minutes: {shlex.join(command)}"
        )


def _table(search: Search, found: Found) -> None:
    before, rows = search.survey.prior.after([], 1.0).mean, []
    for number in sorted(found.tried, key=lambda number: -found.belief.mean[number]):
        speeds = [run.speed for run in found.runs if run.combination == number]
        values = float(np.median(speeds)), found.belief.mean[number], before[number]
        rows.append([search.names[number], str(len(speeds)), *(f"{np.exp(value):,.0f}" for value in values)])
    console().print(table_of(rows, ("combination", "runs", "measured", "expected", "predicted"), numbers=True))


def _write_hardware(sweep_dir: Path) -> None:
    """Fit the constants of the device to the runs, and write them to the file TUNED. Warn if the runs are not sufficient."""
    try:
        with naming("fitting the constants of the device"):
            calibration = calibrate_device([sweep_dir])
    except ConfigError as error:
        warn(f"the constants of the device were not fitted: {error}")
        return
    figures = calibration.as_json()
    changed = [f"{key} {figures['before'][key]:.3g} -> {value:.3g}" for key, value in figures["fitted"].items()]
    say(f"\nconstants of the device: {', '.join(changed)}")
    _write(sweep_dir / TUNED, as_yaml(calibration))
    say(
        "to use these constants in the next `meshrunner tune`, add "
        f"--config-dir {shlex.quote(str(shown(sweep_dir)))} hardware=tuned"
    )


def _write_best(loader: Any, config: DictConfig, search: Search, best: int, name: str) -> None:
    """Write a combination to experiment file `name`: its options, and all keys whose values do not follow from the options."""
    job = search.jobs[best]
    given = [each for each in typed(config.hydra.overrides.task) if key_of(each) in SET_BY_TUNE]
    overrides = [*(each for each in job.overrides if key_of(each) not in SET_BY_TUNE), *given]
    run = resolve_config(loader.load_sweep_config(config, overrides), None)
    defaults = loader.load_sweep_config(config, []).hydra.runtime.choices
    choices = {
        group: choice
        for group, choice in run.overrides["choices"].items()
        if group not in shipped.GLOBAL and choice != defaults[group]
    }
    options = [f"{group}={choice}" for group, choice in choices.items()]
    plain = resolve_config(loader.load_sweep_config(config, options), None)
    content: dict[str, Any] = {"defaults": [{f"override /{group}": choice} for group, choice in choices.items()]}
    for key, _, value in differences(plain.config, run.config):
        if value is not ... and key.partition(".")[0] not in ("sweep", "tune"):
            content = with_value(content, key, value)
    title = f"# @package _global_\n# The fastest combination of {search.sweep_dir.name}: {search.names[best]}\n"
    _write(search.sweep_dir / f"experiment/{name}.yaml", title + yaml.safe_dump(content, sort_keys=False, width=120))
    folder = shlex.quote(str(shown(search.sweep_dir)))
    say(f"to train with {search.names[best]}: meshrunner run --config-dir {folder} experiment={name}")


def _write(file: Path, content: str) -> None:
    file.parent.mkdir(exist_ok=True)
    replace_file(file, content.encode())
