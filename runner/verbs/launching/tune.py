"""`meshrunner tune`: find the fastest combination of settings that fits, by predicting all combinations and running a few."""

from meshrunner.runner.console import naming
from meshrunner.runner.process.forkserver import warm
from meshrunner.runner.process.signals import hold_stop_requests


def tune(arguments: list[str]) -> int:
    """Search the combinations of the given values, or a default `space` if each key has one value. May raise ConfigError."""
    warm()  # start early: the forkserver imports torch while this process composes the configuration
    hold_stop_requests()
    with naming("composing the configuration"):
        from meshrunner.runner.commands.parser import split
        from meshrunner.runner.config.compose import Composer, grid
        from meshrunner.runner.config.devices import gpu_count
        from meshrunner.runner.verbs.reference.queries import answered

        options, arguments = split("tune", arguments)
        cells = [f"sweep.best_by=[{options.best_by}]"] if options.best_by else []
        given = ["-m", "hydra/sweeper=tune", *arguments, *cells]
        composer = Composer("tune", given)
        if answered(composer):
            return 0
        config = composer.compose_sweep()
        if len(grid(composer.hydra.config_loader, config)) == 1:
            on_cpus = config.hardware.kind == "cpu" or (config.hardware.kind == "auto" and not gpu_count())
            composer = Composer("tune", [*given, f"space={'cpu' if on_cpus else 'layouts'}"])
            config = composer.compose_sweep()
        from meshrunner.runner.sweep.hydra_launchers import run_sweep
    return run_sweep(composer, config)
