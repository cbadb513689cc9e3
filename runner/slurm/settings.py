"""The keys of `hydra/launcher=slurm`, and the nodes that a run requests from SLURM."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from meshrunner.recipes.errors import ConfigError
from meshrunner.recipes.option import Section, whole
from meshrunner.runner.config.compose import Composed
from meshrunner.runner.config.devices import node_devices
from meshrunner.runner.config.experiment import Experiment
from meshrunner.runner.config.hardware import GPU
from meshrunner.runner.config.validation import invalid

CountOrNull = Annotated[int | None, whole(None)]


class Nodes(NamedTuple):
    """The nodes and GPUs that a run requests from SLURM. Only runs with equal requests can be tasks of one job array."""

    number: int
    gpus: int | None
    """GPUs to request on each node; None if the run requests no GPUs."""
    whole: bool
    """Whether the run requests all GPUs of its nodes. Such a run by default also requests all CPUs and memory of the nodes."""


def _time(value: Any) -> Any:
    """Reject a number as a time limit: YAML reads 1:00:00 without quotes as 3600, and SLURM would read 3600 as minutes."""
    if value is not None and not isinstance(value, str):
        raise PydanticCustomError(
            "time", "expected quoted text like '1:00:00' or '2-00:00:00', got {got}", {"got": repr(value)}
        )
    return value


def _lines(preamble: str) -> str:
    """Reject a backslash and an `n` outside of quotes, because the command line does not turn the pair into a line break."""
    if r"\n" in re.sub(r"'[^']*'|\"[^\"]*\"", "", preamble):
        raise PydanticCustomError("lines", r"\n is not a line break here; separate commands by ; or use a YAML file")
    return preamble


class Slurm(Section):
    """The resources to request from SLURM, and the commands that start jobs on the nodes."""

    partition: str | None
    """Partition of the jobs. If partition, account, qos or constraint is null, the cluster's default applies."""
    account: str | None
    """Account to charge."""
    qos: str | None
    """Quality of service."""
    constraint: str | None
    """Features that the nodes must have, such as `h100`."""
    nodes: CountOrNull
    """Nodes of each run; null: launch.nodes."""
    gpus_per_node: CountOrNull
    """GPUs to request on each node. null: no GPUs if `hardware` is not a GPU, else launch.workers (auto: all GPUs of a node)."""
    cpus_per_task: CountOrNull
    """CPUs to request on each node. One SLURM task per node starts all workers of the node.

    null: a run on all GPUs of a node requests all CPUs and memory (`--exclusive --mem=0`), a run on some GPUs requests
    `cpus_per_gpu`, and a run without GPUs gets the cluster's default. If `extra` requests CPUs or memory, null adds nothing.
    """
    cpus_per_gpu: CountOrNull
    """CPUs to request per GPU for a run that uses only some GPUs of its nodes; null: the cluster's default."""
    time: Annotated[str | None, BeforeValidator(_time)]
    """Time limit as quoted text, '12:00:00' or '2-00:00:00'; null: twice the predicted time plus launch.start_timeout_minutes."""
    max_parallel: CountOrNull
    """Maximum number of runs that SLURM executes at the same time, for each job array of a sweep; null: no limit."""
    max_requeues: Annotated[int, whole(at_least=0)]
    """Maximum number of times that a job restarts from its last checkpoint after preemption, the time limit or a node failure."""
    notice_s: int = Field(ge=0, le=65535)
    """Seconds before the time limit at which SLURM signals a job, so that the job saves a checkpoint and stops."""
    extra: list[str]
    """Additional options for sbatch, such as ['--mail-type=END', '--exclude=node7']."""
    srun: list[str]
    """Additional arguments for srun, such as ['--container-image=image.sqsh']."""
    preamble: Annotated[str, AfterValidator(_lines)]
    """Shell lines to run before srun, such as `module load` commands."""
    command: str | None
    """Command that starts meshrunner on a node, such as 'apptainer exec --nv image.sif meshrunner'; null: this installation."""
    wait: bool
    """Whether meshrunner waits until all jobs have ended, and then prints the table of results."""
    dry_run: bool
    """Whether to only print the sbatch script, as --dry-run does."""

    @classmethod
    def read(cls, launcher: dict[str, Any]) -> Self:
        """Check and return the settings in the section `hydra.launcher`. Raise a ConfigError that lists all invalid keys."""
        try:
            return cls.model_validate({key: value for key, value in launcher.items() if key != "_target_"})
        except ValidationError as error:
            raise invalid(error, cls, launcher, "hydra.launcher") from None

    def apply_to(self, composed: Composed) -> Composed:
        """Copy `nodes`, if not null, to launch.nodes of a config. Raise ConfigError if launch.nodes is neither 1 nor `nodes`."""
        launch = composed.config["launch"]
        if self.nodes is None or launch["nodes"] == self.nodes:
            return composed
        if launch["nodes"] != 1:
            raise ConfigError(
                f"hydra.launcher.nodes({self.nodes}) differs from launch.nodes({launch['nodes']}): set only one of them"
            )
        return replace(composed, config=composed.config | {"launch": launch | {"nodes": self.nodes}})

    def fit(self, experiment: Experiment) -> None:
        """Raise ConfigError if `nodes` is set and differs from launch.nodes of an existing run directory."""
        if self.nodes is not None and self.nodes != experiment.launch.nodes:
            raise ConfigError(
                f"hydra.launcher.nodes({self.nodes}) differs from launch.nodes({experiment.launch.nodes}) of the run directory. "
                "Submit a new run in another directory, or change launch.nodes in the config.yaml of this directory"
            )

    def workers(self, experiment: Experiment) -> int:
        """Return the number of workers per node. `auto`: one per requested GPU or, without GPUs, this machine's default."""
        if experiment.launch.workers != "auto":
            return experiment.launch.workers
        return self.gpus(experiment) or node_devices(experiment).workers

    def request(self, experiment: Experiment) -> Nodes:
        gpus, hardware = self.gpus(experiment), experiment.hardware
        whole = gpus is not None and isinstance(hardware, GPU) and gpus >= hardware.devices_per_node
        return Nodes(experiment.launch.nodes_used, gpus, whole)

    def gpus(self, experiment: Experiment) -> int | None:
        """Return the number of GPUs that a run requests on each node, or None if it requests no GPUs."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        if not isinstance(experiment.hardware, GPU):
            return None
        if experiment.launch.emulate is not None:
            return 1
        workers = experiment.launch.workers
        return experiment.hardware.devices_per_node if workers == "auto" else workers

    @property
    def program(self) -> str:
        """Shell command that starts meshrunner on a node: `command`, or the program of this installation."""
        if self.command is not None:
            return self.command
        beside = Path(sys.executable).with_name("meshrunner")
        return shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(sys.executable)} -m meshrunner"
