"""`meshrunner bisect`: find the commit, interpreter or setting that made runs slower, larger or different."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from meshrunner.recipes.errors import ConfigError, Interrupted
from meshrunner.runner.bisect.referee import FEWEST, FIGURES, Referee, Variant
from meshrunner.runner.bisect.searches import fewest_overrides, first_commit, first_of_list, git
from meshrunner.runner.commands.parser import parse
from meshrunner.runner.config.compose import Composer, grid
from meshrunner.runner.console import counted, say, shown
from meshrunner.runner.rundir import key_of, load_overrides
from meshrunner.runner.rundir.files import is_run
from meshrunner.runner.sweep.combinations import varying

NewReferee = Callable[[Variant, Variant], Referee]
"""Function that creates the referee of a good and a bad variant, with the settings of the command line."""


def bisect(arguments: list[str]) -> int:
    """Print the first bad change. Raise ConfigError if GOOD or BAD cannot run, or if they do not differ."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    given, overrides = parse("bisect", arguments[:cut]), arguments[cut + 1 :]
    if given.by not in FIGURES:
        raise ConfigError(f"bisect: --by: expected {', '.join(FIGURES)}, got {given.by}")
    if given.rounds < FEWEST:
        raise ConfigError(f"bisect: --rounds: expected at least {FEWEST}, got {given.rounds}")
    folder = (given.dir or Path(f"sweeps/{datetime.now():%Y-%m-%d/%H-%M-%S}-bisect")).absolute()
    new_referee = partial(Referee, by=given.by, most=given.rounds, folder=folder)
    ends = given.good, given.bad
    try:
        if all(is_run(Path(end)) for end in ends):
            found = _among_overrides(*ends, overrides, new_referee)
        elif {"-m", "--multirun"} & set(overrides):
            found = _in_sweep(*ends, overrides, new_referee)
        else:
            found = _among_commits(*ends, overrides, new_referee)
    except KeyboardInterrupt:
        raise Interrupted(f"the bisection; the same command with --dir {shown(folder)} continues it") from None
    say(f"first bad change{' (one of several)' * (len(found) > 1)}: {', '.join(found)}")
    return 0


def _among_overrides(good: str, bad: str, overrides: list[str], new_referee: NewReferee) -> list[str]:
    """Return the fewest overrides of a bad run that make a good run bad. overrides: further overrides for both runs."""
    own, other = (_by_key([*load_overrides(Path(end)).task, *overrides]) for end in (good, bad))
    if own == other:
        raise ConfigError(f"bisect: {good} and {bad} have the same overrides")
    referee = new_referee(Variant(good, [*own.values()]), Variant(bad, [*other.values()]))
    return fewest_overrides(own, other, referee.is_bad)


def _by_key(overrides: Iterable[str]) -> dict[str, str]:
    return {key: each for each in overrides if not (key := key_of(each)).startswith("hydra.")}


def _in_sweep(good: str, bad: str, overrides: list[str], new_referee: NewReferee) -> list[str]:
    """Return the first bad combination of a sweep. good, bad: an override, or its value, that only one combination has."""
    composer = Composer("bisect", overrides)
    jobs = grid(composer.hydra.config_loader, composer.compose_sweep())
    varied = varying(jobs)
    names = [[each for each in job if each in varied] for job in jobs]
    numbers = []
    for end in (good, bad):
        found = [i for i, name in enumerate(names) if any(end in (each, each.partition("=")[2]) for each in name)]
        if len(found) != 1:
            raise ConfigError(f"bisect: {end} matches {counted(len(found), 'combination')} of the sweep, not one")
        numbers += found
    first, last = numbers
    order = range(first, last + 1) if first <= last else range(first, last - 1, -1)
    flags = [f"--config-dir={composer.args.config_dir}"] * (composer.args.config_dir is not None)
    variants = [Variant(" ".join(names[i]), [*flags, *jobs[i]]) for i in order]
    return first_of_list(variants, new_referee(variants[0], variants[-1]).is_bad)


def _among_commits(good: str, bad: str, overrides: list[str], new_referee: NewReferee) -> list[str]:
    """Return the first bad commit of the repository that contains the current directory. good, bad: revisions."""
    here = Path.cwd()
    inside = here.relative_to(git(here, "rev-parse", "--show-toplevel"))
    with TemporaryDirectory(prefix="meshrunner-bisect-") as trees:

        def variant(revision: str) -> Variant:
            """Check a revision out. Each commit has a worktree of its own, so that no stale bytecode is imported."""
            commit = git(here, "rev-parse", "--verify", f"{revision}^{{commit}}")
            tree = Path(trees, commit)
            if not tree.exists():
                git(here, "worktree", "add", "--detach", str(tree), commit)
            return Variant(git(here, "log", "-1", "--format=%h %s", commit), overrides, tree / inside)

        try:
            referee = new_referee(variant(good), variant(bad))
            control = Path(trees, "control")
            git(here, "worktree", "add", "--detach", "--no-checkout", str(control), bad)
            commits = first_commit(control, good, bad, lambda commit: referee.is_bad(variant(commit)))
            return [variant(commit).name for commit in commits]
        finally:
            for tree in Path(trees).iterdir():
                git(here, "worktree", "remove", "--force", str(tree))
