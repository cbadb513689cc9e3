"""`meshrunner sync`: upload the W&B runs that were recorded offline."""

from __future__ import annotations

from meshrunner.runner.commands.parser import existing, parse
from meshrunner.runner.console import say, shown, warn
from meshrunner.runner.process.signals import interruptible
from meshrunner.runner.trackers.offline import OfflineRun, find_offline_runs, server, silence, upload


def sync(arguments: list[str]) -> int:
    """
    Upload the offline W&B runs at or below directories, except for runs that were uploaded before or are still running.

    Returns:
        The exit status: 1 if a run could not be uploaded, for example because nobody is logged in or the server is silent.

    Raises:
        ConfigError: wrong arguments, or a directory that does not exist.
    """
    given = parse("sync", arguments)
    directories = [existing(directory) for directory in given.directories]
    found = list(dict.fromkeys(run for directory in directories for run in find_offline_runs(directory)))
    growing = [run for run in found if run.growing]
    todo = [run for run in found if not run.uploaded and run not in growing]
    for run in growing:
        warn(f"{shown(run.folder)} is still running, so its record is incomplete")
    if not todo:
        say(f"nothing to upload: {_counted(found, growing)}")
        return 0
    with interruptible("; repeat the command to upload the rest"):
        return _dry_run(todo, found, growing) if given.dry_run else _upload(todo)


def _counted(found: list[OfflineRun], growing: list[OfflineRun]) -> str:
    uploaded = sum(run.uploaded for run in found if run not in growing)
    known = {"already uploaded": uploaded, "still running": len(growing)}
    return ", ".join(f"{number} {what}" for what, number in known.items() if number) or "no offline W&B run was found"


def _dry_run(todo: list[OfflineRun], found: list[OfflineRun], growing: list[OfflineRun]) -> int:
    say(f"would upload {_runs(len(todo))} to {server()}:")
    for run in todo:
        say(f"  {shown(run.folder)}")
    if len(todo) < len(found):
        say(_counted(found, growing))
    return 0


def _upload(todo: list[OfflineRun]) -> int:
    url = server()
    if why := silence(url):
        warn(f"nothing was uploaded: {url} does not answer: {why}")
        return 1
    say(f"uploading {_runs(len(todo))} to {url} ...")
    uploaded: list[OfflineRun] = []

    def done(run: OfflineRun) -> None:
        uploaded.append(run)
        say(f"  {shown(run.folder)}")

    last = upload(todo, done)
    if len(uploaded) == len(todo):
        say(f"uploaded {_runs(len(todo))}")
        return 0
    warn(f"uploaded {len(uploaded)} of {_runs(len(todo))}; wandb reported: {last}")
    return 1


def _runs(number: int) -> str:
    return f"{number} run{'s' * (number != 1)}"
