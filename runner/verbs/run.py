"""`meshrunner run`: one run from overrides, or with -m a sweep over every combination."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path

from meshrunner.runner.process.forkserver import warm
from meshrunner.runner.process.signals import hold_stop_requests

HYDRA_QUESTIONS = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")


def run(arguments: list[str]) -> int:
    """The exit status; raises ConfigError for a configuration that is wrong: then nothing was started."""
    if not any(argument.startswith(HYDRA_QUESTIONS) for argument in arguments):
        warm()  # first of all: torch is imported there while Hydra composes here
        hold_stop_requests()
    from meshrunner.runner.config.compose import Composer, parse

    gc.disable()  # while much is imported and little is garbage: torch is imported beside it, on a sibling core at worst
    composer = Composer(parse("run", arguments))
    if composer.answer():
        return 0
    composed = composer.one()
    if composed is None:
        _collect_again()
        from meshrunner.runner.sweep.launcher import run_sweep

        return run_sweep(composer)
    if composed.submits:
        from meshrunner.runner.verbs.submit import submit_one

        return submit_one(composed)
    from meshrunner.runner.config.devices import node_devices
    from meshrunner.runner.config.experiment import check
    from meshrunner.runner.config.from_checkpoint import fit_continuing
    from meshrunner.runner.launch.nodes import only_this_node
    from meshrunner.runner.rundir.run import place

    experiment = check(composed.config)
    fit_continuing(experiment, composed.run_dir, node_devices(experiment).workers)
    only_this_node(experiment.launch.nodes)
    place(composed.config, composed.run_dir, composed.overrides)
    _collect_again()
    return execute_and_report(composed.run_dir)


def _collect_again() -> None:
    """This process may live for days from here on: what was imported stays, what comes is collected."""
    gc.freeze()
    gc.enable()


def execute_and_report(run_dir: Path, *, force: bool = False) -> int:
    """Execute a run directory in front of a user; returns the exit status."""
    from meshrunner.runner.launch.execute import execute
    from meshrunner.runner.launch.report import report
    from meshrunner.runner.rundir.states import EXIT_STATUS

    outcome, summary = execute(run_dir, force=force)
    with suppress(BrokenPipeError):  # `meshrunner run | head`: the run is recorded, only nobody listens
        if summary:  # the run's first node has one
            report(run_dir, outcome, summary)
    return EXIT_STATUS.get(outcome.state, 1)
