"""Execute runs with another Python interpreter (`launch.python`), which has its own torch but uses this meshrunner's code."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.storage import cache_dir
from meshrunner.runner.process import receipt

VARIABLE = "MESHRUNNER_PYTHON"
"""Environment variable with the `launch.python` that executes this process. The path in `sys.executable` may differ."""
VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def is_other(python: str | None) -> bool:
    """Return whether `launch.python` names an interpreter other than this one."""
    found = shutil.which(python) if python else None
    return python not in (None, os.environ.get(VARIABLE)) and (
        not found or _identity(found) != _identity(sys.executable)
    )


def _identity(python: str) -> tuple[Path, Path]:
    """Return two paths that identify an environment: equal for its `python` and `python3`, different for other environments."""
    return Path(python).parent.resolve(), Path(python).resolve()


@cache
def unsuitable(python: str) -> str:
    """Return the reason why an interpreter cannot execute runs; "" if the interpreter is suitable."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    needed = [each for each in map(Requirement, requires("meshrunner") or ()) if not each.marker]
    command = [python, "-P", "-c", VERSIONS, *(each.name for each in needed)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return f"launch.python: cannot execute {python}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"launch.python: {python} does not answer within 60 s"
    try:
        found = json.loads(done.stdout)
    except ValueError:
        last = [f"exit status {done.returncode}", *done.stderr.strip().splitlines()][-1]
        return f"launch.python: cannot use {python}: {last}"
    wrong = [
        f"{each.name} {found[each.name]} instead of {each}" if each.name in found else f"no {each.name}"
        for each in needed
        if each.name not in found or not each.specifier.contains(found[each.name], prereleases=True)
    ]
    hint = "install the required packages for this interpreter"
    return f"launch.python: {python} has {', '.join(wrong)}; {hint}" if wrong else ""


def continue_in(python: str | None, arguments: Sequence[str]) -> None:
    """If `launch.python` is another interpreter, replace this process: let that interpreter execute meshrunner with `arguments`.
    Raise ConfigError if the interpreter is unsuitable."""
    if python is None or not is_other(python):
        return
    if reason := unsuitable(python):
        raise ConfigError(reason)
    paths = [str(_code()), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | receipt.passed_on() | {"PYTHONPATH": os.pathsep.join(paths), VARIABLE: python}
    os.execve(shutil.which(python) or python, [python, "-P", "-m", "meshrunner", *arguments], variables)


def refuse_others(pythons: Iterable[str | None]) -> None:
    """Raise ConfigError if a combination needs another interpreter, because this process can trace only with its own torch."""
    if others := sorted({str(python) for python in pythons if is_other(python)}):
        raise ConfigError(
            f"launch.python: a run that uses {others[0]} cannot be predicted together with other runs; predict it alone"
        )


def _code() -> Path:
    """Return a directory that holds links to meshrunner's packages, and no other packages of this environment."""
    package = Path(sys.modules["meshrunner"].__file__ or "").parent
    folder = cache_dir() / "code" / hashlib.blake2b(str(package).encode(), digest_size=8).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    for name in (package.name, "hydra_plugins"):
        with suppress(FileExistsError):
            (folder / name).symlink_to(package.with_name(name))
    return folder
