"""The run directory: everything there is to know about one run, on disk, whoever executes it.

JSON files are replaced atomically, `events.jsonl` is append-only. `claim` makes sure that no two processes execute one
directory: the owner is named in `status.json` and its heartbeat is kept fresh; an owner that is gone may be replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.option import ConfigError

FINAL = frozenset({"completed", "failed", "oom", "timeout", "skipped", "interrupted", "preempted"})
"""States of a run that nobody executes any more."""
HEARTBEAT_S = 10.0
STALE_S = 120.0
"""Age of a heartbeat after which an owner on another host counts as gone."""


class Busy(Exception):
    """Another living process executes this run directory."""


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically: a reader sees the old file or the new one, never half of one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    try:
        with beside.open("w") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is none or it is damaged."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def place(config: dict[str, Any], run_dir: Path, overrides: dict[str, Any]) -> None:
    """
    Write a new run directory, state `pending`.

    Args:
        config: the resolved configuration, `auto` values as they are.
        overrides: what the user typed and which options Hydra chose.

    Raises:
        ConfigError: the directory holds a run already, or cannot be written.
    """
    from omegaconf import OmegaConf  # here: the workers use this module, too, and start faster without it

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if (run_dir / "config.yaml").exists():
            raise ConfigError(
                f"{run_dir} holds a run already. `meshrunner resume {run_dir}` continues it; for a new run choose another "
                "hydra.run.dir"
            )
        (run_dir / "logs").mkdir(exist_ok=True)
        (run_dir / "overrides.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(overrides)))
        write_json(run_dir / "status.json", {"state": "pending", "reason": "", "attempt": 0})
        (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))  # last: now it is a run
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {run_dir}: {error.strerror}") from None


def read_config(run_dir: Path) -> dict[str, Any]:
    """The configuration a run directory holds; raises ConfigError when there is none or it is no YAML mapping."""
    import yaml
    from omegaconf import OmegaConf

    path = run_dir / "config.yaml"
    try:
        text = path.read_text()
        # OmegaConf would take a sentence for a key without a value.
        loaded = (
            OmegaConf.to_container(OmegaConf.create(text), resolve=True)
            if isinstance(yaml.safe_load(text), dict)
            else None
        )
    except FileNotFoundError:
        raise ConfigError(f"{run_dir} is not a run directory: it has no config.yaml") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} is not a mapping")
    return {str(key): value for key, value in loaded.items()}


def read_status(run_dir: Path) -> dict[str, Any]:
    """`status.json`, {} where there is none."""
    return read_json(run_dir / "status.json")


def update_status(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Change some keys of `status.json`; returns the whole."""
    with _locked(run_dir):
        status = read_status(run_dir) | changes
        write_json(run_dir / "status.json", status)
    return status


def this_process() -> dict[str, Any]:
    """The `owner` entry that names this process beyond reuse of its process id."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": _process_start(os.getpid()),
        "boot_id": _boot_id(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "slurm_restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
    }


def owner_is_alive(status: dict[str, Any]) -> bool:
    """Whether the process that `status.json` names still executes the run."""
    owner = status.get("owner") or {}
    if status.get("state") != "running" or not owner:
        return False
    job, restart = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if job is not None and owner.get("slurm_job_id") == job and owner.get("slurm_restart") != restart:
        return False  # SLURM has started the job again, perhaps because the node with the owner has died
    if owner.get("host") == socket.gethostname():
        same_boot = owner.get("boot_id") == _boot_id()
        return same_boot and _process_start(int(owner["pid"])) == owner.get("pid_started") is not None
    return time.time() - float(status.get("heartbeat") or 0) < STALE_S


def claim(run_dir: Path) -> dict[str, Any]:
    """Make this process the owner of a run, state `running`, `attempt` + 1; raises Busy if it has a living owner."""
    (run_dir / "logs").mkdir(exist_ok=True)  # a directory made by hand may hold config.yaml alone
    with _locked(run_dir):
        status = read_status(run_dir)
        if owner_is_alive(status):
            owner = status["owner"]
            raise Busy(f"{run_dir} is being executed by process {owner['pid']} on {owner['host']}")
        now = time.time()
        status |= {"state": "running", "reason": "", "started": now, "ended": None, "heartbeat": now}
        status |= {"attempt": int(status.get("attempt") or 0) + 1, "owner": this_process(), "workers": []}
        write_json(run_dir / "status.json", status)
    return status


@contextmanager
def heartbeat(run_dir: Path) -> Iterator[None]:
    """Refresh the owner's heartbeat in the background. A full disk must not end the run, so a failure is passed over."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            try:
                update_status(run_dir, heartbeat=time.time())
            except OSError:
                continue

    thread = threading.Thread(target=beat, daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    with (run_dir / ".status.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _process_start(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])
