"""`meshrunner plan`: predict the memory and speed of a run or, with -m, of each run of a grid, without a GPU."""

import json
import shlex
from argparse import Namespace
from collections.abc import Sequence

from meshrunner.recipes.errors import ConfigError
from meshrunner.runner.commands.parser import split
from meshrunner.runner.config.compose import Composed, Composer, warn_of_short_sequences
from meshrunner.runner.config.experiment import check
from meshrunner.runner.config.interpreter import continue_in
from meshrunner.runner.console import console, say, table_of
from meshrunner.runner.predict import DOES_NOT_FIT, Forecast, Planned, largest_that_fits, predict_config
from meshrunner.runner.process.forkserver import warm
from meshrunner.runner.rundir import FITTING, key_of
from meshrunner.runner.verbs.reference.queries import answered


def plan(arguments: list[str]) -> int:
    """Predict one run, or rank the runs of a grid. Return 1 if no run fits. Raise ConfigError if the configuration is invalid."""
    if {"-m", "--multirun"} & set(arguments):
        warm()  # start early: the forkserver imports torch while this process composes the configuration
    options, overrides = split("plan", arguments)
    composer = Composer("plan", overrides)
    if answered(composer):
        return 0
    composed = composer.single_run()
    return (
        _rank(composer, options, overrides) if composed is None else _predict(composed, options, arguments, overrides)
    )


def _predict(composed: Composed, options: Namespace, arguments: list[str], overrides: list[str]) -> int:
    continue_in(check(composed.config).launch.python, ["plan", *arguments])
    for flag in ("best_by", "top", "run", "submit"):
        if getattr(options, flag):
            raise ConfigError(f"plan: --{flag.replace('_', '-')} needs several combinations; add -m")
    how = {"active_only": options.active, "with_timeline": options.html is not None}
    if options.max is None:
        planned = Planned(predict_config(composed.config, **how))
    else:
        planned = largest_that_fits(overrides, options.max, **how)
    if options.max != "seq_len":
        warn_of_short_sequences([composed])
    forecast, findings = planned.forecast, planned.findings
    if options.json:
        print(json.dumps(planned.as_json(), indent=2))
    else:
        _show(forecast, findings)
    if options.html is not None:
        from meshrunner.runner.predict import write_page

        answer, reason = forecast.verdict
        figures, remarks = (_rows(forecast), _remarks(forecast)) if forecast.timeline is not None else ([], [])
        command = shlex.join(["meshrunner", "plan", *arguments])
        write_page(options.html, command, answer, [*findings, reason], figures, remarks, forecast.timeline)
        say(f"page: {options.html}", to_stderr=True)
    return int(forecast.verdict.answer == DOES_NOT_FIT)


def _rank(composer: Composer, options: Namespace, overrides: list[str]) -> int:
    from meshrunner.runner.compare.best import by
    from meshrunner.runner.compare.comparison import compare_runs
    from meshrunner.runner.compare.export import as_json
    from meshrunner.runner.compare.select import check_top
    from meshrunner.runner.sweep.ranking import SKIPPED, lines, rank

    check_top(options.top)
    ranked = rank(composer, active_only=options.active, key=options.max)[: options.top]
    comparison = by(compare_runs([each.run for each in ranked]), options.best_by)
    if options.json:
        print(as_json(comparison) if comparison.best_by else json.dumps([each.as_json() for each in ranked], indent=2))
    elif comparison.best_by:
        from meshrunner.runner.compare.table import print_best

        print_best(comparison)
    else:
        say("\n".join(lines(ranked, console().width)))
    if options.html is not None:
        from meshrunner.runner.compare.page.write import write_page as write_comparison

        write_comparison(comparison, options.html)
        say(f"page: {options.html}", to_stderr=True)
    if options.run or options.submit:
        return _execute([each.job for each in ranked if each.forecast.verdict.answer in FITTING], overrides, options)
    return int(all(each.forecast.verdict.answer in (DOES_NOT_FIT, SKIPPED) for each in ranked))


def _execute(jobs: list[Sequence[str]], overrides: list[str], options: Namespace) -> int:
    """Run or submit `jobs`, the combinations that fit in memory. Return the sweep's exit status, or 1 if no combination fits."""
    from meshrunner.runner.sweep.hydra_launchers import run_sweep

    if not jobs:
        return 1
    # sweep.exclude was applied already. Applying a rule again would fail if these combinations lack a key of the rule.
    given = [[*(each for each in job if key_of(each) != "sweep.exclude"), "sweep.exclude=[]"] for job in jobs]
    verb, launcher = ("submit", ["hydra/launcher=slurm"]) if options.submit else ("run", [])
    return run_sweep(Composer(verb, overrides + launcher), jobs=given)


def _show(forecast: Forecast, findings: Sequence[str]) -> None:
    screen = console()
    for finding in findings:
        screen.print(finding, soft_wrap=False)
    screen.print(f"{forecast.verdict.answer}: {forecast.verdict.reason}", soft_wrap=False)
    if forecast.memory is None:
        return
    screen.print(table_of(_rows(forecast)))
    for remark in _remarks(forecast):
        screen.print(remark, soft_wrap=False)


def _remarks(forecast: Forecast) -> list[str]:
    return [*([f"speed: {forecast.speed.error_basis}"] if forecast.speed else []), *forecast.remarks]


def _rows(forecast: Forecast) -> list[tuple[str, str]]:
    rows, memory, speed = [], forecast.memory, forecast.speed
    if memory is not None:
        largest_first = sorted(memory.by_category_gib.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {gib:.2f}" for name, gib in largest_first if gib >= 0.005)
        active = (
            f"{memory.peak_active_gib:.2f} GiB ({memory.peak_active_pct:.1f}%) in {memory.phase}, rank {forecast.rank}"
        )
        rows += [("peak active", active), ("of which", f"{parts} GiB")]
        if memory.peak_reserved_gib is not None:
            rows.append(("peak reserved", f"{memory.peak_reserved_gib:.2f} GiB ({memory.peak_reserved_pct:.1f}%)"))
        if memory.block_gib is not None:
            block = f"{1024 * memory.block_gib:,.2f} MiB of activations between its forward and its backward"
            rows.append(("a block adds", block))
        rows.append(("start-up", f"{memory.startup_gib:.2f} GiB"))
    if speed is not None:
        mfu = "" if speed.mfu is None else f", MFU {speed.mfu:.1f}%"
        parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in speed.seconds_by_part.items() if seconds)
        rows.append(("speed", f"{speed.wps:,.0f} WPS per device{mfu}, {speed.step_time_s:.3f} s per step"))
        rows.append(("of which", f"{parts} s; exposed communication {speed.exposed_communication_s:.3f} s"))
        if speed.pipeline_idle_pct is not None:
            rows.append(("pipeline idle", f"{speed.pipeline_idle_pct:.1f}% of the step, averaged over ranks"))
    return rows
