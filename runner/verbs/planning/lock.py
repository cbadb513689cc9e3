"""`meshrunner lock`: record the facts that a configuration determines exactly, or check that these facts are unchanged."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.config_keys import with_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.parser import split
from meshrunner.runner.config.compose import Composer, grid
from meshrunner.runner.config.devices import check_on_devices
from meshrunner.runner.config.experiment import check
from meshrunner.runner.config.hydra.overrides import as_typed
from meshrunner.runner.config.interpreter import continue_in, refuse_others
from meshrunner.runner.console import counted, naming, say
from meshrunner.runner.rundir import key_of
from meshrunner.runner.verbs.reference.queries import answered

if TYPE_CHECKING:
    from meshrunner.runner.predict import Sections

HARDWARE = "hardware=h100_80gb"
"""Hardware that is assumed if none is named, so that a lock file does not depend on this machine's GPUs."""
FIXED = ("hardware", "steps")
"""Keys that `--losses` sets itself, instead of using the user's values."""


def lock(arguments: list[str]) -> int:
    """Write a lock file or, with --check, return 3 if a fact differs from the file. Raise ConfigError for wrong arguments."""
    from meshrunner.runner.compare.table import print_columns
    from meshrunner.runner.predict import OF_CODE
    from meshrunner.runner.verbs.planning.lock_file import LOCK_FILE, Change, Lock, changes, table

    options, given = split("lock", arguments)
    if not (options.check or options.update) and answered(Composer("lock", given)):
        return 0
    path = Path(options.file or LOCK_FILE)
    locked = None
    if options.check or options.update:
        if given or options.losses is not None:
            raise ConfigError("lock: --check and --update use the overrides in the lock file; omit yours")
        locked = Lock.read(path)
        given, losses = locked.arguments, locked.losses
    else:
        losses = options.losses or 0
    found = Lock(given, losses, derived(given, losses, arguments))
    total = sum(len(facts) for sections in found.runs.values() for facts in sections.values())
    size = f"{counted(total, 'fact')} of {counted(len(found.runs), 'run')}"
    changed = changes(locked.runs, found.runs) if locked else []
    if not options.check:
        found.write(path)
        say(f"{path}: {size}" + (f", {counted(len(changed), 'change')}" if locked else ""))
    elif not changed:
        say(f"unchanged: {size}")
    by_cause: dict[str, list[Change]] = {}
    for each in changed:
        cause = ""
        if locked and locked.torch != found.torch and each.section not in OF_CODE:
            cause = f", perhaps because torch changed from {locked.torch} to {found.torch}"
        by_cause.setdefault(cause, []).append(each)
    for cause, rows in sorted(by_cause.items()):
        say(f"{counted(len(rows), 'fact')} changed{cause}:")
        print_columns(table(rows), 3)
    if options.check and changed:
        say("`meshrunner lock --update` accepts the changes")
    return 3 if options.check and changed else 0


def derived(arguments: Sequence[str], losses: int, command: Sequence[str] = ()) -> dict[str, Sections]:
    """Derive the facts of each run, keyed by the overrides in which the runs differ. `losses`: number of steps whose losses
    belong to the facts. `command`: see `_runs`."""
    from meshrunner.runner.predict import exact_facts
    from meshrunner.runner.sweep.combinations import configured_workers

    found: dict[str, Sections] = {}
    runs = list(_runs(arguments, command))
    with naming(f"deriving the facts of {counted(len(runs), 'run')}") as progress:
        for i, (varied, config, reason) in enumerate(runs):
            if reason:
                found[" ".join(varied)] = {"run": {"impossible": reason}}
                continue
            config = with_value(config, "launch.workers", configured_workers(check(config)))
            found[" ".join(varied)] = exact_facts(*check_on_devices(config))
            progress(i + 1, len(runs))
    trained = _trained(arguments, losses) if losses else []
    for varied, _, reason in runs if losses else ():
        own = {each for each in varied if key_of(each) not in FIXED}
        values = next((values for task, values in trained if own <= task), [])
        if not reason and len(values) != losses:
            raise ConfigError(f"lock: --losses: {' '.join(['the run', *varied])} did not train {losses} steps on CPUs")
        if not reason:
            found[" ".join(varied)]["losses"] = {f"step {i + 1}": value for i, value in enumerate(values)}
    return found


def _trained(arguments: Sequence[str], steps: int) -> list[tuple[set[str], list[str]]]:
    """Train for a few steps on this machine's CPUs. Return the overrides and the losses of each run."""
    from meshrunner.runner.compare.runs import read_runs
    from meshrunner.runner.process.receipt import run_command

    flag = "-m" if {"-m", "--multirun"} & set(arguments) else "--run"
    own = [each for each in arguments if each not in ("-m", "--multirun") and key_of(each) not in FIXED]
    given = [f"steps={steps}", "measure_after=0", "log_every=1", "tracker=none", "checkpoint=none", "hardware=cpu"]
    with TemporaryDirectory() as folder:
        where = [f"hydra.run.dir={folder}/run", f"hydra.sweep.dir={folder}/sweep"]
        runs = read_runs([run_command(flag, [*own, *given, *where], output=sys.stderr)])
        return [(set(run.task), [repr(row.get("train/loss")) for row in run.events]) for run in runs]


def _runs(arguments: Sequence[str], command: Sequence[str]) -> Iterator[tuple[list[str], dict[str, Any], str]]:
    """Yield (varying overrides, configuration, reason) for each run. `reason` says why a run is impossible; "" if it is possible.
    `command`: all arguments of `meshrunner lock`, so that another interpreter can repeat the command."""
    from meshrunner.runner.sweep.combinations import Target, check_batch, configured_workers, varying

    composer = Composer("lock", list(arguments))
    composed = composer.single_run()
    if composed is not None:
        continue_in(check(composed.config).launch.python, ["lock", *command])
        if composed.config["hardware"]["kind"] == "auto":
            composed = Composer("lock", [*arguments, HARDWARE]).single_run()
        assert composed is not None
        yield [], composed.config, ""
        return
    config, loader = composer.compose_sweep(), composer.hydra.config_loader
    jobs = grid(loader, config)
    if not any(key_of(each) == "hardware" for each in jobs[0]) and config.hardware.kind == "auto":
        jobs = [[*job, HARDWARE] for job in jobs]
    combinations = check_batch(loader, config, jobs, 0, Target(configured_workers)).combinations
    refuse_others(job.experiment.launch.python for job in combinations if not job.reason)
    varied = varying([job.overrides for job in combinations])
    for job in combinations:
        yield as_typed([each for each in job.overrides if each in varied]), job.runs[0].config, job.reason
