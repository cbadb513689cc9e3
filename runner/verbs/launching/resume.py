"""`meshrunner resume`: continue a run, or execute the unfinished runs of a sweep."""

from meshrunner.runner.process.forkserver import warm
from meshrunner.runner.process.signals import hold_stop_requests


def resume(arguments: list[str]) -> int:
    """Resume a run or sweep. Raise ConfigError if the arguments are invalid or the run cannot continue."""
    from meshrunner.runner.commands.parser import existing, parse
    from meshrunner.runner.config.experiment import check
    from meshrunner.runner.config.resumable import more_to_train
    from meshrunner.runner.console import say
    from meshrunner.runner.measure.evaluations import reason_to_end
    from meshrunner.runner.rundir import Summary, read_config, read_state
    from meshrunner.runner.rundir.files import SUMMARY, is_sweep
    from meshrunner.runner.verbs.launching.run import execute_and_report, in_its_interpreter

    hold_stop_requests()
    given = parse("resume", arguments)
    run_dir = existing(given.directory)
    if is_sweep(run_dir):
        warm()
        from meshrunner.runner.sweep.hydra_launchers import resume_sweep

        return resume_sweep(run_dir)
    in_its_interpreter(run_dir, force=given.force)
    if read_state(run_dir) == "completed":
        trained = Summary.read(run_dir / SUMMARY).steps or 0
        experiment = check(read_config(run_dir))
        if reason_to_end(run_dir, experiment) or not more_to_train(experiment, run_dir, trained):
            say(f"{run_dir} is completed; nothing to do")
            return 0
    warm()
    return execute_and_report(run_dir, force=given.force)
