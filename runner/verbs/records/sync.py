"""`meshrunner sync`: upload the W&B runs that were recorded offline."""

from meshrunner.runner.commands.parser import existing, parse
from meshrunner.runner.console import counted, say, shown, warn
from meshrunner.runner.process.signals import interruptible
from meshrunner.runner.rundir import owner_is_alive, read_status
from meshrunner.runner.trackers.offline import OfflineRun, find_offline_runs, server, silence, upload


def sync(arguments: list[str]) -> int:
    """Upload offline W&B runs. Skip runs that are already uploaded or still running. Return 1 if an upload fails, else 0."""
    given = parse("sync", arguments)
    directories = [existing(directory) for directory in given.directories]
    found = list(dict.fromkeys(run for directory in directories for run in find_offline_runs(directory)))
    growing = [run for run in found if owner_is_alive(read_status(run.folder))]
    todo = [run for run in found if not run.uploaded and run not in growing]
    for run in growing:
        warn(f"skipping {shown(run.folder)}: it is still running, so its record is incomplete")
    known = {"already uploaded": len(found) - len(todo) - len(growing), "still running": len(growing)}
    rest = ", ".join(f"{number} {state}" for state, number in known.items() if number)
    if not todo:
        say(f"nothing to upload: {rest or 'no offline W&B run was found'}")
        return 0
    with interruptible("; repeat the command to upload the rest"):
        if not given.dry_run:
            return _upload(todo)
        say(f"would upload {counted(len(todo), 'run')} to {server()}:")
        for run in todo:
            say(f"  {shown(run.folder)}")
        if rest:
            say(rest)
        return 0


def _upload(todo: list[OfflineRun]) -> int:
    url = server()
    if why := silence(url):
        warn(f"nothing was uploaded: {url} does not answer: {why}")
        return 1
    say(f"uploading {counted(len(todo), 'run')} to {url} ...")
    last = upload(todo, lambda run: say(f"  {shown(run.folder)}"))
    uploaded = sum(run.uploaded for run in todo)
    if uploaded == len(todo):
        say(f"uploaded {counted(len(todo), 'run')}")
        return 0
    warn(f"uploaded {uploaded} of {counted(len(todo), 'run')}; wandb reported: {last}")
    return 1
