"""`meshrunner lock`: record what a configuration determines exactly, or check that it is unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from meshrunner.recipes.config_keys import with_value
from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.parser import split
from meshrunner.runner.config.compose import Composer, grid
from meshrunner.runner.config.devices import check_on_devices, expected_devices
from meshrunner.runner.config.experiment import check
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.config.interpreter import continue_in, refuse_others
from meshrunner.runner.console import counted, naming, say
from meshrunner.runner.rundir import key_of
from meshrunner.runner.verbs.reference.queries import answered

if TYPE_CHECKING:
    from meshrunner.runner.compare.runs import Run
    from meshrunner.runner.predict import Sections

HARDWARE = "hardware=h100_80gb"
"""Hardware that is assumed if none is named, so that a lock file is the same on all machines."""


def lock(arguments: list[str]) -> int:
    """Write a lock file or, with --check, return 3 if a fact differs from it. Raise ConfigError for wrong arguments."""
    from meshrunner.runner.compare.table import print_columns
    from meshrunner.runner.verbs.planning.lock_file import LOCK_FILE, Lock, changes, of_code, table

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
    other_torch = locked is not None and locked.torch != found.torch
    for own in (True, False) if other_torch else (None,):
        if rows := [each for each in changed if own is None or of_code(each) == own]:
            cause = (
                f", perhaps because torch changed from {locked.torch} to {found.torch}"
                if own is False and locked
                else ""
            )
            say(f"{counted(len(rows), 'fact')} changed{cause}:")
            print_columns(table(rows), 3)
    if options.check and changed:
        say("`meshrunner lock --update` accepts the changes")
    return 3 if options.check and changed else 0


def derived(arguments: Sequence[str], losses: int, command: Sequence[str] = ()) -> dict[str, Sections]:
    """Derive the facts of each run, keyed by its varying overrides."""
    from meshrunner.runner.predict import exact_facts

    found: dict[str, Sections] = {}
    runs = list(_runs(arguments, command))
    with naming(f"deriving the facts of {counted(len(runs), 'run')}") as progress:
        for i, (name, config, reason) in enumerate(runs):
            if reason:
                found[name] = {"run": {"impossible": reason}}
                continue
            experiment = check(config)
            if experiment.launch.workers == "auto" and isinstance(experiment.hardware, GPU):
                # The number of this machine's GPUs does not matter.
                config = with_value(config, "launch.workers", experiment.hardware.devices_per_node)
            found[name] = exact_facts(*check_on_devices(config))
            progress(i + 1, len(runs))
    for run in _trained(arguments, losses) if losses else ():
        name = next(name for name in found if set(name.split()) <= set(run.task))
        found[name]["losses"] = {f"step {row.step}": repr(row.get("train/loss")) for row in run.events}
    return found


def _trained(arguments: Sequence[str], steps: int) -> list[Run]:
    """Train for a few steps on this machine's CPUs. Raise ConfigError if a run does not complete."""
    from meshrunner.runner.compare.runs import read_runs
    from meshrunner.runner.process.receipt import run_command

    flag = "-m" if {"-m", "--multirun"} & set(arguments) else "--run"
    own = [each for each in arguments if each not in ("-m", "--multirun") and key_of(each) not in ("hardware", "steps")]
    given = [f"steps={steps}", "measure_after=0", "log_every=1", "tracker=none", "checkpoint=none", "hardware=cpu"]
    with TemporaryDirectory() as folder:
        where = [f"hydra.run.dir={folder}/run", f"hydra.sweep.dir={folder}/sweep"]
        runs = read_runs([run_command(flag, [*own, *given, *where])])
        for run in runs:
            if len(run.events) != steps:
                raise ConfigError(f"lock: --losses: {run.path.name} is {run.state}: {run.reason}")
        return runs


def _runs(arguments: Sequence[str], command: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name and the configuration of each run, and the reason why it is impossible, or "". command: arguments of `lock`
    with which another interpreter (`launch.python`) continues."""
    from meshrunner.runner.sweep.combinations import Target, check_batch, varying

    composer = Composer("lock", list(arguments))
    composed = composer.single_run()
    if composed is not None:
        continue_in(composed.config["launch"]["python"], ["lock", *command])
        if composed.config["hardware"]["kind"] == "auto":
            composed = Composer("lock", [*arguments, HARDWARE]).single_run()
        assert composed is not None
        yield "", composed.config, ""
        return
    config, loader = composer.compose_sweep(), composer.hydra.config_loader
    jobs = grid(loader, config)
    if not any(key_of(each) == "hardware" for each in jobs[0]) and config.hardware.kind == "auto":
        jobs = [[*job, HARDWARE] for job in jobs]
    target = Target(lambda experiment: expected_devices(experiment).workers)
    combinations = check_batch(loader, config, jobs, 0, target).combinations
    varied = varying([job.overrides for job in combinations])
    refuse_others(job.experiment.launch.python for job in combinations if not job.reason)
    for job in combinations:
        yield " ".join(each for each in job.overrides if each in varied), job.runs[0].config, job.reason
