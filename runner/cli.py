"""The command line: one function per verb. What a verb does not need, it does not import."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

HELP = """\
usage: meshrunner VERB ...

  run    [OVERRIDES] [-m]    train; with -m, a sweep over every combination
  resume DIR [--force]       execute a run directory as it stands on disk, from its newest checkpoint, or the rest of a sweep
  show   [OVERRIDES]         resolved configuration, mesh, wrap plan, parameters, FLOPs per token; starts nothing
  compare DIR [DIR...]       which settings vary between runs, what they change, whether the losses agree; -h lists its options
  status DIR [DIR...]        how far every run of a sweep is, also while it is running
  submit [OVERRIDES] [-m]    write run directories and submit them to SLURM; --dry-run prints the script and does nothing
  submit DIR                 submit again what of a run or sweep directory has no result
  cancel DIR                 stop what runs or waits
  place  [OVERRIDES] [-m]    write run directories, start nothing
  doctor                     what this machine has, what is missing and why it matters

OVERRIDES are Hydra's: model=llama3_8b parallelism.shard=4 +key=value ~key. `meshrunner run --help` lists the options.

exit status: 0 every run ended as asked; 1 a run failed; 2 the configuration is wrong, nothing was started;
             75 preempted, may be run again; 130 interrupted"""

HYDRA_QUESTIONS = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")


def main() -> NoReturn:
    """Entry point; ends with the exit status of the help text."""
    signal.signal(signal.SIGINT, _leave)  # imports now and then swallow a KeyboardInterrupt
    # A folder `runner` in the current directory must not be ours, but a user's own classes may live there.
    here = os.getcwd()  # noqa: PTH109
    sys.path[:] = [entry for entry in sys.path if entry not in ("", here)] + [here]
    code = _dispatch(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    _end(code)


def _leave(_: int, __: FrameType | None) -> NoReturn:
    os.write(2, b"interrupted; nothing was started\n")
    _end(130)


def _end(code: int) -> NoReturn:
    """Nothing that still runs in the background may delay or change the end."""
    # A signal may come while runner.child is being imported: then there is nobody to leave behind.
    leave: Callable[[int], NoReturn] = getattr(sys.modules.get("runner.child"), "leave", os._exit)
    leave(code)


def _dispatch(arguments: list[str]) -> int:
    verbs: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "resume": _resume,
        "show": _show,
        "compare": _compare,
        "status": _status,
        "submit": _submit,
        "cancel": _cancel,
        "place": _place,
        "doctor": _doctor,
    }
    if "-sc" in arguments or "--shell-completion" in arguments:  # the shell calls without a verb
        return _complete(arguments, list(verbs))
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0 if arguments else 2
    verb = verbs.get(arguments[0])
    if verb is None:
        from recipes.option import did_you_mean

        print(
            f"meshrunner: unknown verb '{arguments[0]}'.{did_you_mean(arguments[0], verbs)}\n\n{HELP}", file=sys.stderr
        )
        return 2
    return _guarded(verb, arguments[1:])


def _guarded(verb: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Turn the errors a user can cause into one screen and an exit status."""
    try:
        return verb(arguments)
    except (Exception, KeyboardInterrupt) as error:
        known = _explain(error, arguments)
        if known is None:
            raise
        code, text = known
        print(text, file=sys.stderr)
        return code


def _explain(error: BaseException, arguments: list[str]) -> tuple[int, str] | None:
    """Exit status and text for an error a user can cause; None for a fault of this program."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from recipes.option import ConfigError
    from runner.outcome import Interrupted
    from runner.rundir import Busy

    if isinstance(error, Interrupted):
        return 130, f"interrupted {error}"
    if isinstance(error, Busy):
        return 1, str(error)
    if isinstance(error, ConfigError):
        return 2, str(error)
    if isinstance(error, HydraException | OmegaConfBaseException | YAMLError) or type(error) in (
        ValueError,
        UnicodeDecodeError,
    ):
        from runner.explain import explain

        return 2, explain(error, [a for a in arguments if not a.startswith("-")])
    return None


def _complete(arguments: list[str], verbs: list[str]) -> int:
    """Tab completion. The line typed is `meshrunner run mo`; Hydra expects it without the verb."""
    from runner import compose

    words = os.environ.get("COMP_LINE", "").split(" ", 2)
    if len(words) == 2:
        print(" ".join(verb for verb in verbs if verb.startswith(words[1])))
        return 0
    if len(words) == 3:
        os.environ["COMP_LINE"] = f"{words[0]} {words[2]}"
    compose.Composer(compose.parse("", arguments)).answer()
    return 0


def _run(arguments: list[str]) -> int:
    if not any(argument.startswith(HYDRA_QUESTIONS) for argument in arguments):
        from runner.child import warm
        from runner.preemption import hold

        warm()  # first of all: torch is imported there while Hydra composes here
        hold()
    from runner import compose

    gc.disable()  # while much is imported and little is garbage: torch is imported beside it, on a sibling core at worst
    composer = compose.Composer(compose.parse("run", arguments))
    if composer.answer():
        return 0
    composed = composer.one()
    if composed is None:
        _collect_again()
        from runner.sweep import run_sweep

        return run_sweep(composer)
    if composed.submits:
        from runner.slurm.launcher import submit_one

        return submit_one(composed)
    from runner.devices import resolve
    from runner.experiment import check
    from runner.nodes import only_this_node
    from runner.resume import fit_continuing
    from runner.rundir import place

    experiment = check(composed.config)
    fit_continuing(experiment, composed.run_dir, resolve(experiment)[1])
    only_this_node(experiment.launch.nodes)
    place(composed.config, composed.run_dir, composed.overrides)
    _collect_again()
    return _execute(composed.run_dir)


def _collect_again() -> None:
    """This process may live for days from here on: what was imported stays, what comes is collected."""
    gc.freeze()
    gc.enable()


def _resume(arguments: list[str]) -> int:
    from recipes.option import ConfigError
    from runner.experiment import check
    from runner.preemption import hold
    from runner.resume import more_to_train
    from runner.rundir import read_config, read_json, read_status

    hold()
    force, folders = "--force" in arguments, [argument for argument in arguments if argument != "--force"]
    if len(folders) != 1 or folders[0].startswith("-"):
        raise ConfigError("usage: meshrunner resume DIR [--force]")
    run_dir = Path(folders[0]).absolute()
    if not run_dir.is_dir():
        raise ConfigError(f"there is no folder {run_dir}")
    if (run_dir / "sweep.json").exists():
        from runner.child import warm

        warm()
        from runner.sweep import resume_sweep

        return resume_sweep(run_dir)
    if read_status(run_dir).get("state") == "completed":
        trained = read_json(run_dir / "summary.json").get("steps", 0)
        if not more_to_train(check(read_config(run_dir)), run_dir, trained):
            print(f"{run_dir} is completed; there is nothing to do")
            return 0
    from runner.child import warm

    warm()
    return _execute(run_dir, force=force)


def _execute(run_dir: Path, *, force: bool = False) -> int:
    from runner.execute import EXIT, execute
    from runner.report import report

    outcome, summary = execute(run_dir, force=force)
    with suppress(BrokenPipeError):  # `meshrunner run | head`: the run is recorded, only nobody listens
        if summary:  # the run's first node has one
            report(run_dir, outcome, summary)
    return EXIT.get(outcome.state, 1)


def _show(arguments: list[str]) -> int:
    from runner import compose

    composer = compose.Composer(compose.parse("show", arguments))
    if composer.answer():
        return 0
    from recipes.option import ConfigError
    from runner.show import show

    composed = composer.one()
    if composed is None:
        raise ConfigError("show explains one run; leave out -m and give each key one value")
    show(composed)
    return 0


def _compare(arguments: list[str]) -> int:
    from runner.compare.verb import compare

    return compare(arguments)


def _status(arguments: list[str]) -> int:
    from runner.status import status

    status(arguments)
    return 0


def _submit(arguments: list[str]) -> int:
    from recipes.option import ConfigError
    from runner import compose
    from runner.slurm import launcher
    from runner.sweep import run_sweep

    dry = "--dry-run" in arguments
    arguments = [argument for argument in arguments if argument != "--dry-run"]
    given = compose.parse("submit", arguments).overrides
    folders = [each for each in given if "=" not in each and not each.startswith("~")]
    if folders:
        usage = "usage: meshrunner submit [OVERRIDES] [-m] or submit DIR [hydra.launcher.KEY=VALUE]"
        if len(folders) > 1 or len(given) < len(arguments):
            raise ConfigError(usage)
        if not Path(folders[0]).is_dir():
            raise ConfigError(f"there is no folder {folders[0]}; {usage}")
        rest = [each for each in given if each != folders[0]]
        return launcher.submit_again(Path(folders[0]).absolute(), rest + ["hydra.launcher.dry_run=true"] * dry)
    if {"hydra/launcher=local", "hydra/launcher=place"} & set(arguments):
        raise ConfigError("hydra/launcher: `submit` hands runs over to SLURM; `run` and `place` are verbs of their own")
    if not any(argument.startswith("hydra/launcher=") for argument in arguments):
        arguments = [*arguments, "hydra/launcher=slurm"]
    composer = compose.Composer(compose.parse("submit", arguments + ["hydra.launcher.dry_run=true"] * dry))
    if composer.answer():
        return 0
    composed = composer.one()
    return run_sweep(composer) if composed is None else launcher.submit_one(composed)


def _cancel(arguments: list[str]) -> int:
    from recipes.option import ConfigError

    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("usage: meshrunner cancel DIR")
    folder = Path(arguments[0]).absolute()
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    from runner.slurm.launcher import cancel

    return cancel(folder)


def _place(arguments: list[str]) -> int:
    from runner import compose
    from runner.slurm import launcher
    from runner.sweep import run_sweep

    composer = compose.Composer(compose.parse("place", [*arguments, "hydra/launcher=place"]))
    if composer.answer():
        return 0
    composed = composer.one()
    return run_sweep(composer) if composed is None else launcher.place_one(composed)


def _doctor(arguments: list[str]) -> int:
    from recipes.option import ConfigError

    if arguments:
        raise ConfigError("usage: meshrunner doctor")
    from runner.doctor import doctor

    doctor()
    return 0
